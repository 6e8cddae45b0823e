"""Who may write to a run directory: opdcl to its own only, and one process at a time, by a lock."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from opdcl.errors import UsageError, typed
from opdcl.rundir.files import now
from opdcl.rundir.layout import RunDir


def refuse_foreign(run: RunDir) -> None:
    """Refuse a directory that is not a run's, or that links out of itself, so that nothing is overwritten."""
    hint = "choose another directory with -o"
    if run.path.exists() and not run.path.is_dir():
        raise UsageError(f"{run.path} is a file", hint)
    names = {p.name for p in run.path.iterdir()} if run.path.is_dir() else set()
    # A crash can leave the temporary file of config.json, which is the first that a run writes.
    begun = {name for name in names if name.startswith(f".{run.config.name}.")}
    if names - begun - {".lock", "logs"} and not run.is_run():
        raise UsageError(f"{run.path} exists and is not a run directory", hint)
    for folder, folders, files in os.walk(run.path):
        for name in (*folders, *files):
            if os.path.islink(link := os.path.join(folder, name)):
                hint = "replace it by what it points to; the run directory itself may be a link"
                message = f"{link} is a symbolic link: what a run writes stays inside its directory"
                raise UsageError(message, hint)


@contextlib.contextmanager
def locked(run: RunDir) -> Iterator[dict | None]:
    """Lock the run for this process and yield the previous owner if it died without unlocking, else None.

    The lock file stays: deleting it would let two processes lock two files of the same name. Only if nothing
    else was written into a new directory, both go. The file contains the owner, and is empty while nobody
    holds the lock. The system releases the locks of a process that ends; on a shared disk they may not reach
    other machines, so an owner on another one is believed to live.

    Raises:
        UsageError: The directory is foreign, another process holds the lock, or the file system has no locks.
    """
    refuse_foreign(run)
    new = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]
    run.path.mkdir(parents=True, exist_ok=True)
    file = run.path / ".lock"
    try:
        held = FileLock(file, mode=0o644, fallback_to_soft=False).acquire(blocking=False)
    except Timeout:
        raise _in_use(run, _owner(file), "wait for it, or stop it") from None
    except OSError as fault:
        problem = f"{run.path}: this file system cannot lock ({fault.strerror})"
        raise UsageError(problem, "choose a local disk with -o") from fault
    host = socket.gethostname()
    with held:
        owner = _owner(file)
        if owner.get("host", host) != host:
            hint = f"if that process has ended, or this machine had that name: {typed('rm', file)}"
            raise _in_use(run, owner, hint)
        file.write_text(json.dumps({"pid": os.getpid(), "host": host, "since": now()}))
        try:
            yield owner or None
        finally:
            if file.exists():
                file.write_text("")
                if new and os.listdir(run.path) == [file.name]:
                    file.unlink()
                    with contextlib.suppress(OSError):  # another command has begun to use one of them
                        for folder in new:
                            folder.rmdir()


def owner_of(run: RunDir) -> dict:
    """Return the process that holds a run's lock; one on another machine is believed to live."""
    file = run.path / ".lock"
    owner = _owner(file)
    if owner.get("host") == socket.gethostname():
        with file.open() as held, contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return {}
    return owner


def _owner(file: Path) -> dict:
    try:
        owner = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _in_use(run: RunDir, owner: dict, hint: str) -> UsageError:
    if not owner:  # for an instant after the lock was taken
        return UsageError(f"{run.path} is in use by another process", hint)
    process, host, begin = (owner.get(key) for key in ("pid", "host", "since"))
    return UsageError(f"{run.path} is in use by process {process} on {host} since {begin}", hint)
