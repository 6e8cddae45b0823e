"""The one owner of the console: results on stdout, everything else on stderr; human, JSON or quiet."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from opdcl.errors import OpdclError
from opdcl.text import harmless, redact

# Silent: not even errors, because another process says the same.
Mode = Literal["human", "json", "quiet", "silent"]
# Off a terminal a line is printed at most this often, in seconds.
LINE_EVERY = 15
# Off a terminal a table may be this wide, in characters.
PIPE_WIDTH = 10_000


class Output:
    """Show progress, notes, tables and errors in the mode that the user asked for."""

    def __init__(self, mode: Mode = "human"):
        self.mode = mode
        # The streams as they are now: while a stage works, sys.stdout and sys.stderr lead to the log.
        self._out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        if not self._out.is_terminal:  # a pipe has no width: whoever reads lines wants them whole
            self._out.width = PIPE_WIDTH
        self._err = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    def result(self, human: str, data: Any) -> None:
        """Print the command's result: text for people, or one JSON document."""
        if self.mode == "silent":
            return
        if self.mode == "json":
            self._out.file.write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        else:
            self._out.print(harmless(human), markup=False)

    def table(self, title: str, columns: list[str], rows: list[list[str]], data: Any) -> None:
        """Print a table for people, or `data` as JSON."""
        if self.mode in ("json", "silent"):
            self.result("", data)
            return
        table = Table(title=Text(harmless(title)) if title else None, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for i, column in enumerate(columns):
            # Text, not str: rich reads [brackets] in a str as markup.
            table.add_column(Text(harmless(column)), no_wrap=i == 0, overflow="fold")
        for row in rows:
            table.add_row(*(Text(harmless(cell)) for cell in row))
        self._out.print(table)

    def note(self, text: str) -> None:
        """Say something in passing, on stderr."""
        if self.mode == "human":
            self._err.print(harmless(redact(text)), markup=False)

    def ask(self) -> str:
        """Read one line from stdin, with a prompt if a person is typing; empty at the end of input."""
        if sys.stdin.isatty():
            self._err.print("> ", end="")
        return sys.stdin.readline()

    def error(self, fault: OpdclError) -> None:
        """Print what is wrong and what to type next."""
        if self.mode == "silent":
            return
        self._err.print(f"error: {harmless(redact(fault.message))}", markup=False)
        if fault.hint:
            self._err.print(f"hint: {harmless(redact(fault.hint))}", markup=False)

    def stage(self, name: str) -> StageLine:
        """Return the live line of one stage; use it as a context manager."""
        return StageLine(name, self)


class StageLine:
    """One live line on a terminal, a plain line now and then elsewhere."""

    def __init__(self, name: str, output: Output):
        self.name, self.output = name, output
        self._live: Progress | None = None
        self._task: Any = None
        self._last = 0.0
        self._shown: dict[str, float | str] = {}

    def __enter__(self) -> StageLine:
        console = self.output._err
        if self.output.mode == "human" and console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[values]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
                console=console, transient=False,
            )  # fmt: skip
            self._live.start()
            self._task = self._live.add_task(self.name, total=None, values="", visible=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def progress(self, done: int, total: int, **values: float | str) -> None:
        """Show how far the stage is; a value not given again keeps its last one."""
        self._shown |= values
        text = " ".join(f"{k.replace('_per_s', '/s')} {_short(v)}" for k, v in self._shown.items())
        if self._live:
            self._live.update(self._task, completed=done, total=total, values=text, visible=True)
        elif self.output.mode == "human" and (time.monotonic() - self._last >= LINE_EVERY or done == total):
            self._last = time.monotonic()
            self.output.note(f"{self.name} {done}/{total} {text}".rstrip())

    def note(self, text: str) -> None:
        """Print a line above the live one."""
        self.output.note(f"{self.name}: {text}")


def _short(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"
