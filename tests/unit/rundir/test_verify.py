"""Seals tell what is damaged, steps that are not finite leave no trace, and secrets stay out of what is written."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers.recovering import Silent, run

from opdcl.config.load import load
from opdcl.errors import OpdclError, UsageError
from opdcl.rundir.seals import damage, seal
from opdcl.sanitize import redact
from opdcl.training import StageCallback, finite_or_skipped


@pytest.mark.parametrize("tenth", range(10))
def test_a_seal_tells_a_cut_file(tmp_path, tenth):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "weights").write_bytes(bytes(range(256)) * 10)
    seal(tmp_path)
    assert damage(tmp_path) == ""
    (tmp_path / "deep" / "weights").write_bytes((bytes(range(256)) * 10)[: 256 * tenth])
    assert damage(tmp_path) == "deep/weights has changed"


def test_a_seal_tells_a_missing_file_and_its_own_absence(tmp_path):
    (tmp_path / "weights").write_bytes(b"x")
    assert "seal" in damage(tmp_path)
    seal(tmp_path)
    (tmp_path / "weights").unlink()
    assert damage(tmp_path) == "weights is missing"
    (tmp_path / "seal.json").write_text('{"weights": ')
    assert "seal" in damage(tmp_path)


class Told(StageCallback):
    """The trainer's callback, without a run directory."""

    def __init__(self):
        super().__init__(Silent(), 9)
        self.rows = []

    def write(self, row):
        self.rows.append(row)


def trainer_with(callback):
    return SimpleNamespace(
        callback_handler=SimpleNamespace(callbacks=[callback]), state=SimpleNamespace(global_step=4)
    )


@pytest.mark.parametrize(
    ("loss", "gradient"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, -math.inf)]
)
def test_a_step_that_is_not_finite_changes_nothing_once_and_halts_twice(loss, gradient):
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(3)).sum().backward()
    optimizer.step()  # so that there are moments, which alone would move the weights
    before = [p.detach().clone() for p in layer.parameters()]
    layer.weight.grad = torch.full_like(layer.weight, gradient)
    callback = Told()
    assert finite_or_skipped(trainer_with(callback), layer, torch.tensor(loss)) == 0
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
    assert callback.rows == [{"step": 5, "skipped": "loss or gradient is not finite"}]
    layer.weight.grad = torch.full_like(layer.weight, gradient)
    with pytest.raises(OpdclError, match="for the second time"):
        finite_or_skipped(trainer_with(callback), layer, torch.tensor(loss))


def test_a_finite_step_is_left_alone():
    layer = torch.nn.Linear(3, 2)
    layer(torch.ones(3)).sum().backward()
    assert finite_or_skipped(trainer_with(Told()), layer, torch.tensor(2.0)) == 2.0
    assert layer.weight.grad is not None


def test_recovery_from_a_model_that_holds_nan_halts_before_it_trains(backbone, tuned):
    with torch.no_grad():
        next(p for n, p in backbone.causal_lm.named_parameters() if "layers.1" in n and "up_proj" in n)[
            0, 0
        ] = math.nan
    with pytest.raises(OpdclError) as found:
        run(backbone, tuned, health={"watch": False})
    assert "not finite" in str(found.value)


SECRETS = [
    "hf_abcdefghijklmnopqrstuvwx",
    "sk-proj-abcdefghijklmnop1234",
    "https://me:pa55word@host/x",
    "https://host/x?token=abcdef123456",
]


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_blanked_out(text):
    shown = redact(f"loading {text} now")
    assert "[redacted]" in shown
    assert text not in shown
    assert shown.startswith("loading ")
    assert shown.endswith(" now")


def test_the_values_of_secret_variables_are_blanked_out(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "plain-looking-words")
    assert redact("sent plain-looking-words there") == "sent [redacted] there"


@pytest.mark.parametrize(
    "text",
    [
        "runs/quickstart",
        "opdcl run quickstart --set recover.steps=60",
        "https://example.org/a?b=c",
        "HuggingFaceTB/SmolLM2-135M",
    ],
)
def test_ordinary_text_is_left_alone(text):
    assert redact(text) == text


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_in_the_configuration_is_refused_without_repeating_it(text):
    with pytest.raises(UsageError, match="looks like a secret") as found:
        load(["quickstart"], [f"model.id={text}"])
    assert text not in str(found.value) + found.value.hint
