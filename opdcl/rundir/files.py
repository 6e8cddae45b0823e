"""Read and write a run's files: each appears whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from opdcl.errors import UsageError


def cache_home() -> Path:
    """Return the folder for converted models and tables: `$OPDCL_CACHE`, else the user's cache folder."""
    if named := os.environ.get("OPDCL_CACHE"):
        return Path(os.path.expanduser(named))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache"))) / "opdcl"


def now() -> str:
    """Return the time as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `content` so that `path` holds either the old text or all of the new one, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinity are refused: they are not JSON."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file of the run; a missing or broken one is a `UsageError` that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as fault:
        raise UsageError(
            f"{path} does not exist", "opdcl run WORKFLOW -o RUN makes a run directory"
        ) from fault
    except json.JSONDecodeError as fault:
        raise UsageError(
            f"{path} is not valid JSON: {fault}", "restore the file, or start the run anew"
        ) from fault


def read_jsonl(path: Path) -> list[dict]:
    """Read a JSONL file; a last line cut off by a crash is left out, any other broken line is a `UsageError`."""
    if not path.exists():
        return []
    rows = []
    # Bytes, because a crash can cut a character in two; and not splitlines(), which also splits at U+2028 and its
    # like, which stand raw inside JSON strings.
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError) as fault:
            if number < len(lines):
                raise UsageError(
                    f"{path}:{number} is not valid JSON: {fault}", "restore the file, or run anew"
                ) from fault
    return rows


@contextlib.contextmanager
def folder_appears_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that takes the name `path` once the block has ended without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with open(file, "rb") as handle:
                    os.fsync(handle.fileno())
        os.chmod(temporary, 0o755)
        old = temporary.with_name(f"{temporary.name}.old")
        if path.exists():
            os.replace(path, old)
        os.replace(temporary, path)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
