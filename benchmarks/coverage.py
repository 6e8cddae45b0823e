"""Simulate evaluations whose truth is known: how often are the intervals and verdicts of a report right?

python benchmarks/coverage.py                # 2,500 evaluations of each kind; a quarter of an hour
python benchmarks/coverage.py --fractions D  # 1,500 of D from scores that are fractions; or of R, or score

An answer passes where five normal numbers add up to more than zero: the model's level with the luck of its
training seed, the difficulty of the prompt for all models, that of the prompt's cluster, the model's own view
of the prompt, and the luck of the single answer. With one seed the truth is that of the trained model, with
several that of the recipe. Nothing here uses the package's formulas.

With `--fractions` a share of the right answers scores a fraction instead of 1, as the overlap of words does.
The second model loses single answers of the first one, in clusters several at once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy.special import ndtr

from opdcl.results import intervals, measurements, ratios
from opdcl.rundir.layout import machine

NORMAL = NormalDist()

# Variances: of a prompt's difficulty, of a model's own view of it, of a single answer.
DIFFICULTY, OWN_VIEW, ANSWER = 2.25, 0.25, 1.0

# Of scores with fractions: the share of prompts that the better model answers, what the worse one keeps of
# them, the least and the greatest fraction, and the correlation that prompts of a cluster have.
ANSWERED, LEFT, FRACTION, ALIKE = 0.9, 0.1, (0.3, 0.9), 0.6
FEW_PROMPTS, SHARES, FRACTION_KINDS = (5, 10, 20, 40, 200), (0.15, 1.0), ("D", "R", "score")

# The part of a prompt's difficulty that its cluster shares: the design effect of three wordings is near 1.9.
SHARED = 0.9


@dataclass(frozen=True)
class Model:
    """A model's pass rate and the standard deviation of the rate between its training seeds."""

    rate: float
    seed_sd: float = 0.0
    """Zero for base, which gives the same answers in every run."""


@dataclass(frozen=True)
class World:
    """An evaluation that can be repeated: the models, how many seeds, prompts and clusters."""

    models: tuple[Model, ...]
    seeds: int = 1
    prompts: int = 308
    clusters: int | None = None

    def draw(self, random: np.random.Generator) -> tuple[list[np.ndarray], list[float], np.ndarray | None]:
        """Return the scores of each model, `(S, N)`, their true rates, and the clusters of the prompts."""
        count = self.clusters or self.prompts
        ids = np.arange(self.prompts) * count // self.prompts
        shared = SHARED if self.clusters else 0.0
        difficulty = random.normal(0, (DIFFICULTY * shared) ** 0.5, count)[ids]
        difficulty = difficulty + random.normal(0, (DIFFICULTY * (1 - shared)) ** 0.5, self.prompts)
        # The seed of the fine-tune is also that of the recovery that follows it.
        luck = random.normal(0, 1, self.seeds)
        scores, rates = [], []
        for model in self.models:
            own = random.normal(0, OWN_VIEW**0.5, self.prompts)
            level, spread = self._level(model)
            seeds = level + spread * (0.7 * luck + 0.51**0.5 * random.normal(0, 1, self.seeds))
            answers = random.normal(0, ANSWER**0.5, (self.seeds if model.seed_sd else 1, self.prompts))
            scores.append((seeds[:, None] + difficulty + own + answers > 0).astype(float))
            of_run = NORMAL.cdf(float(seeds[0]) / (DIFFICULTY + OWN_VIEW + ANSWER) ** 0.5)
            rates.append(of_run if self.seeds == 1 else model.rate)
        return scores, rates, ids if self.clusters else None

    @staticmethod
    def _level(model: Model) -> tuple[float, float]:
        """Return the mean of a model's level and its standard deviation between seeds."""
        point = NORMAL.inv_cdf(model.rate)
        relative = model.seed_sd / NORMAL.pdf(point)
        spread = relative * ((DIFFICULTY + OWN_VIEW + ANSWER) / (1 - relative**2)) ** 0.5
        return point * (DIFFICULTY + OWN_VIEW + ANSWER + spread**2) ** 0.5, spread


@dataclass(frozen=True)
class Fractions:
    """An evaluation on few prompts, in which a share of the right answers scores a fraction."""

    kind: str
    """R: base is the better model, tuned the worse one. D: the other way round. score: of the better one."""
    truth: float
    prompts: int
    share: float
    clustered: bool = False

    def draw(self, random: np.random.Generator) -> measurements.States:
        """Return the scores of the three models on the same prompts, and the clusters of three prompts."""
        ids = np.arange(self.prompts) // 3 if self.clustered else None
        right, left, kept = (self._chances(random, ids) for _ in range(3))
        scores = np.where(
            random.random(self.prompts) < self.share, random.uniform(*FRACTION, self.prompts), 1.0
        )
        better = scores * (right < ANSWERED)
        worse = better * (left < LEFT)
        # What the worse model keeps is there in any case, and of the rest the share that is true.
        recovered = np.where(kept < self.truth, better, worse)
        if self.kind == "R":
            return measurements.States(better, worse, recovered, clusters=ids)
        return measurements.States(worse, better, recovered, clusters=ids)

    def _chances(self, random: np.random.Generator, ids: np.ndarray | None) -> np.ndarray:
        """Return a number between 0 and 1 per prompt; those of one cluster are alike."""
        own = random.normal(0, 1, self.prompts)
        if ids is None:
            return ndtr(own)
        shared = random.normal(0, 1, self.prompts)[ids]
        return ndtr(ALIKE**0.5 * shared + (1 - ALIKE) ** 0.5 * own)


def try_fractions(world: Fractions, draws: int, seed: int = 0) -> dict[str, Any]:
    """Return how often the interval covers the truth, how often it has no width, and the good verdicts."""
    random = np.random.default_rng(seed)
    covered = pointlike = found = good = 0
    widths = []
    for _ in range(draws):
        states = world.draw(random)
        if world.kind == "score":
            estimate, status = intervals.mean(states.tuned, states.clusters), ""
        elif world.kind == "R":
            estimate, status = ratios.recovery(states), ratios.status_of(states)
        else:
            estimate, status = ratios.domain_retention(states), ratios.domain_status_of(states)
        good += status in ("recovered", "kept")
        if estimate is not None:
            found += 1
            covered += estimate.low <= world.truth <= estimate.high
            pointlike += estimate.high - estimate.low < 1e-9
            widths.append(estimate.high - estimate.low)
    return {
        "coverage": round(covered / found, 4) if found else None,
        "no_width": round(pointlike / found, 4) if found else None,
        "not_computed": draws - found,
        "width": round(float(np.median(widths)), 4) if widths else None,
        "good_verdicts": round(good / draws, 4),
    }


def fraction_cells() -> Iterator[Fractions]:
    """Yield the evaluations with fractions: 0.85 of R and of D must not be called recovered or kept."""
    for kind, share, truth in itertools.product("DR", SHARES, (0.85, 0.95, 1.0)):
        for prompts, clustered in itertools.product(FEW_PROMPTS, (False, True)):
            yield Fractions(kind, truth, prompts, share, clustered)
    for share, prompts, clustered in itertools.product(SHARES, FEW_PROMPTS, (False, True)):
        score = ANSWERED * (1 - share + share * sum(FRACTION) / 2)
        yield Fractions("score", score, prompts, share, clustered)


def estimates(kind: str, scores: list[np.ndarray], rates: list[float], clusters: Any) -> Any:
    """Return the estimate of one kind, and the truth that it should cover."""
    if kind == "score":
        return intervals.mean(scores[0], clusters), rates[0]
    if kind == "difference":
        return intervals.difference(scores[1], scores[0], clusters), rates[1] - rates[0]
    states = measurements.States(*scores, clusters=clusters)
    base, tuned, recovered, *floor = rates
    if kind == "R":
        start = max(tuned, *floor, 0)
        return ratios.recovery(states), (recovered - start) / (base - start)
    return ratios.domain_retention(states), (recovered - base) / (tuned - base)


def cover(kind: str, world: World, draws: int, seed: int = 0) -> dict[str, Any]:
    """Return how often an interval covers the truth or lies below or above it, and its median width."""
    random = np.random.default_rng(seed)
    below = above = missing = 0
    widths = []
    for _ in range(draws):
        estimate, truth = estimates(kind, *world.draw(random))
        if estimate is None:
            missing += 1
            continue
        below += estimate.high < truth
        above += estimate.low > truth
        widths.append(estimate.high - estimate.low)
    found = draws - missing
    return {
        "coverage": round(1 - (below + above) / found, 4),
        "below": round(below / found, 4),
        "above": round(above / found, 4),
        "not_computed": missing,
        "width": round(float(np.median(widths)), 4),
    }


def judge(world: World, draws: int, seed: int = 0) -> dict[str, Any]:
    """Return the share of each status."""
    random = np.random.default_rng(seed)
    counts: dict[str, int] = {}
    for _ in range(draws):
        scores, _, clusters = world.draw(random)
        states = measurements.States(*scores, clusters=clusters)
        status = ratios.status_of(states)
        counts[status] = counts.get(status, 0) + 1
    return {"statuses": {status: round(count / draws, 4) for status, count in sorted(counts.items())}}


def coverage_cells() -> Iterator[tuple[str, World]]:
    """Yield every kind of interval with the evaluations on which it is tried."""
    shapes = ((308, None), (504, 168))
    rates = ((0.4, 0.01), (0.4, 0.03), (0.8, 0.09), (0.5, 0.115), (0.01, 0.003), (0.02, 0.005), (0.035, 0.01))
    for seeds, (prompts, clusters) in itertools.product((1, 2, 3, 5), shapes):
        size = (seeds, prompts, clusters)
        for rate, seed_sd in rates:
            yield "score", World((Model(rate, seed_sd),), *size)
        for recovered, seed_sd in ((0.40, 0.01), (0.36, 0.03), (0.30, 0.115)):
            base, tuned, model = Model(0.41), Model(0.05, 0.015), Model(recovered, seed_sd)
            yield "difference", World((base, model), *size)
            yield "R", World((base, tuned, model), *size)
            yield "R", World((base, tuned, model, Model(0.12)), *size)
        for seed_sd in (0.01, 0.05, 0.09):
            yield "D", World((Model(0.02), Model(0.82, seed_sd), Model(0.78, seed_sd)), *size)


def verdict_cells() -> Iterator[tuple[str, World]]:
    """Yield the truths at which a verdict must be rare, and those at which it should be frequent."""
    base, tuned = Model(0.41), Model(0.05)
    margin = Model(base.rate - ratios.NON_INFERIORITY_MARGIN)
    drop = Model(base.rate - ratios.SMALLEST_DROP)
    truths = {
        "recovered at the margin": (base, tuned, margin),
        "recovered equals base": (base, tuned, base),
        "recovered equals tuned": (base, tuned, tuned),
        "nothing forgotten": (base, base, base),
        "ten points forgotten": (base, drop, drop),
    }
    sizes = ((308, None), (504, 168), (1000, None))
    for seeds, (prompts, clusters), (truth, models) in itertools.product((1, 3, 5), sizes, truths.items()):
        # With one seed the verdict is about the trained model, whatever other seeds would have given.
        for seed_sd in (0.01, 0.03) if seeds > 1 else (0.0,):
            trained = (Model(model.rate, seed_sd) for model in models[1:])
            yield truth, World((base, *trained), seeds, prompts, clusters)


def rows(cells: Iterator[tuple[str, World]], function: Any, draws: int) -> Iterator[dict[str, Any]]:
    """Yield one record per cell, and print it."""
    for i, (kind, world) in enumerate(cells):
        found = function(kind, world, draws, i)
        cell = {
            "kind": kind,
            "seeds": world.seeds,
            "prompts": world.prompts,
            "clusters": world.clusters or world.prompts,
            "rates": [model.rate for model in world.models],
            "seed_sd": [model.seed_sd for model in world.models],
            **found,
        }
        print(json.dumps(cell), flush=True)
        yield cell


def fraction_rows(kind: str, draws: int) -> Iterator[dict[str, Any]]:
    """Yield one record per evaluation of this kind with fractions, and print it."""
    for i, world in enumerate(fraction_cells()):
        if world.kind != kind:
            continue
        cell = vars(world) | try_fractions(world, draws, i)
        print(json.dumps(cell), flush=True)
        yield cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int)
    parser.add_argument("--fractions", choices=FRACTION_KINDS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    draws = options.draws or (1500 if options.fractions else 2500)
    out = options.out or Path(__file__).with_name("fractions.json" if options.fractions else "coverage.json")
    if options.fractions:
        # One kind at a time: the record keeps those that another call has tried.
        before = json.loads(out.read_text())["fractions"] if out.exists() else []
        others = [cell for cell in before if cell["kind"] != options.fractions]
        found = {"fractions": others + list(fraction_rows(options.fractions, draws))}
    else:
        found = {
            "intervals": list(rows(coverage_cells(), cover, draws)),
            "verdicts": list(rows(verdict_cells(), lambda kind, *rest: judge(*rest), draws)),
        }
    record = {
        "date": date.today().isoformat(),
        "command": "python " + " ".join(sys.argv),
        "machine": machine(),
        "draws": draws,
        "seconds": round(time.perf_counter() - started, 1),
        **found,
    }
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
