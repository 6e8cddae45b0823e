"""Hash files, adapters and plain data with SHA-256."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ADAPTER = "adapter_model.safetensors"


def file_hash(file: Path) -> str:
    """Return the SHA-256 of a file's content as 64 hexadecimal digits."""
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def adapter_hash(folder: Path) -> str:
    """Return the SHA-256 of an adapter's weights."""
    return file_hash(folder / ADAPTER)


def hash_files(files: list[Path]) -> str:
    """Return a hash of 16 digits over the files' names and contents, in the given order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def hash_value(value: Any) -> str:
    """Return a hash of 16 digits for plain data; the order of a mapping's keys does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
