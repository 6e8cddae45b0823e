"""A recovery that goes wrong is noticed, slowed down and stopped, and its best adapter is kept."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers.recovering import Silent, run, short_recovery, whole_and_resumed

from opdcl.distill.health import Health, Writing, check_turn_end, drift, signs
from opdcl.errors import OpdclError, UsageError
from opdcl.repetition import repetition
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import StageDir
from opdcl.sampling.rollout import Prompt, Rollout

NORM = 10.0
BASE = Writing(length=40.0, ended=0.8, repetition=0.02)
TUNED = Writing(length=9.0, ended=1.0, repetition=0.05)
WELL = {
    "stream": "general",
    "author": "student",
    "teacher_entropy": 3.0,
    "student_entropy": 2.5,
    "grad_norm": 1.0,
    "adapter_norm": 11.0,
    "repetition": 0.1,
}
WRONG = {
    "teacher_entropy": (9.0, "teacher entropy"),
    "student_entropy": (0.001, "student entropy"),
    "grad_norm": (1e5, "gradient norm"),
    "adapter_norm": (31.0, "adapter norm"),
    "repetition": (0.8, "repetition"),
}
GONE_WRONG = {
    "length": (121.0, "answer length"),
    "ended": (0.29, "share of truncated answers"),
    "repetition": (0.36, "repetition"),
}


def test_a_healthy_step_shows_no_sign():
    assert signs(WELL, NORM) == []
    assert BASE.signs(BASE, TUNED) == TUNED.signs(BASE, TUNED) == []


@pytest.mark.parametrize("field", WRONG)
def test_each_bound_has_its_sign(field):
    value, name = WRONG[field]
    (sign,) = signs({**WELL, field: value}, NORM)
    assert sign.name == name
    assert sign.hint


@pytest.mark.parametrize("field", GONE_WRONG)
def test_writing_is_judged_by_how_base_and_tuned_write(field):
    value, name = GONE_WRONG[field]
    (sign,) = dataclasses.replace(BASE, **{field: value}).signs(BASE, TUNED)
    assert sign.name == name
    assert sign.hint
    # What base or tuned does is no fault of the recovery.
    assert dataclasses.replace(BASE, **{field: value}).signs(BASE, Writing(121.0, 0.29, 0.36)) == []


def test_domain_answers_may_be_certain():
    assert signs({**WELL, "stream": "domain", "student_entropy": 0.001}, NORM) == []


def test_what_a_teacher_repeats_is_no_fault_of_the_student():
    assert signs({**WELL, "author": "teacher", "repetition": 0.8}, NORM) == []


def test_writing_is_counted_by_hand():
    answers = [Rollout(Prompt([1]), [5, 6], [], True), Rollout(Prompt([1]), [5, 5, 5, 5, 5, 5], [], False)]
    assert Writing.of(answers) == Writing(length=4.0, ended=0.5, repetition=pytest.approx(2 / 3))


class Notes(Silent):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


class Rate:
    """An optimizer of which only the learning rate matters."""

    rate = 1.0

    def halve_rate(self):
        self.rate /= 2


def watch(tmp_path, rows, on=True, stop=None):
    """Feed logged steps to a watch, resumed after step `stop`; return the rates it leaves, and its rows."""
    out = StageDir(tmp_path / "stage")
    out.path.mkdir(parents=True, exist_ok=True)
    tuned = SimpleNamespace(adapter_norm=lambda state: NORM)

    def write(row):
        with open(out.metrics, "a") as file:
            file.write(json.dumps(row) + "\n")

    def start():
        callback = SimpleNamespace(write=write, report=Notes())
        health = Health(on, tuned, out, callback)
        health.on_start(BASE, TUNED)
        return health

    health = start()
    optimizer = Rate()
    for step, row in enumerate(rows, 1):
        write({"step": step, **row})  # as the stage does before anything watches the step
        if "own" in row:
            health.on_validation(step, Writing(**row["own"]), optimizer)
        if "adapter_norm" in row:
            health.after_step(step, row, optimizer)
        if step == stop:
            health = start()
    return [optimizer.rate], [row for row in read_jsonl(out.metrics) if "health" in row]


BAD = {**WELL, "repetition": 1.0}
LOOPS = {"own": dataclasses.asdict(dataclasses.replace(BASE, repetition=0.9))}


def test_a_sign_that_passes_changes_nothing(tmp_path):
    assert watch(tmp_path, [BAD, BAD, WELL, BAD, BAD, WELL]) == ([1.0], [])


def test_a_sign_that_lasts_halves_the_rate_once(tmp_path):
    rates, written = watch(tmp_path, [BAD] * 5)
    assert rates == [0.5]
    assert [(r["step"], r["health"]["action"]) for r in written] == [(3, "rate halved")]


def test_a_sign_that_lasts_as_long_again_halts(tmp_path):
    with pytest.raises(OpdclError, match=r"repetition is 1, past its limit of 0\.6") as caught:
        watch(tmp_path, [BAD] * 6)
    assert "best" in caught.value.hint


def test_a_halved_rate_acts_on_the_very_next_step_interrupted_or_not(backbone, tuned, monkeypatch):
    monkeypatch.setattr("opdcl.distill.health.ADAPTER_GROWTH", 0.0)  # each step shows a sign
    constant = {"optimizer": {"schedule": "constant"}, "save_steps": 3, "keep": "last"}
    config = short_recovery(tuned, method="general", steps=5, learning_rate=0.004, **constant)
    for stage in whole_and_resumed(backbone, tuned, config, stop=4):
        rates = [row["learning_rate"] for row in read_jsonl(stage.metrics) if "learning_rate" in row]
        assert rates == [0.004, 0.004, 0.004, 0.002, 0.002]


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_resumed_recovery_halts_where_an_uninterrupted_one_does(tmp_path, stop):
    """`stop` lies before, at or after the step that halves the rate."""
    with pytest.raises(OpdclError, match="halted at step 6"):
        watch(tmp_path, [BAD] * 8, stop=stop)
    rows = [row for row in read_jsonl(tmp_path / "stage" / "metrics.jsonl") if "health" in row]
    assert [(r["step"], r["health"]["action"]) for r in rows] == [(3, "rate halved"), (6, "halted")]


def test_streams_are_counted_apart(tmp_path):
    domain = {**WELL, "stream": "domain"}
    assert watch(tmp_path, [BAD, domain] * 3)[0] == [0.5]


def test_the_watch_can_be_switched_off(tmp_path):
    assert watch(tmp_path, [BAD] * 20, on=False) == ([1.0], [])


def test_repetition_is_counted_within_each_completion():
    assert repetition([[1, 2, 3, 4, 5, 6, 7]]) == 0
    assert repetition([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0
    assert repetition([[7] * 11]) == pytest.approx(7 / 8)
    assert repetition([[1], []]) == 0


def test_a_rate_far_too_high_halts_and_leaves_the_best_adapter(backbone, tuned):
    with pytest.raises(OpdclError, match="halted at step"):
        run(backbone, tuned, learning_rate=0.9, steps=30, validate_every=3)
    best = tuned / "out" / "trainer" / "best"
    assert (best / "adapter_model.safetensors").exists()
    assert any("validation" in r for r in read_jsonl(tuned / "out" / "metrics.jsonl"))


def test_held_out_kl_that_rises_halts_whatever_the_steps_look_like(backbone, tuned):
    settings = {"learning_rate": 0.5, "steps": 12, "validate_every": 2}
    with pytest.raises(OpdclError, match=r"held-out KL rose|top tokens"):
        run(backbone, tuned, **settings)
    shutil.rmtree(tuned / "out")
    assert run(backbone, tuned, health=False, **settings)[-1]["step"] == 12


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


def test_a_student_that_loops_is_slowed_down_at_one_validation_and_stopped_at_the_next(tmp_path):
    between = [WELL, WELL]
    rates, written = watch(tmp_path, [WELL | LOOPS, *between])
    assert rates == [0.5]
    assert written[0]["health"] == {
        "sign": "repetition",
        "value": 0.9,
        "bound": pytest.approx(0.35),
        "action": "rate halved",
    }
    with pytest.raises(OpdclError, match=r"halted at step 4: repetition is 0\.9, past its limit of 0\.35"):
        watch(tmp_path / "again", [WELL | LOOPS, *between, WELL | LOOPS])


@pytest.mark.parametrize("stop", [1, 2])
def test_a_resumed_recovery_remembers_that_the_student_looped(tmp_path, stop):
    with pytest.raises(OpdclError, match="halted at step 3"):
        watch(tmp_path, [WELL | LOOPS, WELL, WELL | LOOPS], stop=stop)


def test_writing_is_not_judged_when_the_watch_is_off(tmp_path):
    assert watch(tmp_path, [WELL | LOOPS] * 5, on=False) == ([1.0], [])


def test_where_little_was_forgotten_a_small_rise_of_kl_is_no_alarm():
    def reason(start, now):
        return drift({"general_kl": start}, {"general_kl": now}, lambda kl: kl["general_kl"])

    assert reason(0.05, 0.54) == ""
    assert "from 0.05 to 0.56" in reason(0.05, 0.56)
    assert reason(4.0, 5.9) == ""
    assert "from 4.00 to 6.10" in reason(4.0, 6.1)


def test_lost_overlap_of_top_tokens_is_an_alarm_unless_it_was_small_from_the_start():
    def reason(start, now):
        return drift({"general_overlap": start}, {"general_overlap": now}, lambda kl: 0.0)

    assert reason(0.5, 0.2) == ""
    assert "shares 5% of the teacher's top tokens, 50% at the start" in reason(0.5, 0.05)
    assert reason(0.04, 0.05) == reason(0.08, 0.07) == ""
