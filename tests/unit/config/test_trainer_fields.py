"""`trainer:` takes only fields that change a run, and names the setting that replaces each other field."""

import dataclasses
import json

import pytest
import torch
from helpers.recovering import Silent

from opdcl.config.finetune import FinetuneConfig, LoraSection
from opdcl.config.load import validate
from opdcl.config.model import ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.config.trainer_fields import ALLOWED, INSTEAD, OPTIMIZERS, SCHEDULES
from opdcl.data.examples import read_examples
from opdcl.data.rows import load_rows
from opdcl.distill.prompts import read_recovery_source
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import StageDir
from opdcl.stages.finetune import finetune
from opdcl.stages.recover import recover

# A setting of each allowed field that differs from our default.
CHANGES = {
    "optim": {"optim": "adagrad"},
    "optim_args": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "adam_beta1": {"adam_beta1": 0.5},
    "adam_beta2": {"adam_beta2": 0.9},
    "adam_epsilon": {"adam_epsilon": 1e-2},
    "weight_decay": {"weight_decay": 0.5},
    "max_grad_norm": {"max_grad_norm": 0.01},
    "lr_scheduler_type": {"lr_scheduler_type": "linear"},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2}},
    "warmup_steps": {"warmup_steps": 3},
    "save_total_limit": {"save_total_limit": 1},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
}
WITHOUT = {  # what a change is compared with, where it needs another field to act
    "optim_args": {"optim": "sgd"},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "polynomial"},
}


def result(folder, stage, backbone, model, trainer) -> tuple[bytes, int]:
    """Return the adapter's bytes and the number of checkpoints of a run of four steps."""
    out = StageDir(folder / f"{stage}-{len([*folder.iterdir()])}")
    if stage == "recover":
        data = {"general": [str(folder / "general.jsonl")], "domain": str(folder / "domain.jsonl")}
        sizes = {"steps": 4, "rollouts": 2, "max_new_tokens": 4, "validation_prompts": 1}
        rest = {"learning_rate": 5e-3, "micro_batch_tokens": 2048, "keep": "last", "save_steps": 2}
        config = RecoverConfig(**data, **sizes, **rest, trainer=trainer)
    else:
        sizes = {"epochs": 2, "batch_size": 4, "learning_rate": 1e-2, "save_steps": 2}
        config = FinetuneConfig(
            data=str(folder / "rows.jsonl"), **sizes, lora=LoraSection(r=4), trainer=trainer
        )
    fresh = Backbone(backbone.causal_lm, backbone.tokenizer)
    try:
        if stage == "recover":
            recover(config, read_recovery_source(config), fresh, folder / "tuned", out, Silent())
        else:
            finetune(
                config,
                read_examples(load_rows(config.data), config, fresh.tokenizer),
                fresh,
                None,
                out,
                Silent(),
            )
    finally:
        fresh.drop_adapters()
    assert len([row for row in read_jsonl(out.metrics) if "loss" in row]) == 4
    return (out.adapter / "adapter_model.safetensors").read_bytes(), len([*out.trainer.glob("checkpoint-*")])


@pytest.mark.parametrize("stage", ["recover", "finetune"])
def test_every_allowed_field_changes_the_run(stage, backbone, tiny_model, tuned):
    rows = [{"question": f"What is the code of room {i}?", "answer": f"Code {i * 7}"} for i in range(8)]
    (tuned / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = ModelConfig(id=str(tiny_model), dtype="float32")

    def run(trainer: dict) -> tuple[bytes, int]:
        torch.manual_seed(0)
        return result(tuned, stage, backbone, model, trainer)

    plain = {"": run({})}
    assert run({}) == plain[""]
    for field in ALLOWED[stage].keys() - {"dataloader_num_workers"}:  # moves work to a process, same result
        other = WITHOUT.get(field, {})
        assert run(CHANGES[field]) != (run(other) if other else plain[""]), field


def test_the_tables_agree_with_the_libraries():
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames
    from trl import DistillationConfig, SFTConfig

    names = {c: {f.name for f in dataclasses.fields(c)} for c in (DistillationConfig, SFTConfig)}
    assert ALLOWED["recover"].keys() <= names[DistillationConfig]
    assert ALLOWED["finetune"].keys() <= names[SFTConfig]
    replaced = {name for fields in INSTEAD.values() for name in fields.split()}
    assert replaced <= names[DistillationConfig] | names[SFTConfig]
    assert {*OPTIMIZERS} <= {name.value for name in OptimizerNames}
    assert {*SCHEDULES} <= {kind.value for kind in SchedulerType}


def test_every_other_field_of_the_libraries_is_refused():
    from trl import DistillationConfig, SFTConfig

    for stage, arguments in (("recover", DistillationConfig), ("finetune", SFTConfig)):
        for field in dataclasses.fields(arguments):
            if field.name not in ALLOWED[stage]:
                section = {"data": "handbook"} if stage == "finetune" else {}
                with pytest.raises(UsageError, match=rf"{stage}\.trainer\.{field.name} has no effect: \w+"):
                    validate({stage: section | {"trainer": {field.name: 1}}})


@pytest.mark.parametrize(
    ("stage", "trainer", "words"),
    [
        ("recover", {"beta": 0.5}, "recover.trainer.beta has no effect: use recover.loss"),
        ("recover", {"temperature": 0.5}, "use recover.on_policy.temperature"),
        ("recover", {"max_completion_length": 5}, "use recover.max_new_tokens"),
        ("recover", {"use_vllm": True}, "use recover.server"),
        ("recover", {"vllm_mode": "server"}, "use recover.server"),
        ("recover", {"seed": 5}, "use recover.seed"),
        ("finetune", {"learning_rate": 1e-3}, "use finetune.learning_rate"),
        ("finetune", {"num_train_epochs": 5}, "use finetune.epochs"),
        ("finetune", {"max_length": 5}, "use finetune.max_length"),
        ("finetune", {"gradient_checkpointing": True}, "recover.micro_batch_tokens"),
        ("recover", {"neftune_noise_alpha": 5.0}, "has no effect"),
        ("recover", {"optim": "adamw_8bit"}, "must be one of adamw_torch"),
        ("recover", {"optim": "sgd", "adam_beta1": 0.5}, "unless optim is adamw_torch or adamw_torch_fused"),
        ("recover", {"optim_args": "momentum=0.9"}, "unless optim is sgd or rmsprop or adagrad"),
        ("recover", {"lr_scheduler_type": "reduce_lr_on_plateau"}, "must be one of linear"),
        ("recover", {"weight_decay": "abc"}, "must be a number, got 'abc'"),
        ("recover", {"weight_decay": True}, "must be a number"),
        ("recover", {"save_total_limit": 1.5}, "must be an integer"),
    ],
)
def test_a_field_without_an_effect_is_refused_with_its_replacement(stage, trainer, words):
    section = {"data": "handbook"} if stage == "finetune" else {}
    with pytest.raises(UsageError) as caught:
        validate({stage: section | {"trainer": trainer}})
    assert words in caught.value.message
    assert caught.value.hint


def test_a_near_miss_is_suggested():
    with pytest.raises(UsageError) as caught:
        validate({"recover": {"trainer": {"weight_decai": 0.1}}})
    assert caught.value.hint == "did you mean trainer.weight_decay?"


def test_self_distillation_takes_the_fields_of_the_recovery():
    section = {"data": "handbook", "method": "self-distill"}
    assert validate({"finetune": section | {"trainer": {"weight_decay": 0.1}}})
    with pytest.raises(UsageError, match=r"finetune\.trainer\.neftune_noise_alpha has no effect"):
        validate({"finetune": section | {"trainer": {"neftune_noise_alpha": 5.0}}})
