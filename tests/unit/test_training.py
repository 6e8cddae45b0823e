"""Training steps whose loss or gradient is not finite."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from helpers.recovering import Silent, run

from opdcl.config.recover import RecoverConfig
from opdcl.errors import OpdclError
from opdcl.rundir.layout import StageDir
from opdcl.stages.recover import _student
from opdcl.training import StageCallback, finite_or_skipped


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
