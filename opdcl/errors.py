"""The errors a user can meet: each says what is wrong and what to type next."""

from __future__ import annotations

import errno
import re


class OpdclError(Exception):
    """A failure with a remedy. `exit_code` is the process exit code it maps to."""

    exit_code = 1

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(OpdclError):
    """The command, the configuration or the data is wrong; nothing was started."""

    exit_code = 2


class GateError(OpdclError):
    """Everything ran, and a required score was not met."""

    exit_code = 3


class EnvironmentFault(OpdclError):
    """This machine cannot run it: a model, a package or memory is missing."""

    exit_code = 4


class Interrupted(OpdclError):
    """The user stopped the run; the checkpoint is saved."""

    exit_code = 130


def translate(fault: Exception, workers: int = 1) -> OpdclError:
    """Word the faults of the machine for people; anything else is named with its type."""
    # Libraries in Rust wrap the system's error into their own, and keep its number in the text only.
    wrapped = re.search(r"os error (\d+)", str(fault))
    number = fault.errno if isinstance(fault, OSError) else int(wrapped[1]) if wrapped else None
    where = getattr(fault, "filename", None) or fault
    if number in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
        return OpdclError(
            f"the disk or quota is full: {where}", "free some space and run the same command again"
        )
    if number == errno.ENAMETOOLONG:
        return UsageError(f"this name is too long for a file: {str(where)[:60]}...", "choose a shorter one")
    if number == errno.EROFS:
        return OpdclError(f"this file system is read-only: {where}", "choose another directory with -o")
    if isinstance(fault, PermissionError):
        return OpdclError(f"no permission: {fault.filename}", "choose another directory with -o")
    if "out of memory" in str(fault).lower() or isinstance(fault, MemoryError):
        return OpdclError("out of memory", "--set recover.micro_batch_tokens=512, or smaller batches")
    if workers > 1 and any(word in str(fault).lower() for word in ("gloo", "nccl", "connection")):
        return OpdclError(
            "another process has ended", "what it said last is its reason; the same command goes on"
        )
    if "DataLoader worker" in str(fault):
        return OpdclError(
            "a process that loads data was killed",
            "the same command goes on from the last checkpoint; fewer workers need less memory",
        )
    return OpdclError(f"{type(fault).__name__}: {str(fault)[:500]}", "OPDCL_DEBUG=1 shows the traceback")
