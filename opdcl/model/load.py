"""Find, load and check models: the embedded default, hub ids, and safetensors or GGUF on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from opdcl import parallel
from opdcl.config.model import ModelConfig
from opdcl.errors import EnvironmentFault, UsageError
from opdcl.hub import reachable
from opdcl.model.embedded import EMBEDDED, embedded_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_base(config: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the base model, in evaluation mode on its device, and its tokenizer.

    Raises:
        UsageError: The model does not exist, has no chat template, or its weights are pickles.
        EnvironmentFault: The device is missing.
    """
    # Huge pages for torch's large buffers on Linux: logits of a big vocabulary otherwise cost a page fault per 4 KiB. Read
    # by torch at its first large allocation, so it has to be set before the model is loaded.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = pick_device(config.device)
    with parallel.first_worker_first():
        source, extra = model_source(config)
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code, **extra}
    with _worded(config):
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        if gguf := extra.get("gguf_file"):
            from transformers import GgufConfig

            options["quantization_config"] = GgufConfig(gguf_file=gguf, dequantize=True)
        else:
            options["use_safetensors"] = True
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, pick_dtype(config.dtype, device)), **options
        )
    if not tokenizer.chat_template:
        raise UsageError(
            f"model {config.id!r} has no chat template: it is not an instruct model",
            "choose the instruct version of the model, or add a chat_template.jinja to its folder",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.use_cache = False
    if device == "cpu":
        # Out of the file's small pages into memory with huge ones, where every pass over the weights is faster.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    parallel.shard(model, device, config.shard)  # layer by layer, so that the device never holds the whole
    return model.to(device).eval(), tokenizer


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer alone."""
    from transformers import AutoTokenizer

    source, extra = model_source(config)
    with _worded(config):
        return AutoTokenizer.from_pretrained(
            source, revision=config.revision, trust_remote_code=config.trust_remote_code, **extra
        )


@contextlib.contextmanager
def _worded(config: ModelConfig) -> Iterator[None]:
    """Turn what the libraries raise while they load a model into one error with its fix."""
    from huggingface_hub.errors import GatedRepoError
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError) as fault:
        first = next((line.strip() for line in str(fault).splitlines() if line.strip()), type(fault).__name__)
        chain: list[BaseException] = [fault]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)
        gated = any(isinstance(f, GatedRepoError) for f in chain)
        hint = "accept its licence on the model's page, then set HF_TOKEN" if gated else _model_hint(config)
        raise UsageError(f"model {config.id!r} cannot be loaded: {first[:300]}", hint) from fault


def check_exists(config: ModelConfig) -> None:
    """Refuse at once, and before anything is written, a model that cannot be found."""
    model_source(config, convert=False)


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that ends a turn: the tokenizer's, and all that the generation config names."""
    declared = model.generation_config.eos_token_id
    declared = declared if isinstance(declared, list) else [declared]
    return sorted({i for i in [tokenizer.eos_token_id, *declared] if i is not None})


def pick_device(name: str = "auto") -> str:
    """Return the device to use; one that was asked for and is missing is an `EnvironmentFault`."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as fault:
        raise EnvironmentFault(f"device {name!r} is not available", "opdcl doctor shows what is") from fault
    return name


def pick_dtype(name: str, device: str) -> str:
    """Return `bfloat16` where the hardware multiplies in it, else `float32`, unless a dtype is named.

    A processor without AVX-512 BF16 or AMX emulates bfloat16 about eight times slower than it computes in float32.
    """
    import torch

    if name != "auto":
        return name
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def model_source(config: ModelConfig, convert: bool = True) -> tuple[str, dict]:
    """Return what `from_pretrained` is to load, and further options for it."""
    if config.id == EMBEDDED:
        return (str(embedded_folder()) if convert else EMBEDDED), {}
    path = Path(os.path.expanduser(config.id))
    if path.suffix == ".gguf" and os.path.isfile(path):
        return str(path.parent), {"gguf_file": path.name}
    if os.path.isdir(path):
        if not (path / "config.json").exists():
            raise UsageError(
                f"{path} holds no config.json, so it is not a model", "name the folder of a model"
            )
        return str(path), {}
    if path.is_absolute() or config.id.startswith((".", "~")) or config.id.count("/") != 1:
        raise UsageError(f"model {config.id!r} is neither a folder nor a hub id", _model_hint(config))
    _require_hub(config)
    return config.id, {}


def _require_hub(config: ModelConfig) -> None:
    """Fail in seconds, not after a minute of retries, when a hub model is neither cached nor within reach."""
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(config.id, "config.json", revision=config.revision), str):
        return
    if not reachable():
        raise UsageError(
            f"model {config.id!r} is not in the local cache and the hub is out of reach", _model_hint(config)
        )


def _model_hint(config: ModelConfig) -> str:
    return f"--model {EMBEDDED} is embedded; or name a folder with safetensors, or, while online, opdcl fetch WORKFLOW"


def base_fingerprint(model: torch.nn.Module) -> str:
    """Return the SHA-256 over the bits of all base weights, adapters left out."""
    import torch
    from torch.distributed.tensor import DTensor

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            continue
        weight = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        bits = weight.detach().cpu().contiguous().view(torch.uint8)
        digest.update(memoryview(bits.flatten().numpy()))
    return digest.hexdigest()
