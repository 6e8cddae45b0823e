"""What the loops of both trainings share: rate and order of steps, progress, metrics, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import math
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch

from opdcl import parallel
from opdcl.errors import Interrupted, OpdclError
from opdcl.parallel import ending
from opdcl.rundir.stage import StageDir

# A longer gradient, by its norm, is scaled down to this length.
LONGEST_GRADIENT = 1.0


Shape = Literal["linear", "cosine"]


class StageReport(Protocol):
    """Receives a stage's progress; `opdcl.console` prints it."""

    @property
    def is_live(self) -> bool: ...  # whether texts are shown

    def progress(self, done: int, total: int, words: str = "") -> None: ...

    def part(self, what: str, done: int, total: int) -> None: ...

    def texts(self, texts: Mapping[str, str]) -> None: ...

    def note(self, text: str) -> None: ...


def counted(report: StageReport, what: str, total: int, done: int = 0) -> Callable[[Sequence[Any]], None]:
    """Begin a part of a stage; return the function that takes the items done since its last call."""
    count = counter(partial(report.part, what), total, done)
    if total:
        count(())
    return count


def counter(show: Callable[[int, int], None], total: int, done: int) -> Callable[[Sequence[Any]], None]:
    """Return the function that takes the items done since its last call, on top of `done`."""

    def count(items: Sequence[Any]) -> None:
        nonlocal done
        # The other workers do as many in the same time.
        done = min(done + len(items) * parallel.worker_count(), total)
        show(done, total)

    return count


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a stage's steps, which count from 0: it rises, and then falls to zero."""

    steps: int
    warm_up: float
    """Share of the steps in which the rate rises; the first one has a rate above 0."""
    shape: Shape

    def share(self, step: int) -> float:
        """Return the rate of a step as a share of the peak."""
        rising = math.ceil(self.steps * self.warm_up)
        if step < rising:
            return (step + 1) / rising
        progress = (step - rising) / max(self.steps - rising, 1)
        return 1.0 - progress if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


class Clock:
    """The seconds that the parts of a step take."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of this block to a part; on a GPU, wait for what the block has launched."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call."""
        seconds, self._seconds = self._seconds, {}
        return {name: round(value, 3) for name, value in seconds.items()}


def endless(count: int, seed: int) -> Iterator[int]:
    """Yield indices below `count`, each once per epoch, in seeded order."""
    if not count:
        raise ValueError("of no rows, none can be drawn")
    shuffle = random.Random(seed)
    while True:
        order = list(range(count))
        shuffle.shuffle(order)
        yield from order


# Says what a step did, by its values.
Describe = Callable[[Mapping[str, Any]], str]


class StageLog:
    """The metrics of a stage, in its folder and on the screen."""

    def __init__(self, report: StageReport, out: StageDir, steps: int, describe: Describe = lambda step: ""):
        self.report, self.out, self.steps, self.describe = report, out, steps, describe
        self._skipped: int | None = None

    def write(self, row: dict[str, Any]) -> None:
        """Append one row to `metrics.jsonl`."""
        with open(self.out.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def step(self, step: int, values: dict[str, Any], tokens: int, seconds: float) -> None:
        """Record what a step did, and describe it on the screen."""
        self.write({"step": step, **values, "tokens": tokens, "seconds": round(seconds, 3)})
        self.report.progress(step, self.steps, words=self.describe(values))

    def skip(self, step: int) -> None:
        """Record a step skipped for a loss or gradient that is not finite.

        Raises:
            OpdclError: It is the second one.
        """
        if self._skipped is not None:
            hint = "lower the learning rate; the same command resumes from the last checkpoint"
            raise OpdclError(f"loss or gradient is not finite at step {step}, for the second time", hint)
        self._skipped = step
        self.write({"step": step, "skipped": "loss or gradient is not finite"})
        self.report.note(f"step {step}: loss or gradient is not finite; the step is skipped")


class Interruption:
    """Ctrl-C or SIGTERM during a stage: the first one ends it with a checkpoint, a second one at once."""

    def __init__(self, report: StageReport):
        self.report = report
        # Agreed is what all workers know: a signal may come to one of them even while they ask.
        self.came = self.agreed = False

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Take the signals in this block, if it runs in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in ending()}
        for number in previous:
            signal.signal(number, self._take)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def has_come(self) -> bool:
        """Return whether a signal has come to any worker until now; all of them must ask."""
        self.agreed = parallel.any_worker(self.came)
        return self.agreed

    def end(self, step: int, steps: int) -> None:
        """End the stage after this step, whose checkpoint is saved, if a signal has come.

        Raises:
            Interrupted: Steps are left.
            KeyboardInterrupt: It came in the last step; the stages after this one must not start.
        """
        if self.agreed and step < steps:
            raise Interrupted(f"interrupted at step {step} of {steps}; checkpoint saved")
        if step == steps and self.has_come():  # its checkpoint is saved in any case
            raise KeyboardInterrupt

    def _take(self, number: int, frame: Any) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
        self.report.note("stopping after this step; press Ctrl-C again to stop at once")


def is_finite(model: torch.nn.Module, loss: torch.Tensor) -> bool:
    """Return whether a step's loss and every part of its gradient are finite."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    # NaN where any is NaN.
    largest = torch._foreach_norm(gradients, math.inf) if gradients else ()
    return bool(torch.stack([loss.detach(), *largest]).isfinite().all())
