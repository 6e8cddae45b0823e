"""The lock that lets one process write to a run directory, and another one continue when that has died."""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from opdcl.errors import UsageError
from opdcl.rundir.files import guarded, is_lost, now, taken_over
from opdcl.rundir.layout import RunDir

# File systems of one machine. The system releases the locks of a process that ends, so a lock that can be
# taken has no owner. On a shared disk, a lock may not reach the other machines.
LOCAL = {"apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}

# Seconds between two signs of life of an owner, and without one until it counts as dead.
BEAT, SILENCE = 60.0, 300.0


@contextlib.contextmanager
def locked(run: RunDir, note: Callable[[str], None] = lambda text: None) -> Iterator[dict | None]:
    """Lock the run for this process and yield the previous owner if it died without unlocking, else None.

    The lock file stays: deleting it would let two processes lock two files of the same name. Only if nothing
    else was written into a new directory, both go. The file contains the owner, who touches it every minute,
    and is empty while nobody holds the lock. On a shared disk, the owner on another machine counts as dead
    after five minutes; `note` reports the wait.

    Raises:
        UsageError: Another process holds the lock, or the file system has no locks.
    """
    new = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]
    run.path.mkdir(parents=True, exist_ok=True)
    file = run.path / ".lock"
    try:
        held = FileLock(file, mode=0o644, fallback_to_soft=False).acquire(blocking=False)
    except Timeout:
        raise _in_use(run, _owner(file)) from None
    except OSError as fault:
        problem = f"{run.path}: this file system cannot lock ({fault.strerror})"
        raise UsageError(problem, "choose a local disk with -o") from fault
    host = socket.gethostname()
    with held:
        owner = _owner(file)
        if owner.get("host", host) != host and not _is_local(run.path):
            _wait_for_silence(run, file, owner, note)
        mine = json.dumps({"pid": os.getpid(), "host": host, "since": now()})
        file.write_text(mine)
        ended = threading.Event()
        threading.Thread(target=_beat, args=(file, mine, ended), daemon=True).start()
        try:
            with guarded(file, mine):
                yield owner or None
        except KeyboardInterrupt as fault:
            if is_lost(file, mine):  # then it was the heartbeat that interrupted
                raise taken_over(run.path) from fault
            raise
        finally:
            ended.set()
            if file.exists() and not is_lost(file, mine):
                file.write_text("")
                if new and os.listdir(run.path) == [file.name]:
                    file.unlink()
                    with contextlib.suppress(OSError):  # another command has begun to use one of them
                        for folder in new:
                            folder.rmdir()


def _beat(file: Path, mine: str, ended: threading.Event) -> None:
    """Touch the lock file until the lock is released; interrupt the process if another one has taken it.

    It was then suspended for so long that it counted as dead. Where an interrupt is ignored, the next file
    that is to appear in the run ends it.
    """
    while not ended.wait(BEAT):
        if is_lost(file, mine):
            _thread.interrupt_main()
            return
        with contextlib.suppress(OSError):  # the next beat may come through
            os.utime(file)


def _wait_for_silence(run: RunDir, file: Path, owner: dict, note: Callable[[str], None]) -> None:
    """Return once the owner on another machine has given no sign of life for long enough.

    Raises:
        UsageError: It gave one.
    """
    last = file.stat().st_mtime
    # The time stamp may lie ahead, by a clock that went wrong: it only shortens the wait, by our own clock.
    wait = min(SILENCE, last + SILENCE - _clock_of(run.path))
    end = time.monotonic() + wait
    if wait > 0:
        who = f"process {owner.get('pid')} on {owner.get('host')}"
        note(f"{run.path} was left locked by {who}; waiting {wait:.0f} s for a sign of life")
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(BEAT / 4, left))
        if file.stat().st_mtime != last:
            raise _in_use(run, owner)


def _clock_of(folder: Path) -> float:
    """Return the time by the clock of the file system, which need not be that of this machine."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime


def _is_local(folder: Path) -> bool:
    """Return whether a folder is known to lie on a file system that no other machine reaches."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return False
    kinds: dict[Path, str] = {}
    for line in mounts:
        _, place, kind, *_ = line.split(" ")
        kinds[Path(place.replace("\\040", " "))] = kind  # a later mount hides an earlier one
    resolved = folder.resolve()
    mounted = next((place for place in (resolved, *resolved.parents) if place in kinds), None)
    return mounted is not None and kinds[mounted] in LOCAL


def _owner(file: Path) -> dict:
    try:
        owner = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _in_use(run: RunDir, owner: dict) -> UsageError:
    hint = "wait for it, or stop it"
    if not owner:  # for an instant after the lock was taken
        return UsageError(f"{run.path} is in use by another process", hint)
    process, host, begin = (owner.get(key) for key in ("pid", "host", "since"))
    return UsageError(f"{run.path} is in use by process {process} on {host} since {begin}", hint)
