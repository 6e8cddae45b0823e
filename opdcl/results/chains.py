"""Compare runs that build on one another: one domain after the other, or several specialists merged into one.

A step is a run; its end is the recovered adapter, or the tuned one if the run does not recover. Scores after
each step form the matrix of continual learning. Three figures follow from it: the average score at the end;
forgetting, the distance of the end below the best score of a suite before the last step (Chaudhry et al.,
arXiv 1801.10112); and backward transfer, the movement of earlier domains since they were learned (Lopez-Paz
and Ranzato, arXiv 1706.08840). For retention suites the best earlier score includes base's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from opdcl.results.arms import Board, Column, Suites, pool, pooled_column, said_by, scores_of, seed_notes
from opdcl.results.intervals import Change, Estimate, change_over, mean_over
from opdcl.results.measurements import MeasuredSuite, States, section
from opdcl.results.origins import count_learned, holder, learned_by, places_of, rows_set_aside, without_seed
from opdcl.results.ratios import domain_retention
from opdcl.results.summary import Results
from opdcl.rundir.layout import RunDir

# The name of the run that a run starts from, among those that it builds on; teachers have names of their own.
START = ""

# Suite -> scores whose means are added, those whose means are taken away, and the clusters of their prompts.
Figure = dict[str, Change]


@dataclass(frozen=True)
class Chain:
    """Consecutive steps. A line is one run per step, each started from the one before."""

    steps: list[Column]
    lines: dict[str, list[Results]]
    """Seeds of the last run -> its line."""
    figures: dict[str, Estimate | None]
    """Average, forgetting and backward transfer over all lines; None where one is not measured."""

    @property
    def name(self) -> str:
        return " \N{RIGHTWARDS ARROW} ".join(step.name for step in self.steps)

    @property
    def learned(self) -> list[str | None]:
        """The domain suite that each step learned."""
        return [step.learned for step in self.steps]


class Difference(NamedTuple):
    """One chain minus another that learned the same domains, paired by prompt and seed."""

    of: str
    against: str
    average: Estimate | None
    forgetting: Estimate | None


class TeacherRetention(NamedTuple):
    """What a step has kept of what a teacher taught it."""

    step: str
    teacher: str
    suite: str
    kept: Estimate | None
    """The share of the teacher's gain on the suite."""


@dataclass(frozen=True)
class Chains(Board):
    """Steps that build on one another, a column each."""

    base: Column
    chains: list[Chain]
    differences: list[Difference]
    kept: list[TeacherRetention]


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


def compare_chains(runs: Sequence[RunDir]) -> Chains:
    """Return the scores after every step, the chains, and the share kept from each teacher."""
    members = [Results(run) for run in runs]
    faults, of_runs = said_by(members)
    suites, left_out = _shared_suites(members)
    groups = pool(members, _seed_key)
    steps, unsure = [], []
    for name, group in groups.items():
        learned, note = _domain_suite(name, group[0])
        step = pooled_column(name, group, group, suites, group[0].near.asked)
        steps.append(replace(step, learned=learned))
        unsure += [note] if note else []
    chains = _chains(steps, suites)
    base: dict[str, np.ndarray] = {}
    for member in members:
        for name, suite in member.named.items():
            if "base" in suite.rows:
                base.setdefault(name, suite.values("base"))
    return Chains(
        suites=suites,
        columns=steps,
        faults=faults,
        notes=[*faults, *left_out, *of_runs, *unsure, *_notes(steps, chains, suites)],
        base=Column("base", "base", 1, base),
        chains=chains,
        differences=_differences(chains, suites),
        kept=_kept(steps, suites),
    )


def _shared_suites(members: list[Results]) -> tuple[Suites, list[str]]:
    """Return the suites by name, and notes on runs with other prompts of one, which lose it."""
    suites: Suites = {}
    notes = []
    for member in members:
        member.named = {}
        for suite in (suite for suite in member.suites if suite.rows):
            name = _shared_name(suite, suites, member)
            first = suites.setdefault(name, replace(suite, name=name))
            if suite.asked == first.asked:
                member.named[name] = suite
            else:
                reason = f"it has other prompts of {name}, or another metric"
                notes.append(f"{name} is left out for {member.path}: {reason}.")
    return suites, notes


def _shared_name(suite: MeasuredSuite, suites: Suites, member: Results) -> str:
    """Return the name of a run's suite among all: the rows that each run sets aside have one name.

    Domain suites that ask the same are one, and those of one name without a prompt in common are two.
    """
    known = suites.get(suite.name)
    if suite.role != "domain":
        return suite.name
    for name in (suite.name, *suites):
        if name in suites and name not in member.named and suites[name].asked == suite.asked:
            return name
    if known and not {row["prompt"] for row in suite.measured} & {row["prompt"] for row in known.measured}:
        return f"{suite.name} of {without_seed(member.place.name, member.seeds)}"
    return suite.name


def _domain_suite(name: str, first: Results) -> tuple[str | None, str]:
    """Return the suite of the domain that a step learned, and a note where its rows do not decide.

    They do if they are those of one suite, by content, file or name; the order of suites says nothing.
    """
    domains = [suite for suite, found in first.named.items() if found.role == "domain"]
    if not section(first.run, "finetune") or not domains:
        return None, ""
    named = [suite for suite in domains if len(domains) == 1 or _asks_rows_of(first, suite)]
    if len(named) == 1:
        return named[0], ""
    reason = "its rows are those of none of them, or of several"
    remedy = "give one suite the name of the file of rows, without its ending"
    return None, f"{name}: which of its domain suites it learned is unknown: {reason}; {remedy}."


def _asks_rows_of(made: Results, shared: str) -> bool:
    """Return whether a suite asks what a run's own fine-tune learned, or what it has set aside."""
    suite, rows = made.named[shared], str(section(made.run, "finetune")["data"])
    learned, file = learned_by(made.run), (section(made.run, "eval").get("data") or {}).get(suite.name)
    # `handbook/staff` is the suite handbook_staff.
    is_named = suite.name in (Path(rows).stem, rows.replace("/", "_"))
    is_theirs = is_named or file in (rows, str(rows_set_aside(made.run)))
    groups = {f"cluster {row.get('cluster')}" for row in suite.measured}
    return is_theirs or bool(groups & learned) or count_learned(suite.measured, learned) > 0


def _seed_key(member: Results) -> str:
    """Return a run's training seeds; runs of two chains with equal seeds form a pair."""
    return str(sorted({str(seed) for seed in member.seeds.values()}))


def _chains(steps: list[Column], suites: Suites) -> list[Chain]:
    """Return every chain of at least two steps, from a first step to one that no other starts from."""
    step_of = {member: step for step in steps for member in step.members}
    by_place = {member.place: member for member in step_of}
    start_of = {place: _parents(member.run).get(START) for place, member in by_place.items()}
    lines: dict[tuple[Column, ...], dict[str, list[Results]]] = defaultdict(dict)
    for place, member in by_place.items():
        if place in start_of.values():
            continue
        line, before = [member], start_of[place]
        while before in by_place:
            line.insert(0, by_place[before])
            before = start_of[before]
        if len(line) > 1:
            lines[tuple(step_of[run] for run in line)][_seed_key(member)] = line
    chains = []
    for of_chain, by_seed in lines.items():
        figures = _figures(of_chain, [*by_seed.values()], suites)
        estimates = {name: _estimate(figure) for name, figure in figures.items()}
        chains.append(Chain([*of_chain], by_seed, estimates))
    return chains


def _figures(steps: Sequence[Column], lines: Sequence[list[Results]], suites: Suites) -> dict[str, Figure]:
    """Return average, forgetting and backward transfer over some lines; empty where not measured."""
    # The runs of each step, one per line.
    runs_of = [*zip(*lines, strict=True)]
    learned_at = {step.learned: number for number, step in enumerate(steps)}
    counted = [name for name, suite in suites.items() if suite.role == "retention" or name in learned_at]
    average: Figure = {}
    forgetting: Figure = {}
    transfer: Figure = {}
    for name in counted:
        clusters, after = suites[name].clusters, [scores_of(runs, name) for runs in runs_of]
        # Retention from base on, a domain since it was learned.
        if name in learned_at:
            *before, end = after[learned_at[name] :]
        else:
            *before, end = scores_of(runs_of[-1], name, "base"), *after
        measured = [scores for scores in before if scores is not None]
        if end is not None:
            average[name] = [end], [], clusters
            if before and len(measured) == len(before):
                forgetting[name] = [max(measured, key=lambda scores: scores.mean())], [end], clusters
                if name in learned_at:
                    transfer[name] = [end], [measured[0]], clusters
    average = average if len(average) == len(counted) else {}
    return {"average": average, "forgetting": forgetting, "backward_transfer": transfer}


def _estimate(figure: Figure) -> Estimate | None:
    """Estimate the mean over suites of scores, or of their differences; None if it is not measured."""
    changes = [*figure.values()]
    if not changes:
        return None
    if any(below for _, below, _ in changes):
        return change_over(changes).rounded()
    return mean_over([above[0] for above, _, _ in changes], [clusters for *_, clusters in changes]).rounded()


def _differences(chains: list[Chain], suites: Suites) -> list[Difference]:
    found = []
    for one, other in itertools.combinations(chains, 2):
        seeds = [seed for seed in one.lines if seed in other.lines]
        if one.learned != other.learned or not seeds:
            continue
        ours, theirs = (_figures(c.steps, [c.lines[seed] for seed in seeds], suites) for c in (one, other))
        changes = []
        for name in ("average", "forgetting"):
            change: Figure = {}
            if ours[name].keys() == theirs[name].keys():
                for suite, (above, below, clusters) in ours[name].items():
                    added, taken, _ = theirs[name][suite]
                    change[suite] = [*above, *taken], [*below, *added], clusters
            changes.append(_estimate(change))
        found.append(Difference(one.name, other.name, *changes))
    return found


def _kept(steps: list[Column], suites: Suites) -> list[TeacherRetention]:
    """Return each step's share of each teacher's gain over base; each seed has its own teacher."""
    owners = {member.place: (step, member) for step in steps for member in step.members}
    rows = []
    for step in steps:
        parents = [_parents(member.run) for member in step.members]
        for teacher in parents[0]:
            found = [owners[of_run[teacher]] for of_run in parents if of_run.get(teacher) in owners]
            suite = found[0][0].learned if len(found) == len(parents) else None
            if teacher == START or suite is None:
                continue
            base, student = scores_of(step.members, suite, "base"), step.scores.get(suite)
            taught = scores_of([member for _, member in found], suite)
            if base is not None and taught is not None and student is not None:
                floor, clusters = suites[suite].floor_values(), suites[suite].clusters
                share = domain_retention(States(base, taught, student, floor, clusters))
                rows.append(TeacherRetention(step.name, teacher, suite, share and share.rounded()))
    return rows


def _notes(steps: list[Column], chains: list[Chain], suites: Suites) -> list[str]:
    notes = []
    for step in steps:
        if missing := [name for name in suites if name not in step.scores]:
            notes.append(f"{step.name} is not measured on {', '.join(missing)}.")
    for chain in chains:
        domains = [name for name, suite in suites.items() if suite.role == "domain"]
        if others := [name for name in domains if name not in chain.learned]:
            notes.append(f"{chain.name}: no step is known to have learned {', '.join(others)}: left out.")
        for name in suites:
            if chain.learned.count(name) > 1:
                since = "which counts from the last of them on"
                notes.append(f"{chain.name}: several steps learned {name}, {since}.")
        if behind := max(step.seeds for step in chain.steps) - len(chain.lines):
            notes.append(f"{chain.name}: seeds that have not reached the last step are left out: {behind}.")
    counts = {len(chain.lines) for chain in chains} or {step.seeds for step in steps}
    return notes + seed_notes(counts)
