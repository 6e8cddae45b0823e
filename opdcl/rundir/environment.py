"""Describe what a run was made with: package versions and the machine."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "lm_eval", "accelerate")


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that affect results."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def machine() -> dict[str, Any]:
    """Describe CPU and memory without identifying the host."""
    name, memory = platform.machine(), 0
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    with suppress(OSError, ValueError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"name": name, "cores": os.cpu_count(), "memory_bytes": memory}


def machine_of(device: torch.device) -> dict[str, Any]:
    """Describe the machine that computes on a device: by the name of its GPU, if it is one."""
    import torch

    found = machine()
    if device.type == "cuda":
        found |= {"name": torch.cuda.get_device_name(device), "processor": found["name"]}
    return found
