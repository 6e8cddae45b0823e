"""The one door through which transformers reads models and tokenizers; that of adapters is `adapter_door`.

Left to itself it does more than was asked: it puts an adapter that it finds beside a model onto the model,
and asks on stdout whether to run code that comes with it. A test finds every call of `from_pretrained`
elsewhere in the package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.errors import UsageError
from opdcl.hub import Repository, holds
from opdcl.model.adapter_door import SETTINGS

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def read_model_config(source: str, *, trust_remote_code: bool, **options: Any) -> PretrainedConfig:
    """Return a model's own configuration.

    Raises:
        UsageError: There is an adapter beside the model.
    """
    from transformers import AutoConfig

    refuse_adapter_beside(source, options.get("revision"))
    config: PretrainedConfig = AutoConfig.from_pretrained(
        source, trust_remote_code=trust_remote_code, **options
    )
    if config._attn_implementation not in (None, "eager"):  # kernels that somebody else had, such as flash's
        config._attn_implementation = "sdpa"
    return config


def read_generation(source: str, revision: str | None) -> GenerationConfig:
    """Return a model's own settings for generation, which bring no code."""
    from transformers import GenerationConfig

    return GenerationConfig.from_pretrained(source, revision=revision)


def read_tokenizer(source: str, *, trust_remote_code: bool, **options: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, or the one in an adapter's folder."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        source, trust_remote_code=trust_remote_code, **options
    )
    return tokenizer


def read_model(
    source: str, *, trust_remote_code: bool, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model without any adapter, and what transformers reports on its tensors.

    Tensors of another shape are in the report and raise no error.

    Raises:
        UsageError: There is an adapter beside the model.
    """
    from transformers import AutoModelForCausalLM

    place = {key: options[key] for key in ("revision", "gguf_file") if key in options}
    own = read_model_config(source, trust_remote_code=trust_remote_code, **place)
    if own._attn_implementation == "sdpa":
        options["config"] = own
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = AutoModelForCausalLM.from_pretrained(
        source, trust_remote_code=trust_remote_code, **options
    )
    return model, report


def read_tensors(
    bare: PreTrainedModel, tensors: dict[str, torch.Tensor]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model of the kind of `bare` with these tensors, and the report of `read_model`.

    transformers' own loading runs, with all its renaming and stacking, on tensors without values.
    """
    model, report = type(bare).from_pretrained(
        None,
        config=bare.config,
        state_dict=tensors,
        device_map={"": "meta"},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    return model, report


def refuse_adapter_beside(source: str, revision: str | None) -> None:
    """Refuse a model's folder or repository that holds an adapter too."""
    if os.path.isdir(source):
        if not (file := Path(source) / SETTINGS).is_file():
            return
        place = str(file)
        hint = f"move {SETTINGS} and the adapter's weights into a folder of their own"
    elif holds(Repository("model", source, revision), SETTINGS):
        place = f"{SETTINGS} in its repository"
        hint = f"hf download {source} --exclude 'adapter_*' --local-dir FOLDER; then name FOLDER"
    else:
        return
    both = "for both as one model, opdcl export ADAPTER -o MODEL merges them"
    problem = (
        f"model {source!r} cannot be loaded: {place} says that an adapter lies beside it, "
        f"and which of the two is meant is not known"
    )
    raise UsageError(problem, f"{hint}; {both}")
