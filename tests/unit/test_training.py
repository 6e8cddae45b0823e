"""What both stages share: learning rates from the first step on, and steps that are not finite."""

import contextlib
import json
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from helpers.recovering import Silent, run, short_recovery, train
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from opdcl.config.recover import RecoverConfig
from opdcl.distill.prompts import read_recovery_source
from opdcl.errors import OpdclError
from opdcl.model.backbone import Backbone
from opdcl.rundir.layout import StageDir
from opdcl.stages.recover import _student, recover
from opdcl.training import StageCallback, StageTrainer, finite_or_skipped


class Recorder(StageCallback):
    """The stage callback, with its rows in a list instead of a run directory."""

    def __init__(self):
        super().__init__(Silent(), 9)
        self.rows = []

    def write(self, row):
        self.rows.append(row)


class Shown(Silent):
    """A report that keeps what a progress line shows, and the notes."""

    def __init__(self):
        self.values, self.notes = {}, []

    def progress(self, done, total, **values):
        self.values = values

    def note(self, text):
        self.notes.append(text)


@pytest.mark.parametrize(
    ("kl", "shown"), [(0.739, {"stream", "loss"}), (0.502, {"stream", "loss", "kl"}), (None, {"loss"})]
)
def test_a_divergence_that_is_the_loss_is_shown_once(tmp_path, kl, shown):
    callback = StageCallback(Shown(), 9)
    callback._out = StageDir(tmp_path)
    logs = {"loss": 0.739} | ({"kl": kl, "stream": "general"} if kl else {})
    state = SimpleNamespace(log_history=[], global_step=1)
    callback.on_log(None, state, None, logs=logs)
    assert callback.report.values.keys() == shown | {"tokens_per_s"}
    assert json.loads(callback._out.metrics.read_text()).get("kl") == kl  # the file has both


def test_only_a_slower_sampler_is_mentioned(backbone):
    report = Shown()
    _student(RecoverConfig(), backbone, None, report)
    assert report.notes == []
    backbone.causal_lm.config.layer_types = ["full_attention", "linear_attention"]
    _student(RecoverConfig(), backbone, None, report)
    reason = "some layers are not attention"
    assert report.notes == [f"the slower sampler `generate` is used: {reason}"]


def trainer_with(callback):
    return SimpleNamespace(
        callback_handler=SimpleNamespace(callbacks=[callback]), state=SimpleNamespace(global_step=4)
    )


@pytest.mark.parametrize(
    ("loss", "gradient"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, -math.inf)]
)
def test_a_non_finite_step_is_skipped_once_and_stops_the_stage_the_second_time(loss, gradient):
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(3)).sum().backward()
    optimizer.step()  # the moments alone would now change the weights
    before = [p.detach().clone() for p in layer.parameters()]
    layer.weight.grad = torch.full_like(layer.weight, gradient)
    callback = Recorder()
    assert finite_or_skipped(trainer_with(callback), layer, torch.tensor(loss)) == 0
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
    assert callback.rows == [{"step": 5, "skipped": "loss or gradient is not finite"}]
    layer.weight.grad = torch.full_like(layer.weight, gradient)
    with pytest.raises(OpdclError, match="for the second time"):
        finite_or_skipped(trainer_with(callback), layer, torch.tensor(loss))


def test_a_finite_step_keeps_its_loss_and_gradient():
    layer = torch.nn.Linear(3, 2)
    layer(torch.ones(3)).sum().backward()
    assert finite_or_skipped(trainer_with(Recorder()), layer, torch.tensor(2.0)) == 2.0
    assert layer.weight.grad is not None


def test_recovery_of_a_model_that_contains_nan_stops_before_training(backbone, tuned):
    with torch.no_grad():
        next(p for n, p in backbone.causal_lm.named_parameters() if "layers.1" in n and "up_proj" in n)[
            0, 0
        ] = math.nan
    with pytest.raises(OpdclError) as caught:
        run(backbone, tuned, health=False)
    assert "not finite" in str(caught.value)


@pytest.mark.parametrize("steps", [1, 2, 40])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("constant_with_warmup", {}),
        ("inverse_sqrt", {}),
        ("warmup_stable_decay", {"num_decay_steps": 1, "warmup_type": "cosine"}),
    ],
)
def test_the_first_step_learns_and_only_the_warm_up_is_changed(tmp_path, steps, kind, options):
    """Each step of the warm-up has the rate that transformers gives to the next; its last has the peak."""
    warm_up = math.ceil(steps * 0.1)

    def rates(trainer_class) -> list[float]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            lr_scheduler_type=kind,
            lr_scheduler_kwargs=options,
            warmup_steps=warm_up,
            learning_rate=1.0,
            report_to="none",
            use_cpu=True,
        )
        trainer = trainer_class(model=torch.nn.Linear(1, 1), args=arguments)
        trainer.create_optimizer_and_scheduler(steps)
        found = []
        for _ in range(steps):
            found.append(trainer.optimizer.param_groups[0]["lr"])
            assert trainer.lr_scheduler.get_last_lr() == [found[-1]] * len(trainer.optimizer.param_groups)
            trainer.optimizer.step()
            trainer.lr_scheduler.step()
        return found

    theirs, ours = rates(Trainer), rates(StageTrainer)
    assert theirs[0] == 0
    assert ours[: warm_up - 1] == theirs[1:warm_up]
    assert ours[warm_up - 1] == 1
    assert ours[warm_up:] == theirs[warm_up:]


def test_a_recovery_of_one_step_learns(backbone, tuned):
    (step,) = [row for row in run(backbone, tuned, steps=1, learning_rate=0.004) if "loss" in row]
    assert step["learning_rate"] == 0.004
    before, after = (
        load_file(tuned / place / "adapter_model.safetensors") for place in ("tuned", "out/trainer/best")
    )
    assert any((before[name] != after[name]).any() for name in before)


def test_an_interrupt_in_the_last_step_is_not_lost(backbone, tuned):
    class InterruptedAtTheEnd(Silent):
        def progress(self, done, total, **values):
            if done == total:
                os.kill(os.getpid(), signal.SIGINT)

    config = short_recovery(tuned, save_steps=2)
    whole = train(backbone, tuned, "whole", config)
    out = StageDir(tuned / "interrupted")
    for report in (InterruptedAtTheEnd(), Silent()):
        fresh = Backbone(backbone.causal_lm, backbone.tokenizer)
        expected = (
            pytest.raises(KeyboardInterrupt) if type(report) is not Silent else contextlib.nullcontext()
        )
        with expected:
            recover(config, read_recovery_source(config), fresh, tuned / "tuned", out, report)
        fresh.drop_adapters()
    name = "adapter_model.safetensors"
    assert (out.adapter / name).read_bytes() == (whole.adapter / name).read_bytes()
