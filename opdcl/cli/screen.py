"""The terminal of the command line: how streams and screen are set up, and how a result is printed."""

from __future__ import annotations

import os
import select
import sys

from opdcl import launcher
from opdcl.console import Output
from opdcl.errors import typed
from opdcl.outcomes import Outcome

# How the sentence of a result is coloured, as the report's heading is.
STYLES = {"good": "green", "mixed": "blue", "bad": "red"}

output = Output()


def reset() -> None:
    """Print to the standard streams as they are now."""
    global output
    output = Output()


def start(json: bool, quiet: bool = False, workers: int = 1) -> None:
    """Choose what is printed, and how many workers run. From here on nothing but `output` reaches stdout."""
    launcher.request_workers(workers)
    output.mode = "json" if json else "quiet" if quiet else "human"
    sys.stdout = sys.stderr


def show(outcome: Outcome, all: bool = False) -> None:
    """Print a result: faults and remarks, its sentence, tables and notes; or faults and one JSON document."""
    output.remarks(outcome.faults, outcome.remarks)
    if output.mode == "json":
        output.result("", outcome.data)
        return
    tables = outcome.tables if all or not outcome.brief else outcome.brief
    if outcome.sentence not in ("", *(table.title for table in tables), *outcome.notes):
        first, *further = outcome.sentence.split("\n")
        output.result(first, None, f"bold {STYLES.get(outcome.severity, '')}")
        for line in further if tables is outcome.tables else ():
            output.result(line, None)
        if tables:
            output.result("", None)
    for number, table in enumerate(tables):
        output.table("\n" * (number > 0) + table.title, table.columns, table.rows, None)
    if tables is outcome.brief and outcome.more:
        output.note(f"all scores: {outcome.more}")
    for note in outcome.notes:
        output.note(note)
    if "--dry-run" in sys.argv:
        suggest(*(word for word in sys.argv[1:] if word != "--dry-run"))


def suggest(*words: object) -> None:
    """Say which command comes next."""
    output.note(f"next: {typed('opdcl', *words)}")


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
