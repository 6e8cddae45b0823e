"""The console: results go to stdout, everything else to stderr. Nothing else in opdcl prints."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import re
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from opdcl import parallel
from opdcl.errors import Interrupted, OpdclError
from opdcl.results.format import duration
from opdcl.sanitize import harmless, harmless_json, readable, redact

# PEFT imports it if it is installed; on a CPU it warns about an optional kernel.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


@dataclass(frozen=True)
class _Growing:
    """A text that is asked for whenever the terminal is drawn."""

    text: Callable[[], str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(readable(self.text()))


class Redacting(io.TextIOBase):
    """A text stream that redacts secrets from what libraries print."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(redact(text))

    def flush(self) -> None:
        self._stream.flush()


class Unstoppable:
    """A text stream that drops what it cannot write: a run does not stop because nobody reads its notes."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            silence(self._stream.fileno())
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream.fileno())


def silence(number: int) -> None:
    """Send what is still written to a standard stream nowhere: Python flushes it at its end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, number)
    os.close(nothing)


class ResultConsole(Console):
    """A console that raises `BrokenPipeError` if nobody reads it any more; rich would exit with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@contextlib.contextmanager
def quiet_libraries(log: Path | None = None) -> Iterator[None]:
    """Send what libraries print, warn and log to a file, or nowhere, and turn off their progress bars."""
    import datasets
    from transformers.utils import logging as transformers_logging

    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    datasets.disable_progress_bars()
    warnings.simplefilter("default")
    root = logging.getLogger()
    with open(log or os.devnull, "a", encoding="utf-8") as file:
        stream = Redacting(file)
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        root.addHandler(handler)
        logging.captureWarnings(True)
        try:
            # `Output` keeps the real streams.
            with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
                yield
        finally:
            logging.captureWarnings(False)
            root.removeHandler(handler)
            file.flush()
            if log and not log.stat().st_size:
                log.unlink()


Mode = Literal["human", "json", "quiet"]

# Without a terminal: seconds between two lines of progress, and the width of a table in characters.
LINE_EVERY, PIPE_WIDTH = 15, 10_000
# Seconds that are no delay.
SOON = 10
# After how many seconds without a word a pipe is told what takes so long.
SILENCE = 10

# Longer lines of prose are hard to read, however wide the terminal is.
PROSE_WIDTH = 100

# Lines that begin so hold a command or a path, which must stay whole to be copied.
TO_COPY = ("next: ", "hint: ", "report: ", "wrote ", " ")


# Spaces within an interval, around an equals sign, and before a percent sign or a unit of nats.
TOGETHER = re.compile(r"(?<=\d,) (?=-?\d)| (?=[=%\[])|(?<==) ")


def wrapped(text: str, console: Console) -> str:
    """Return a text whose lines of prose break at words on a terminal; a pipe gets it as it is."""
    if not console.is_terminal:
        return text
    width = min(console.width, PROSE_WIDTH)
    lines = []
    for line in text.split("\n"):
        if not line.startswith(TO_COPY):
            line = TOGETHER.sub("\N{NO-BREAK SPACE}", line)
            line = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
            line = line.replace("\N{NO-BREAK SPACE}", " ")
        lines.append(line)
    return "\n".join(lines)


class Output:
    """Print results, notes, progress and errors. Of several workers only the first one prints."""

    def __init__(self, mode: Mode = "human"):
        self.mode = mode
        # Keep the present streams: while a stage runs, sys.stdout and sys.stderr lead to the log.
        self._out = ResultConsole(file=sys.stdout, highlight=False, soft_wrap=True)
        if not self._out.is_terminal:  # programs that read a pipe want whole lines
            self._out.width = PIPE_WIDTH
        err: Any = Unstoppable(sys.stderr)
        self._err = Console(file=err, highlight=False, soft_wrap=True)

    @property
    def _shows_notes(self) -> bool:
        return self.mode == "human" and parallel.rank() == 0

    @property
    def width(self) -> int:
        """The number of characters of a line of results."""
        return self._out.width

    def result(self, human: str, data: Any, style: str | None = None) -> None:
        """Print the command's result: text for people, or one JSON document."""
        if parallel.rank():
            return
        if self.mode == "json":
            # Elsewhere a character could become a question mark; escaped, it stays what it is.
            encoding = getattr(self._out.file, "encoding", None) or "utf-8"
            escape = encoding.lower().replace("-", "") != "utf8"
            document = json.dumps(data, indent=2, ensure_ascii=escape, allow_nan=False)
            self._out.file.write(harmless_json(document) + "\n")
        else:
            self._out.print(wrapped(readable(human), self._out), markup=False, style=style)

    def table(self, title: str, columns: list[str], rows: list[list[str]], data: Any) -> None:
        """Print a table for people, or `data` as JSON."""
        if self.mode == "json" or parallel.rank():
            self.result("", data)
            return
        heading = Text(readable(title)) if title else None
        table = Table(title=heading, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for i, column in enumerate(columns):
            # In a str, rich would read [brackets] as markup.
            table.add_column(Text(readable(column)), no_wrap=i == 0, overflow="fold")
        for row in rows:
            table.add_row(*(Text(readable(cell)) for cell in row))
        if self._out.is_terminal:
            self._out.print(table)
            return
        with self._out.capture() as text:  # no spaces up to the width of the longest cell
            self._out.print(table)
        self._out.file.write("".join(f"{line.rstrip()}\n" for line in text.get().splitlines()))

    def note(self, text: str) -> None:
        """Print a line on stderr, unless the mode is quiet or JSON."""
        if self._shows_notes:
            self._say(text, "green" if text.startswith("next: ") else None)

    def warn(self, text: str) -> None:
        """Print a line on stderr in every mode, in red: it must not be missed."""
        if parallel.rank() == 0:
            self._say(text, "red")

    def remarks(self, faults: Sequence[str], notes: Sequence[str]) -> None:
        """Print what to know before a result is read: the faults in every mode, then the notes."""
        for fault in faults:
            self.warn(f"fault: {fault}")
        for note in notes:
            self.note(f"note: {note}")

    def _say(self, text: str, style: str | None = None) -> None:
        self._err.print(wrapped(readable(redact(text)), self._err), markup=False, style=style)

    @property
    def _is_live(self) -> bool:
        """Whether notes go to a terminal on which a line can change; with TERM=dumb none can."""
        return self._shows_notes and self._err.is_terminal and not self._err.is_dumb_terminal

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[Callable[[str | Callable[[], str]], None]]:
        """Show on a terminal what is being done; yields the function that says what is done now.

        It takes a text, or a function that returns the text of the moment. Elsewhere the first text is a
        note, if it takes long.
        """
        if not self._is_live:
            said = threading.Timer(SILENCE, self.note, [text])
            said.start()
            try:
                yield lambda text: None
            finally:
                said.cancel()
            return
        with self._err.status(text) as status:
            yield lambda text: status.update(text if isinstance(text, str) else _Growing(text))

    def can_ask(self) -> bool:
        """Return whether somebody reads notes and types."""
        return self._shows_notes and sys.stdin.isatty()

    def ask(self) -> str:
        """Read one line from stdin, with a prompt on a terminal. Returns "" at the end of the input."""
        if not sys.stdin.isatty():
            return sys.stdin.readline()
        self._err.print("> ", end="")
        line = ""
        with contextlib.suppress(KeyboardInterrupt):  # at the prompt, Ctrl-C ends the input as Ctrl-D does
            line = sys.stdin.readline()
        if not line:
            self._err.print()  # both leave the cursor behind the prompt
        return line

    def error(self, fault: OpdclError, from_any_worker: bool = False) -> None:
        """Print what is wrong and what to do next."""
        if parallel.rank() and not from_any_worker:
            return
        word, style = ("note", None) if isinstance(fault, Interrupted) else ("error", "red")
        self._say(f"{word}: " + fault.message.replace("\n", f"\n{word}: "), style)
        if fault.hint:
            self._say(f"hint: {fault.hint}", "cyan")

    def stage(self, name: str, on_progress: Callable[[int, int], None] = lambda done, of: None) -> StageLine:
        """Return the progress line of a stage, a context manager."""
        return StageLine(name, self, on_progress)


class _Bars(Progress):
    """The bar of a stage, that of the part it is at, and a line of words below them."""

    words = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:  # it counts down between two steps
            task.fields["left"] = task.fields["ends"]()
        yield from super().get_renderables()
        if self.words:
            yield Text(harmless(self.words), no_wrap=True, overflow="ellipsis")


class Pace:
    """How far a count of something is, and how long the rest takes by the mean of its steps."""

    def __init__(self, what: str, done: int):
        self.what = what
        self.began = self.latest = done, time.monotonic()
        self.total = done

    def left(self) -> float:
        """Return the seconds left, below 0 once a step takes longer than that; NaN without a mean."""
        (first, began), (done, then) = self.began, self.latest
        if done in (first, self.total):
            return math.nan
        return (then - began) / (done - first) * (self.total - done) - (time.monotonic() - then)


class StageLine:
    """Progress of one stage: live lines on a terminal, otherwise a plain line every few seconds."""

    def __init__(self, name: str, output: Output, on_progress: Callable[[int, int], None]):
        self.name, self.output, self._on_progress = name, output, on_progress
        self.is_live = output._is_live
        self._live: _Bars | None = None
        self._task: Any = None
        self._last = -math.inf
        self._pace: Pace | None = None
        self._part: Pace | None = None
        self._part_task: Any = None

    def __enter__(self) -> StageLine:
        if self.is_live:
            self._live = _Bars(
                TextColumn("{task.description}"),
                BarColumn(12),
                TextColumn("{task.fields[count]}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=self.output._err,
                # A library's own bars go where `quiet_libraries` sends them, not above this one.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            # Until the first step the bar pulses, so that what comes before is not silent.
            self._task = self._bar(self.name, lambda: self._left(self._pace, self._part))
            self._live.start()
        return self

    def _bar(self, what: str, ends: Callable[[], str]) -> Any:
        return self._live and self._live.add_task(what, total=None, count="", ends=ends)

    def __exit__(self, *_: object) -> None:
        self._end_part()
        self._pace = None  # what is not done has no time left
        if self._live:
            self._live.stop()

    def progress(self, done: int, total: int, words: str = "") -> None:
        """Show the stage's progress, which ends a part, and `words` on the step."""
        self._pace = self._pace or Pace(self.name, done)
        self._end_part()
        if self._live:
            self._live.words = words
        self._show(self._task, f"{self.name} {done}/{total} {words}".rstrip(), self._pace, done, total)
        self._on_progress(done, total)

    def part(self, what: str, done: int, total: int) -> None:
        """Show the progress of a part of the stage, such as a validation, until the next part or step."""
        if self._part is None or what != self._part.what or done == 0:
            self._end_part()
            self._part = Pace(what, done)
            self._part_task = self._bar(f"  {what}", lambda: self._left(self._part))
        self._show(self._part_task, f"{self.name}: {what} {done}/{total}", self._part, done, total)

    def _show(self, task: Any, line: str, pace: Pace, done: int, total: int) -> None:
        """Move a bar on a terminal; elsewhere print a line now and then, and when the stage is done."""
        now = time.monotonic()
        pace.latest, pace.total = (done, now), total
        if self._live:
            self._live.update(task, completed=done, total=total, count=f"{done}/{total}")
        elif now - self._last >= LINE_EVERY or (done == total and pace is self._pace):
            self._last = now
            self.output.note(f"{line} {self._left(pace)}".rstrip())

    def _left(self, *paces: Pace | None) -> str:
        """Say how long the first of these counts takes from now, no less than the others."""
        left = [pace.left() for pace in paces if pace]
        if not left or math.isnan(left[0]):
            return ""
        seconds = max(left)  # the first one, if another is NaN
        return f"left {duration(seconds)}" if seconds > -SOON else f"over {duration(-seconds)} already"

    def _end_part(self) -> None:
        if self._live and self._part:
            self._live.remove_task(self._part_task)
        self._part = None

    def texts(self, texts: Mapping[str, str]) -> None:
        """Show texts beside their names on a terminal, each cut to a line."""
        if not self._live:
            return
        widest = max(map(len, texts))
        for name, text in texts.items():
            line = Text(harmless(redact(f"  {name:{widest}}  {' '.join(text.split())}")))
            line.truncate(self._live.console.width, overflow="ellipsis")
            self._live.console.print(line)

    def note(self, text: str) -> None:
        """Print a note, above the live lines if there are any."""
        self.output.note(f"{self.name}: {text}")
