"""Compare runs that build on one another: one domain after the other, or several specialists merged into one.

A step is a run; its end is the recovered adapter, or the tuned one if the run does not recover. Scores after
each step form the matrix of continual learning. Three figures follow from it: the average score at the end;
forgetting, the distance of the end below the best score of a suite before the last step (Chaudhry et al.,
arXiv 1801.10112); and backward transfer, the movement of earlier domains since they were learned (Lopez-Paz
and Ranzato, arXiv 1706.08840). For retention suites the best earlier score includes base's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from opdcl.errors import UsageError
from opdcl.results import stats
from opdcl.results.arms import as_key, notes_of_runs, pool, seed_notes, split_seeds
from opdcl.results.scores import Suite
from opdcl.results.summary import Results
from opdcl.rundir.layout import RunDir

# The name of the run that a run starts from, among those that it builds on; teachers have names of their own.
START = ""


def build_on_one_another(runs: list[RunDir]) -> bool:
    """Return whether one of the runs starts from another, or has it as a teacher."""
    paths = {run.path.resolve() for run in runs}
    return any(paths & {*_parents(run).values()} for run in runs)


def _parents(run: RunDir) -> dict[str, Path]:
    """Return the runs that a run builds on: its start, and by their names the teachers that are adapters."""
    settings = run.settings()
    teachers = (settings.get("recover") or {}).get("teachers") or {}
    places = {START: settings.get("start")}
    places |= {name: teacher.get("adapter") for name, teacher in teachers.items()}
    return {name: Path(place).resolve() for name, place in places.items() if place}


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a chain: runs that differ only in their seeds."""

    name: str
    runs: list[RunDir]

    @cached_property
    def learned(self) -> str | None:
        """The suite of the domain that this step learned: the first one configured."""
        workflow = self.runs[0].settings()
        domains = (workflow.get("eval") or {}).get("domain") or [None]
        return domains[0] if workflow.get("finetune") else None


class Scores:
    """The scores of all runs, on suites with the same prompts and metric in every run."""

    def __init__(self, runs: list[RunDir]):
        self.suites: dict[str, Suite] = {}
        self.notes: list[str] = []
        self.faults: list[str] = []
        self._suite_of: dict[tuple[RunDir, str], Suite] = {}
        notes_of: dict[str, list[str]] = {}
        for run in runs:
            results = Results(run)
            self.faults += [f"{run.path}: {fault}" for fault in results.faults]
            notes_of[str(run.path)] = results.remarks
            for suite in results.suites:
                if suite.rows:
                    self._add(run, suite)
        self.notes += notes_of_runs(notes_of)

    def _add(self, run: RunDir, suite: Suite) -> None:
        first = self.suites.setdefault(suite.name, suite)
        if (suite.metric, suite.prompts) == (first.metric, first.prompts):
            self._suite_of[run, suite.name] = suite
        else:
            reason = f"it has other prompts of {suite.name}, or another metric"
            self.notes.append(f"{suite.name} is left out for {run.path}: {reason}.")

    def of(self, runs: Sequence[RunDir], suite: str, base: bool = False) -> np.ndarray | None:
        """Return `(runs, N)` scores at the end of each run, or of base; None unless all are measured."""
        scores = []
        for run in runs:
            state = "base" if base else "recovered" if run.find_stage("recover") else "tuned"
            results = self._suite_of.get((run, suite))
            if results is None or state not in results.rows:
                return None
            scores.append(results.values(state))
        return np.stack(scores) if scores else None

    def estimate(self, suite: str, scores: np.ndarray) -> dict[str, float]:
        return stats.mean(scores, self.suites[suite].clusters).as_dict()

    def average(self, changes: dict[str, np.ndarray]) -> dict[str, float]:
        """Estimate the mean over suites."""
        clusters = [self.suites[name].clusters for name in changes]
        return stats.mean_over(list(changes.values()), clusters).as_dict()


class Chain(NamedTuple):
    """Consecutive steps. A line is one run per step, each started from the one before."""

    steps: list[Step]
    lines: dict[str, list[RunDir]]
    """Seeds of the last run -> its line."""

    @property
    def name(self) -> str:
        return " \N{RIGHTWARDS ARROW} ".join(step.name for step in self.steps)


def compare(runs: list[RunDir]) -> dict[str, Any]:
    """Return the scores after every step, the figures of each chain, and the share kept from each teacher."""
    scores, steps = Scores(runs), _steps(runs)
    chains = _chains(steps)
    members = [run for step in steps for run in step.runs]
    return {
        "suites": {name: suite.description for name, suite in scores.suites.items()},
        "base": {name: found for name in scores.suites if (found := _base(name, members, scores))},
        "steps": [_step_row(step, scores) for step in steps],
        "chains": [_chain_row(chain, scores) for chain in chains],
        "differences": [d for a, b in itertools.combinations(chains, 2) if (d := _difference(a, b, scores))],
        "kept": [row for step in steps for row in _kept_rows(step, steps, scores)],
        "faults": scores.faults,
        "notes": scores.faults + _notes(steps, chains, scores),
    }


def _base(suite: str, runs: list[RunDir], scores: Scores) -> dict[str, float]:
    """Return base's score by the first run that measured it; empty without one."""
    measured = (scores.of([run], suite, base=True) for run in runs)
    first = next((found for found in measured if found is not None), None)
    return {} if first is None else scores.estimate(suite, first)


def _step_row(step: Step, scores: Scores) -> dict[str, Any]:
    measured = {name: x for name in scores.suites if (x := scores.of(step.runs, name)) is not None}
    estimates = {name: scores.estimate(name, x) for name, x in measured.items()}
    paths = [str(run.path) for run in step.runs]
    return {"name": step.name, "seeds": len(paths), "runs": paths, "scores": estimates}


def _chain_row(chain: Chain, scores: Scores) -> dict[str, Any]:
    figures = _figures(chain, list(chain.lines), scores)
    return {
        "name": chain.name,
        "steps": [step.name for step in chain.steps],
        "seeds": len(chain.lines),
        **{k: scores.average(v) if v else None for k, v in figures.items()},
    }


def _seed_key(run: RunDir) -> str:
    """Return a run's training seeds; runs of two chains with equal seeds form a pair."""
    return str(sorted({str(seed) for seed in split_seeds(run)[1].values()}))


def _steps(runs: list[RunDir]) -> list[Step]:
    """Group runs by their settings and the runs that they build on; refuse one that builds on itself."""
    by_path = {run.path.resolve(): run for run in runs}

    def key(run: RunDir, descendants: tuple[Path, ...] = ()) -> str:
        path = run.path.resolve()
        if path in descendants:
            raise UsageError(f"{run.path} builds on itself", "name another run as its start or teacher")
        settings, _ = split_seeds(run)
        own = {k: v for k, v in settings.items() if k != "start" and k.rsplit(".", 1)[-1] != "adapter"}
        parents = {
            name: key(by_path[parent], (*descendants, path)) if parent in by_path else str(parent)
            for name, parent in _parents(run).items()
        }
        return as_key([own, parents])

    groups = pool(runs, [key(run) for run in runs], [_seed_key(run) for run in runs])
    return [Step(name, group) for name, group in groups.items()]


def _chains(steps: list[Step]) -> list[Chain]:
    """Return every chain of at least two steps, from a first step to one that no other starts from."""
    step_of = {run.path.resolve(): step for step in steps for run in step.runs}
    by_path = {run.path.resolve(): run for step in steps for run in step.runs}
    start_of = {path: _parents(run).get(START) for path, run in by_path.items()}
    chains: dict[tuple[int, ...], Chain] = {}
    for path, run in by_path.items():
        if path in start_of.values():
            continue
        line = [run]
        while (path := start_of[path]) in by_path:
            line.insert(0, by_path[path])
        chain = [step_of[r.path.resolve()] for r in line]
        if len(chain) > 1:
            chains.setdefault(tuple(map(id, chain)), Chain(chain, {})).lines[_seed_key(run)] = line
    return list(chains.values())


def _figures(chain: Chain, seeds: Sequence[str], scores: Scores) -> dict[str, dict[str, np.ndarray]]:
    """Return figure -> suite -> `(seeds, N)` values whose mean is the figure; empty if not measured."""
    # The runs of each step, one per seed.
    runs_of = [[chain.lines[seed][step] for seed in seeds] for step in range(len(chain.steps))]
    last = runs_of[-1]
    learned_at = {step.learned: i for i, step in enumerate(chain.steps) if step.learned}
    ends, forgetting, transfer = {}, {}, {}
    is_complete = True
    for name, suite in scores.suites.items():
        is_domain = name in learned_at
        if suite.role != "retention" and not is_domain:
            continue
        end = scores.of(last, name)
        if end is None:
            is_complete = False
            continue
        ends[name] = end
        # What it was before the last step: since it was learned, or from base on.
        before = [] if is_domain else [scores.of(last, name, base=True)]
        for runs in runs_of[learned_at.get(name, 0) : -1]:
            before.append(scores.of(runs, name))
        measured = [score for score in before if score is not None]
        if not before or len(measured) < len(before):
            continue
        forgetting[name] = max(measured, key=lambda score: score.mean()) - end
        if is_domain:
            transfer[name] = end - measured[0]
    average = ends if is_complete else {}
    return {"average": average, "forgetting": forgetting, "backward_transfer": transfer}


def _difference(one: Chain, other: Chain, scores: Scores) -> dict[str, Any] | None:
    """Return the differences between two chains that learned the same domains, paired by prompt and seed."""
    seeds = [seed for seed in one.lines if seed in other.lines]
    if [s.learned for s in one.steps] != [s.learned for s in other.steps] or not seeds:
        return None
    a, b = (_figures(chain, seeds, scores) for chain in (one, other))
    row: dict[str, Any] = {"of": one.name, "against": other.name, "seeds": len(seeds)}
    for figure in ("average", "forgetting"):
        comparable = a[figure] and a[figure].keys() == b[figure].keys()
        changes = {name: x - b[figure][name] for name, x in a[figure].items()} if comparable else {}
        row[figure] = scores.average(changes) if changes else None
    return row


def _kept_rows(step: Step, steps: list[Step], scores: Scores) -> list[dict[str, Any]]:
    """Return a step's share of each teacher's gain over base; each seed has its own teacher."""
    owner = {run.path.resolve(): (other, run) for other in steps for run in other.runs}
    rows = []
    for name in [name for name in _parents(step.runs[0]) if name != START]:
        owners = [owner[path] for run in step.runs if (path := _parents(run).get(name)) in owner]
        suite = owners[0][0].learned if owners else None
        if suite is None or len(owners) < len(step.runs):
            continue
        base, student = scores.of(step.runs, suite, base=True), scores.of(step.runs, suite)
        teacher = scores.of([run for _, run in owners], suite)
        if base is not None and teacher is not None and student is not None:
            measured = scores.suites[suite]
            states = stats.States(base, teacher, student, measured.floor_values(), measured.clusters)
            share = stats.domain_retention(states)
            row = {"step": step.name, "teacher": name, "suite": suite, "kept": share and share.as_dict()}
            rows.append(row)
    return rows


def _notes(steps: list[Step], chains: list[Chain], scores: Scores) -> list[str]:
    notes = list(scores.notes)
    for step in steps:
        if missing := [name for name in scores.suites if scores.of(step.runs, name) is None]:
            notes.append(f"{step.name} is not measured on {', '.join(missing)}.")
    for chain in chains:
        if behind := max(len(step.runs) for step in chain.steps) - len(chain.lines):
            have, are = ("seeds have", "are") if behind > 1 else ("seed has", "is")
            missing_end = f"{behind} {have} not reached the last step"
            notes.append(f"{chain.name}: {missing_end} and {are} left out of the chain.")
    return notes + seed_notes({len(c.lines) for c in chains} or {len(step.runs) for step in steps})
