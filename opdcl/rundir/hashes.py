"""Hashes of files, adapters and plain data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ADAPTER = "adapter_model.safetensors"


def file_hash(file: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def hash_value(value: Any) -> str:
    """Return a short stable hash of plain data."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_files(files: list[Path]) -> str:
    """Return a short hash over the files' contents, in order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def adapter_hash(folder: Path) -> str:
    """Return the SHA-256 of an adapter's safetensors file."""
    return hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
