"""The one door through which transformers and PEFT read models, tokenizers and adapters.

Left to themselves they do more than was asked: transformers puts an adapter that it finds beside a model onto
the model, and asks on stdout whether to run code that comes with it; PEFT takes over an adapter's settings of
training. A test finds every call of `from_pretrained` elsewhere in the package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.errors import UsageError
from opdcl.hub import Repository, holds

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SETTINGS = "adapter_config.json"


def read_model_config(source: str, *, trust_remote_code: bool, **options: Any) -> PretrainedConfig:
    """Return a model's own configuration.

    Raises:
        UsageError: An adapter lies beside the model.
    """
    from transformers import AutoConfig

    refuse_adapter_beside(source, options.get("revision"))
    config: PretrainedConfig = AutoConfig.from_pretrained(
        source, trust_remote_code=trust_remote_code, **options
    )
    return config


def read_generation(source: str, revision: str | None) -> GenerationConfig:
    """Return a model's own settings for generation, which bring no code."""
    from transformers import GenerationConfig

    return GenerationConfig.from_pretrained(source, revision=revision)


def read_tokenizer(source: str, *, trust_remote_code: bool, **options: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, or the one that lies beside an adapter."""
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
        UsageError: An adapter lies beside the model.
    """
    from transformers import AutoModelForCausalLM

    refuse_adapter_beside(source, options.get("revision"))
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
