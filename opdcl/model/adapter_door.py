"""The one door through which PEFT reads adapters. Left to itself, it takes over settings of training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

SETTINGS = "adapter_config.json"


def read_adapter_settings(folder: Path) -> LoraConfig:
    """Return PEFT's configuration of the adapter in a folder, without dropout, which opdcl never uses.

    PEFT has no dropout for the stacked weights of experts, and refuses such an adapter.
    """
    from peft import LoraConfig

    config = LoraConfig.from_pretrained(str(folder))
    config.lora_dropout = 0.0
    return config


def put_adapter(
    model: PreTrainedModel | PeftModel, folder: Path, name: str, trainable: bool = False
) -> tuple[PeftModel, Any]:
    """Put the adapter in a folder onto a model, which may have others; return it and PEFT's report.

    For weights that the report calls missing or unexpected, PEFT keeps an untrained adapter.
    """
    from peft import PeftModel

    config = read_adapter_settings(folder)
    options: dict[str, Any] = {"is_trainable": trainable, "ignore_mismatched_sizes": True}
    if not isinstance(model, PeftModel):
        model = PeftModel.from_pretrained(model, str(folder), name, config=config, **options)
    elif name not in model.peft_config:
        config.inference_mode = not trainable
        model.add_adapter(name, config)
        if trainable:
            model.set_requires_grad(name)
    # Only this returns the names that do not match.
    return model, model.load_adapter(str(folder), name, **options)
