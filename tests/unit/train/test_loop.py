"""What both stages share: learning rates from the first step on, and steps that are not finite."""

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
from functools import partial

import pytest
import torch
from helpers.recovering import Silent, recover_rows, run, short_recovery, train
from transformers import get_scheduler

from opdcl.config.recover import RecoverConfig
from opdcl.data.rows import load_rows
from opdcl.errors import Interrupted, OpdclError
from opdcl.model.backbone import Backbone
from opdcl.pipeline.tasks import dose
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.stage import StageDir
from opdcl.train.finetune import Losses
from opdcl.train.learner import Learner
from opdcl.train.loop import Interruption, Schedule, StageLog, is_finite
from opdcl.train.recover import student_here
from opdcl.train.validation import describe_step


class Shown(Silent):
    """A report that keeps what a progress line shows, and the notes."""

    is_live = True

    def __init__(self):
        self.words, self.notes, self.shown = "", [], []

    def progress(self, done, total, words=""):
        self.words = words

    def texts(self, texts):
        self.shown.append(texts)

    def note(self, text):
        self.notes.append(text)


def test_a_validation_says_two_numbers_and_shows_an_answer_of_each_model(backbone, tuned):
    config, out, report = short_recovery(tuned), StageDir(tuned / "out"), Shown()
    recover_rows(config, backbone, tuned / "tuned", out, report)
    backbone.drop_adapters()
    measured = [row for row in read_jsonl(out.metrics) if "validation" in row]
    first, last = measured[0]["start"]["validation"], measured[-1]["validation"]
    said = f"KL of own answers {first['own_distance']:.2f} at the start, now {last['own_distance']:.2f}"
    said += f"; KL on your prompts {first['domain_kl']:.2f} at the start, now {last['domain_kl']:.2f}"
    assert f"step 6: {said}" in report.notes[-1]
    assert [*report.shown[-1]] == ["prompt", "original model", "fine-tuned model", "model in training"]
    rows = [row.shown() for row in load_rows(config.general[0])]
    asked = [shown["prompt"] for shown in report.shown]
    assert len({*asked}) > 1, "not always the same"
    assert {*asked} <= {*rows}


def test_a_step_shows_its_loss_and_who_wrote_and_keeps_the_rest(tmp_path):
    log = StageLog(Shown(), StageDir(tmp_path), 9, partial(describe_step, RecoverConfig()))
    log.step(1, {"loss": 0.739, "kl": 0.5, "stream": "general", "author": "teacher"}, 10, 0.5)
    assert log.report.words == "general prompts, the original model answers: loss 0.739"
    assert json.loads(log.out.metrics.read_text())["kl"] == 0.5


def test_the_loss_of_the_users_rows_stands_apart_from_that_of_replayed_ones():
    losses = Losses({"stream": "domain", "loss": loss} for loss in (9.0, 2.0, 1.0, 1.0, 1.0, 0.0))
    assert losses.add({}) == "your rows: loss 1.00 (6 of 6 steps)"
    assert losses.add({"stream": "general", "loss": 0.06}) == (
        "your rows: loss 1.00 (6 of 7 steps); general rows 0.06"
    )


def test_only_a_slower_sampler_is_mentioned(backbone):
    report = Shown()
    student_here(backbone, report)
    assert report.notes == []
    backbone.causal_lm.config.layer_types = ["full_attention", "linear_attention"]
    student_here(backbone, report)
    reason = "some layers are not attention"
    assert report.notes == [f"the slower sampler `generate` is used: {reason}"]


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan)])
def test_a_loss_or_gradient_that_is_not_finite_is_noticed(loss, gradient):
    layer = torch.nn.Linear(3, 2)
    layer(torch.ones(3)).sum().backward()
    assert is_finite(layer, torch.tensor(2.0))
    layer.weight.grad = torch.full_like(layer.weight, gradient)
    assert not is_finite(layer, torch.tensor(loss))


@pytest.fixture
def spoil(monkeypatch):
    """Return a function that makes the gradients of these steps, counted from 1, not a number."""

    def spoil_steps(*steps):
        plain, count = Learner.learn, itertools.count(1)

        def learn(self, batch):
            if next(count) not in steps:
                return plain(self, batch)
            weight = next(p for p in self.backbone.peft.parameters() if p.requires_grad)
            hook = weight.register_hook(lambda gradient: torch.full_like(gradient, math.nan))
            sums = plain(self, batch)
            hook.remove()
            return sums

        monkeypatch.setattr(Learner, "learn", learn)

    return spoil_steps


def test_a_step_that_is_not_finite_changes_nothing_and_is_recorded(backbone, tuned, spoil):
    settings = {"steps": 3, "validate_every": 3, "start": 1, "health": False}
    settings |= {"lmbda": 0.0, "method": "general"}
    norms = [row["adapter_norm"] for row in run(backbone, tuned, **settings) if "loss" in row]
    shutil.rmtree(tuned / "out")
    spoil(2)
    rows = run(backbone, tuned, **settings)
    assert [row["step"] for row in rows if "skipped" in row] == [2]
    steps = {row["step"]: row["adapter_norm"] for row in rows if "loss" in row}
    assert steps == {1: norms[0], 3: norms[1]}  # after the skipped step the adapter is as before it
    rates = [row["learning_rate"] for row in rows if "learning_rate" in row]
    assert len(rates) == 2


def test_a_second_step_that_is_not_finite_ends_the_stage(backbone, tuned, spoil):
    spoil(1, 3)
    with pytest.raises(OpdclError, match="step 3, for the second time"):
        run(backbone, tuned, steps=4, start=1, health=False)


def test_recovery_of_a_model_that_contains_nan_stops_before_training(backbone, tuned):
    with torch.no_grad():
        backbone.causal_lm.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    with pytest.raises(OpdclError) as caught:
        run(backbone, tuned, health=False)
    assert "not finite" in str(caught.value)


def theirs(shape: str, steps: int, warm_up: int) -> list[float]:
    """Return the shares of the peak that transformers' schedule gives to the steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(shape, optimizer, warm_up, steps)
    return [schedule.lr_lambdas[0](step) for step in range(steps)]


@pytest.mark.parametrize("steps", [1, 2, 3, 40])
@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_schedule_is_that_of_transformers_but_begins_above_zero(shape, steps):
    """Each step of the warm-up has the rate that transformers gives to the next; its last has the peak."""
    schedule, warm_up = Schedule(steps, 0.1, shape), math.ceil(steps * 0.1)
    ours, expected = [schedule.share(step) for step in range(steps)], theirs(shape, steps, warm_up)
    assert ours[: warm_up - 1] == expected[1:warm_up]
    assert ours[warm_up - 1] == 1
    assert ours[warm_up:] == pytest.approx(expected[warm_up:])


def test_an_interrupt_before_the_first_step_ends_the_recovery_at_once(backbone, tuned):
    class Impatient(Shown):
        def part(self, what, done, total):
            if what == "the original model answers" and not self.shown:
                self.shown.append(what)
                os.kill(os.getpid(), signal.SIGINT)

    out, report = StageDir(tuned / "interrupted"), Impatient()
    with pytest.raises(KeyboardInterrupt):
        recover_rows(short_recovery(tuned), backbone, tuned / "tuned", out, report)
    backbone.drop_adapters()
    # None of the answers that are shown once a start is chosen.
    assert report.shown == ["the original model answers"]
    assert not out.metrics.exists()
    assert [note for note in report.notes if "rank" not in note] == []


def test_an_interrupt_in_the_last_step_is_not_lost(backbone, tuned):
    class InterruptedAtTheEnd(Silent):
        def progress(self, done, total, **values):
            if done == total:
                os.kill(os.getpid(), signal.SIGINT)

    config = short_recovery(tuned)
    whole = train(backbone, tuned, "whole", config)
    out = StageDir(tuned / "interrupted")
    for report in (InterruptedAtTheEnd(), Silent()):
        fresh = Backbone(backbone.causal_lm, backbone.tokenizer)
        expected = (
            pytest.raises(KeyboardInterrupt) if type(report) is not Silent else contextlib.nullcontext()
        )
        with expected:
            recover_rows(config, fresh, tuned / "tuned", out, report)
        fresh.drop_adapters()
    name = "adapter_model.safetensors"
    assert (out.adapter / name).read_bytes() == (whole.adapter / name).read_bytes()


def test_a_signal_while_the_workers_agree_ends_the_next_step(monkeypatch):
    def agree_slowly(flag: bool) -> list[bool]:
        os.kill(os.getpid(), signal.SIGINT)
        return [flag]

    interruption = Interruption(Silent())
    with interruption.awaited():
        with monkeypatch.context() as patch:
            patch.setattr("opdcl.parallel.all_values", agree_slowly)
            assert not interruption.has_come()
        interruption.end(1, 3)  # no checkpoint was saved, and no other worker would end here
        assert interruption.has_come()
        with pytest.raises(Interrupted, match="step 2 of 3"):
            interruption.end(2, 3)


def test_a_dose_counts_answers_and_tokens_by_stream_and_author_and_the_seconds_of_the_parts():
    rows = [
        {"step": 0, "validation": {}},
        {"step": 1, "stream": "general", "author": "teacher", "answers": 2, "graded": 30},
        {"step": 2, "stream": "domain", "author": "teacher", "answers": 4, "graded": 9},
        {"step": 3, "skipped": "not finite", "parts": {"teacher": 0.25, "student": 2.0}},
        {"step": 4, "stream": "general", "author": "student", "answers": 2, "graded": 12},
        {"step": 5, "stream": "general", "author": "teacher", "answers": 1, "graded": 7},
    ]
    rows[1]["parts"] = {"teacher": 1.5}
    assert dose(rows) == {
        "graded": {
            "general": {"teacher": {"answers": 3, "tokens": 37}, "student": {"answers": 2, "tokens": 12}},
            "domain": {"teacher": {"answers": 4, "tokens": 9}},
        },
        "parts": {"teacher": 1.75, "student": 2.0},
    }


def test_the_parts_of_a_step_add_up_to_its_time_and_its_dose_to_its_tokens(backbone, tuned):
    rows = [row for row in run(backbone, tuned) if "loss" in row]
    for row in rows:
        assert row["graded"] == row["tokens"]
        assert row["answers"] == pytest.approx(row["tokens"] / row["mean_length"])
        assert {"sampling", "teacher", "student", "validation"} >= row["parts"].keys()
    # The first step's parts hold what came before it: base and tuned were measured.
    assert all(sum(row["parts"].values()) <= row["seconds"] + 0.01 for row in rows[1:])
