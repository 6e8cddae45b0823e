"""Compare the tensors that a model's files hold with those that the model needs.

transformers gives a tensor that it does not find random values and says so in a warning only.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.errors import UsageError
from opdcl.rundir.files import read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SAVE_AGAIN = "load it with transformers and save it again: save_pretrained writes safetensors"


@dataclass(frozen=True)
class Found:
    """What is reported on loading a model or an adapter: names in its files, and shapes that differ."""

    missing: list[str]
    unexpected: list[str]
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    """A name, the shape in the file, and the shape in the model."""
    total: int
    """How many tensors the model has, or the file of an adapter holds."""
    left_over: Sequence[str] = ()
    """Unexpected tensors that bear the name of one of the model's layers."""

    @classmethod
    def of(cls, model: PreTrainedModel, report: Mapping[str, Any]) -> Found:
        """Return what the report of `from_pretrained(..., output_loading_info=True)` says about a model."""
        tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        missing = set(report["missing_keys"])
        # One of two tied tensors in the files is enough; if both are missing, one of them is named.
        missing = {name for name in missing if tied.get(name) not in missing}
        shapes = [(key, tuple(here), tuple(there)) for key, here, there in report["mismatched_keys"]]
        total = len(set(model.state_dict()) - set(tied))
        unexpected, layers = sorted(report["unexpected_keys"]), {name for name, _ in model.named_modules()}
        left_over = [key for key in unexpected if key.rpartition(".")[0] in layers]
        return cls(sorted(missing), unexpected, sorted(shapes), total, left_over)


def shown_shape(shape: Sequence[int]) -> str:
    """Return the sizes of a tensor as text."""
    return " x ".join(map(str, shape)) or "one number"


def weight_files(folder: Path, name: str) -> list[Path]:
    """Return the safetensors files that transformers loads from a folder.

    Raises:
        UsageError: There are none, or one that the index names is missing.
    """
    one, shards = folder / ONE_FILE, list[Path]()
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        named = index.get("weight_map") if isinstance(index, dict) else None
        if not (isinstance(named, dict) and named and all(isinstance(file, str) for file in named.values())):
            raise UsageError(f"{folder / INDEX} does not say which file holds which tensor", "copy it again")
        shards = [folder / file for file in sorted(set(named.values()))]
    if one.is_file():
        if other := next((file for file in shards if file != one and file.is_file()), None):
            problem = f"model {name!r} holds two sets of weights: {ONE_FILE}, and {other.name} of {INDEX}"
            raise UsageError(problem, "programs differ in which they take: move the old ones away")
        return [one]
    if shards:
        if lost := [file for file in shards if not file.is_file()]:
            problem = f"{len(lost)} of {len(shards)} files of model {name!r} are missing, such as {lost[0]}"
            raise UsageError(problem, "copy it again, with all its files")
        return shards
    if pickle := next((file for kind in PICKLES for file in sorted(folder.glob(kind))), None):
        raise UsageError(
            f"model {name!r} holds its weights as a pickle ({pickle.name}), which can run code", SAVE_AGAIN
        )
    raise UsageError(f"model {name!r} holds no weights: there is no {ONE_FILE}", SAVE_AGAIN)


def headers(files: Collection[Path]) -> dict[str, torch.Tensor]:
    """Return the tensors of safetensors files by name, without their values.

    Raises:
        UsageError: A file is damaged.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - it is no dict
                    shape = file.get_slice(key).get_shape()
                    tensors[key] = torch.empty(shape, device="meta")
        except (SafetensorError, OSError, json.JSONDecodeError) as fault:
            raise UsageError(f"{path} is damaged: {fault}", "copy it again") from fault
    return tensors
