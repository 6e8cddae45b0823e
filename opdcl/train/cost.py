"""What a stage has cost: answers and tokens that it learned from, seconds of its parts, peak memory."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


def dose(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the steps in a stage's metrics learned from, and how long their parts took.

    `graded` holds answers and tokens by stream and author; `parts` holds seconds.
    """
    graded: dict[str, dict[str, dict[str, int]]] = {}
    parts: dict[str, float] = {}
    for row in rows:
        for name, seconds in row.get("parts", {}).items():
            parts[name] = round(parts.get(name, 0.0) + seconds, 3)
        if "graded" in row:
            of_author = graded.setdefault(row["stream"], {}).setdefault(
                row["author"], {"answers": 0, "tokens": 0}
            )
            of_author["answers"] += row["answers"]
            of_author["tokens"] += row["graded"]
    return {"graded": graded, "parts": parts}


def reset_peak_memory() -> None:
    """Start a new measurement of peak memory, where the system allows it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return peak memory in bytes since `reset_peak_memory`: of the GPU, or else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError, StopIteration, ValueError):
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
