"""Read what an adapter's folder holds: checked settings, and its weights' names and shapes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from opdcl.config.model import ModelConfig
from opdcl.errors import OpdclError, UsageError
from opdcl.hub import HUB_IDS
from opdcl.model.adapter_door import SETTINGS, read_adapter_settings
from opdcl.model.load import model_source, pick_dtype, skeleton
from opdcl.model.rules import (
    COPY_AGAIN,
    MERGE_FIRST,
    ON_BASE,
    OTHER_BASE,
    OTHER_SETTINGS,
    copied_weights,
    refuse_broken,
)
from opdcl.model.tensors import Found, headers, weight_files
from opdcl.rundir.hashes import ADAPTER, hash_files
from opdcl.rundir.layout import adapter_config

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig

HIGHEST_RANK = 2**16
# A name for an adapter that is not PEFT's own: `default` in the names of a file would go unnoticed.
STATE = "student"
# What PEFT writes before the base's own names.
PREFIX = "base_model.model."
Rank = Annotated[int, Field(gt=0, le=HIGHEST_RANK)]
Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NamesOrPattern = str | list[str] | None
Layer = Annotated[int, Field(ge=0)]


class _Settings(BaseModel, strict=True):
    """The settings that opdcl or PEFT computes with, each with what its value must be."""

    r: Rank = Field(1, description=f"a whole number from 1 to {HIGHEST_RANK}")
    lora_alpha: Scale = Field(1.0, description="a number above 0")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="a number from 0 to below 1")
    rank_pattern: dict[str, Rank] = Field(
        {}, description=f"names with whole numbers from 1 to {HIGHEST_RANK}"
    )
    alpha_pattern: dict[str, Scale] = Field({}, description="names with numbers above 0")
    target_modules: NamesOrPattern = Field(None, description="a list of names, or a pattern")
    exclude_modules: NamesOrPattern = Field(None, description="a list of names, or a pattern")
    target_parameters: NamesOrPattern = Field(None, description="a list of names")
    layers_to_transform: Layer | list[Layer] | None = Field(None, description="numbers of layers")
    layers_pattern: NamesOrPattern = Field(None, description="a list of names")
    use_dora: bool | None = Field(None, description="true or false")
    use_rslora: bool | None = Field(None, description="true or false")
    fan_in_fan_out: bool | None = Field(None, description="true or false")
    base_model_name_or_path: str | None = Field(None, description="text")
    revision: str | None = Field(None, description="text")


def checked_settings(folder: Path) -> dict[str, Any]:
    """Return the content of an adapter's configuration, whose values are possible ones.

    Raises:
        UsageError: A value is missing, of the wrong type, or impossible; the message names the file.
    """
    settings, file = adapter_config(folder), folder / SETTINGS
    if settings.get("peft_type", "LORA") == "LORA":
        for key in ("r", "lora_alpha"):
            if key not in settings:
                raise UsageError(f"{file} does not set {key}", COPY_AGAIN)
    try:
        _Settings.model_validate(settings)
    except ValidationError as fault:
        key = str(fault.errors()[0]["loc"][0])
        must_be = _Settings.model_fields[key].description
        problem = f"{file} sets {key} to {str(settings[key])[:60]}: it must be {must_be}"
        raise UsageError(problem, COPY_AGAIN) from fault
    return settings


@contextlib.contextmanager
def peft_faults(folder: Path, problem: str = "", hint: str = OTHER_BASE) -> Iterator[None]:
    """Translate what PEFT raises on an adapter's folder; without a `problem`, name the cause.

    PEFT raises a `ValueError` where its layers have no support for a setting of the adapter.
    """
    from peft.utils.error import NoMatchingPeftModuleError

    from opdcl.model.hardware import is_out_of_memory

    try:
        yield
    except OpdclError:
        raise
    except Exception as fault:
        if is_out_of_memory(fault):
            raise
        lines = str(fault).strip().splitlines()
        reason = lines[0][:300] if lines else type(fault).__name__
        if not problem and isinstance(fault, ValueError) and not isinstance(fault, NoMatchingPeftModuleError):
            problem, hint = f"PEFT cannot put adapter {folder} onto the base model", OTHER_SETTINGS
        problem = problem or f"adapter {folder} does not fit the base model"
        raise UsageError(f"{problem}: {reason}", hint) from fault


def read_lora_config(folder: Path) -> LoraConfig:
    """Return PEFT's configuration of the adapter in a folder.

    Raises:
        UsageError: The configuration is malformed.
    """
    checked_settings(folder)
    with peft_faults(folder, f"{folder / SETTINGS} cannot be read", COPY_AGAIN):
        return read_adapter_settings(folder)


def check_on_base(folder: Path, base: ModelConfig) -> list[str]:
    """Check that an adapter fits its base; return notes. No weights of the model are loaded.

    Raises:
        UsageError: Its settings are malformed, names or shapes of its weights differ from those of an adapter
            on this base, or it holds embeddings that are not the base's.
    """
    import torch
    from peft import get_peft_model, set_peft_model_state_dict

    bare = skeleton(base)
    config = read_lora_config(folder)
    held = headers([folder / ADAPTER])
    with peft_faults(folder), torch.device("meta"):
        adapted = get_peft_model(bare, config, adapter_name=STATE)
        # PEFT's own loading, with all its renaming, on tensors without values.
        low_rank = {name: tensor for name, tensor in held.items() if "lora_" in name}
        found = set_peft_model_state_dict(adapted, low_rank, STATE, ignore_mismatched_sizes=True)
    missing = [name for name in found.missing_keys if "lora_" in name]
    refuse_misfit(folder, adapted, STATE, missing, found.unexpected_keys)
    notes = note_other_base(folder, base)
    if copies := copied_weights(held):
        if weights := stored_weights(base, copies):
            refuse_other_copies(folder, weights)
        unused = f"holds weights of its base, unchanged, which are not used: {', '.join(copies)}"
        notes.append(f"adapter {folder} {unused}")
    return notes


def note_other_base(folder: Path, base: ModelConfig) -> list[str]:
    """Say whether an adapter names another base than this one: by their files, if both are folders here."""
    named = adapter_config(folder).get("base_model_name_or_path")
    if not named or named in (base.id, HUB_IDS.get(base.id)):
        return []
    if not (os.path.isdir(named) and os.path.isdir(base.id)):
        return [f"adapter {folder} names {named} as its base, and is put on {base.id}"]
    ours, theirs = (sorted(Path(place).glob("*.safetensors")) for place in (base.id, named))
    sizes = [[file.stat().st_size for file in files] for files in (ours, theirs)]
    if sizes[0] == sizes[1] and hash_files(ours) == hash_files(theirs):
        return []
    return [f"warning: adapter {folder} was trained on {named}, whose weights are not those of {base.id}"]


def refuse_misfit(
    folder: Path, adapted: torch.nn.Module, state: str, missing: Sequence[str], unexpected: Sequence[str]
) -> None:
    """Refuse an adapter that PEFT could not load whole as `state`, by the names in its file.

    PEFT keeps an untrained adapter for weights that are missing or have another shape.
    """
    unexpected = _that_change_something(folder, unexpected)
    if not (missing or unexpected):
        return
    held, needed = headers([folder / ADAPTER]), adapted.state_dict()
    in_file = {name.replace(f".{state}.", ".").removesuffix(f".{state}"): name for name in missing}
    found = Found(
        missing=[stored for stored in in_file if stored not in held],
        unexpected=[*unexpected],
        mismatched=[
            (stored, held[stored].shape, needed[name].shape)
            for stored, name in in_file.items()
            if stored in held
        ],
        total=len(held),
    )
    refuse_broken(ON_BASE, found, f"adapter {folder} does not fit the base model: ")


def _that_change_something(folder: Path, names: Sequence[str]) -> list[str]:
    """Leave out biases of low-rank matrices that are zero: mergekit writes them for layers with biases."""
    from safetensors.torch import load_file

    if not any(name.endswith(".bias") for name in names):
        return [*names]
    zero = {name for name, bias in load_file(folder / ADAPTER).items() if not bias.any()}
    biases = {name for name in zero if name.endswith((".lora_A.bias", ".lora_B.bias"))}
    return [name for name in names if name.replace(f".{STATE}.", ".") not in biases]


def stored_weights(base: ModelConfig, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return a base's weights by their names in an adapter, as its files hold them, in the run's precision.

    Nothing is returned if the base is not in safetensors on this machine.
    """
    import torch
    from safetensors import safe_open

    source, options = model_source(base)
    if not os.path.isdir(source) or "gguf_file" in options:
        return {}
    dtype = getattr(torch, pick_dtype(base.dtype))
    found: dict[str, torch.Tensor] = {}
    for path in weight_files(Path(source), base.id):
        with safe_open(path, framework="pt") as file:
            stored = set(file.keys())
            for name in names:
                own = name.removeprefix(PREFIX)
                if own not in stored and own.startswith("lm_head"):  # tied to the embeddings
                    own = "model.embed_tokens.weight"
                if own in stored:
                    found[name] = file.get_tensor(own).to(dtype)
    return found


def refuse_other_copies(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Refuse an adapter whose embeddings or head are not its base's; `weights` are these, by its names."""
    import torch
    from safetensors import safe_open

    with safe_open(folder / ADAPTER, framework="pt") as file:
        for name in copied_weights(file.keys()):
            weight = weights.get(name)
            if weight is None or not torch.equal(file.get_tensor(name).to(weight), weight):
                problem = f"it changes more than linear layers and experts: {name} is not its base's"
                raise UsageError(f"adapter {folder} cannot be recovered: {problem}", MERGE_FIRST)
