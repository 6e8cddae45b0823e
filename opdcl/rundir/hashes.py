"""Hash files, adapters and plain data with SHA-256, and seal folders with the hashes of their files.

The plan, reuse, shared reading, kept answers and arms compare identities to decide whether two things are the
same. A part is a setting or a content hash. A name or a path is used only if the content cannot be read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opdcl.errors import UsageError
from opdcl.rundir.files import RESTORE, read_text, write_atomic

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
    # Names from outside may hold a lone surrogate.
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def flushed_hash(file: Path) -> str:
    """Flush a file to the disk and return its hash."""
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())
    return file_hash(file)


def seal(folder: Path) -> None:
    """Flush a folder's files and write their hashes: an intact seal proves them complete."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file != folder / SEAL]
    write_seal(folder, {str(file.relative_to(folder)): flushed_hash(file) for file in files})


def write_seal(folder: Path, hashes: Mapping[str, str]) -> None:
    """Write the hashes of a folder's files, by their names in it, and a hash of the seal itself."""
    write_atomic(folder / SEAL, _seal_text(hashes))


def read_seal(folder: Path) -> dict[str, str]:
    """Return the hashes of a folder's files, by their names in it.

    Raises:
        UsageError: The seal is missing, or was changed.
    """
    text, root = read_text(folder / SEAL), f"{os.path.realpath(folder)}{os.sep}"
    problem = UsageError(f"{folder / SEAL} has changed, so it cannot vouch for other files", RESTORE)
    try:
        hashes = json.loads(text)
        # A name that leads out of the folder would tell of any file whether it is there.
        outside = [name for name in hashes if not os.path.realpath(folder / name).startswith(root)]
    except (ValueError, TypeError, RecursionError) as fault:
        raise problem from fault
    if outside or not (isinstance(hashes, dict) and all(isinstance(d, str) for d in hashes.values())):
        raise problem
    own = hashes.pop(SEAL, None)
    # Earlier versions did not hash the seal, but never wrote an empty one.
    if (not hashes and own is None) or (own is not None and text != _seal_text(hashes)):
        raise problem
    return hashes


def _seal_text(hashes: Mapping[str, str]) -> str:
    files = dict(sorted(hashes.items()))
    own = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return json.dumps({**files, SEAL: own}, indent=2, ensure_ascii=False) + "\n"


def damage(folder: Path) -> str:
    """Return the first problem of a sealed folder, or "" if every file is unchanged."""
    try:
        hashes = read_seal(folder)
    except UsageError:
        return "its seal is missing or unreadable"
    problems = ((name, check(folder / name, digest)) for name, digest in hashes.items())
    return next((f"{name} {problem}" for name, problem in problems if problem), "")


def check(file: Path, digest: str) -> str:
    """Compare a file with its recorded hash; return "is missing", "has changed", or "" if it is unchanged."""
    if not file.is_file():
        return "is missing"
    try:
        return "" if file_hash(file) == digest else "has changed"
    except OSError as fault:
        return f"cannot be read: {fault.strerror}"


@dataclass(frozen=True)
class Identity:
    """All that something depends on, as plain data: equal parts make equal results."""

    parts: Any

    @property
    def key(self) -> str:
        """A hash of all parts, as 16 digits."""
        return hash_value(self.parts)

    def changed_since(self, earlier: Mapping[str, Any]) -> list[str]:
        """Return the names of the parts that were others, or were not there; of numbers, both values too."""
        changed = []
        for key in sorted({*earlier, *self.parts}):
            match earlier.get(key), self.parts.get(key):
                case int() | float() as then, int() | float() as now if then != now:
                    changed.append(f"{key} {then:g} -> {now:g}")
                case then, now if then != now:
                    changed.append(key)
        return changed
