"""What follows from columns of measurements: statuses, the ratios R, D and C, and whether answers are alike.

All is paired, because every model answers the same prompts. Scores are arrays of one value per prompt, 0 or 1
for fail or pass or a fraction, or one row per training seed (`opdcl.results.intervals`).

C = 1 - distance(recovered) / distance(start). The start is tuned, or the floor if that is nearer to base: a
model with base's style and other content recovers nothing, however far away tuned is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from opdcl.results.format import IN_DOMAIN_STYLE, LENGTH, NATS, SCORE, SHARE, Unit
from opdcl.results.intervals import (
    TWO_SIDED,
    Clusters,
    Estimate,
    are_scores,
    cluster_ids,
    difference,
    difference_sources,
    half_width,
    mean,
    median,
    pass_or_fail,
    ratio,
    student,
    total,
)
from opdcl.results.measurements import MeasuredSuite, States, floors_of, pooled
from opdcl.results.status import (
    DOMAIN_STYLE,
    FEWEST_PROMPTS,
    HALF_OF_THE_GAIN,
    LARGEST_FLOOR,
    MOST_OF_THE_GAIN,
    NON_INFERIORITY_MARGIN,
    SMALLEST_DROP,
    STATES,
    UNFIT,
    Domain,
    NoRatio,
    Retention,
    both_halves,
)

# The share of repetitions in which a detectable difference is found.
POWER = 0.8

# How far the recovered model's share of answers that end, and of repeated 4-grams, may lie from base's, and
# its mean length, as a share of base's.
MARGINS = {"ended": 0.05, "repetition": 0.05, "tokens": 0.10}


class Figure(NamedTuple):
    """What is estimated of each state, and how tables show it."""

    column: str
    """Of `MeasuredSuite.column`."""
    label: str = ""
    """Empty where JSON alone has it."""
    unit: Unit = SCORE
    estimate: Callable[[np.ndarray, Clusters], Estimate] = mean


def nats(distances: np.ndarray, clusters: Clusters) -> Estimate:
    """Estimate the mean of distances, which have no upper end."""
    return total([([distances], clusters)])


def in_domain_style(distances: np.ndarray, clusters: Clusters) -> Estimate:
    """Estimate the share of requests that are answered in domain style."""
    return mean(np.array(distances > DOMAIN_STYLE, float), clusters)


# How the answers to a suite are written, by their keys in the JSON.
AS_WRITTEN = {
    "ended": Figure("ended", "answers that end"),
    "tokens": Figure("tokens", "tokens per answer", LENGTH),
    "repetition": Figure("repetition", "repeated 4-grams"),
    "script": Figure("script", "in the prompt's script"),
}
# How far the answers at temperature 1 are from base, and how they are written.
FROM_BASE = {
    "distance": Figure("distance", "distance to base, mean\nnats per token", NATS, nats),
    "forward": Figure("forward", estimate=nats),
    "reverse": Figure("reverse", estimate=nats),
    "median": Figure("distance", "distance to base, median\nnats per token", NATS, median),
    "domain_manner": Figure("distance", IN_DOMAIN_STYLE, SHARE, in_domain_style),
    "length": Figure("tokens"),
    "ended": Figure("ended"),
    "repetition": Figure("repetition"),
    "distinct": Figure("distinct"),
}


def figures_of(
    suites: Sequence[MeasuredSuite], state: str, figures: Mapping[str, Figure]
) -> dict[str, Estimate]:
    """Return the figures of a state that are measured, on one suite or the same one of several seeds."""
    found = {}
    for key, figure in figures.items():
        if (numbers := pooled(suites, state, figure.column)) is not None:
            found[key] = figure.estimate(numbers, suites[0].clusters).rounded()
    return found


@dataclass(frozen=True)
class NonInferiority:
    """Whether one model is shown to be less than `margin` worse than another."""

    margin: float
    shown: bool
    at_most: float
    """How much worse it is at most, with 95 % confidence; below zero if it is measurably better."""


def non_inferiority(
    model: np.ndarray,
    reference: np.ndarray,
    clusters: Clusters = None,
    margin: float = NON_INFERIORITY_MARGIN,
) -> NonInferiority:
    """Test whether a model is less than `margin` worse than its reference, with 95 % confidence."""
    at_most = -difference(model, reference, clusters).low
    return NonInferiority(margin, at_most < margin, round(at_most, 6))


def detectable_difference(a: np.ndarray, b: np.ndarray, clusters: Clusters = None) -> float:
    """Return the smallest true difference that a paired test finds four times in five.

    It follows from the spread of the observed differences, between prompts and between seeds. Passes and
    failures that differ by d on average have at least the variance d (1 - d), whatever spread was seen. The
    same is taken of fractions: a few prompts do not show that no answer is lost as a whole.
    """
    parts = difference_sources(a, b, clusters)
    smallest = half_width(parts) + half_width(parts, POWER)
    if not are_scores(a, b):
        return smallest
    _, count = cluster_ids(np.shape(a)[-1], clusters)
    errors = student(TWO_SIDED, count - 1) + student(POWER, count - 1)
    return max(smallest, errors**2 / (count + errors**2))


def mcnemar(a: np.ndarray, b: np.ndarray, clusters: Clusters = None) -> float:
    """Return the two-sided p-value of equal pass rates: McNemar's exact test (1947).

    The names of the two models are exchanged in whole clusters, in all possible ways.
    """
    change = (np.asarray(a) > 0.5).astype(int) - (np.asarray(b) > 0.5)
    ids, count = cluster_ids(len(change), clusters)
    sums = np.abs(np.bincount(ids, change, count)).astype(int)
    chances = np.ones(1)
    for size in sums[sums > 0]:
        step = np.zeros(2 * size + 1)
        step[[0, -1]] = 0.5
        chances = np.convolve(chances, step)
    distance = np.abs(np.arange(len(chances)) - len(chances) // 2)
    return min(1.0, float(chances[distance >= abs(int(change.sum()))].sum()))


def forgot(states: States) -> bool:
    """Return whether the drop from base to tuned is significant; one seed must pass McNemar's test too."""
    base, tuned, clusters = np.atleast_2d(states.base), np.atleast_2d(states.tuned), states.clusters
    if difference(base, tuned, clusters).low <= 0:
        return False
    several = max(len(base), len(tuned)) > 1
    return several or not pass_or_fail(base, tuned) or mcnemar(base[0], tuned[0], clusters) < 0.05


def headroom_fault(states: States) -> NoRatio | None:
    """Return why the suite can show neither loss nor recovery; None if base is measurably above the floor.

    There is no headroom where most of base's score comes without skill, or less than `SMALLEST_DROP` of it
    with skill. Where there seems to be more, but the interval does not show it, more prompts may.
    """
    enough = None if np.shape(states.base)[-1] >= FEWEST_PROMPTS else NoRatio.TOO_FEW
    if states.floor is None:
        return enough
    if states.floor.mean() > LARGEST_FLOOR * np.mean(states.base):
        return NoRatio.FLOOR_TOO_HIGH
    gap = difference(states.base, states.floor, states.clusters)
    if gap.low > 0:
        return enough
    return NoRatio.FLOOR_TOO_HIGH if gap.value < SMALLEST_DROP else NoRatio.FLOOR_TOO_NEAR


def loss_of(states: States) -> Retention:
    """Return what is shown of the loss from base to tuned: the same before a recovery and after it."""
    if fault := headroom_fault(states):
        return UNFIT[fault]
    if forgot(states):
        return Retention.LOST
    base, tuned, clusters = states.base, states.tuned, states.clusters
    is_above = difference(tuned, base, clusters).low > 0
    found = is_above or detectable_difference(base, tuned, clusters) <= SMALLEST_DROP
    return Retention.NO_FORGETTING if found else Retention.TOO_FEW


def status_of(states: States) -> Retention:
    """Return the outcome on the retention suite; without recovered, `loss_of`.

    `recovered` is non-inferiority to base; a large p-value alone never counts. `partly recovered`: the
    interval of recovered - start lies above zero, where the start is tuned or the floor, if that is higher.
    """
    base, tuned, recovered, _, clusters = states
    loss = loss_of(states)
    if recovered is None or headroom_fault(states):
        return loss
    if loss is not Retention.LOST:
        # The fine-tune did no harm that is seen, but with the recovery there may be some.
        return Retention.NOT_SHOWN if difference(recovered, base, clusters).high < 0 else loss
    if non_inferiority(recovered, base, clusters).shown:
        return Retention.RECOVERED
    gain = difference(recovered, states.above_floor(tuned), clusters)
    return Retention.PARTLY if gain.low > 0 else Retention.NOT_SHOWN


def domain_status_of(states: States) -> Domain:
    """Return the outcome on the domain suite: how much of the gain is shown to be kept."""
    kept = domain_retention(states)
    if states.recovered is None and gained(states):
        return Domain.LEARNED
    if kept is None:
        return Domain.GAIN_NOT_SHOWN
    if kept.low > 0:
        return Domain.KEPT if kept.low >= MOST_OF_THE_GAIN else Domain.PARTLY
    return Domain.LOST if kept.high < HALF_OF_THE_GAIN else Domain.NOT_SHOWN


def recovery(states: States, raw: bool = False) -> Estimate | None:
    """Estimate R = (recovered - start) / (base - start): the share of the skill above the start.

    The start is tuned or the floor, if higher; if `raw`, tuned wherever the floor lies. None without
    measurable forgetting, and if base is less than `SMALLEST_DROP` above the start.
    """
    start = states.tuned if raw else states.above_floor(states.tuned)
    loss = np.mean(states.base) - np.mean(start)
    if states.recovered is None or not forgot(states) or loss < SMALLEST_DROP:
        return None
    return ratio(states.recovered - start, states.base - start, states.clusters)


def why_no_recovery(states: States) -> NoRatio | None:
    """Return why R is not computed; None if it is."""
    if fault := headroom_fault(states):
        return fault
    if not forgot(states):
        return NoRatio.NO_DROP
    if states.recovered is None:
        return NoRatio.NOT_MEASURED
    return None if recovery(states) else NoRatio.SMALL_DROP


def gained(states: States, raw: bool = False) -> bool:
    """Return whether tuned is measurably above base, and unless `raw` above the floor."""
    start = states.base if raw else states.above_floor(states.base)
    return difference(states.tuned, start, states.clusters).low > 0


def domain_retention(states: States, raw: bool = False) -> Estimate | None:
    """Estimate D = (recovered - start) / (tuned - start), where the start is base or the floor, if higher.

    If `raw`, the start is base wherever the floor lies. None unless tuned is measurably above the start.
    """
    start = states.base if raw else states.above_floor(states.base)
    if states.recovered is None or not gained(states, raw):
        return None
    return ratio(states.recovered - start, states.tuned - start, states.clusters)


@dataclass(frozen=True)
class Findings:
    """What is shown of a run or an arm: the statuses, and R and D, each from the floor and raw."""

    status: str
    retention_status: Retention
    domain_status: Domain
    recovery: Estimate | None = None
    recovery_raw: Estimate | None = None
    no_recovery_because: NoRatio | None = NoRatio.NOT_MEASURED
    non_inferiority: NonInferiority | None = None
    domain_retention: Estimate | None = None
    domain_retention_raw: Estimate | None = None


def findings(retention: States | None, domain: States | None, written_alike: bool = True) -> Findings:
    """Return the statuses of both halves and of the run, and R and D.

    Args:
        written_alike: Whether recovered is shown to write as base does; without it, nothing is `recovered`.
    """
    found, kept = Retention.NOT_MEASURED, Domain.NOT_MEASURED
    shown: dict[str, Any] = {}
    if retention:
        found = status_of(retention)
        shown["no_recovery_because"] = why_no_recovery(retention)
        base, recovered = retention.base, retention.recovered
        if recovered is not None:
            shown["non_inferiority"] = non_inferiority(recovered, base, retention.clusters)
        if not headroom_fault(retention):
            shown["recovery"] = _rounded(recovery(retention))
            shown["recovery_raw"] = _rounded(recovery(retention, raw=True))
    if found is Retention.RECOVERED and not written_alike:
        found = Retention.PARTLY
    if domain:
        kept = domain_status_of(domain)
        shown["domain_retention"] = _rounded(domain_retention(domain))
        shown["domain_retention_raw"] = _rounded(domain_retention(domain, raw=True))
    return Findings(both_halves(found, kept), found, kept, **shown)


def _rounded(estimate: Estimate | None) -> Estimate | None:
    return estimate.rounded() if estimate else None


@dataclass(frozen=True)
class ResponseTest(Estimate):
    """Recovered minus base in one measure; of the length, relative to base's.

    `shown`: the whole interval lies within the margin, so the two are shown to be alike. `different`: it
    excludes zero. If both hold, they differ by less than matters.
    """

    base: float
    recovered: float
    margin: float
    shown: bool
    different: bool


ResponseTests = dict[str, ResponseTest | None]


def compared_with_base(suites: Sequence[MeasuredSuite]) -> ResponseTests:
    """Return `equivalence` for each measure of one suite, or of the same one of several seeds."""
    tests: ResponseTests = {}
    for name in MARGINS:
        base, recovered = (pooled(suites, state, name) for state in ("base", "recovered"))
        tests[name] = None
        if base is not None and recovered is not None:
            tests[name] = equivalence(name, base, recovered, suites[0].clusters)
    return tests


def equivalence(
    name: str, base: np.ndarray, recovered: np.ndarray, clusters: Clusters = None
) -> ResponseTest | None:
    """Test by two one-sided tests whether recovered writes as base does; None where a ratio is undefined."""
    change: Estimate | None = difference(recovered, base, clusters)
    if name == "tokens":
        change = ratio(recovered - base, base, clusters)
    if change is None:
        return None
    margin = MARGINS[name]
    return ResponseTest(
        **vars(change.rounded()),
        base=float(base.mean()),
        recovered=float(recovered.mean()),
        margin=margin,
        shown=-margin < change.low and change.high < margin,
        different=not change.low <= 0 <= change.high,
    )


def alike(tests: ResponseTests) -> bool:
    """Return whether recovered is shown to write as base does, in all that was measured."""
    return all(test.shown for test in tests.values() if test)


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
    """State -> figures `FROM_BASE`; empty without a measurement."""
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


def closeness_of(suites: Sequence[MeasuredSuite]) -> Closeness | None:
    """Return the distances, C with its interval, and how each state writes; None without base's answers.

    `suites` are those of one run, or of the training seeds of an arm, on the same prompts.
    """
    distances = {}
    for state in STATES:
        if (column := pooled(suites, state, "distance")) is not None:
            distances[state] = column
    if "base" not in distances:
        return None
    floor, clusters = floors_of(suites), suites[0].clusters
    c, raw, why = _share_gone(distances, floor, clusters)
    results = [result for suite in suites for result in suite.results.values()]
    return Closeness(
        n=len(suites[0].measured),
        c=_rounded(c),
        raw=_rounded(raw),
        why=why,
        floor=None if floor is None else round(float(floor.mean()), 6),
        noise=round(float(distances["base"].mean()), 6),
        states={state: figures_of(suites, state, FROM_BASE) for state in STATES},
        writing=compared_with_base(suites) if "recovered" in distances else {},
        seconds=round(sum(((result.get("cost") or {}).get("seconds", 0.0) for result in results), 0.0), 1),
    )


def _share_gone(
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
