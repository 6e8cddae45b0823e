"""The statistics behind the verdict: always paired, because every model answers the same prompts.

Scores are arrays of one value per prompt: 0 or 1 for fail or pass, or a fraction. Intervals are 95 %
percentile bootstrap intervals over prompts. A prompt with several scored parts is resampled as one unit (a
cluster).

Scores of shape `(seeds, N)` come from several training seeds on the same N prompts. The estimate is the mean
over seeds. Each resample draws seeds and, independently, prompts: one draw of prompts for all seeds (the
pigeonhole bootstrap, Owen 2007), because a hard prompt is hard for every seed. With one seed, the interval
covers prompts only. The bootstrap sees (S - 1) / S of the variance between S seeds.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

RESAMPLES = 10_000

# Below this drop a ratio of differences is mostly noise, so R is not computed.
SMALLEST_DROP = 0.10

# Standard errors between no difference and one that a two-sided 5 % test finds in 80 % of repetitions.
DETECTABLE = 2.80

# How far below base "recovered" may lie and still count as non-inferior.
NON_INFERIORITY_MARGIN = 0.035

# The domain scores and the retention scores of one model.
Point = tuple[np.ndarray, np.ndarray]

# The scores of base, tuned and recovered.
States = tuple[np.ndarray, np.ndarray, np.ndarray]

Status = Literal["recovered", "partly recovered", "not shown", "no measurable forgetting", "not measured"]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return {k: round(v, 6) for k, v in asdict(self).items()}


@lru_cache(maxsize=16)
def _resamples(n: int, seed: int, count: int) -> np.ndarray:
    """Return how often each of n prompts is drawn: `(count, n)` bytes, small enough to cache many suites."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=count).astype(np.uint8)


@lru_cache(maxsize=2)
def _weights(n: int, seed: int, count: int) -> np.ndarray:
    return _resamples(n, seed, count).astype(np.float64)


def _means(scores: np.ndarray, seed: int, suite: int = 0) -> np.ndarray:
    """Return the mean of `(N,)` or `(seeds, N)` scores in each resample.

    Each `suite` index draws its prompts independently; the training seeds are shared by all suites.
    """
    rows = np.atleast_2d(scores)
    seeds, n = rows.shape
    weights = _weights(n, seed + 7919 * suite, RESAMPLES)
    per_seed = np.stack([weights @ row / n for row in rows], axis=1)
    means: np.ndarray = per_seed[:, 0]
    if seeds > 1:
        # Seeded with the number of seeds too: arms with different numbers are drawn independently.
        random = np.random.default_rng((seed, seeds))
        draws = random.multinomial(seeds, np.full(seeds, 1 / seeds), size=len(per_seed))
        means = (per_seed * draws).sum(1) / seeds
    return means


def _estimate(value: float, draws: np.ndarray) -> Estimate:
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return Estimate(float(value), float(low), float(high))


def mean(scores: np.ndarray, seed: int = 0) -> Estimate:
    """Estimate the mean of one score per prompt."""
    scores = np.asarray(scores, float)
    first, n = scores.flat[0], scores.shape[-1]
    if first in (0.0, 1.0) and (scores == first).all():
        # Resampling nothing but failures gives [0, 0]; Wilson's interval says what n prompts can exclude.
        from scipy.stats import binomtest

        wilson = binomtest(int(first * n), n).proportion_ci(method="wilson")
        return Estimate(float(first), float(wilson.low), float(wilson.high))
    return _estimate(scores.mean(), _means(scores, seed))


def mean_over(suites: list[np.ndarray], seed: int = 0) -> Estimate:
    """Estimate the unweighted mean of the suites' means; their scores are `(N,)` or `(seeds, N)`."""
    arrays = [np.asarray(scores, float) for scores in suites]
    draws = np.mean([_means(scores, seed, i) for i, scores in enumerate(arrays)], axis=0)
    return _estimate(np.mean([scores.mean() for scores in arrays]), draws)


def clustered_mean(parts: list[list[float]], seed: int = 0) -> Estimate:
    """Estimate the mean over all parts of all prompts (IFEval's instruction level), resampling prompts."""
    sums = np.array([float(np.sum(p)) for p in parts])
    sizes = np.array([len(p) for p in parts], float)
    weights = _weights(len(parts), seed, RESAMPLES)
    return _estimate(sums.sum() / sizes.sum(), (weights @ sums) / np.maximum(weights @ sizes, 1))


def difference(a: np.ndarray, b: np.ndarray, seed: int = 0) -> Estimate:
    """Estimate mean(a) - mean(b) on the same prompts; equal numbers of seeds are paired in their order."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    if a.shape == b.shape:
        change = a - b
        return _estimate(change.mean(), _means(change, seed))
    return _estimate(a.mean() - b.mean(), _means(a, seed) - _means(b, seed))


def above_mixtures(arm: Point, rivals: list[Point], seed: int = 0) -> Estimate:
    """Estimate how far an arm lies above the best retention of the rivals' mixtures at its domain score.

    Answering each prompt with one of two rivals at random costs nothing and gives every point on the line
    between them. The reference is therefore the upper edge of all these lines, not the rivals' points alone.
    An arm with a higher domain score than every rival is compared with the rival that has the highest.
    """
    points = _centres([arm, *rivals])
    draws = [(_means(domain, seed, suite=1), _means(retention, seed)) for domain, retention in (arm, *rivals)]
    return _estimate(_above_edge(*points)[0], _above_edge(*draws))


def upper_edge(rivals: list[Point]) -> set[int]:
    """Return the indices of the rivals that lie on the upper edge of all their mixtures."""
    points = _centres(rivals)
    return {i for i, point in enumerate(points) if _above_edge(point, *points)[0] >= -1e-9}


def _centres(points: list[Point]) -> list[Point]:
    return [(np.array([np.mean(domain)]), np.array([np.mean(retention)])) for domain, retention in points]


def _above_edge(arm: Point, *rivals: Point) -> np.ndarray:
    """Return an arm's retention minus that of the rivals' upper edge at its domain score, per draw."""
    at = np.minimum(arm[0], np.max([domain for domain, _ in rivals], axis=0))
    edge = np.full_like(at, -np.inf)
    for (left, low), (right, high) in itertools.product(rivals, repeat=2):
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(right > left, np.clip((at - left) / (right - left), 0, 1), 1)
        edge = np.where(right >= at, np.maximum(edge, low + share * (high - low)), edge)
    above: np.ndarray = arm[1] - edge
    return above


def detectable_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return the smallest true difference that a paired test with this many prompts finds four times in five.

    It follows from the spread of the observed differences; over several seeds, from the spread of their mean.
    """
    change = np.atleast_2d(np.asarray(a, float) - np.asarray(b, float)).mean(0)
    return float(DETECTABLE * change.std(ddof=1) / np.sqrt(len(change))) if len(change) > 1 else float("nan")


def mcnemar(a: np.ndarray, b: np.ndarray) -> float:
    """Return the two-sided p-value of McNemar's test (1947) of equal pass rates, exact by the binomial."""
    from scipy.stats import binomtest

    a, b = np.asarray(a) > 0.5, np.asarray(b) > 0.5
    only_a, only_b = int((a & ~b).sum()), int((~a & b).sum())
    return 1.0 if only_a + only_b == 0 else float(binomtest(only_a, only_a + only_b).pvalue)


def ratio(part: np.ndarray, whole: np.ndarray, seed: int = 0) -> Estimate:
    """Estimate mean(part) / mean(whole) of per-prompt differences; R and D are such ratios.

    Resamples with a denominator of zero or below have no meaningful ratio and do not count for the interval.
    """
    below = _means(whole, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        draws = np.where(below > 0, _means(part, seed) / below, np.nan)
    return _estimate(part.mean() / whole.mean(), draws)


def recovery(base: np.ndarray, tuned: np.ndarray, recovered: np.ndarray, seed: int = 0) -> Estimate | None:
    """Estimate R = (M2 - M1) / (M0 - M1); None unless the forgetting is measurable."""
    if not forgetting_is_measurable(base, tuned, seed):
        return None
    return ratio(recovered - tuned, base - tuned, seed)


def forgetting_is_measurable(base: np.ndarray, tuned: np.ndarray, seed: int = 0) -> bool:
    """Return whether scores drop by at least `SMALLEST_DROP` from base to tuned, with an interval above zero.

    For pass-or-fail scores McNemar's test must reject too, on every seed.
    """
    drop = difference(base, tuned, seed)
    if drop.value < SMALLEST_DROP or drop.low <= 0:
        return False
    pairs = zip(np.atleast_2d(base), np.atleast_2d(tuned), strict=True)
    pass_or_fail = bool(np.isin([base, tuned], (0.0, 1.0)).all())
    return not pass_or_fail or all(mcnemar(b, t) < 0.05 for b, t in pairs)


def domain_retention(
    base: np.ndarray, tuned: np.ndarray, recovered: np.ndarray, seed: int = 0
) -> Estimate | None:
    """Estimate D = (M2 - M0) / (M1 - M0); None unless the interval of the domain gain lies above zero."""
    if difference(tuned, base, seed).low <= 0:
        return None
    return ratio(recovered - base, tuned - base, seed)


def status_of(base: np.ndarray, tuned: np.ndarray, recovered: np.ndarray, seed: int = 0) -> Status:
    """Return the outcome on the retention suite.

    `recovered`: the interval of recovered - base lies above the negative margin (non-inferiority; a large
    p-value alone never counts). `partly recovered`: the interval of recovered - tuned lies above zero.
    """
    if not forgetting_is_measurable(base, tuned, seed):
        return "no measurable forgetting"
    if difference(recovered, base, seed).low > -NON_INFERIORITY_MARGIN:
        return "recovered"
    return "partly recovered" if difference(recovered, tuned, seed).low > 0 else "not shown"


def outcome(retention: States | None, domain: States | None, seed: int = 0) -> dict[str, Any]:
    """Return `status`, R as `recovery` and D as `domain_retention`."""
    r = recovery(*retention, seed=seed) if retention else None
    d = domain_retention(*domain, seed=seed) if domain else None
    return {
        "status": status_of(*retention, seed=seed) if retention else "not measured",
        "recovery": r and r.as_dict(),
        "domain_retention": d and d.as_dict(),
    }
