"""Closeness to base: how far each state's answers are from base's, and C, the share of that distance gone.

C = 1 - distance(recovered) / distance(start). The start is tuned, or the floor if that is nearer to base: a
model with base's style and other content recovers nothing, however far away tuned is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opdcl.config.evaluate import CLOSENESS
from opdcl.repetition import WORD, distinct
from opdcl.results import response_stats
from opdcl.results.intervals import Clusters, Estimate, mean, median, ratio, total
from opdcl.results.response_stats import ResponseTests
from opdcl.results.scores import MeasuredSuite, floors_of, load_measured, stacked
from opdcl.results.status import DOMAIN_STYLE, MOST_OF_THE_GAIN, STATES, Retention
from opdcl.rundir.layout import RunDir

# The response statistics of a state, and their names in `response_stats`.
MEASURES = {"length": "tokens", "ended": "ended", "repetition": "repetition", "distinct": "distinct"}


@dataclass(frozen=True)
class Closeness:
    """How far the states are from base on sampled answers, in nats per token."""

    n: int
    c: Estimate | None
    raw: Estimate | None
    """C counted from tuned, wherever the floor lies."""
    why: str | None
    """Why there is no C."""
    floor: float | None
    noise: float
    states: dict[str, dict[str, Estimate]]
    """State -> `distance`, the mean over requests, its two directions `forward` and `reverse`, its `median`,
    `domain_manner`, the share of requests answered in domain style, and how the state writes. Empty without a
    measurement."""
    writing: ResponseTests
    seconds: float

    @property
    def start(self) -> str:
        """What C counts from, with its distance."""
        tuned = self.states["tuned"]["distance"].value
        if self.floor is None or self.floor >= tuned:
            return f"tuned, {tuned:.2f} nats"
        return f"base's answers to unrelated prompts, {self.floor:.2f} nats"

    @property
    def status(self) -> Retention | None:
        """The outcome by how much of tuned's distance to base is gone; None if that is undefined.

        `recovered`: as much of it is shown to be gone as of the domain's gain has to be left.
        """
        if self.c is None:
            return None
        if self.c.low >= MOST_OF_THE_GAIN:
            return Retention.RECOVERED
        return Retention.PARTLY if self.c.low > 0 else Retention.NOT_SHOWN

    @property
    def how_written(self) -> dict[str, dict[str, Estimate]]:
        """State -> measure of `response_stats` -> estimate."""
        written: dict[str, dict[str, Estimate]] = {}
        for state, found in self.states.items():
            written[state] = {MEASURES[name]: found[name] for name in MEASURES if name in found}
        return written


def load_closeness(run: RunDir) -> MeasuredSuite:
    """Return the states' answers and distances, paired by prompt, as a suite of the metric `distance`."""
    return load_measured(run, CLOSENESS, CLOSENESS)


def closeness_of(suites: Sequence[MeasuredSuite]) -> Closeness | None:
    """Return the distances, C with its interval, and how each state writes; None without base's answers.

    `suites` are those of one run, or of the training seeds of an arm, on the same prompts.
    """
    distances = {}
    for state in STATES:
        if suites and all(state in suite.rows for suite in suites):
            distances[state] = distances_of(suites, state)
    if "base" not in distances:
        return None
    floor, clusters = floors_of(suites), suites[0].clusters
    c, raw, why = _closeness(distances, floor, clusters)
    states: dict[str, dict[str, Estimate]] = {}
    for state in STATES:
        states[state] = _estimates(suites, state) if state in distances else {}
    seconds = 0.0
    for suite in suites:
        for result in suite.results.values():
            seconds += (result.get("cost") or {}).get("seconds", 0.0)
    return Closeness(
        n=len(suites[0].measured),
        c=c and c.rounded(),
        raw=raw and raw.rounded(),
        why=why,
        floor=None if floor is None else round(float(floor.mean()), 6),
        noise=round(float(distances["base"].mean()), 6),
        states=states,
        writing=response_stats.compared_with_base(suites) if "recovered" in distances else {},
        seconds=round(seconds, 1),
    )


def distances_of(suites: Sequence[MeasuredSuite], state: str, name: str = "distance") -> np.ndarray:
    """Return a state's `(S, N)` numbers in nats per token: its distance, or one direction of it."""
    columns = []
    for suite in suites:
        columns.append([row["scores"][name] for row in suite.rows[state]])
    return stacked(columns)


def _estimates(suites: Sequence[MeasuredSuite], state: str) -> dict[str, Estimate]:
    """Return a state's distance: mean, both directions, median, share in domain style; and how it writes."""
    clusters = suites[0].clusters
    found = {}
    for name in ("distance", "forward", "reverse"):
        found[name] = total([([distances_of(suites, state, name)], clusters)]).rounded()
    distances = distances_of(suites, state)
    found["median"] = median(distances, clusters).rounded()
    found["domain_manner"] = mean((distances > DOMAIN_STYLE).astype(float), clusters).rounded()
    written = response_stats.measures(suites, state)
    words = [[WORD.findall(row["response"]) for row in suite.rows[state]] for suite in suites]
    written["distinct"] = stacked([*map(distinct, words)])
    for name, measure in MEASURES.items():
        if measure in written:
            found[name] = mean(written[measure], clusters).rounded()
    return found


def _closeness(
    distances: dict[str, np.ndarray], floor: np.ndarray | None, clusters: Clusters
) -> tuple[Estimate | None, Estimate | None, str | None]:
    """Return C, C counted from tuned wherever the floor lies, and why there is none."""
    if missing := [state for state in STATES if state not in distances]:
        return None, None, f"{' and '.join(missing)} not measured"
    base, tuned, recovered = (distances[state] for state in STATES)
    # Base's distance to itself is what rounding in 16 bits makes of no difference at all.
    if total([([tuned, -base], clusters)]).low <= 0:
        return None, None, "tuned is not measurably away from base"
    start = tuned if floor is None or floor.mean() >= tuned.mean() else floor
    c = ratio(start - recovered, start, clusters, of_scores=False)
    raw = ratio(tuned - recovered, tuned, clusters, of_scores=False)
    return c, raw, None if c else "the distance to start from is too uncertain for a ratio"
