"""Fields of `transformers.TrainingArguments` that act in our training loops; settings that replace others.

tests/unit/config/test_trainer_fields.py shows that each allowed field changes a run.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic_core import PydanticCustomError

from opdcl.config.section import LARGEST
from opdcl.errors import nearest
from opdcl.sanitize import harmless

# Optimizers that need no further package; schedules that need no evaluation during training.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "rmsprop", "adagrad")
SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "constant"),
    *("constant_with_warmup", "inverse_sqrt", "warmup_stable_decay"),
)
NUMBER = (int, float)

# Field -> its type, or its values.
RECOVER: dict[str, Any] = {
    "optim": OPTIMIZERS,
    "optim_args": str,
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm"), NUMBER),
    "lr_scheduler_type": SCHEDULES,
    "lr_scheduler_kwargs": dict,
    "warmup_steps": NUMBER,
    "save_total_limit": int,
}
ALLOWED = {
    "recover": RECOVER,
    "finetune": RECOVER | {"neftune_noise_alpha": NUMBER, "dataloader_num_workers": int},
}

# Field -> the smallest and the largest value.
BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("adam_beta1", "adam_beta2"), (0, 1 - 1e-9)),
    "adam_epsilon": (0, 1),
    "weight_decay": (0, 1000),
    "max_grad_norm": (0, 1e6),
    "warmup_steps": (0, LARGEST),
    "save_total_limit": (0, LARGEST),
    "neftune_noise_alpha": (0, 1000),
    "dataloader_num_workers": (0, 128),
}

# Optimizer -> the arguments that `optim_args` may give it; transformers ignores any other without a word.
_NUMBERS = ("momentum", "weight_decay", "dampening", "alpha", "eps", "lr_decay")
OPTIMIZER_ARGUMENTS = {
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
    "rmsprop": ("momentum", "alpha", "eps", "weight_decay", "centered"),
    "adagrad": ("lr_decay", "weight_decay", "eps"),
}

# Fields that only some optimizers read.
NEEDS_OPTIMIZER = {
    "optim_args": ("sgd", "rmsprop", "adagrad"),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), ("adamw_torch", "adamw_torch_fused")),
}

# Setting, or reason -> the fields that it replaces.
INSTEAD = {
    "use {stage}.learning_rate": "learning_rate",
    "use {stage}.seed": "seed data_seed shuffle_dataset",
    "use {stage}.save_steps": "save_steps save_strategy",
    "use finetune.epochs": "num_train_epochs",
    "use recover.steps or finetune.epochs": "max_steps",
    "use recover.rollouts or finetune.batch_size": "per_device_train_batch_size",
    "use finetune.max_length": "max_length truncation_mode",
    "use finetune.lora.target_modules": "optim_target_modules",
    "adapters have no dropout": "disable_dropout",
    "use recover.on_policy.temperature": "temperature",
    "use recover.max_new_tokens": "max_completion_length",
    "use recover.loss": "beta label_smoothing_factor",
    "use recover.teachers": "teacher_model_name_or_path teacher_model_revision",
    "use recover.server": "use_vllm",
    "use -o": "output_dir",
    "use track": "report_to",
    "use model.dtype": "bf16 fp16",
    "use model.device": "use_cpu",
    "use model.deterministic": "full_determinism",
    "use model.shard": "fsdp fsdp_config",
    "use model.trust_remote_code": "trust_remote_code",
    "use {stage}.loss": "loss_type",
    "only answer tokens count in the loss": "completion_only_loss assistant_only_loss",
    "memory is bounded by recover.micro_batch_tokens and finetune.batch_size": "gradient_accumulation_steps "
    "gradient_checkpointing activation_checkpointing auto_find_batch_size",
    "metrics.jsonl always has every step": "logging_steps logging_strategy logging_first_step",
    "our loops do not call the model's own forward pass": "torch_compile use_liger_kernel",
    "rows of similar length already share a batch": "train_sampling_strategy packing "
    "packing_strategy padding_free",
    "resuming needs the whole checkpoint": "save_only_model",
}


def check_trainer(stage: str, fields: dict[str, Any]) -> None:
    """Refuse a trainer field without an effect in a stage, and a value of the wrong type.

    Raises:
        PydanticCustomError: Its context names the key, and holds a hint.
    """
    allowed = ALLOWED[stage]
    for name, value in fields.items():
        if reason := _fault(stage, name, value, fields):
            hint = _hint(name, allowed)
            context = {"key": f"trainer.{harmless(name)}", "reason": reason, "hint": hint}
            raise PydanticCustomError("trainer", "{reason}", context)


def _hint(name: str, allowed: dict[str, Any]) -> str:
    if name in allowed:
        return "change the value, or leave the field out"
    near = nearest(name, allowed, 0.75)
    return f"did you mean trainer.{near}?" if near else f"allowed: {', '.join(allowed)}"


def _fault(stage: str, name: str, value: Any, fields: dict[str, Any]) -> str:
    expected = ALLOWED[stage].get(name)
    if expected is None:
        name = "use_vllm" if name.startswith("vllm_") else name
        instead = next((instead for instead, names in INSTEAD.items() if name in names.split()), None)
        return f"has no effect: {(instead or 'the training loop does not read it').format(stage=stage)}"
    optimizers = NEEDS_OPTIMIZER.get(name)
    if optimizers and fields.get("optim", OPTIMIZERS[0]) not in optimizers:
        return f"has no effect unless optim is {' or '.join(optimizers)}"
    if expected in (OPTIMIZERS, SCHEDULES):
        return "" if value in expected else f"must be one of {', '.join(expected)}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, expected):
        kind = {str: "text", int: "an integer", dict: "a mapping", NUMBER: "a number"}[expected]
        return f"must be {kind}, got {value!r}"
    if name == "optim_args":
        return _fault_of_optimizer_arguments(str(fields.get("optim")), value)
    low, high = BOUNDS.get(name, (-math.inf, math.inf))
    if name in BOUNDS and not low <= value <= high:  # neither is NaN between them
        return f"must be from {low:g} to {high:.12g}, got {value!r}"
    return ""


def _fault_of_optimizer_arguments(optimizer: str, text: str) -> str:
    known = OPTIMIZER_ARGUMENTS[optimizer]
    given = dict(part.partition("=")[::2] for part in text.replace(" ", "").split(","))
    if given.get("nesterov", "").lower() == "true" and ("momentum" not in given or "dampening" in given):
        return f"must give nesterov a momentum and no dampening, got {text!r}"
    for part in text.replace(" ", "").split(","):
        key, _, value = part.partition("=")
        if key not in known:
            return f"must be KEY=VALUE,... with keys of {optimizer} ({', '.join(known)}), got {part!r}"
        if key in _NUMBERS:
            try:
                is_number = 0 <= float(value) <= 1000
            except ValueError:
                is_number = False
            if not is_number:
                return f"must give {key} a number from 0 to 1000, got {value!r}"
        elif value.lower() not in ("true", "false"):
            return f"must give {key} true or false, got {value!r}"
    return ""
