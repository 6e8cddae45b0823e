"""Read and write files so that each appears complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from opdcl.errors import UsageError

RESTORE = "restore the file, or start a new run"
DAY = 86_400  # seconds

# Stands in the names of files and folders that are not complete yet.
UNFINISHED = ".opdcl-"

# The name of a temporary folder that its maker keeps locked: `.NAME.opdcl-PID-RANDOM`.
LOCKED = re.compile(r"\..+\.opdcl-\d+-\w+")


def cache_home() -> Path:
    """Return the folder for models, tables and texts: `$OPDCL_CACHE`, else `opdcl` in the user's cache."""
    if folder := os.environ.get("OPDCL_CACHE"):
        return Path(os.path.expanduser(folder))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache"))) / "opdcl"


def now() -> str:
    """Return the current UTC time in ISO 8601, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file that holds either the old or the complete new content, even after a power failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write_beside(path, content)
    except OSError as fault:
        fault.filename, fault.filename2 = str(path), None  # not the temporary file's name
        raise


def _write_beside(path: Path, content: str | bytes) -> None:
    """Write a temporary file, and give it the name of `path` when it is complete."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}{UNFINISHED}")
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


def read_text(path: Path) -> str:
    """Return the text of a file; raise a `UsageError` naming the file if it cannot be read."""
    if not path.exists():
        raise UsageError(f"{path} does not exist", "opdcl run WORKFLOW -o RUN makes a run directory")
    if not path.is_file():  # a folder, or a pipe, which would wait for a writer
        raise UsageError(f"{path} is not a file", RESTORE)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as fault:
        raise UsageError(f"{path} is not valid UTF-8: {fault}", RESTORE) from fault
    except OSError as fault:
        raise UsageError(f"{path} cannot be read: {fault.strerror}", RESTORE) from fault


def read_json(path: Path) -> Any:
    """Read a JSON file; raise a `UsageError` naming the file if it is missing or invalid."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise UsageError(f"{path} is not valid JSON: {fault}", RESTORE) from fault


def read_jsonl(path: Path) -> list[dict]:
    """Read a JSONL file of objects; return no rows if it does not exist.

    A crash can truncate the last line, which is ignored. Any other invalid line raises a `UsageError`.
    """
    if not path.exists():
        return []
    if not path.is_file():
        raise UsageError(f"{path} is not a file", RESTORE)
    rows = []
    # Bytes: a crash can split a character. `splitlines` would also split at U+2028, which JSON may contain.
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as fault:
            if number < len(lines):
                raise UsageError(f"{path}:{number} is not valid JSON: {fault}", RESTORE) from fault
            continue
        if not isinstance(row, dict):
            raise UsageError(f"{path}:{number} is not a JSON object", RESTORE)
        rows.append(row)
    return rows


@contextlib.contextmanager
def folder_appears_whole(path: Path, keep: str = "") -> Iterator[Path]:
    """Yield a temporary folder and rename it to `path` when the block succeeds.

    An older folder is replaced; with `keep`, one that has a file of this name is left as it is, because other
    processes may be reading it. The files get the mode that the umask allows; libraries write some of them
    for their owner only. What killed processes have left in the same place is removed: it can be as large as
    a model.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, handle = _locked_folder(path)
    try:
        _remove_leftovers(path, temporary.stat().st_mtime)
        yield temporary
        for entry in (temporary, *temporary.rglob("*")):
            entry.chmod((0o755 if entry.is_dir() else 0o644) & ~_umask())
            if entry.is_file():
                with open(entry, "rb") as file:
                    os.fsync(file.fileno())
        _put_in_place(temporary, path, keep)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(handle)


def _locked_folder(path: Path) -> tuple[Path, int]:
    """Make a temporary folder beside `path`, locked until its handle is closed; return both."""
    while True:
        prefix = f".{path.name}{UNFINISHED}{os.getpid()}-"
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=prefix))
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # before it was locked, another process took it for a leftover
            continue
        if _lock(handle) is not False and folder.exists():
            return folder, handle
        os.close(handle)


def _put_in_place(temporary: Path, path: Path, keep: str) -> None:
    """Rename a folder; an older one is replaced, or stays if it has a file of the name `keep`."""
    while True:
        try:
            os.rename(temporary, path)  # onto nothing, or an empty folder
            return
        except OSError as fault:
            if fault.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if keep and (path / keep).exists():
            shutil.rmtree(temporary, ignore_errors=True)
            return
        old = temporary.with_name(f"{temporary.name}.old")
        with contextlib.suppress(FileNotFoundError):  # another process has just replaced it
            os.rename(path, old)
        shutil.rmtree(old, ignore_errors=True)


def _remove_leftovers(path: Path, now: float) -> None:
    """Remove temporary folders beside `path` whose makers are gone.

    One that has no lock, by its name or because the file system has none, is removed after a day, and only
    where `path` is made again. `now` is the time by the clock of the file system, which need not be that of
    this machine.
    """
    for leftover in path.parent.glob(f".*{UNFINISHED}*"):
        try:
            handle = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # it is finished by now, or a file, or belongs to another user
            continue
        try:
            abandoned = _lock(handle) if LOCKED.fullmatch(leftover.name) else None
            if abandoned is None:
                is_old = now - os.fstat(handle).st_mtime > DAY
                abandoned = is_old and leftover.name.startswith(f".{path.name}{UNFINISHED}")
            if abandoned:
                shutil.rmtree(leftover, ignore_errors=True)
        finally:
            os.close(handle)


def _lock(handle: int) -> bool | None:
    """Lock a folder; return False if another process holds the lock, None if the file system has none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _umask() -> int:
    mask = os.umask(0o077)  # the system has no call that only reads it
    os.umask(mask)
    return mask
