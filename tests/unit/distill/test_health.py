"""A recovery that goes wrong is noticed, slowed down and stopped, and its best adapter is kept."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers.recovering import Silent, run

from opdcl.config.recover import HealthSection
from opdcl.distill.health import Baseline, Health, check_turn_end, drift, signs
from opdcl.errors import OpdclError, UsageError
from opdcl.repetition import repetition
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import StageDir
from opdcl.sampling.rollout import Rollout

BASELINE = Baseline(mean_length=40.0, truncated=0.2, adapter_norm=10.0)
ANSWERS = [Rollout([1], [5] * 40, [], i > 0) for i in range(5)]
WELL = {
    "stream": "general",
    "teacher_entropy": 3.0,
    "student_entropy": 2.5,
    "grad_norm": 1.0,
    "adapter_norm": 11.0,
    "repetition": 0.1,
    "mean_length": 45.0,
    "truncated": 0.4,
}
WRONG = {
    "teacher_entropy": (9.0, "teacher entropy"),
    "student_entropy": (0.001, "student entropy"),
    "grad_norm": (1e5, "gradient norm"),
    "adapter_norm": (31.0, "adapter norm"),
    "repetition": (0.8, "repetition"),
    "mean_length": (130.0, "answer length"),
    "truncated": (0.9, "share of truncated answers"),
}


def test_a_healthy_step_shows_no_sign():
    assert signs(WELL, HealthSection(), BASELINE) == []


@pytest.mark.parametrize("field", WRONG)
def test_each_bound_has_its_sign(field):
    value, name = WRONG[field]
    (sign,) = signs({**WELL, field: value}, HealthSection(), BASELINE)
    assert sign.name == name
    assert sign.hint


@pytest.mark.parametrize("field", ["student_entropy", "mean_length", "truncated"])
def test_domain_answers_may_be_short_and_certain(field):
    assert signs({**WELL, "stream": "domain", field: WRONG[field][0]}, HealthSection(), BASELINE) == []


class Notes(Silent):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def watch(tmp_path, rows, limits=None, stop=None):
    """Feed logged steps to a watch, resumed after step `stop`; return the rates it leaves, and its rows."""
    out = StageDir(tmp_path / "stage")
    out.path.mkdir(exist_ok=True)
    tuned = SimpleNamespace(adapter_norm=lambda state: BASELINE.adapter_norm)

    def write(row):
        with open(out.metrics, "a") as file:
            file.write(json.dumps(row) + "\n")

    def start():
        callback = SimpleNamespace(write=write, report=Notes())
        health = Health(limits or HealthSection(), tuned, out, callback)
        health.on_start(ANSWERS)
        return health

    health, scheduler = start(), SimpleNamespace(base_lrs=[1.0])
    for step, row in enumerate(rows, 1):
        write({"step": step, **row})  # as the stage does before anything watches the step
        health.on_log(None, SimpleNamespace(global_step=step), None, logs=row, lr_scheduler=scheduler)
        if step == stop:
            health = start()
    return scheduler.base_lrs, [row for row in read_jsonl(out.metrics) if "health" in row]


BAD = {**WELL, "truncated": 1.0}


def test_a_sign_that_passes_changes_nothing(tmp_path):
    assert watch(tmp_path, [BAD, BAD, WELL, BAD, BAD, WELL]) == ([1.0], [])


def test_a_sign_that_lasts_halves_the_rate_once(tmp_path):
    rates, written = watch(tmp_path, [BAD] * 5)
    assert rates == [0.5]
    assert [(r["step"], r["health"]["action"]) for r in written] == [(3, "rate halved")]


def test_a_sign_that_lasts_as_long_again_halts(tmp_path):
    with pytest.raises(
        OpdclError, match=r"share of truncated answers is 1, past its limit of 0\.7"
    ) as caught:
        watch(tmp_path, [BAD] * 6)
    assert "best" in caught.value.hint


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
    assert watch(tmp_path, [BAD] * 20, HealthSection(watch=False)) == ([1.0], [])


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
    settings = {"learning_rate": 0.5, "steps": 12, "validate_every": 3}
    with pytest.raises(OpdclError, match=r"held-out KL rose|top tokens"):
        run(backbone, tuned, health={"patience": 1000}, **settings)
    shutil.rmtree(tuned / "out")
    assert run(backbone, tuned, health={"watch": False}, **settings)[-1]["step"] == 12


def test_a_uniform_teacher_halts_before_the_first_step(backbone, tuned):
    head = backbone.causal_lm.get_output_embeddings().weight
    with torch.no_grad():
        head.mul_(1e-4)
    with pytest.raises(OpdclError, match="close to uniform"):
        run(backbone, tuned)
    assert run(backbone, tuned, steps=2, health={"watch": False})[-1]["step"] == 2


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


def test_a_reward_of_length_is_noticed(tmp_path):
    """Answers that grow step by step until none of them ends."""
    rows = [{**WELL, "mean_length": 40.0 + 15 * i, "truncated": min(1.0, 0.2 + 0.1 * i)} for i in range(12)]
    with pytest.raises(OpdclError, match=r"share of truncated answers|answer length"):
        watch(tmp_path, rows)


def test_the_baseline_is_measured_on_base_s_answers(backbone, tuned):
    backbone.load_adapter(tuned / "tuned", "student", trainable=True)
    backbone.load_adapter(tuned / "tuned", "tuned")
    health = Health(HealthSection(), backbone, StageDir(tuned / "none"), None)
    health.on_start([Rollout([1], [5, 6], [], True), Rollout([1], [5, 6, 7, 8], [], False)])
    assert (health.baseline.mean_length, health.baseline.truncated) == (3.0, 0.5)
    assert health.baseline.adapter_norm == pytest.approx(backbone.adapter_norm("student"))


def test_where_little_was_forgotten_a_small_rise_of_kl_is_no_alarm():
    def reason(start, now):
        return drift({"general_kl": start}, {"general_kl": now}, lambda kl: kl["general_kl"], HealthSection())

    assert reason(0.05, 0.54) == ""
    assert "from 0.05 to 0.56" in reason(0.05, 0.56)
    assert reason(4.0, 5.9) == ""
    assert "from 4.00 to 6.10" in reason(4.0, 6.1)


def test_lost_overlap_of_top_tokens_is_an_alarm_unless_it_was_small_from_the_start():
    def reason(start, now):
        return drift({"general_overlap": start}, {"general_overlap": now}, lambda kl: 0.0, HealthSection())

    assert reason(0.5, 0.2) == ""
    assert "shares 5% of the teacher's top tokens, 50% at the start" in reason(0.5, 0.05)
    assert reason(0.04, 0.05) == reason(0.08, 0.07) == ""
