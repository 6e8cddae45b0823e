"""Closeness to base: how far each state's answers are from base's, and C, the share of that distance gone.

C = 1 - distance(recovered) / distance(start). The start is tuned, or the floor if that is nearer to base: a
model with base's style and other content wins nothing back, however far away tuned is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from opdcl.config.evaluate import CLOSENESS
from opdcl.results import writing
from opdcl.results.scores import STATES, Suite, load_suite
from opdcl.rundir.layout import RunDir

if TYPE_CHECKING:
    import numpy as np

    from opdcl.results.stats import Estimate

# What is told of how a state writes, and its name among the measures of `writing`.
MEASURES = {"length": "tokens", "ended": "ended", "repetition": "repetition"}


def load(run: RunDir) -> Suite:
    """Return the states' answers and distances, paired by prompt, as a suite of the metric `distance`."""
    return load_suite(run, CLOSENESS, CLOSENESS)


def summarise(suites: Sequence[Suite]) -> dict[str, Any] | None:
    """Return the distances, C with its interval, and how each state writes; None without base's answers.

    `suites` are those of one run, or of the training seeds of an arm, on the same prompts.
    """
    from opdcl.results.intervals import mean, total

    states = [state for state in STATES if suites and all(state in suite.rows for suite in suites)]
    if "base" not in states:
        return None
    clusters = suites[0].clusters
    c, raw, why = _closeness(suites, states)
    found: dict[str, Any] = {"n": len(suites[0].prompts), "why": why}
    found |= c.as_dict() if c else dict.fromkeys(("value", "low", "high"))
    floor = _floor(suites)
    found["raw"] = raw and raw.as_dict()
    found["floor"] = None if floor is None else round(float(floor.mean()), 6)
    found["noise"] = round(float(values(suites, "base").mean()), 6)
    columns = {state: [writing.values(suite, state) for suite in suites] for state in STATES}
    found["writing"] = {}
    if "recovered" in states:
        found["writing"] = writing.equivalences(columns["base"], columns["recovered"], clusters)
    for state in STATES:
        estimates = {
            name: total([([values(suites, state, name)], clusters)]).as_dict()
            for name in ("distance", "forward", "reverse")
            if state in states
        }
        for name, measure in MEASURES.items():
            if state in states and all(measure in column for column in columns[state]):
                array = stacked([column[measure] for column in columns[state]])
                estimates[name] = mean(array, clusters).as_dict()
        found[state] = estimates
    costs = [result.get("cost") or {} for suite in suites for result in suite.results.values()]
    return found | {"seconds": round(sum(cost.get("seconds", 0.0) for cost in costs), 1)}


def values(suites: Sequence[Suite], state: str, name: str = "distance") -> np.ndarray:
    """Return a state's `(S, N)` numbers in nats per token: its distance, or one direction of it."""
    return stacked([[row["scores"][name] for row in suite.rows[state]] for suite in suites])


def stacked(columns: Sequence[Any]) -> np.ndarray:
    """Return the numbers of one run as `(N,)`, of several as `(S, N)`."""
    import numpy as np

    array = np.array(columns, float)
    return array[0] if len(array) == 1 else array


def same_prompts(suites: Sequence[Suite]) -> bool:
    return all(suite.rows and suite.prompts == suites[0].prompts for suite in suites)


def _floor(suites: Sequence[Suite]) -> np.ndarray | None:
    """Return the distances of base's answers to other prompts, or None if they were not measured."""
    floors = [suite.floor_values() for suite in suites]
    return None if any(floor is None for floor in floors) else stacked(floors)


def _closeness(
    suites: Sequence[Suite], states: list[str]
) -> tuple[Estimate | None, Estimate | None, str | None]:
    """Return C, C counted from tuned wherever the floor lies, and why there is none."""
    from opdcl.results.intervals import difference, ratio

    if missing := [state for state in STATES if state not in states]:
        return None, None, f"{' and '.join(missing)} not measured"
    clusters = suites[0].clusters
    base, tuned, recovered = (values(suites, state) for state in STATES)
    # Base's distance to itself is what rounding in 16 bits makes of no difference at all.
    if difference(tuned, base, clusters).low <= 0:
        return None, None, "tuned is not measurably away from base"
    floor = _floor(suites)
    start = tuned if floor is None or floor.mean() >= tuned.mean() else floor
    found, raw = (ratio(x - recovered, x, clusters) for x in (start, tuned))
    return found, raw, None if found else "the distance to start from is too uncertain for a ratio"
