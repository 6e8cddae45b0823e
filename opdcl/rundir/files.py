"""Read and write files so that each appears complete or not at all."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from opdcl.errors import UsageError

RESTORE = "restore the file, or start a new run"
DAY = 86_400  # seconds


def cache_home() -> Path:
    """Return the folder for converted models and tables: `$OPDCL_CACHE`, else `opdcl` in the user's cache."""
    if folder := os.environ.get("OPDCL_CACHE"):
        return Path(os.path.expanduser(folder))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache"))) / "opdcl"


def now() -> str:
    """Return the current UTC time in ISO 8601, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file that holds either the old or the complete new content, even after a power failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically; raise `ValueError` for NaN and infinity, which JSON does not have."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; raise a `UsageError` naming the file if it is missing or invalid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as fault:
        hint = "opdcl run WORKFLOW -o RUN makes a run directory"
        raise UsageError(f"{path} does not exist", hint) from fault
    except ValueError as fault:
        raise UsageError(f"{path} is not valid JSON: {fault}", RESTORE) from fault


def read_jsonl(path: Path) -> list[dict]:
    """Read a JSONL file; return no rows if it does not exist.

    A crash can truncate the last line, which is ignored. Any other invalid line raises a `UsageError`.
    """
    if not path.exists():
        return []
    rows = []
    # Bytes: a crash can split a character. `splitlines` would also split at U+2028, which JSON may contain.
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as fault:
            if number < len(lines):
                raise UsageError(f"{path}:{number} is not valid JSON: {fault}", RESTORE) from fault
    return rows


def read_new_rows(path: Path, place: int) -> tuple[int, list[dict]]:
    """Return the rows that a JSONL file has from byte `place` on, and the place after its last whole line."""
    if not path.exists():
        return place, []
    with open(path, "rb") as file:
        file.seek(place)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    return place + len(whole), [json.loads(line) for line in whole.split(b"\n") if line.strip()]


@contextlib.contextmanager
def folder_appears_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary folder and rename it to `path` when the block succeeds, replacing an older folder.

    Its files get the mode that the umask allows; libraries write some of them for their owner only. What a
    process killed more than a day ago has left of the same folder is removed: it can be as large as a model.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.opdcl-"
    for leftover in path.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(FileNotFoundError):  # another process has just finished
            if time.time() - leftover.stat().st_mtime > DAY:
                shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=prefix))
    try:
        yield temporary
        for entry in (temporary, *temporary.rglob("*")):
            entry.chmod((0o755 if entry.is_dir() else 0o644) & ~_umask())
            if entry.is_file():
                with open(entry, "rb") as handle:
                    os.fsync(handle.fileno())
        old = temporary.with_name(f"{temporary.name}.old")
        if path.exists():
            os.replace(path, old)
        os.replace(temporary, path)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0o077)  # the system has no call that only reads it
    os.umask(mask)
    return mask
