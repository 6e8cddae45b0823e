"""What work costs on this machine with this model, measured while it is done.

Work is counted by kind: `train` and `learn STREAM` in tokens of sequences that are learned from, `measure`
in tokens that are only graded, `read` in tokens of prompts, `step` in steps of the decoding loop, `write` in
tokens that it decodes, `score SUITE` in answers that are scored, `likelihood SUITE` in texts. An `answer ...`
costs tokens instead of seconds: its mean length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opdcl import parallel

# Amounts by kind of work.
Work = dict[str, float]

# A kind that was not measured yet costs so many times another one, the first of these that was. The factors
# were seen with the embedded model on a CPU; a run replaces them by its own measurements as soon as it can. A
# recovery grades every token of an answer over the whole vocabulary, a fine-tune few tokens of each row.
SIMILAR = {
    "train": (("train", 1.0), ("learn", 0.33)),
    "learn": (("learn", 1.0), ("train", 3.0)),
    "measure": (("learn", 0.4), ("train", 1.3)),
    "read": (("measure", 0.4), ("train", 0.5)),
}

# Decoding steps from which the two parts of a step's time are told apart.
ENOUGH_STEPS = 6


def sized(kind: str, amount: float) -> str:
    """Return a kind with the size of its portions: small ones use the hardware less, and so cost more."""
    return f"{kind} ~{4 ** round(math.log(max(amount, 1), 4))}"


def total(*works: Work) -> Work:
    """Return the sum of several pieces of work."""
    sums: Work = {}
    for work in works:
        for kind, amount in work.items():
            sums[kind] = sums.get(kind, 0.0) + amount
    return sums


def decoding(prompts: Sequence[int], mean: float, limit: int, rows_at_once: int) -> Work:
    """Return the work of answering prompts of these lengths, given the mean length of an answer.

    A batch takes as many steps as its longest answer; lengths are taken to fall off exponentially.
    """
    if not prompts:
        return {}
    count = math.ceil(len(prompts) / parallel.worker_count())
    batches = math.ceil(count / rows_at_once)
    steps = min(limit, mean * (1 + math.log(count / batches)))
    share = count / len(prompts)
    return {"read": sum(prompts) * share, "step": batches * steps, "write": count * mean}


class Costs:
    """Costs per unit: those measured in this process, else those of earlier runs, else guesses."""

    def __init__(self, known: Mapping[str, float] | None = None):
        self.known = dict(known or {})
        self.guesses: dict[str, float] = {}
        self.accounted = 0.0
        """Seconds of all work so far, with which an enclosing measurement tells what is left for itself."""
        self.running: tuple[int, int] | None = None
        """Of the batch that is being decoded, if its engine says so: the steps left, the rows not ended."""
        self._sums: dict[str, tuple[float, float]] = {}
        # Sums over decoding steps: their number, rows, squared rows, seconds, rows times seconds.
        self._steps = [0.0] * 5

    def add(self, kind: str, amount: float, cost: float) -> None:
        """Record that an amount of work has cost so many seconds, or answers so many tokens."""
        before, spent = self._sums.get(kind, (0.0, 0.0))
        self._sums[kind] = before + amount, spent + cost
        if not kind.startswith("answer"):
            self.accounted += cost

    def decoded(self, steps: int, rows: int, seconds: float) -> None:
        """Record decoding steps with so many rows each."""
        parts = (steps, steps * rows, steps * rows * rows, seconds, rows * seconds)
        self._steps = [a + b for a, b in zip(self._steps, parts, strict=True)]
        self.accounted += seconds

    @contextmanager
    def timed(self, kind: str, amount: float) -> Iterator[None]:
        """Record what the block costs, without what is recorded within it."""
        started, accounted = time.perf_counter(), self.accounted
        yield
        self.add(kind, amount, time.perf_counter() - started - (self.accounted - accounted))

    def answered(self, name: str, lengths: Sequence[int]) -> None:
        """Record the lengths of answers of one kind."""
        if lengths:
            self.add(f"answer {name}", len(lengths), sum(lengths))

    def measured(self) -> dict[str, float]:
        """Return the units that were measured in this process."""
        units = {kind: cost / amount for kind, (amount, cost) in self._sums.items() if amount}
        return units | self._decoding_units()

    def _decoding_units(self) -> dict[str, float]:
        """Fit a step's time as `step` + rows * `write` by least squares, `step` not below zero.

        A token that is decoded computes at least as much as one that is read with others.
        """
        count, rows, squares, seconds, products = self._steps
        if count < ENOUGH_STEPS:
            return {}
        amount, cost = self._sums.get("read", (0.0, 0.0))
        write = cost / amount if amount else 0.0
        variance = squares - rows * rows / count
        if variance > 1e-3 * squares:
            write = max(write, (products - rows * seconds / count) / variance)
        write = min(write, seconds / rows)
        return {"step": (seconds - write * rows) / count, "write": write}

    def unit(self, kind: str, guess: bool = True) -> float | None:
        """Return what one unit costs, or None. Without `guess`, only what was measured, now or earlier.

        Scoring is taken to be free until it is measured.
        """
        units = self.known | self.measured()
        if kind in units:
            return units[kind]
        if not guess:
            return None
        if kind.startswith("score"):
            return 0.0
        if kind in self.guesses:
            return self.guesses[kind]
        for other, factor in SIMILAR.get(kind.split()[0], ()):
            # Of the same stream if there is one.
            found = sorted(
                (k for k in units if k.split()[0] == other), key=lambda k: k.split()[:2] != kind.split()[:2]
            )
            if found:
                return units[found[0]] * factor
        return None

    def seconds(self, work: Work, guess: bool = True) -> float | None:
        """Return what work will take, or None if that is not known."""
        units = {kind: self.unit(kind, guess) for kind, amount in work.items() if amount}
        if any(unit is None for unit in units.values()):
            return None
        return sum(work[kind] * unit for kind, unit in units.items() if unit)

    def rest_of_batch(self, ended: Sequence[int], rows: int, limit: int, mean: float | None) -> Work | None:
        """Return the work left of the batch that is being decoded; None as long as nothing is known.

        The first answers to end are the shortest. So at first the expected `mean` length counts, and the
        more answers have ended, the more the rate at which they did.

        Args:
            ended: Lengths of the answers of this batch that have ended, in tokens.
            rows: How many answers the batch has in all.
            limit: Maximum length of an answer.
            mean: Expected mean length of an answer, or None.
        """
        left, running = self.running or (0, 0)
        if not running:
            return {}
        if mean is None and len(ended) < 3:
            return None
        exposed, share = sum(ended) + running * (limit - left), len(ended) / rows
        tokens = steps = 0.0
        if ended:
            per_row = exposed / len(ended)
            weight = share if mean is not None else 1.0
            tokens += weight * running * per_row * (1 - math.exp(-left / per_row))
            steps += weight * per_row * (1 + math.log(running))
        if mean is not None:
            weight = 1 - share
            tokens += weight * max(rows * mean - exposed, running)
            steps += weight * max(mean * (1 + math.log(rows)) - (limit - left), 1)
        return {"step": min(steps, left), "write": min(tokens, running * left)}
