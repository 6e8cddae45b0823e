"""How long the rest of an evaluation will take, while its answers are being written."""

from __future__ import annotations

import time
from collections.abc import Sequence

from opdcl.model.costs import Costs, Work, decoding, total
from opdcl.sampling.rollout import Rollout

# A batch of answers: their maximum length, and the lengths of their prompts.
Batch = tuple[int, Sequence[int]]


class Pace:
    """The time left of a state's answers to a suite, both in `name`; `later` has the batches to come."""

    def __init__(self, costs: Costs, name: str, batch: Batch, later: Sequence[Batch]):
        self.costs, self.name, self.later = costs, name, later
        self.limit, self.prompts = batch
        self._ended: list[int] = []
        self._started = time.perf_counter()
        costs.running = None

    def left(self, finished: Sequence[Rollout]) -> float | None:
        """Return the seconds left after these answers have ended too; None as long as nothing is known."""
        self._ended += [len(rollout.completion_ids) for rollout in finished]
        done, rows = len(self._ended), len(self.prompts)
        if self.costs.running is None:  # an engine that does not say where it is
            elapsed = time.perf_counter() - self._started
            work: Work | None = {}
            seconds = elapsed / max(done, 1) * (rows - done)
        else:
            running, seconds = self.costs.running[1], 0.0
            work = self.costs.rest_of_batch(
                self._ended, done + running, self.limit, self._expected(self.limit)
            )
            waiting = sorted(self.prompts)[done + running :]
            work = self._with(work, [(self.limit, waiting), *self.later])
        rest = None if work is None else self.costs.seconds(work)
        return None if rest is None else rest + seconds

    def _expected(self, limit: int) -> float | None:
        return self.costs.unit(f"answer {self.name} {limit}")

    def _with(self, work: Work | None, batches: Sequence[Batch]) -> Work | None:
        """Return work and that of batches, whose answers are as long as expected, or as those so far."""
        works = [work]
        for limit, prompts in batches:
            if prompts:
                mean = self._expected(limit) or (sum(self._ended) / len(self._ended) if self._ended else None)
                works.append(decoding(prompts, mean, limit, len(prompts)) if mean else None)
        known = [part for part in works if part is not None]
        return total(*known) if len(known) == len(works) else None
