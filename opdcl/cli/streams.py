"""Reopen standard streams that the shell closed, and replace characters that they cannot encode."""

from __future__ import annotations

import os
import select
import sys

NAMES = ("stdin", "stdout", "stderr")


def prepare() -> None:
    """Open closed streams on nothing, and let no character stop a command.

    A number that stays free would be given to the next file that is opened, and what a library prints would
    end up in that file.
    """
    for number, name in enumerate(NAMES):
        if getattr(sys, name) is None:
            _open_on_nothing(number, name)
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            # A prompt keeps the bytes that are not UTF-8, so that it can be refused by name.
            stream.reconfigure(errors="surrogateescape" if name == "stdin" else "replace")


def _open_on_nothing(number: int, name: str) -> None:
    handle = os.open(os.devnull, os.O_RDWR)
    if handle != number:
        os.dup2(handle, number)
        os.close(handle)
    stream = os.fdopen(number, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def reader_is_gone() -> bool:
    """Return whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
