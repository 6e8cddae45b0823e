"""Closeness to base: how far each state's answers are from base's, and C, the share of that distance gone.

C = 1 - distance(recovered) / distance(start). The start is tuned, or the floor if that is nearer to base: a
model with base's style and other content wins nothing back, however far away tuned is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from opdcl.config.evaluate import CLOSENESS
from opdcl.results import writing
from opdcl.results.intervals import Clusters, Estimate, mean, ratio, total
from opdcl.results.scores import Suite, floors_of, load_suite, stacked
from opdcl.results.status import STATES
from opdcl.rundir.layout import RunDir

# What is told of how a state writes, and its name among the measures of `writing`.
MEASURES = {"length": "tokens", "ended": "ended", "repetition": "repetition"}


def load(run: RunDir) -> Suite:
    """Return the states' answers and distances, paired by prompt, as a suite of the metric `distance`."""
    return load_suite(run, CLOSENESS, CLOSENESS)


def summarise(suites: Sequence[Suite]) -> dict[str, Any] | None:
    """Return the distances, C with its interval, and how each state writes; None without base's answers.

    `suites` are those of one run, or of the training seeds of an arm, on the same prompts.
    """
    distances = {}
    for state in STATES:
        if suites and all(state in suite.rows for suite in suites):
            distances[state] = values(suites, state)
    if "base" not in distances:
        return None
    floor, clusters = floors_of(suites), suites[0].clusters
    c, raw, why = _closeness(distances, floor, clusters)
    costs = [result.get("cost") or {} for suite in suites for result in suite.results.values()]
    return {
        "n": len(suites[0].prompts),
        "why": why,
        **(c.as_dict() if c else dict.fromkeys(("value", "low", "high"))),
        "raw": raw and raw.as_dict(),
        "floor": None if floor is None else round(float(floor.mean()), 6),
        "noise": round(float(distances["base"].mean()), 6),
        "writing": writing.compared_with_base(suites) if "recovered" in distances else {},
        **{state: _estimates(suites, state) if state in distances else {} for state in STATES},
        "seconds": round(sum(cost.get("seconds", 0.0) for cost in costs), 1),
    }


def values(suites: Sequence[Suite], state: str, name: str = "distance") -> np.ndarray:
    """Return a state's `(S, N)` numbers in nats per token: its distance, or one direction of it."""
    of_suites = []
    for suite in suites:
        of_suites.append([row["scores"][name] for row in suite.rows[state]])
    return stacked(of_suites)


def _estimates(suites: Sequence[Suite], state: str) -> dict[str, dict[str, float]]:
    """Return the estimates of a state's distance, in both directions, and of how it writes."""
    names, clusters = ("distance", "forward", "reverse"), suites[0].clusters
    found = {name: total([([values(suites, state, name)], clusters)]) for name in names}
    written = writing.measures(suites, state)
    found |= {
        name: mean(written[measure], clusters) for name, measure in MEASURES.items() if measure in written
    }
    return {name: estimate.as_dict() for name, estimate in found.items()}


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
    found, raw = (ratio(x - recovered, x, clusters, of_scores=False) for x in (start, tuned))
    return found, raw, None if found else "the distance to start from is too uncertain for a ratio"
