"""Failures of the machine and of libraries, as errors that say what is wrong and what to do next."""

from __future__ import annotations

import errno
import os
import re
import shutil

from opdcl.errors import EnvironmentFault, OpdclError, UsageError

FULL = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT)

# Errors of the system -> what is wrong with the path, and what to do.
WRONG_PATH = {
    errno.EACCES: ("permission denied", "choose another place, or change its permissions"),
    errno.EPERM: ("permission denied", "choose another place, or change its permissions"),
    errno.ENOTDIR: ("a part of this path is a file", "choose another path; OPDCL_CACHE sets the cache's"),
    errno.EEXIST: ("a file is where a folder should be", "choose another path, or move the file away"),
    errno.EISDIR: ("a folder is where a file should be", "choose another path, or move the folder away"),
    errno.ELOOP: ("a link leads to itself", "remove the link"),
}
AGAIN = "then run the same command again"


def translate(fault: BaseException, workers: int = 1) -> OpdclError:
    """Return a failure of the machine or of a library as an error with a hint; our own errors have one.

    With several `workers`, a lost connection means that another worker exited.
    """
    text = str(fault)
    known = fault if isinstance(fault, OpdclError) else _of_system(fault, text)
    if known:
        return known
    if "out of memory" in text.lower() or isinstance(fault, MemoryError):
        return OpdclError("out of memory", "use smaller batches: --set recover.micro_batch_tokens=512")
    if "inline_container" in text or "PytorchStreamWriter" in text:  # torch does not say why
        return OpdclError("a checkpoint cannot be written: the disk is full or fails", f"free space, {AGAIN}")
    if workers > 1 and any(word in text.lower() for word in ("gloo", "nccl", "connection")):
        return OpdclError("another worker exited", f"see its last message, {AGAIN} to resume")
    if isinstance(fault, OSError) and fault.errno:
        reason = (fault.strerror or os.strerror(fault.errno)).lower()
        if isinstance(fault, ConnectionError | TimeoutError):
            return OpdclError(f"the connection failed: {reason}", f"check the network, {AGAIN}")
        problem = f"cannot read or write {_place(fault) or 'a file'}: {reason}"
        return OpdclError(problem, f"check the path and the disk, {AGAIN}")
    if isinstance(fault, UnicodeEncodeError):  # a lone surrogate, or bytes of a name in another encoding
        near = ascii(fault.object[max(fault.start - 20, 0) : fault.end + 20])
        return UsageError(f"a name or text is not valid Unicode: {near}", "rename the file, or mend the text")
    told = f"{type(fault).__name__}: {text[:500]}"
    if not isinstance(fault, Exception):  # such as a panic in Rust, mostly over what it was given
        told = f"a library failed: {told}"
    return OpdclError(told, "set OPDCL_DEBUG=1 to see the traceback")


def _of_system(fault: BaseException, text: str) -> OpdclError | None:
    """Return an error of the system that says what is wrong with a path, or with this machine's limits."""
    # Libraries in Rust, and a copy of a folder, wrap the system's error: only the text has its number.
    wrapped = re.search(r"(?:os error |\[Errno )(\d+)", text)
    number = getattr(fault, "errno", None) or (int(wrapped[1]) if wrapped else None)
    where = _place(fault) or text
    if number in FULL:
        return OpdclError(f"the disk or quota is full: {where}", f"free some space, {AGAIN}")
    if number == errno.EROFS:
        return OpdclError(f"the file system is read-only: {where}", "choose another place")
    if number == errno.ENAMETOOLONG:
        return UsageError(f"the file name is too long: {where[:60]}...", "choose a shorter name")
    if number in (errno.EMFILE, errno.ENFILE):
        return EnvironmentFault("too many files are open", f"allow more: ulimit -n 4096, {AGAIN}")
    if number in WRONG_PATH:
        problem, hint = WRONG_PATH[number]
        return UsageError(f"{problem}: {where}", hint)
    return None


def _place(fault: BaseException) -> str:
    """Return the path that a failure is about, "" if it names none.

    For a copy this is the new file: reading the old one fails rarely, and then the system names both. The
    temporary name of an unfinished folder is left out.
    """
    path = getattr(fault, "filename2", None) or getattr(fault, "filename", None)
    if isinstance(fault, shutil.Error) and isinstance(fault.args[0], list):  # (from, to, why) of each file
        path = fault.args[0][0][1]
    return re.sub(r"/\.([^/]+)\.opdcl-\d+-\w+", r"/\1", str(path)) if path is not None else ""
