"""Every setting of the optimizer changes what both stages learn, and the defaults are the stages' own."""

import json

import pytest
import torch
from helpers.recovering import Silent, short_recovery, train

from opdcl.config.finetune import FinetuneConfig, LoraSection
from opdcl.config.load import validate
from opdcl.config.optimizer import OptimizerSection
from opdcl.data.examples import read_examples
from opdcl.data.rows import load_rows
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import StageDir
from opdcl.stages.finetune import as_distillation, finetune

# Values of each setting that differ from every default.
CHANGES = {
    "weight_decay": [0.5],
    "schedule": ["linear", "constant"],
    "warmup": [0.5, 0.75],
    "max_grad_norm": [0.0, 0.01],
    "betas": [[0.5, 0.999], [0.9, 0.9]],
}
# The defaults of each stage, named.
OWN = {"finetune": {"schedule": "cosine", "warmup": 0.05}, "recover": {"warmup": 0.1}}
STEPS = 8


@pytest.fixture
def learn(backbone, tuned):
    """Return a function that trains a stage for eight steps: the adapter's bytes, and each step's rate."""
    rows = [{"question": f"What is the code of room {i}?", "answer": f"Code {i * 7}"} for i in range(8)]
    (tuned / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(stage: str, **optimizer) -> tuple[bytes, list[float]]:
        settings = {"learning_rate": 1e-2, "optimizer": optimizer}
        name = f"out{len([*tuned.glob('out*')])}"
        torch.manual_seed(0)
        if stage == "recover":
            config = short_recovery(tuned, steps=STEPS, health=False, keep="last", **settings)
            out = train(backbone, tuned, name, config)
        else:
            config = FinetuneConfig(
                data=str(tuned / "rows.jsonl"), epochs=4, batch_size=4, lora=LoraSection(r=4), **settings
            )
            out, fresh = StageDir(tuned / name), Backbone(backbone.causal_lm, backbone.tokenizer)
            examples = read_examples(load_rows(config.data), config, fresh.tokenizer)
            finetune(config, examples, fresh, None, out, Silent())
            fresh.drop_adapters()
        rates = [row["learning_rate"] for row in read_jsonl(out.metrics) if "loss" in row]
        assert len(rates) == STEPS
        return (out.adapter / "adapter_model.safetensors").read_bytes(), rates

    return run


@pytest.mark.parametrize("stage", ["finetune", "recover"])
def test_every_setting_changes_what_is_learned(learn, stage):
    assert CHANGES.keys() == OptimizerSection.model_fields.keys()
    plain = learn(stage)
    assert learn(stage) == plain
    for name, values in CHANGES.items():
        for value in values:
            assert learn(stage, **{name: value})[0] != plain[0], (name, value)


@pytest.mark.parametrize("stage", ["finetune", "recover"])
def test_the_defaults_are_the_stages_own(learn, stage):
    assert learn(stage, **OWN[stage]) == learn(stage)


@pytest.mark.parametrize("stage", ["finetune", "recover"])
@pytest.mark.parametrize(
    ("settings", "eighths"),
    [
        ({"schedule": "linear", "warmup": 0}, [8, 7, 6, 5, 4, 3, 2, 1]),
        ({"schedule": "linear", "warmup": 0.5}, [2, 4, 6, 8, 8, 6, 4, 2]),
        ({"schedule": "constant", "warmup": 0.5}, [2, 4, 6, 8, 8, 8, 8, 8]),
        ({"schedule": "constant", "warmup": 1}, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_a_schedule_named_by_the_user_takes_no_part_of_the_stages_own(learn, stage, settings, eighths):
    assert learn(stage, **settings)[1] == pytest.approx([1e-2 * part / 8 for part in eighths])


def test_self_distillation_has_the_optimizer_of_the_fine_tune():
    named = {"weight_decay": 0.1, "warmup": 0.3, "betas": [0.8, 0.9]}
    config = validate({"finetune": {"data": "d", "method": "self-distill", "batch_size": 4}}).finetune
    config = config.model_copy(update={"optimizer": OptimizerSection(**named), "learning_rate": 1e-3})
    assert as_distillation(config, 8).optimizer == config.optimizer


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"betas": [0.9]}, "at least 2 items"),
        ({"betas": [0.9, 1]}, r"betas\.1: must be less than 1"),
        ({"warmup": 3}, "warmup: must be at most 1"),
        ({"schedule": "polynomial"}, "schedule: must be 'auto', 'linear', 'cosine' or 'constant'"),
        ({"adam_epsilon": 1e-6}, r"unknown key recover\.optimizer\.adam_epsilon"),
    ],
)
def test_other_values_are_refused(optimizer, words):
    with pytest.raises(UsageError, match=words):
        validate({"recover": {"optimizer": optimizer}})


@pytest.mark.parametrize("stage", ["finetune", "recover"])
def test_arguments_of_transformers_are_unknown(stage):
    with pytest.raises(UsageError, match=rf"unknown key {stage}\.trainer"):
        validate({stage: {"trainer": {"weight_decay": 0.1}}})
