"""95 % intervals of means, differences and ratios over prompts, clusters of prompts, and training seeds.

Scores are arrays of one value per prompt, `(N,)`, or one row per training seed, `(S, N)`: every seed answers
the same prompts. Prompts of one cluster (three wordings of one fact) are not independent: `clusters` holds N
ids, and None makes each prompt a cluster of its own.

A mean varies with the choice of prompts and with the training seeds. Each source has a variance and the
quantile of Student's t that belongs to its number of clusters or seeds; the squares of the two half-widths
add up (Howe 1974). So three seeds count as three. With one seed, an interval covers the choice of prompts
only. Scores have Wilson's interval (1927) with the effective number of prompts, ratios Fieller's (1954).
Nothing is drawn at random. benchmarks/coverage.py measures how often the intervals cover the truth.

Few prompts show less spread than there is: 20 answers out of 20 may be kept where one in ten is lost. So
scores between 0 and 1, passes and fractions alike, count two imagined answers more (Bonett and Price 2012).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Clusters = np.ndarray | None

# Arrays on the same prompts whose means add up, and the clusters of these prompts.
Sum = tuple[Sequence[np.ndarray], Clusters]

# Scores on one suite's prompts that count as above, as many that count as below, and the prompts' clusters.
Change = tuple[Sequence[np.ndarray], Sequence[np.ndarray], Clusters]

# A source of variance: the variance of the mean through it, and its degrees of freedom.
Source = tuple[float, int]

TWO_SIDED = 0.975

# How far 0 and 1, the two imagined answers of one model, lie from the middle.
HALF_A_SCORE = 0.5


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def rounded(self) -> Estimate:
        """Return it as reports show it and decide by it, to six digits."""
        return Estimate(round(self.value, 6), round(self.low, 6), round(self.high, 6))


def mean(scores: np.ndarray, clusters: Clusters = None) -> Estimate:
    """Estimate the mean of one number per prompt: with Wilson's interval if all lie between 0 and 1."""
    scores = np.asarray(scores, float)
    if not are_scores(scores):
        return total([([scores], clusters)])
    value = float(scores.mean())
    _, count = cluster_ids(scores.shape[-1], clusters)
    if value in (0.0, 1.0):
        # No spread is seen; Wilson's interval says what this many clusters can exclude.
        inflation = student(TWO_SIDED, count - 1) ** 2 / count
    else:
        within = value * (1 - value)
        inflation = half_width(sources([([scores], clusters)])) ** 2 / within
        # By chance a few passes can look more regular than independent ones.
        least = student(TWO_SIDED, count - 1) ** 2 / scores.size
        if not pass_or_fail(scores):
            # Fractions vary less than passes; how much less, the two imagined answers leave open.
            imagined = half_width(imagined_answers(scores.shape[-1], clusters, HALF_A_SCORE)) ** 2 / within
            least = min(least, inflation + imagined)
        inflation = max(inflation, least)
    centre = (value + inflation / 2) / (1 + inflation)
    half = np.sqrt(inflation * value * (1 - value) + inflation**2 / 4) / (1 + inflation)
    # Rounding would exclude 0 and 1 themselves.
    low, high = max(min(centre - half, value), 0.0), min(max(centre + half, value), 1.0)
    return Estimate(value, float(low), float(high))


def median(numbers: np.ndarray, clusters: Clusters = None) -> Estimate:
    """Estimate the median of one number per prompt.

    Its interval holds each number below which half of the prompts may lie, by the interval of that share.
    """
    numbers = np.asarray(numbers, float)
    ordered = np.unique(numbers)

    def may_be_half(place: int) -> bool:
        return mean((numbers <= ordered[place]).astype(float), clusters).high >= 0.5

    def more_than_half(place: int) -> bool:
        return mean((numbers < ordered[place]).astype(float), clusters).low > 0.5

    places = range(len(ordered))
    lowest = bisect_left(places, True, key=may_be_half)
    highest = bisect_left(places, True, key=more_than_half) - 1
    return Estimate(float(np.median(numbers)), float(ordered[lowest]), float(ordered[highest]))


def mean_over(suites: Sequence[np.ndarray], clusters: Sequence[Clusters] | None = None) -> Estimate:
    """Estimate the unweighted mean of the suites' means; their numbers are `(N,)` or `(S, N)`."""
    ids = clusters or [None] * len(suites)
    if len(suites) == 1:
        return mean(suites[0], ids[0])
    return total([([np.asarray(x, float) / len(suites)], c) for x, c in zip(suites, ids, strict=True)])


def change_over(changes: Sequence[Change]) -> Estimate:
    """Estimate the unweighted mean over suites of how much higher some scores are than others.

    Each suite has its imagined answers, as in `difference`, once for each pair of its scores.
    """
    sums: list[Sum] = []
    imagined: list[Source] = []
    for above, below, clusters in changes:
        scores = [*above, *below]
        signed = [*above, *(-np.asarray(x, float) for x in below)]
        sums.append(([np.asarray(x, float) / len(changes) for x in signed], clusters))
        if are_scores(*scores):
            of_suite = imagined_answers(np.shape(scores[0])[-1], clusters)
            pairs = len(scores) / 2
            imagined += [(pairs * variance / len(changes) ** 2, freedom) for variance, freedom in of_suite]
    value = float(sum(np.mean(x) for arrays, _ in sums for x in arrays))
    half = half_width(sources(sums) + imagined)
    return Estimate(value, value - half, value + half)


def clustered_mean(parts: Sequence[Sequence[float]], clusters: Clusters = None) -> Estimate:
    """Estimate the mean over all parts of all prompts (IFEval's instruction level): a prompt is a cluster."""
    ids = np.arange(len(parts)) if clusters is None else np.asarray(clusters)
    return mean(np.concatenate([np.asarray(p, float) for p in parts]), ids.repeat([len(p) for p in parts]))


def difference(a: np.ndarray, b: np.ndarray, clusters: Clusters = None) -> Estimate:
    """Estimate mean(a) - mean(b) on the same prompts; equal numbers of seeds are paired in their order."""
    value, half = float(np.mean(a) - np.mean(b)), half_width(difference_sources(a, b, clusters))
    largest = 1.0 if are_scores(a, b) else np.inf
    return Estimate(value, max(value - half, -largest), min(value + half, largest))


def difference_sources(a: np.ndarray, b: np.ndarray, clusters: Clusters = None) -> list[Source]:
    """Return the variances of mean(a) - mean(b)."""
    seen = sources([([a, -np.asarray(b, float)], clusters)])
    return seen + (imagined_answers(np.shape(a)[-1], clusters) if are_scores(a, b) else [])


def imagined_answers(n: int, clusters: Clusters, distance: float = 1.0) -> list[Source]:
    """Return the variance of two more prompts, with numbers at this distance above and below the middle.

    A distance of 1 is that of a prompt which only one of two models can answer. Without the two, six prompts
    on which two models agree would prove them equal (Bonett and Price 2012). In a suite with clusters they
    weigh more than a prompt and less than a cluster.
    """
    _, count = cluster_ids(n, clusters)
    return [(2 * distance**2 / (n * count), max(count - 1, 1))]


def total(sums: Sequence[Sum]) -> Estimate:
    """Estimate a sum of means; the prompts of different sums are independent."""
    value = float(sum(np.mean(array) for arrays, _ in sums for array in arrays))
    half = half_width(sources(sums))
    return Estimate(value, value - half, value + half)


def ratio(
    part: np.ndarray, whole: np.ndarray, clusters: Clusters = None, of_scores: bool = True
) -> Estimate | None:
    """Estimate mean(part) / mean(whole) of paired differences of scores; R and D are such ratios.

    The interval holds every ratio r for which mean(part - r * whole) may be zero. The result is None where
    mean(whole) may be zero or below, because the interval would be unbounded. `of_scores` is false for
    numbers that may exceed 1, such as distances, even if these do not.
    """
    part, whole = np.atleast_2d(np.asarray(part, float)), np.atleast_2d(np.asarray(whole, float))
    above, below = float(part.mean()), float(whole.mean())
    if below <= 0:
        return None
    value = above / below
    # Seeds whose variance is not above zero at the estimate are left out of the whole parabola.
    _, *seeds = sources([([part - value * whole], clusters)])
    kept = [True, *(variance > 0 for variance, _ in seeds)]
    imagined = 0.0
    if of_scores and max(np.abs(part).max(), np.abs(whole).max()) <= 1:
        imagined = half_width(imagined_answers(part.shape[1], clusters)) ** 2

    def width(x: np.ndarray) -> float:
        pairs = zip(sources([([x], clusters)], clipped=False), kept, strict=True)
        return imagined + sum(v * student(TWO_SIDED, freedom) ** 2 for (v, freedom), keep in pairs if keep)

    of_part, of_whole, of_gap = width(part), width(whole), width(part - whole)
    a = below**2 - of_whole
    b = above * below - (of_part + of_whole - of_gap) / 2
    root = b**2 - a * (above**2 - of_part)
    if a <= 0 or root < 0:
        return None
    return Estimate(value, (b - root**0.5) / a, (b + root**0.5) / a)


def are_scores(*numbers: np.ndarray) -> bool:
    """Return whether all numbers lie between 0 and 1: passes and failures, or fractions."""
    return all(bool(np.min(x) >= 0 and np.max(x) <= 1) for x in numbers)


def pass_or_fail(*scores: np.ndarray) -> bool:
    """Return whether all scores are 0 or 1."""
    return all(bool(np.isin(x, (0.0, 1.0)).all()) for x in scores)


@lru_cache(maxsize=256)
def student(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(max(freedom, 1), probability))


def half_width(parts: Sequence[Source], probability: float = TWO_SIDED) -> float:
    """Return half the width of an interval whose upper end has this probability."""
    return float(sum(v * student(probability, freedom) ** 2 for v, freedom in parts) ** 0.5)


def sources(sums: Sequence[Sum], clipped: bool = True) -> list[Source]:
    """Return the variances of a sum of means: through the prompts of each sum, then through the seeds.

    Arrays with the same number of seeds share them. `clipped` replaces a negative estimate by zero.
    """
    prompts: list[Source] = []
    seed_means: dict[int, np.ndarray] = {}
    noise: dict[int, float] = {}
    for arrays, clusters in sums:
        ids, count = cluster_ids(np.shape(arrays[0])[-1], clusters)
        rows: dict[int, np.ndarray] = {}
        for x in (np.atleast_2d(np.asarray(array, float)) for array in arrays):
            rows[len(x)] = rows[len(x)] + x if len(x) in rows else x
        averages = np.sum([x.mean(0) for x in rows.values()], axis=0)
        prompts.append((_between_clusters(averages[None], ids, count), max(count - 1, 1)))
        for seeds, x in rows.items():
            if seeds > 1:
                seed_means[seeds] = seed_means.get(seeds, np.zeros(seeds)) + x.mean(1)
                single = _between_clusters(x - x.mean(0), ids, count) / (seeds * (seeds - 1))
                noise[seeds] = noise.get(seeds, 0.0) + single
    through_seeds: list[Source] = []
    for seeds, means in seed_means.items():
        # A seed's mean holds the luck of its single answers too, which the prompts' variance has already.
        variance = float(means.var(ddof=1) / seeds - noise[seeds])
        through_seeds.append((max(variance, 0.0) if clipped else variance, seeds - 1))
    return prompts + through_seeds


def cluster_ids(n: int, clusters: Clusters) -> tuple[np.ndarray, int]:
    """Return each prompt's cluster as a number from 0, and the number of clusters."""
    if clusters is None:
        return np.arange(n), n
    names, ids = np.unique(np.asarray(clusters), return_inverse=True)
    return ids, len(names)


def _between_clusters(rows: np.ndarray, ids: np.ndarray, count: int) -> float:
    """Return the sum of the variances of the rows' means, each from the sums of its clusters.

    One cluster shows no spread. It counts as if two more were there, as far above and below as the largest
    number is from zero; with Student's t of one degree of freedom that excludes nothing.
    """
    if count == 1:
        return float(2 * (np.abs(rows).max(1) ** 2).sum())
    centred = rows - rows.mean(1, keepdims=True)
    sums = np.stack([np.bincount(ids, row, count) for row in centred])
    return float((sums**2).sum() / rows.shape[1] ** 2 * count / max(count - 1, 1))
