"""Check an adapter that somebody else has made: alone, and beside the base that it is put on.

Recovery switches between base and adapters on one set of base weights, so all that an adapter has learned
must be in its low-rank matrices.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from opdcl.config.model import ModelConfig
from opdcl.errors import OpdclError, UsageError
from opdcl.hub import HUB_IDS
from opdcl.model.check_model import Faults, Found, headers, refuse_first, shown_shape, weight_files
from opdcl.model.load import SETTINGS, model_source, skeleton
from opdcl.rundir.hashes import ADAPTER, hash_files
from opdcl.rundir.layout import adapter_config

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig

OTHER_SETTINGS = "train it without that; docs/repair.md lists what an adapter may have"
MERGE_FIRST = (
    "merge it with PEFT first, as docs/repair.md shows; "
    "then opdcl recover MODEL --base BASE, with both models in memory"
)
TRAIN_AGAIN = "train it again, or copy the right file"
COPY_AGAIN = "copy it again from where the adapter was trained"
OTHER_BASE = "use the base model that the adapter was trained on"

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


OFF: tuple[Any, ...] = (None, False, 0, "", "none", [], {})
# Settings that have to be off -> what the adapter changes otherwise.
MORE_THAN_LOW_RANK = {
    "bias": "it changes the biases of its base",
    "lora_bias": "its low-rank matrices have biases",
    "layer_replication": "it repeats layers of its base",
    "alora_invocation_tokens": "it is an activated LoRA, which acts on a part of each text only",
    "arrow_config": "it routes between adapters",
    "use_qalora": "it is a QALoRA adapter, which needs its quantized base",
    "use_bdlora": "its matrices are block-diagonal",
    "kasa_config": "it changes the weights of its base",
    "monteclora_config": "its matrices are random",
}
# A merged model has all that adapters with these have learned.
MERGED = {
    "modules_to_save": "it replaces whole modules of its base",
    "trainable_token_indices": "it changes the embeddings of some tokens",
}
# Settings that are checked by what they say, or may have any value. PEFT ignores what it does not know, with
# a warning only.
KNOWN = {
    *(*_Settings.model_fields, *MORE_THAN_LOW_RANK, *MERGED),
    *("peft_type", "task_type", "init_lora_weights", "peft_version", "auto_mapping", "inference_mode"),
    *("megatron_core", "qalora_group_size", "runtime_config"),
    # Settings of a start, which `init_lora_weights` switches on.
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    # It concerns embeddings and heads, which are merged only.
    "ensure_weight_tying",
}
# These ways to initialise an adapter do not change the base; all others subtract their start from it.
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")

EMBEDDINGS = re.compile("embed|wte|lm_head")
COPIES = re.compile(r"(embed_tokens|embed_in|word_embeddings|wte|lm_head|embed_out)\.weight$")


def check_adapter(folder: Path) -> None:
    """Refuse an adapter that has learned more than low-rank changes of linear layers and experts.

    Raises:
        UsageError: The adapter is of another kind, or damaged.
    """
    from safetensors.torch import load_file

    settings, names = checked_settings(folder), list(headers([folder / ADAPTER]))
    refuse_first(faults_of_kind(settings, names), f"adapter {folder} cannot be recovered: ")
    refuse_first(faults_of_weights(load_file(folder / ADAPTER)), f"adapter {folder} cannot be used: ")


def faults_of_kind(settings: Mapping[str, Any], names: Sequence[str]) -> Faults:
    """Yield why an adapter with these settings, and weights of these `names`, has learned more."""
    used = {key: value for key, value in settings.items() if value not in OFF}
    kind, task, start = (settings.get(key) for key in ("peft_type", "task_type", "init_lora_weights"))
    if kind != "LORA":
        yield f"it is of type {kind}, not LORA", OTHER_SETTINGS
    if task not in (None, "", "CAUSAL_LM"):
        hint = "name a chat model's adapter; a reward model's has learned scores, not answers"
        yield f"it is for a model of another task (task_type: {task})", hint
    for key, why in MORE_THAN_LOW_RANK.items():
        if key in used:
            yield f"{why} ({key}: {used[key]})", OTHER_SETTINGS
    for key, value in used.items():
        if key not in KNOWN:
            does = f"opdcl does not know what {key} does, which it sets to {str(value)[:60]}"
            yield does, OTHER_SETTINGS
    if start not in PLAIN_STARTS:
        yield f"its start was subtracted from its base (init_lora_weights: {start})", OTHER_SETTINGS
    for name in names:
        if not ("lora_" in name or EMBEDDINGS.search(name) or "modules_to_save" in used):
            reason = f"it changes more than linear layers and experts, or not by low rank ({name})"
            yield reason, OTHER_SETTINGS
    for key, why in MERGED.items():
        if key in used:
            yield f"{why} ({key}: {used[key]})", MERGE_FIRST
    copies = copied_weights(names)  # these are compared with the base when it is known
    for name in names:
        if EMBEDDINGS.search(name) and name not in copies:
            yield f"it changes embeddings or the head ({name})", MERGE_FIRST


def copied_weights(names: Iterable[str]) -> list[str]:
    """Return which of an adapter's weights are a base's embeddings or head.

    PEFT saves them with an adapter whenever the vocabulary was resized, trained or not.
    """
    return [name for name in names if "lora_" not in name and COPIES.search(name)]


def faults_of_weights(weights: Mapping[str, torch.Tensor]) -> Faults:
    """Yield what is wrong with the numbers of an adapter's weights."""
    if not weights:
        yield "it has no weights", TRAIN_AGAIN
    layers: dict[str, bool] = {}
    for name, weight in weights.items():
        if not weight.is_floating_point():
            kind = str(weight.dtype).removeprefix("torch.")
            yield f"{name} holds numbers of type {kind}, which is none for weights", TRAIN_AGAIN
        elif not weight.float().isfinite().all():  # which types of eight bits do not have
            yield f"{name} holds NaN or infinity", TRAIN_AGAIN
        # The change of a layer is the product of its matrices, so one that is zero is enough.
        layer = re.sub(r"lora_(embedding_)?[AB]", "lora", name)
        layers[layer] = layers.get(layer, False) or not weight.float().any()
    if layers and all(layers.values()):
        yield "it changes nothing: in each layer one of its matrices is zero", TRAIN_AGAIN


@contextlib.contextmanager
def peft_faults(folder: Path) -> Iterator[None]:
    """Translate what PEFT raises on an adapter's folder.

    It raises a `ValueError` where its layers have no support for a setting of the adapter.
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
        problem, hint = f"adapter {folder} does not fit the base model", OTHER_BASE
        if isinstance(fault, ValueError) and not isinstance(fault, NoMatchingPeftModuleError):
            problem, hint = f"PEFT cannot put adapter {folder} onto the base model", OTHER_SETTINGS
        lines = str(fault).strip().splitlines()
        reason = lines[0][:300] if lines else type(fault).__name__
        raise UsageError(f"{problem}: {reason}", hint) from fault


def read_lora_config(folder: Path) -> LoraConfig:
    """Return PEFT's configuration of the adapter in a folder.

    Raises:
        UsageError: The configuration is malformed.
    """
    from opdcl.model.lora import stored_config

    checked_settings(folder)
    with peft_faults(folder):
        return stored_config(folder)


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
    lacking = [stored for stored in in_file if stored not in held]
    shapes = [(one, held[one].shape, needed[name].shape) for one, name in in_file.items() if one in held]
    found = Found(lacking, [*unexpected], shapes, len(held))
    refuse_first(faults_on_base(found), f"adapter {folder} does not fit the base model: ")


# What a name in an adapter's file holds that it should not -> what left it there, and what to do.
TRACES_IN_ADAPTERS = {
    "base_model.model.base_model.model.": "PEFT's wrapper was saved twice: take one `base_model.model.` out "
    "of the names in the file",
    "pretrained_model.": "TRL's wrapper with a value head was saved too: take `pretrained_model.` out of the "
    "names in the file",
    "_orig_mod.": "torch.compile's wrapper was saved too: take `_orig_mod.` out of the names in the file",
    "_fsdp_wrapped_module.": "FSDP's wrapper was saved too: save the adapter's full state dict",
    ".default.": "PEFT's name of the adapter was saved too: save it with save_pretrained, or take `.default` "
    "out of the names in the file",
    "language_model.": "it was trained on a model with a vision tower: name that one with --base, or take "
    "`language_model.` out of the names in the file",
}


def faults_on_base(found: Found) -> Faults:
    """Yield why the weights of an adapter do not fit a base."""
    if found.unexpected:
        count = f"{len(found.unexpected)} of its {found.total} weights have no counterpart there"
        yield f"{count}, such as {found.unexpected[0]}", found.hint(TRACES_IN_ADAPTERS, OTHER_BASE)
    for name, here, there in found.mismatched[:1]:
        yield f"{name} is {shown_shape(here)}, and would have to be {shown_shape(there)}", OTHER_BASE
    if found.missing:
        count = f"its file lacks {len(found.missing)} of the weights that its settings ask for"
        yield f"{count}, such as {found.missing[0]}", COPY_AGAIN


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

    from opdcl.model.hardware import pick_dtype

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
