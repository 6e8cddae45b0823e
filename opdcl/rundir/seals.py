"""Seals: hashes that show whether a folder is as it was written."""

from __future__ import annotations

import json
import os
from pathlib import Path

from opdcl.rundir.files import write_json
from opdcl.rundir.hashes import file_hash

SEAL = "seal.json"


def seal(folder: Path, files: list[Path] | None = None) -> None:
    """Force a folder's files to the disk, then record their hashes: whoever finds an intact seal, finds all of it."""
    files = (
        files
        if files is not None
        else [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != SEAL]
    )
    for file in files:
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    write_json(folder / SEAL, {str(file.relative_to(folder)): file_hash(file) for file in files})


def damage(folder: Path) -> str:
    """Say what is wrong with a sealed folder; empty where every file is as it was sealed."""
    try:
        sealed = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        for name, digest in sealed.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if file_hash(folder / name) != digest:
                return f"{name} has changed"
    except (OSError, ValueError, AttributeError):
        return "its seal is missing or unreadable"
    return ""
