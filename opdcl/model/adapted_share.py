"""How much of a model an adapter changes, found without loading any weights."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from opdcl.config.finetune import LoraSection
from opdcl.config.model import ModelConfig
from opdcl.model.adapter_files import read_lora_config
from opdcl.model.load import skeleton
from opdcl.model.lora import base_weight
from opdcl.model.targets import lora_config


def planned_config(adapter: LoraSection | Path, model: PreTrainedModel) -> LoraConfig:
    """Return PEFT's configuration of a new adapter on a model, or of the one in a folder."""
    return read_lora_config(adapter) if isinstance(adapter, Path) else lora_config(adapter, model)


def adapted_share(model: ModelConfig, adapter: LoraSection | Path) -> float:
    """Return the share of a model's weights that an adapter changes. No weights are loaded."""
    return _share(
        model.model_dump_json(), adapter if isinstance(adapter, Path) else adapter.model_dump_json()
    )


@functools.cache  # the arms of a comparison mostly share both
def _share(model: str, adapter: str | Path) -> float:
    bare = skeleton(ModelConfig.model_validate_json(model))
    total = sum(parameter.numel() for parameter in bare.parameters())
    lora = adapter if isinstance(adapter, Path) else LoraSection.model_validate_json(adapter)
    with torch.device("meta"):
        adapted = get_peft_model(bare, planned_config(lora, bare))
    layers = [layer for layer in adapted.modules() if isinstance(layer, BaseTunerLayer)]
    return sum(base_weight(layer).numel() for layer in layers) / total
