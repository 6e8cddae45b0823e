"""The errors that a user can meet. Each one says what is wrong and what to do next."""

from __future__ import annotations

import difflib
import os
import shlex
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


def nearest_path(path: str) -> str:
    """Return the most similar name beside a missing file or folder, for a hint; "" if there is none."""
    folder, name = os.path.split(path)
    try:
        known = os.listdir(folder or ".")
    except (OSError, ValueError):
        return ""
    near = nearest(name, known, 0.8)
    return os.path.join(folder, near) if near else ""


def listed(names: Iterable[object], most: int = 10) -> str:
    """Return names as text for a message: at most `most` of them, each cut to a readable length."""
    texts = [str(name) for name in names]
    shown = [text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}..." for text in texts[:most]]
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(shown) + more


def typed(*words: object) -> str:
    """Return words of a command as a shell takes them: a path with a blank in quotes."""
    return shlex.join(map(str, words))
