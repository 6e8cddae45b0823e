"""The errors that a user can meet. Each one says what is wrong and what to do next."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable

LONGEST_NAME = 100


class OpdclError(Exception):
    """A failure with a hint for the user. `exit_code` is the exit code of the command line."""

    exit_code = 1

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(OpdclError):
    """The command, the configuration or the data is wrong. Nothing was started."""

    exit_code = 2


class GateError(OpdclError):
    """Everything ran, but a score is shown to miss its gate."""

    exit_code = 3


class EnvironmentFault(OpdclError):
    """This machine lacks a model, a package or memory."""

    exit_code = 4


class InconclusiveError(OpdclError):
    """Everything ran, but the scores neither show that a gate is met nor that it is missed."""

    exit_code = 5


class Interrupted(OpdclError):
    """The user stopped the run; the checkpoint is saved."""

    exit_code = 130


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known name that is most similar to this one, for a hint; "" if none is similar."""
    if len(name) > LONGEST_NAME:  # comparing takes time that grows with the square of the length
        return ""
    return next(iter(difflib.get_close_matches(name, [*known], 1, cutoff)), "")


def listed(names: Iterable[object], most: int = 10) -> str:
    """Return names as text for a message: at most `most` of them, each cut to a readable length."""
    texts = [str(name) for name in names]
    shown = [text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}..." for text in texts[:most]]
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(shown) + more


def translate(fault: Exception, workers: int = 1) -> OpdclError:
    """Return a failure of the machine or of a library as an error with a hint.

    With several `workers`, a lost connection means that another worker exited.
    """
    text = str(fault)
    # Libraries written in Rust wrap the system's error; only the text has its number.
    wrapped = re.search(r"os error (\d+)", text)
    number = fault.errno if isinstance(fault, OSError) else int(wrapped[1]) if wrapped else None
    where = getattr(fault, "filename", None) or fault
    if number in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
        hint = "free some space, then run the same command again"
        return OpdclError(f"the disk or quota is full: {where}", hint)
    if number == errno.ENAMETOOLONG:
        return UsageError(f"the file name is too long: {str(where)[:60]}...", "choose a shorter name")
    if number == errno.EROFS:
        return OpdclError(f"the file system is read-only: {where}", "choose another directory with -o")
    if isinstance(fault, PermissionError):
        return OpdclError(f"permission denied: {fault.filename}", "choose another directory with -o")
    if "out of memory" in text.lower() or isinstance(fault, MemoryError):
        hint = "use smaller batches, for example --set recover.micro_batch_tokens=512"
        return OpdclError("out of memory", hint)
    if workers > 1 and any(word in text.lower() for word in ("gloo", "nccl", "connection")):
        hint = "see its last message, then run the same command again to resume"
        return OpdclError("another worker exited", hint)
    if "DataLoader worker" in text:
        resume = "run the same command again to resume from the last checkpoint"
        return OpdclError("a data loading process was killed", f"{resume}; fewer processes need less memory")
    return OpdclError(f"{type(fault).__name__}: {text[:500]}", "set OPDCL_DEBUG=1 to see the traceback")
