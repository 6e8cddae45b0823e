"""Values for the settings that are left at `auto`, from the model's size and the device."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from opdcl import parallel
from opdcl.config.load import flatten, with_setting
from opdcl.config.model import LoraSection, ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.config.workflow import Workflow
from opdcl.errors import UsageError
from opdcl.model.load import EMBEDDED, is_gguf, read_config
from opdcl.rundir.layout import adapter_config

# The fewest and the most steps of a recovery that follows the size of its fine-tune.
BOUNDS = 32, 512

# SmolLM2-135M. Neither rate comes from a sweep.
HIDDEN, ALPHA_OVER_R = 576, 2.0
FINETUNE_RATE, RECOVER_SHARE = 1e-3, 0.5

# Not measured here. Earlier versions of tinker-cookbook used this power of the hidden size for Llama models,
# 0.0775 for Qwen; it now lists rates from its own sweep, 3e-4 to 1e-3 for most models. At a fixed alpha / r
# the best rate hardly depends on the rank (Schulman et al., "LoRA Without Regret", 2025).
EXPONENT = 0.781

# Not measured: it only keeps the rate valid where alpha / r is extreme.
HIGHEST_RATE = 0.1


def resolve(
    workflow: Workflow, hidden: int, alpha_over_r: float, device: str
) -> tuple[Workflow, dict[str, str]]:
    """Return the workflow with a number for every `auto`, and the origin of each of these numbers by key.

    `hidden` is the base model's hidden size, `alpha_over_r` the adapter's scale.
    """
    rate = FINETUNE_RATE * (HIDDEN / hidden) ** EXPONENT * ALPHA_OVER_R / alpha_over_r
    size, adapter = f"hidden size {hidden}", f"hidden size {hidden}, alpha/r {alpha_over_r:g}"
    rollouts = 8 if hidden < 1536 else 16 if hidden < 3072 else 32
    reward = workflow.recover.reward if workflow.recover else None
    group = reward.group if reward else 1  # rollouts are whole groups
    on_cuda = device.startswith("cuda")
    return _fill(
        workflow,
        {
            "finetune.learning_rate": (_two_digits(rate), adapter),
            "finetune.batch_size": (16, "any model"),
            "recover.learning_rate": (_two_digits(RECOVER_SHARE * rate), adapter),
            "recover.rollouts": (math.ceil(rollouts / group) * group, size),
            "recover.micro_batch_tokens": (8192 if on_cuda else 2048, device),
            "eval.batch_size": (256 if on_cuda else 320, device),
        },
    )


def with_steps(workflow: Workflow, learned: int | None) -> tuple[Workflow, dict[str, str]]:
    """Return the workflow with a number for `recover.steps` at `auto`, and its origin by key.

    `learned` is how many tokens the fine-tune's rows have over all epochs; None without a fine-tune.
    """
    config = workflow.recover
    if config is None or config.steps != "auto":
        return workflow, {}
    if learned is None:
        steps = RecoverConfig.model_fields["steps"].default
        return _fill(workflow, {"recover.steps": (steps, "without a fine-tune")})
    general, domain = (config.completions(s) * config.limit(s) for s in ("general", "domain"))
    if config.method == "general":
        domain, per_period = 0, 1
    else:
        per_period = config.general_per_domain
    periods = math.ceil(learned / (per_period * general + domain))
    fewest, most = BOUNDS
    steps = min(max(periods * (per_period + bool(domain)), fewest), most)
    return _fill(workflow, {"recover.steps": (steps, f"the fine-tune learns from {learned:,} tokens")})


def _fill(workflow: Workflow, choices: dict[str, tuple[Any, str]]) -> tuple[Workflow, dict[str, str]]:
    """Return the workflow with a choice for each of these keys that is at `auto`, and its origin by key."""
    values, origins = flatten(workflow.model_dump()), {}
    for key, (value, reason) in choices.items():
        if values.get(key) == "auto":
            workflow = with_setting(workflow, key, value)
            origins[key] = f"auto: {reason}"
    return workflow, origins


def _two_digits(rate: float) -> float:
    return float(f"{min(rate, HIGHEST_RATE):.1e}")


def resolve_for_machine(workflow: Workflow) -> tuple[Workflow, dict[str, str]]:
    """Return `resolve` for the workflow's model on this machine. If nothing is `auto`, it reads no model.

    Raises:
        UsageError: The model, or the adapter to start from, was not found.
    """
    _, open_keys = resolve(workflow, HIDDEN, ALPHA_OVER_R, "cpu")
    if not open_keys and all(model.dtype != "auto" for model in workflow.models()):
        return workflow, {}
    from opdcl.model.hardware import pick_device, pick_dtype

    device = pick_device()
    # Which precision is faster is measured: each worker for itself could find another one.
    dtype = parallel.on_first_worker(lambda: pick_dtype("auto"))
    workflow, dtypes = with_dtype(workflow, dtype, device)
    if not open_keys:
        return workflow, dtypes
    hidden = HIDDEN if workflow.model.id == EMBEDDED else text_config(workflow.model).hidden_size
    workflow, origins = resolve(workflow, hidden, _alpha_over_r(workflow), device)
    return workflow, dtypes | origins


def with_dtype(workflow: Workflow, dtype: str, device: str) -> tuple[Workflow, dict[str, str]]:
    """Return the workflow with a dtype for every model at `auto`, and the origin of each of them by key."""
    keys = ["model.dtype", *(f"recover.teachers.{name}.model.dtype" for name in workflow.teachers())]
    return _fill(workflow, dict.fromkeys(keys, (dtype, device)))


def named_after(workflow: Workflow, directory: Path) -> Workflow:
    """Return the workflow, which takes the name of its run directory if it has none of its own."""
    if workflow.name != Workflow.model_fields["name"].default:
        return workflow
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", directory.resolve().name).strip("-._")[:64]
    return workflow.model_copy(update={"name": name}) if name else workflow


def text_config(model: ModelConfig) -> Any:
    """Return the language part of a model's own configuration, without loading its weights."""
    config = read_config(model)
    if getattr(config, "quantization_config", None) and not is_gguf(model):
        hint = (
            "name the model that it was made from, with --base; its adapters fit that one too. "
            "--set model.quantization=4bit quantizes it"
        )
        raise UsageError(f"model {model.id!r} is quantized, which opdcl cannot load", hint)
    return config


def _alpha_over_r(workflow: Workflow) -> float:
    if workflow.start:
        from opdcl.model.adapters import adapter_scale, find_adapter, tuned_model

        if tuned_model(workflow.start, workflow.model):
            return LoraSection().alpha / LoraSection().r
        return adapter_scale(adapter_config(find_adapter(workflow.start)))
    return workflow.finetune.lora.alpha / workflow.finetune.lora.r if workflow.finetune else ALPHA_OVER_R
