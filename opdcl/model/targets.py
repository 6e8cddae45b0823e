"""Which weights an adapter changes: those of linear layers, and in a mixture of experts the experts' stacks.

transformers keeps a layer's experts stacked in 3-D parameters, which PEFT adapts by `target_parameters`.
"""

from __future__ import annotations

import re

import torch
from peft import LoraConfig
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from opdcl.config.lora import LoraSection
from opdcl.model.architecture import architecture

# In models with experts, PEFT takes a layer of such a name for the experts themselves and leaves the layer
# out (`peft.utils.transformers_weight_conversion`). Named as the parameter `NAME.weight`, it is kept.
MISTAKEN = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def stacks(model: PreTrainedModel) -> list[str]:
    """Return the names of the experts' parameters, each `(experts, ., .)`; none without a mixture."""
    experts = architecture(model.config).experts
    return [name for name, p in model.named_parameters() if p.ndim == 3 and p.shape[0] == experts]


def adaptable(model: PreTrainedModel) -> list[str]:
    """Return the names of all linear layers except the head, and of the experts' parameters."""
    head, linear = model.get_output_embeddings(), torch.nn.Linear | Conv1D
    layers = [name for name, m in model.named_modules() if isinstance(m, linear) and m is not head]
    return layers + stacks(model)


def is_target(name: str, targets: str | list[str]) -> bool:
    """Return whether `target_modules` means a layer: as in PEFT, a list holds names or endings of names,
    and a string other than `all-linear` is a regular expression."""
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def lora_config(lora: LoraSection, model: PreTrainedModel) -> LoraConfig:
    """Return PEFT's configuration of a new adapter on a model without adapters.

    An expert's rank is r / (experts per token), so a token meets rank r in every layer, as in Schulman et al.
    ("LoRA Without Regret", 2025); the scale alpha / r stays. Routers get no adapter.
    """
    config = LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM"
    )
    if not (experts := set(stacks(model))):
        return config
    names = [name for name in adaptable(model) if is_target(name, lora.target_modules)]
    layers = {n for n in names if n not in experts and n.rpartition(".")[2] not in MISTAKEN}
    parameters = [n if n in experts else f"{n}.weight" for n in names if n not in layers]
    rank = max(1, lora.r // architecture(model.config).active_experts)
    endings = sorted({re.escape(".".join(n.split(".")[-2:])) for n in names if n in experts})
    config.target_modules, config.target_parameters = layers, parameters or None
    config.rank_pattern = dict.fromkeys(endings, rank)
    config.alpha_pattern = dict.fromkeys(endings, lora.alpha * rank / lora.r)
    return config
