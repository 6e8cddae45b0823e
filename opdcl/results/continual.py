"""Compare runs that build on one another: one domain after the other, or several specialists merged into one.

A step is a run; its end is the recovered adapter, or the tuned one if the run does not recover. Scores after
each step form the matrix of continual learning. Three figures follow from it: the average score at the end;
forgetting, the distance of the end below the best score of a suite before the last step (Chaudhry et al.,
arXiv 1801.10112); and backward transfer, the movement of earlier domains since they were learned (Lopez-Paz
and Ranzato, arXiv 1706.08840). For retention suites the best earlier score includes base's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opdcl.results import closeness, stats, tables
from opdcl.results.arms import Arm, Member, notes_of_runs, pool, seed_notes
from opdcl.results.format import CHANGE, NATS, SCORE, cell, points
from opdcl.results.intervals import Estimate
from opdcl.results.learned import learned
from opdcl.results.origins import holder, places_of
from opdcl.results.scores import Suite
from opdcl.results.tables import Table, View
from opdcl.rundir.layout import RunDir

# The name of the run that a run starts from, among those that it builds on; teachers have names of their own.
START = ""

# Suite -> `(seeds, N)` scores whose means are added, and those whose means are taken away: a figure.
Figure = dict[str, tuple[list[np.ndarray], list[np.ndarray]]]


@dataclass(frozen=True)
class StepRow:
    """The scores of all suites after a step."""

    name: str
    seeds: int
    runs: list[str]
    scores: dict[str, Estimate]
    distance: Estimate | None
    """From base, in nats per token; None unless every run measured it, on the same prompts."""


@dataclass(frozen=True)
class ChainRow:
    """The figures of a chain; None where one is not measured."""

    name: str
    seeds: int
    average: Estimate | None
    forgetting: Estimate | None
    backward_transfer: Estimate | None


@dataclass(frozen=True)
class Difference:
    """One chain minus another, paired by prompt and seed."""

    of: str
    against: str
    average: Estimate | None
    forgetting: Estimate | None


@dataclass(frozen=True)
class Kept:
    """A step's share of the gain of one of its teachers."""

    step: str
    teacher: str
    suite: str
    kept: Estimate | None


@dataclass(frozen=True)
class Comparison:
    """Steps that build on one another."""

    suites: dict[str, dict[str, Any]]
    base: dict[str, Estimate]
    steps: list[StepRow]
    chains: list[ChainRow]
    differences: list[Difference]
    kept: list[Kept]
    faults: list[str]
    notes: list[str]


@dataclass(frozen=True)
class Chain:
    """Consecutive steps. A line is one run per step, each started from the one before."""

    steps: list[Arm]
    lines: dict[str, list[Member]]
    """Seeds of the last run -> its line."""
    learned: list[str | None]
    """The domain suite that each step learned."""

    @property
    def name(self) -> str:
        return " \N{RIGHTWARDS ARROW} ".join(step.name for step in self.steps)


def build_on_one_another(runs: Sequence[RunDir]) -> bool:
    """Return whether one of the runs starts from another, or has it as a teacher."""
    paths = {run.path.resolve() for run in runs}
    return any(paths & {*_parents(run).values()} for run in runs)


def _parents(run: RunDir) -> dict[str, Path]:
    """Return the runs that a run builds on: its start, and by their names the teachers that are adapters.

    An adapter inside a run stands for the run only if the run ended with it.
    """
    parents = {}
    for key, place in places_of(run).items():
        maker, stage = holder(place)
        is_end = maker and stage == maker.last_stage()
        name = START if key == "start" else key.split(".")[-2]
        parents[name] = (maker.path if maker and is_end else Path(place)).resolve()
    return parents


def compare(runs: Sequence[RunDir]) -> Comparison:
    """Return the scores after every step, the figures of each chain, and the share kept from each teacher."""
    members = [Member(run) for run in runs]
    faults, of_runs = [], {}
    for member in members:
        summary = member.summary
        faults += [f"{member.path}: {fault}" for fault in summary.faults]
        of_runs[member.path] = [note for note in summary.notes if note not in summary.faults]
    suites, left_out = _shared_suites(members)
    steps = _steps(members)
    known = _learned(steps)
    chains = _chains(steps, {step: suite for step, (suite, _) in known.items()})
    differences = []
    for i, chain in enumerate(chains):
        for other in chains[i + 1 :]:
            if chain.learned == other.learned and chain.lines.keys() & other.lines.keys():
                differences.append(_difference(chain, other, suites))
    return Comparison(
        suites={name: suite.description for name, suite in suites.items()},
        base=_base(members, suites),
        steps=[_step_row(step, suites) for step in steps],
        chains=[_chain_row(chain, suites) for chain in chains],
        differences=differences,
        kept=_kept(steps, suites, {step: suite for step, (suite, _) in known.items()}),
        faults=faults,
        notes=[
            *faults,
            *left_out,
            *notes_of_runs(of_runs),
            *(note for _, note in known.values() if note),
            *_notes(steps, chains, suites),
        ],
    )


def _learned(steps: list[Arm]) -> dict[Arm, tuple[str | None, str]]:
    """Return the domain suite that each step learned, and a note where only its scores tell."""
    by_path = {member.run.path.resolve(): member for step in steps for member in step.members}
    found = {}
    for step in steps:
        start = _parents(step.members[0].run).get(START)
        found[step] = learned(step, by_path.get(start) if start else None)
    return found


def _shared_suites(members: list[Member]) -> tuple[dict[str, Suite], list[str]]:
    """Return the suites by name, and notes on runs with other prompts of one, which lose it."""
    suites: dict[str, Suite] = {}
    notes = []
    for member in members:
        for suite in member.suites:
            first = suites.setdefault(suite.name, suite) if suite.rows else None
            if first is None:
                del member.named[suite.name]
            elif (suite.metric, suite.prompts) != (first.metric, first.prompts):
                del member.named[suite.name]
                reason = f"it has other prompts of {suite.name}, or another metric"
                notes.append(f"{suite.name} is left out for {member.path}: {reason}.")
    return suites, notes


def _scores(members: Sequence[Member], name: str, state: str = "") -> np.ndarray | None:
    """Return `(runs, N)` scores of a state, by default the end of each run; None unless all are measured."""
    found = []
    for member in members:
        suite, wanted = member.named.get(name), state or member.compared
        if suite is None or wanted not in suite.rows:
            return None
        found.append(suite.values(wanted))
    return np.stack(found)


def _base(members: list[Member], suites: dict[str, Suite]) -> dict[str, Estimate]:
    """Return base's score on each suite, by the first run that measured it."""
    base = {}
    for name, suite in suites.items():
        for member in members:
            scores = _scores([member], name, "base")
            if scores is not None:
                base[name] = stats.mean(scores, suite.clusters).rounded()
                break
    return base


def _step_row(step: Arm, suites: dict[str, Suite]) -> StepRow:
    estimates = {}
    for name, suite in suites.items():
        scores = _scores(step.members, name)
        if scores is not None:
            estimates[name] = stats.mean(scores, suite.clusters).rounded()
    paths = [member.path for member in step.members]
    return StepRow(step.name, len(paths), paths, estimates, _distance(step))


def _distance(step: Arm) -> Estimate | None:
    near = [member.near for member in step.members]
    end = step.members[0].compared
    if any(end not in suite.rows or suite.prompts != near[0].prompts for suite in near):
        return None
    found = closeness.summarise(near)
    return found.states[end]["distance"] if found else None


def _chain_row(chain: Chain, suites: dict[str, Suite]) -> ChainRow:
    average, forgetting, transfer = _figures(chain, list(chain.lines), suites)
    return ChainRow(
        name=chain.name,
        seeds=len(chain.lines),
        average=_mean_of(average, suites),
        forgetting=_change_of(forgetting, suites),
        backward_transfer=_change_of(transfer, suites),
    )


def _mean_of(average: Figure, suites: dict[str, Suite]) -> Estimate | None:
    """Estimate the mean over suites of scores; None if it is not measured."""
    if not average:
        return None
    ends = [end for (end,), _ in average.values()]
    return stats.mean_over(ends, [suites[name].clusters for name in average]).rounded()


def _change_of(figure: Figure, suites: dict[str, Suite]) -> Estimate | None:
    """Estimate the mean over suites of a difference of scores; None if it is not measured."""
    if not figure:
        return None
    changes = [(above, below, suites[name].clusters) for name, (above, below) in figure.items()]
    return stats.change_over(changes).rounded()


def _seed_key(member: Member) -> str:
    """Return a run's training seeds; runs of two chains with equal seeds form a pair."""
    return str(sorted({str(seed) for seed in member.seeds.values()}))


def _steps(members: list[Member]) -> list[Arm]:
    """Group runs by their settings and by what they build on."""
    keys = [member.identity.key for member in members]
    return pool(members, keys, [_seed_key(member) for member in members])


def _chains(steps: list[Arm], learned_by: dict[Arm, str | None]) -> list[Chain]:
    """Return every chain of at least two steps, from a first step to one that no other starts from."""
    step_of = {member: step for step in steps for member in step.members}
    by_path = {member.run.path.resolve(): member for member in step_of}
    start_of = {path: _parents(member.run).get(START) for path, member in by_path.items()}
    chains: dict[tuple[Arm, ...], Chain] = {}
    for path, member in by_path.items():
        if path in start_of.values():
            continue
        line, before = [member], start_of[path]
        while before in by_path:
            line.insert(0, by_path[before])
            before = start_of[before]
        chain = [step_of[run] for run in line]
        if len(chain) > 1:
            suites = [learned_by[step] for step in chain]
            chains.setdefault(tuple(chain), Chain(chain, {}, suites)).lines[_seed_key(member)] = line
    return list(chains.values())


def _figures(chain: Chain, seeds: Sequence[str], suites: dict[str, Suite]) -> tuple[Figure, Figure, Figure]:
    """Return average, forgetting and backward transfer; empty where one is not measured."""
    # The runs of each step, one per seed.
    runs_of = []
    for step in range(len(chain.steps)):
        runs_of.append([chain.lines[seed][step] for seed in seeds])
    last = runs_of[-1]
    learned_at = {name: step for step, name in enumerate(chain.learned)}
    average: Figure = {}
    forgetting: Figure = {}
    transfer: Figure = {}
    is_complete = True
    for name, suite in suites.items():
        is_domain = name in learned_at
        if suite.role != "retention" and not is_domain:
            continue
        end = _scores(last, name)
        if end is None:
            is_complete = False
            continue
        average[name] = [end], []
        # What it was before the last step: since it was learned, or from base on.
        before = [] if is_domain else [_scores(last, name, "base")]
        before += [_scores(runs, name) for runs in runs_of[learned_at.get(name, 0) : -1]]
        measured = [scores for scores in before if scores is not None]
        if not before or len(measured) < len(before):
            continue
        forgetting[name] = [max(measured, key=lambda scores: scores.mean())], [end]
        if is_domain:
            transfer[name] = [end], [measured[0]]
    return average if is_complete else {}, forgetting, transfer


def _difference(one: Chain, other: Chain, suites: dict[str, Suite]) -> Difference:
    """Return the differences between two chains that learned the same domains."""
    seeds = [seed for seed in one.lines if seed in other.lines]
    changes = []
    pairs = zip(_figures(one, seeds, suites), _figures(other, seeds, suites), strict=True)
    for ours, theirs in pairs:
        change: Figure = {}
        if ours.keys() == theirs.keys():
            for name, (above, below) in ours.items():
                change[name] = above + theirs[name][1], below + theirs[name][0]
        changes.append(_change_of(change, suites))
    average, forgetting, _ = changes
    return Difference(one.name, other.name, average, forgetting)


def _kept(steps: list[Arm], suites: dict[str, Suite], learned_by: dict[Arm, str | None]) -> list[Kept]:
    """Return each step's share of each teacher's gain over base; each seed has its own teacher."""
    owners = {member.run.path.resolve(): (step, member) for step in steps for member in step.members}
    rows = []
    for step in steps:
        for name in _parents(step.members[0].run):
            places = [_parents(member.run).get(name) for member in step.members]
            if name == START or any(place not in owners for place in places):
                continue
            found = [owners[place] for place in places if place]
            suite = learned_by[found[0][0]]
            if suite is None:
                continue
            base, student = _scores(step.members, suite, "base"), _scores(step.members, suite)
            teacher = _scores([member for _, member in found], suite)
            if base is not None and teacher is not None and student is not None:
                measured = suites[suite]
                states = stats.States(base, teacher, student, measured.floor_values(), measured.clusters)
                share = stats.domain_retention(states)
                rows.append(Kept(step.name, name, suite, share and share.rounded()))
    return rows


def _notes(steps: list[Arm], chains: list[Chain], suites: dict[str, Suite]) -> list[str]:
    notes = []
    for step in steps:
        if missing := [name for name in suites if _scores(step.members, name) is None]:
            notes.append(f"{step.name} is not measured on {', '.join(missing)}.")
    for chain in chains:
        notes += _notes_on_domains(chain, suites)
        if behind := max(len(step.members) for step in chain.steps) - len(chain.lines):
            notes.append(f"{chain.name}: seeds that have not reached the last step are left out: {behind}.")
    counts = {len(chain.lines) for chain in chains} or {len(step.members) for step in steps}
    return notes + seed_notes(counts)


def _notes_on_domains(chain: Chain, suites: dict[str, Suite]) -> list[str]:
    """Say which domain suites a chain's figures leave out, and which of them several steps learned."""
    notes = []
    others = [name for name, suite in suites.items() if suite.role == "domain" and name not in chain.learned]
    if others:
        notes.append(f"{chain.name}: no step is known to have learned {', '.join(others)}: left out.")
    for name in suites:
        if chain.learned.count(name) > 1:
            notes.append(
                f"{chain.name}: several steps learned {name}, which counts from the last of them on."
            )
    return notes


def view(comparison: Comparison) -> View:
    """Lay out steps that build on one another."""
    names = ", ".join(step.name for step in comparison.steps)
    suites = tables.named(comparison.suites)
    all_tables = [_steps_table(comparison), _chains_table(comparison), _kept_table(comparison.kept)]
    return View(
        finding=finding(comparison),
        lead=f"{names}: steps that build on one another, measured on {suites}.",
        tables=tables.with_rows(all_tables),
        details=[],
    )


def finding(comparison: Comparison) -> str:
    """Name the difference of the first two chains at the end, or what one chain has forgotten."""
    for change in comparison.differences:
        if change.average:
            size = tables.compared(change.average).format(change.against)
            return f"{change.of} is {size} at the end, on average over all suites"
    for chain in comparison.chains:
        if chain.forgetting:
            if chain.forgetting.low <= 0:
                return f"{chain.name}: no forgetting is shown"
            return f"{chain.name}: {points(chain.forgetting.value).lstrip('+')} points are forgotten"
    return "Steps that build on one another"


def _steps_table(comparison: Comparison) -> Table:
    suites = comparison.suites
    rows = [["base", *[cell(comparison.base.get(name), SCORE) for name in suites], ""]]
    for step in comparison.steps:
        cells = [cell(step.scores.get(name), SCORE) for name in suites]
        rows.append([tables.with_seeds(step.name, step.seeds), *cells, cell(step.distance, NATS)])
    caption = (
        "The model's scores after each step, and its distance to base in nats per token. Brackets are 95 % "
        "intervals over prompts, and over seeds if there are several."
    )
    columns = ["step", *[f"{name}\n{suite['role']}" for name, suite in suites.items()], "distance\nto base"]
    return Table("After each step", columns, rows, caption)


def _chains_table(comparison: Comparison) -> Table:
    rows = []
    for chain in comparison.chains:
        figures = (chain.average, chain.forgetting, chain.backward_transfer)
        rows.append([chain.name, *[cell(figure, SCORE) for figure in figures]])
    for change in comparison.differences:
        name = f"{change.of}\nminus {change.against}"
        rows.append([name, cell(change.average, CHANGE), cell(change.forgetting, CHANGE), ""])
    caption = (
        "Average: the mean at the end of all retention suites and learned domains. Forgetting: how far they "
        "lie below their best score "
        "before the last step, including base's retention. Backward transfer: how far earlier domains have "
        "moved since they were learned. Differences are in points, paired by prompt and seed."
    )
    return Table("Chains", ["chain", "average", "forgetting", "backward transfer"], rows, caption)


def _kept_table(kept: list[Kept]) -> Table:
    rows = [[row.step, row.teacher, row.suite, cell(row.kept)] for row in kept]
    caption = (
        "The step's share of the teacher's gain over base, or over a higher floor, on the suite that the "
        "teacher learned."
    )
    return Table("Kept from each teacher", ["step", "teacher", "suite", "kept"], rows, caption)
