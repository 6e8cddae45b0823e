"""Make a model folder that transformers 5 has written readable for transformers 4 and programs built on it.

transformers 5 has renamed settings. A program that knows the old names alone does not fail: it takes a
default, and runs the model with other positions. So a folder states these settings under both names, unless
transformers 5 would then read other positions. So it does with families that are newer than the old names,
such as Gemma 4, which no program looks for there.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from opdcl.rundir.files import read_json, write_json

# The tokenizer class that transformers 5 writes for every tokenizer.json without a class of its own.
NEW_CLASS, OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"

# Setting of transformers 5 -> its name in transformers 4, in most models and in GPT-NeoX.
OLD_NAMES = {
    "rope_theta": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "num_local_experts": "num_experts",
}
NEOX_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}

# transformers 4 refuses further keys in a scaling of this kind for these models.
ONLY_FACTORS = {"phi3": ("short_factor", "long_factor")}


def make_portable(folder: Path, has_code: bool = False) -> None:
    """Add the old names of settings to a model folder's config.json and tokenizer_config.json.

    Unless the model has code that was allowed to run, its files name none.
    """
    file = folder / "config.json"
    config = read_json(file)
    for section in _sections(config):
        if section.get("dtype"):  # vLLM would take float16 for bfloat16
            section.setdefault("torch_dtype", section["dtype"])
        if not has_code:
            section.pop("auto_map", None)
    both = copy.deepcopy(config)
    for section in _sections(both):
        _add_old_names(section)
    write_json(file, both if _positions(both) == _positions(config) else config)
    file = folder / "tokenizer_config.json"
    if file.exists():
        settings = read_json(file)
        if settings.get("tokenizer_class") == NEW_CLASS:
            settings["tokenizer_class"] = OLD_CLASS
        if isinstance(settings.get("extra_special_tokens"), list):
            settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
        if not has_code:
            settings.pop("auto_map", None)
        write_json(file, settings)


def _sections(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of a model and those of its parts, such as `text_config`."""
    parts = [part for name, part in config.items() if name.endswith("_config") and isinstance(part, dict)]
    return [config, *parts]


def _positions(config: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the positions that transformers reads from a model's settings, and for its parts, if it can.

    It cannot where old names are foreign to it, nor where code of its own would have to read them.
    """
    from transformers import CONFIG_MAPPING

    try:
        read = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config)).to_dict()
    except Exception:
        return None
    positions = []
    for section in _sections(read):
        rope = dict(section.get("rope_parameters") or {})
        rope.pop("type", None)  # an old name of `rope_type`
        positions.append(rope)
    return positions


def _add_old_names(config: dict[str, Any]) -> None:
    """Add to the settings of a model those that transformers 4 knows by another name, or in another form."""
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:  # layers with a sliding window have positions of their own
        local = rope.get("sliding_attention") or {}
        rope = rope["full_attention"] or {}
        if local.get("rope_theta") != rope.get("rope_theta"):
            config.setdefault("rope_local_base_freq", local.get("rope_theta"))
    model_type = config.get("model_type", "")
    for name, old_name in (NEOX_NAMES if model_type == "gpt_neox" else OLD_NAMES).items():
        value = rope.get(name, config.get(name))
        if value is not None:
            config.setdefault(old_name, value)
    if rope.get("rope_type", "default") != "default" and not config.get("rope_scaling"):
        if rope["rope_type"] == "longrope" and model_type in ONLY_FACTORS:
            factors = {name: rope[name] for name in ONLY_FACTORS[model_type]}
            config["rope_scaling"] = {"type": "longrope", **factors}
        else:
            elsewhere = ("rope_theta", "partial_rotary_factor")
            config["rope_scaling"] = {name: value for name, value in rope.items() if name not in elsewhere}
