"""What work cost in earlier runs on this machine: a file beside the cached models, by machine and model.

A machine is what decides about speed: processor, threads in use, instruction set, device, number format and
number of processes. The file helps to say beforehand how long a run takes. Nothing else depends on it, so a
file that cannot be read or written is passed over.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from opdcl import parallel
from opdcl.config.model import ModelConfig
from opdcl.model.load import pick_device, pick_dtype
from opdcl.rundir.environment import machine
from opdcl.rundir.files import cache_home, now, write_json

DATE = "date"


def times_file() -> Path:
    return cache_home() / "times.json"


def machine_name(model: ModelConfig) -> str:
    """Describe all of this machine that decides about speed, in words."""
    import torch

    device = pick_device(model.device)
    dtype, processes = pick_dtype(model.dtype, device), parallel.worker_count()
    if device.startswith("cuda"):
        place = f"{torch.cuda.get_device_name(device)}"
    else:
        threads, isa = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
        place = f"{machine()['name']}, {threads} thread{'s' * (threads > 1)}, {isa}"
    return f"{place}, {dtype}" + (f", {processes} processes" if processes > 1 else "")


def model_name(model: ModelConfig, tuned: ModelConfig | None = None) -> str:
    """Return the name under which times are kept; `tuned` is a whole model that runs beside its base."""
    parts = model.id, model.revision, model.quantization, tuned and tuned.id
    return " ".join(part for part in parts if part)


def read_times(machine_: str, model: str) -> tuple[dict[str, float], str]:
    """Return the units that were measured, and the date of the last run; nothing if there was none."""
    found = _entries().get(machine_, {})
    entry = found.get(model) if isinstance(found, dict) else None
    if not isinstance(entry, dict):
        return {}, ""
    units = {kind: unit for kind, unit in entry.items() if _is_unit(unit)}
    return units, str(entry.get(DATE, ""))[:10]


def save_times(machine_: str, model: str, units: dict[str, float]) -> None:
    """Keep what was measured; units that this run did not measure keep their values."""
    if not units:
        return
    entries, before = _entries(), read_times(machine_, model)[0]
    if not isinstance(entries.get(machine_), dict):
        entries[machine_] = {}
    measured = {kind: unit for kind, unit in units.items() if _is_unit(unit)}
    entries[machine_][model] = {**before, **measured, DATE: now()}
    with contextlib.suppress(OSError):
        write_json(times_file(), entries)


def _entries() -> dict[str, Any]:
    try:
        entries = json.loads(times_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _is_unit(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
