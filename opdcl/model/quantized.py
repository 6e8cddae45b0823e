"""Models whose linear layers bitsandbytes quantizes to 4 or 8 bits while they are loaded.

4 bits are NF4 with quantized scales (Dettmers et al., arXiv 2305.14314), 8 bits are LLM.int8() (arXiv
2208.07339). Embeddings, norms and head keep their precision.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, Any

from opdcl.config.model import ModelConfig
from opdcl.errors import EnvironmentFault, UsageError

if TYPE_CHECKING:
    import torch


def check_installed(config: ModelConfig) -> None:
    """Refuse a quantized model where bitsandbytes is missing."""
    if config.quantization and importlib.util.find_spec("bitsandbytes") is None:
        message = f"model.quantization: {config.quantization} needs bitsandbytes, which is not installed"
        raise EnvironmentFault(message, "pip install 'bitsandbytes>=0.50'")


def loading_options(config: ModelConfig, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return the options of `from_pretrained` that quantize a model on its device."""
    from transformers import BitsAndBytesConfig

    check_installed(config)
    # It warns at each 8-bit product, and about a kernel that `use_one_path` avoids.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    config_of_weights = BitsAndBytesConfig(
        load_in_4bit=config.quantization == "4bit",
        load_in_8bit=config.quantization == "8bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config_of_weights, "device_map": {"": device}}


def is_quantized(model: torch.nn.Module) -> bool:
    """Return whether a model's linear layers are quantized."""
    return getattr(model, "quantization_method", None) == "bitsandbytes"


def quantized_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the quantized layers of a model by name; adapters around them are not included."""
    kinds = ("Params4bit", "Int8Params")
    layers = model.named_modules()
    return {name: m for name, m in layers if type(m._parameters.get("weight")).__name__ in kinds}


# 4-bit weights per scale. On a CPU, bitsandbytes 0.50 takes the scales of shorter rows from the wrong places.
BLOCK = 64


def use_one_path(model: torch.nn.Module) -> None:
    """Make quantized layers compute in evaluation as in training.

    In evaluation on a CPU, bitsandbytes rounds the inputs of 8-bit layers, which changes log-probabilities by
    tenths of a nat, and stores 4-bit weights in another order. Student and teacher are graded and trained by
    one model only if both modes use the same products.

    Raises:
        UsageError: On a CPU, bitsandbytes would read 4-bit weights of such layers wrongly.
    """
    for name, layer in quantized_layers(model).items():
        layer.train()
        layer.train = lambda mode=True: None
        if hasattr(layer, "init_8bit_state"):
            layer.init_8bit_state()
            # Once only: when PEFT dequantizes for DoRA, it puts a weight without scales in the layer.
            layer.init_8bit_state = lambda: None
        elif model.device.type == "cpu" and layer.in_features % BLOCK:
            message = f"{name} has {layer.in_features} inputs: bitsandbytes cannot run it in 4 bits on a CPU"
            raise UsageError(message, "--set model.quantization=8bit, or a GPU")
