"""Write what a run made for others to load: its adapter, one merged safetensors model, or GGUF for llama.cpp and Ollama.

    opdcl export runs/mine -o my-model
    opdcl export runs/mine -o my-model --format gguf --converter ~/llama.cpp/convert_hf_to_gguf.py

GGUF is written by llama.cpp's own converter, and then proved: loaded back, it must give the merged model's probabilities.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.config.model import ModelConfig
from opdcl.deploy.gguf import LARGEST_GAP, find_converter, to_gguf
from opdcl.errors import UsageError
from opdcl.hub import HUB_IDS
from opdcl.model.adapters import find_states
from opdcl.rundir.files import folder_appears_whole, read_json, write_json
from opdcl.rundir.layout import STAGE_OF

if TYPE_CHECKING:
    from opdcl.training import StageReport


def export(
    place: str,
    state: str | None,
    to: Path,
    format: str,
    outtype: str,
    converter: str | None,
    check: bool,
    report: StageReport,
) -> dict[str, Any]:
    """Write one state of a run, or an adapter from elsewhere, as a folder of its own; return what was written.

    Args:
        place: A run directory, an adapter's folder, or a hub id.
        state: Which of a run's states. Default: the last one.
        to: The folder to make.
        format: `merged`, `adapter` or `gguf`.
        outtype: Number format of a GGUF file.
        converter: llama.cpp's converter, where it is not to be found otherwise.
        check: Whether to load a GGUF file back and compare it.
        report: Where progress is told.

    Raises:
        UsageError: There is no such state, or the folder exists.
        EnvironmentFault: The converter is not there.
        OpdclError: The converter failed, or what it wrote is not the same model.
    """
    if to.exists():
        raise UsageError(f"{to} exists", "choose a new folder with -o")
    if format not in ("merged", "adapter", "gguf"):
        raise UsageError(f"format {format!r} is not known", "--format merged, adapter or gguf")
    if format == "gguf" and outtype not in LARGEST_GAP:
        raise UsageError(f"outtype {outtype!r} is not known", f"--outtype {', '.join(LARGEST_GAP)}")
    # Before minutes go into merging.
    command = find_converter(converter) if format == "gguf" else []
    base, adapters = find_states(place)
    state, folder = pick_state(place, adapters, state)
    written: dict[str, Any] = {"state": state, "format": format, "path": str(to), "adapter": str(folder)}
    with folder_appears_whole(to) as temporary:
        if format == "adapter":
            copy_adapter(folder, temporary, portable(base.id))
        elif format == "merged":
            merge(base, folder, temporary, report)
        else:
            with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.merged.") as merged:
                merge(base, folder, Path(merged), report)
                written |= to_gguf(Path(merged), temporary, command, outtype, check, report)
    return written


def pick_state(place: str, adapters: dict[str, Path], state: str | None) -> tuple[str, Path]:
    """Return the state that is meant, by default the last one, and its adapter."""
    if "adapter" in adapters and state in (None, "adapter"):
        return "adapter", adapters["adapter"]
    if state is not None and state not in STAGE_OF:
        raise UsageError(f"state {state!r} cannot be exported", "--state tuned or --state recovered")
    state = state or next(reversed(adapters), "recovered")
    if state not in adapters:
        raise UsageError(f"{place} has no {state} adapter", f"opdcl {STAGE_OF[state]} makes it")
    return state, adapters[state]


def portable(base: str) -> str:
    """Return what others know a base by: its hub id, or the name of its folder, whose path is nobody's business."""
    return HUB_IDS.get(base, base if base.count("/") == 1 and not os.path.exists(base) else Path(base).name)


def copy_adapter(folder: Path, to: Path, base: str) -> None:
    """Copy an adapter's weights and configuration, which then names its base by `base`."""
    shutil.copyfile(folder / "adapter_model.safetensors", to / "adapter_model.safetensors")
    write_json(
        to / "adapter_config.json",
        read_json(folder / "adapter_config.json") | {"base_model_name_or_path": base},
    )


def merge(base: ModelConfig, adapter: Path, to: Path, report: StageReport) -> None:
    """Write base + adapter as a safetensors model with its tokenizer."""
    from opdcl.model.backbone import Backbone

    backbone = Backbone.load(base)
    report.note("merging")
    merged = backbone.load_adapter(adapter, "student").merge_and_unload()
    merged.config.use_cache = True
    merged.save_pretrained(to)
    backbone.tokenizer.save_pretrained(to)
