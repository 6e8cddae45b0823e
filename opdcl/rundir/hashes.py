"""Hash files, adapters and plain data with SHA-256, and seal folders with the hashes of their files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from opdcl.rundir.files import write_json

ADAPTER, SEAL = "adapter_model.safetensors", "seal.json"


def file_hash(file: Path) -> str:
    """Return the SHA-256 of a file's content as 64 hexadecimal digits."""
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def adapter_hash(folder: Path) -> str:
    """Return the SHA-256 of an adapter's weights."""
    return file_hash(folder / ADAPTER)


def hash_files(files: list[Path], unwritten: Mapping[str, str] | None = None) -> str:
    """Return a hash of 16 digits over the files' names and contents, in their order.

    `unwritten` has the contents of files that do not exist yet, by path.
    """
    digest = hashlib.sha256()
    for file in files:
        text = (unwritten or {}).get(str(file))
        digest.update(file.name.encode() + b"\0" + (text or "").encode())
        if text is None:  # piece by piece: a model's weights need not fit into memory
            with open(file, "rb") as handle:
                hashlib.file_digest(handle, lambda: digest)
    return digest.hexdigest()[:16]


def hash_value(value: Any) -> str:
    """Return a hash of 16 digits for plain data; the order of a mapping's keys does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
        problems = ((name, check(folder / name, digest)) for name, digest in hashes.items())
        return next((f"{name} {problem}" for name, problem in problems if problem), "")
    except (OSError, ValueError, AttributeError):
        return "its seal is missing or unreadable"


def check(file: Path, digest: str) -> str:
    """Compare a file with its recorded hash; return "is missing", "has changed", or "" if it is unchanged."""
    if not file.is_file():
        return "is missing"
    return "" if file_hash(file) == digest else "has changed"
