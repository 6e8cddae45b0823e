"""A recovery that goes wrong is noticed, slowed down and stopped, and its best adapter is kept."""

import dataclasses
import shutil

import pytest
import torch
from helpers.recovering import Silent, run, short_recovery, train

from opdcl.data.chat import check_turn_end
from opdcl.errors import OpdclError, UsageError
from opdcl.repetition import distinct, repetition
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.stage import StageDir
from opdcl.train.loop import StageLog
from opdcl.train.validation import ResponseStats, check_kl, check_responses, response_sign
from opdcl.words import Prompt, Rollout

BASE = ResponseStats(length=40.0, ended=0.8, repetition=0.02)
TUNED = ResponseStats(length=9.0, ended=1.0, repetition=0.05)
GONE_WRONG = {
    "length": (121.0, "answer length"),
    "ended": (0.29, "share of truncated answers"),
    "repetition": (0.36, "repetition"),
}
LOOPING = dataclasses.replace(BASE, repetition=0.9)


@pytest.mark.parametrize("field", GONE_WRONG)
def test_writing_is_judged_by_how_base_and_tuned_write(field):
    value, name = GONE_WRONG[field]
    worse = dataclasses.replace(BASE, **{field: value})
    sign = response_sign(worse, [BASE, TUNED])
    assert (sign.name, sign.value) == (name, pytest.approx(1 - value if field == "ended" else value))
    assert sign.hint
    # What base or tuned does is no fault of the recovery.
    assert response_sign(worse, [BASE, ResponseStats(121.0, 0.29, 0.36)]) is None


def test_base_and_tuned_write_well():
    assert response_sign(BASE, [BASE, TUNED]) is response_sign(TUNED, [BASE, TUNED]) is None


def test_writing_is_counted_by_hand():
    answers = [Rollout(Prompt([1]), [5, 6], [], True), Rollout(Prompt([1]), [5, 5, 5, 5, 5, 5], [], False)]
    # They share their first token alone: one of three different pairs each.
    two_thirds = pytest.approx(2 / 3)
    assert ResponseStats.of(answers) == ResponseStats(4.0, 0.5, repetition=two_thirds, distinct=two_thirds)


def test_distinct_is_what_no_other_answer_has():
    texts = [["yes"], ["yes"], ["a", "b", "a", "b"], ["b", "a", "c"], []]
    padded = [["<", *text, ">"] for text in texts]
    pairs = [{(text[i], text[i + 1]) for i in range(len(text) - 1)} for text in padded]
    others = [set().union(*(p for j, p in enumerate(pairs) if j != i)) for i in range(len(pairs))]
    assert distinct(texts) == [len(own - other) / len(own) for own, other in zip(pairs, others, strict=True)]
    assert distinct(texts)[0] == 0 < distinct(texts)[2]
    assert distinct([["same", "words"]] * 3) == [0, 0, 0]


class Rate:
    """An optimizer of which only the learning rate matters."""

    rate = 1.0

    def halve_rate(self):
        self.rate /= 2


def watch(tmp_path, answers):
    """Judge the student's answers, validation by validation, each time as a resumed run would."""
    out, optimizer = StageDir(tmp_path / "stage"), Rate()
    out.path.mkdir(parents=True, exist_ok=True)
    for step, own in enumerate(answers, 1):
        sign = response_sign(own, [BASE, TUNED])
        check_responses(StageLog(Silent(), out, 9), step, sign, optimizer)
    return optimizer.rate, [row for row in read_jsonl(out.metrics) if "health" in row]


def test_a_student_that_loops_is_slowed_down_at_one_validation_and_stopped_at_the_next(tmp_path):
    rate, written = watch(tmp_path, [BASE, LOOPING, BASE])
    assert rate == 0.5
    sign = {"sign": "repetition", "value": 0.9, "bound": pytest.approx(0.35), "action": "rate halved"}
    assert written == [{"step": 2, "health": sign}]
    message = r"halted at step 3: repetition is 0\.9, past its limit of 0\.35"
    with pytest.raises(OpdclError, match=message) as caught:
        watch(tmp_path / "again", [LOOPING, BASE, LOOPING])
    assert "best" in caught.value.hint
    rows = [row["health"]["action"] for row in read_jsonl(tmp_path / "again" / "stage" / "metrics.jsonl")]
    assert rows == ["rate halved", "halted"]


def test_a_halved_rate_acts_on_the_very_next_step_interrupted_or_not(backbone, tuned, monkeypatch):
    monkeypatch.setattr("opdcl.train.validation.REPETITION_EXCESS", -2.0)  # each validation shows a sign
    config = short_recovery(tuned, method="general", steps=5, validate_every=3, learning_rate=0.004)
    train(backbone, tuned, "resumed", config, stop=4)
    for name in ("whole", "resumed"):
        with pytest.raises(OpdclError, match="halted at step 5"):
            train(backbone, tuned, name, config)
        rates = [r["learning_rate"] for r in read_jsonl(tuned / name / "metrics.jsonl") if "loss" in r]
        assert rates == [0.004, 0.004, 0.003, 0.001]


def test_repetition_is_counted_within_each_completion():
    assert repetition([[1, 2, 3, 4, 5, 6, 7]]) == 0
    assert repetition([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0
    assert repetition([[7] * 11]) == pytest.approx(7 / 8)
    assert repetition([[1], []]) == 0


def test_held_out_kl_that_rises_halts_and_leaves_the_best_adapter(backbone, tuned):
    settings = {"learning_rate": 0.9, "steps": 12, "validate_every": 3}
    with pytest.raises(OpdclError, match="halted at step 3: held-out KL rose"):
        run(backbone, tuned, **settings)
    best = tuned / "out" / "trainer" / "best"
    assert (best / "adapter_model.safetensors").exists()
    assert any("validation" in r for r in read_jsonl(tuned / "out" / "metrics.jsonl"))
    shutil.rmtree(tuned / "out")
    assert run(backbone, tuned, health=False, **settings)[-1]["step"] == 12


@pytest.mark.parametrize(("before", "most", "alarm"), [(0.05, 0.54, 0.56), (4.0, 5.9, 6.1)])
def test_where_little_was_forgotten_a_small_rise_of_kl_is_no_alarm(tmp_path, before, most, alarm):
    log = StageLog(Silent(), StageDir(tmp_path), 9)
    check_kl(log, 3, before, most)
    with pytest.raises(OpdclError, match=f"step 3: held-out KL rose from {before:.2f} to {alarm:.2f}"):
        check_kl(log, 3, before, alarm)


def test_a_uniform_teacher_halts_before_the_first_step(backbone, tuned):
    head = backbone.causal_lm.get_output_embeddings().weight
    with torch.no_grad():
        head.mul_(1e-4)
    with pytest.raises(OpdclError, match="close to uniform"):
        run(backbone, tuned)
    assert run(backbone, tuned, steps=2, health=False)[-1]["step"] == 2


def test_an_eos_list_that_the_template_never_uses_is_refused(backbone, tuned):
    backbone.eos_ids = [77]
    with pytest.raises(UsageError, match="ends an answer with"):
        run(backbone, tuned)


def test_a_template_of_another_model_is_refused(backbone):
    check_turn_end(backbone.tokenizer, backbone.eos_ids)
    backbone.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n[/end]\n{% endfor %}"
    )
    with pytest.raises(UsageError, match="none of which is an end of sequence"):
        check_turn_end(backbone.tokenizer, backbone.eos_ids)
