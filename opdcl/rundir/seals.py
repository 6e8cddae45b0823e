"""Record the hashes of a folder's files, to detect damage later."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from opdcl.rundir.files import write_json
from opdcl.rundir.hashes import file_hash

SEAL = "seal.json"


def seal(folder: Path, files: Iterable[Path] | None = None) -> None:
    """Flush a folder's files, by default all, and write their hashes: an intact seal proves them complete."""
    if files is None:
        files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != SEAL]
    hashes = {}
    for file in files:
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
        hashes[str(file.relative_to(folder))] = file_hash(file)
    write_json(folder / SEAL, hashes)


def damage(folder: Path) -> str:
    """Return the first problem of a sealed folder, or "" if every file is unchanged."""
    try:
        hashes = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        problems = (
            f"{name} {state}" for name, digest in hashes.items() if (state := check(folder / name, digest))
        )
        return next(problems, "")
    except (OSError, ValueError, AttributeError):
        return "its seal is missing or unreadable"


def check(file: Path, digest: str) -> str:
    """Compare a file with its recorded hash; return "is missing", "has changed", or "" if it is unchanged."""
    if not file.is_file():
        return "is missing"
    return "" if file_hash(file) == digest else "has changed"
