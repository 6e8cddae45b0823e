"""Compare runs that build on one another: one domain after the other, or several specialists merged into one.

A step is a run; its end is the recovered adapter, or the tuned one if the run does not recover. Scores after
each step form the matrix of continual learning. Three figures follow from it: the average score at the end;
forgetting, the distance of the end below the best score of a suite before the last step (Chaudhry et al.,
arXiv 1801.10112); and backward transfer, the movement of earlier domains since they were learned (Lopez-Paz
and Ranzato, arXiv 1706.08840). For retention suites the best earlier score includes base's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from opdcl.results import intervals, measurements, ratios
from opdcl.results.board import Board, Column, cells, compared, pool, said_by, scores_of, seed_notes
from opdcl.results.format import CHANGE, NATS, SCORE, cell, points
from opdcl.results.intervals import Estimate
from opdcl.results.measurements import MeasuredSuite, section
from opdcl.results.origins import count_learned, holder, learned_by, places_of, rows_set_aside, without_seed
from opdcl.results.page import Page
from opdcl.results.summary import Results
from opdcl.results.tables import Table, with_rows
from opdcl.rundir.layout import RunDir

# The name of the run that a run starts from, among those that it builds on; teachers have names of their own.
START = ""

# Suite -> scores whose means are added, and those whose means are taken away.
Figure = dict[str, tuple[list[np.ndarray], list[np.ndarray]]]


class TeacherRetention(NamedTuple):
    """What a step has kept of what a teacher taught it."""

    step: str
    teacher: str
    suite: str
    share: Estimate | None
    """Of the teacher's gain on the suite."""


@dataclass(frozen=True)
class Chain:
    """Consecutive steps. A line is one run per step, each started from the one before."""

    steps: list[Column]
    lines: dict[str, list[Results]]
    """Seeds of the last run -> its line."""
    learned: list[str | None]
    """The domain suite that each step learned."""

    @property
    def name(self) -> str:
        return " \N{RIGHTWARDS ARROW} ".join(step.name for step in self.steps)


@dataclass(frozen=True)
class Chains(Board):
    """Steps that build on one another, a column each."""

    base: Column
    chains: list[Chain]
    kept: list[TeacherRetention]

    @property
    def pairs(self) -> list[tuple[Chain, Chain]]:
        """The chains that learned the same domains, with a seed in common."""
        found = []
        for i, one in enumerate(self.chains):
            for other in self.chains[i + 1 :]:
                if one.learned == other.learned and one.lines.keys() & other.lines.keys():
                    found.append((one, other))
        return found

    def distance(self, step: Column) -> Estimate | None:
        """Return a step's distance from base, in nats per token."""
        return step.closeness.states[step.state]["distance"] if step.closeness else None

    def figures(self, chain: Chain) -> dict[str, Estimate | None]:
        """Return the figures of a chain, by name; None where one is not measured."""
        average, changes = _figures(chain, list(chain.lines), self.suites)
        clusters = [self.suites[name].clusters for name in average]
        mean = intervals.mean_over([*average.values()], clusters).rounded() if average else None
        return {"average": mean} | {name: self._change(change) for name, change in changes.items()}

    def differences(self, one: Chain, other: Chain) -> dict[str, Estimate | None]:
        """Return average and forgetting of one chain minus another, paired by prompt and seed."""
        seeds = [seed for seed in one.lines if seed in other.lines]
        average, changes = _figures(one, seeds, self.suites)
        of_other, other_changes = _figures(other, seeds, self.suites)
        higher: Figure = {}
        if average.keys() == of_other.keys():
            higher = {name: ([average[name]], [of_other[name]]) for name in average}
        forgotten: Figure = {}
        ours, theirs = changes["forgetting"], other_changes["forgetting"]
        if ours.keys() == theirs.keys():
            for name, (above, below) in ours.items():
                forgotten[name] = above + theirs[name][1], below + theirs[name][0]
        return {"average": self._change(higher), "forgetting": self._change(forgotten)}

    def _change(self, figure: Figure) -> Estimate | None:
        """Estimate the mean over suites of a difference of scores; None if it is not measured."""
        changes = [(above, below, self.suites[name].clusters) for name, (above, below) in figure.items()]
        return intervals.change_over(changes).rounded() if changes else None


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
    groups = pool(members, [_seed_key(member) for member in members])
    steps = [_step(name, group, suites) for name, group in groups.items()]
    suite_of, unsure = {}, []
    for step in steps:
        suite_of[step], note = _domain_suite(step)
        unsure += [note] if note else []
    chains = _chains(steps, suite_of)
    base: dict[str, np.ndarray] = {}
    for name in suites:
        measured = [scores for member in members if (scores := scores_of([member], name, "base")) is not None]
        if measured:
            base[name] = measured[0]
    return Chains(
        suites=suites,
        columns=steps,
        faults=faults,
        notes=[*faults, *left_out, *of_runs, *unsure, *_notes(steps, chains, suites)],
        base=Column("base", "base", 1, base),
        chains=chains,
        kept=_kept(steps, suites, suite_of),
    )


def _shared_suites(members: list[Results]) -> tuple[dict[str, MeasuredSuite], list[str]]:
    """Return the suites by name, and notes on runs with other prompts of one, which lose it."""
    suites: dict[str, MeasuredSuite] = {}
    notes = []
    for member in members:
        member.named = {}
        for suite in member.suites:
            if not suite.rows:
                continue
            name = _shared_name(suite, suites, member)
            first = suites.setdefault(name, replace(suite, name=name))
            if (suite.metric, suite.prompts) == (first.metric, first.prompts):
                member.named[name] = suite
            else:
                reason = f"it has other prompts of {name}, or another metric"
                notes.append(f"{name} is left out for {member.path}: {reason}.")
    return suites, notes


def _shared_name(suite: MeasuredSuite, suites: dict[str, MeasuredSuite], member: Results) -> str:
    """Return the name of a run's suite among all: the rows that each run sets aside have one name.

    Domain suites that ask the same are one, and those of one name without a prompt in common are two.
    """
    known = suites.get(suite.name)
    if suite.role != "domain":
        return suite.name
    for name in (suite.name, *suites):
        other = suites.get(name)
        alike = other and (other.metric, other.prompts) == (suite.metric, suite.prompts)
        if alike and name not in member.named:
            return name
    if known and not {row["prompt"] for row in suite.measured} & {row["prompt"] for row in known.measured}:
        return f"{suite.name} of {without_seed(member.place.name, member.seeds)}"
    return suite.name


def _step(name: str, members: list[Results], suites: dict[str, MeasuredSuite]) -> Column:
    """Return a step; its closeness only if every run measured its end, on the same prompts."""
    scores, near, end = {}, [member.near for member in members], members[0].end
    for suite in suites:
        found = scores_of(members, suite)
        if found is not None:
            scores[suite] = found
    is_near = all(end in suite.rows and suite.prompts == near[0].prompts for suite in near)
    distance = ratios.closeness_of(near) if is_near else None
    return Column(name, end, len(members), scores, members, members, closeness=distance)


def _domain_suite(step: Column) -> tuple[str | None, str]:
    """Return the suite of the domain that a step learned, and a note where its rows do not decide.

    They do if they are those of one suite, by content, file or name; the order of suites says nothing.
    """
    first = step.members[0]
    domains = [name for name, suite in first.named.items() if suite.role == "domain"]
    if not section(first.run, "finetune") or not domains:
        return None, ""
    named = [name for name in domains if len(domains) == 1 or _asks_rows_of(first, name)]
    if len(named) == 1:
        return named[0], ""
    reason = "its rows are those of none of them, or of several"
    remedy = "give one suite the name of the file of rows, without its ending"
    return None, f"{step.name}: which of its domain suites it learned is unknown: {reason}; {remedy}."


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


def _chains(steps: list[Column], suite_of: dict[Column, str | None]) -> list[Chain]:
    """Return every chain of at least two steps, from a first step to one that no other starts from."""
    step_of = {member: step for step in steps for member in step.members}
    by_place = {member.place: member for member in step_of}
    start_of = {place: _parents(member.run).get(START) for place, member in by_place.items()}
    chains: dict[tuple[Column, ...], Chain] = {}
    for place, member in by_place.items():
        if place in start_of.values():
            continue
        line, before = [member], start_of[place]
        while before in by_place:
            line.insert(0, by_place[before])
            before = start_of[before]
        chain = [step_of[run] for run in line]
        if len(chain) > 1:
            suites = [suite_of[step] for step in chain]
            chains.setdefault(tuple(chain), Chain(chain, {}, suites)).lines[_seed_key(member)] = line
    return list(chains.values())


def _figures(
    chain: Chain, seeds: Sequence[str], suites: dict[str, MeasuredSuite]
) -> tuple[dict[str, np.ndarray], dict[str, Figure]]:
    """Return suite -> scores at the end, and forgetting and backward transfer; empty where not measured."""
    # The runs of each step, one per seed.
    runs_of = [[chain.lines[seed][step] for seed in seeds] for step in range(len(chain.steps))]
    learned_at = {name: step for step, name in enumerate(chain.learned)}
    counted = [name for name, suite in suites.items() if suite.role == "retention" or name in learned_at]
    ends: dict[str, np.ndarray] = {}
    forgetting: Figure = {}
    transfer: Figure = {}
    for name in counted:
        end, is_domain = scores_of(runs_of[-1], name), name in learned_at
        # What it was before the last step: since it was learned, or from base on.
        before = [] if is_domain else [scores_of(runs_of[-1], name, "base")]
        before += [scores_of(runs, name) for runs in runs_of[learned_at.get(name, 0) : -1]]
        measured = [scores for scores in before if scores is not None]
        if end is not None:
            ends[name] = end
            if before and len(measured) == len(before):
                forgetting[name] = [max(measured, key=lambda scores: scores.mean())], [end]
                if is_domain:
                    transfer[name] = [end], [measured[0]]
    average = ends if len(ends) == len(counted) else {}
    return average, {"forgetting": forgetting, "backward_transfer": transfer}


def _kept(
    steps: list[Column], suites: dict[str, MeasuredSuite], suite_of: dict[Column, str | None]
) -> list[TeacherRetention]:
    """Return each step's share of each teacher's gain over base; each seed has its own teacher."""
    owners = {member.place: (step, member) for step in steps for member in step.members}
    rows = []
    for step in steps:
        for teacher in _parents(step.members[0].run):
            places = [_parents(member.run).get(teacher) for member in step.members]
            found = [owners[place] for place in places if place in owners]
            suite = suite_of[found[0][0]] if len(found) == len(places) else None
            if teacher == START or suite is None:
                continue
            base, student = scores_of(step.members, suite, "base"), step.scores.get(suite)
            taught = scores_of([member for _, member in found], suite)
            if base is not None and taught is not None and student is not None:
                floor, clusters = suites[suite].floor_values(), suites[suite].clusters
                share = ratios.domain_retention(measurements.States(base, taught, student, floor, clusters))
                rows.append(TeacherRetention(step.name, teacher, suite, share and share.rounded()))
    return rows


def _notes(steps: list[Column], chains: list[Chain], suites: dict[str, MeasuredSuite]) -> list[str]:
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


def chains_page(board: Chains) -> Page:
    """Lay out steps that build on one another."""
    names = ", ".join(step.name for step in board.columns)
    return Page(
        name="Comparison",
        heading=_finding(board),
        sentence=f"{names}: steps that build on one another, measured on {board.measured}.",
        sections=with_rows([_steps_table(board), _chains_table(board), _kept_table(board)]),
        details=[],
        faults=board.faults,
        notes=board.notes,
    )


def _finding(board: Chains) -> str:
    """Name the difference of the first two chains at the end, or what one chain has forgotten."""
    for one, other in board.pairs:
        if average := board.differences(one, other)["average"]:
            size = compared(average).format(other.name)
            return f"{one.name} is {size} at the end, on average over all suites"
    for chain in board.chains:
        if forgetting := board.figures(chain)["forgetting"]:
            if forgetting.low <= 0:
                return f"{chain.name}: no forgetting is shown"
            return f"{chain.name}: {points(forgetting.value).lstrip('+')} points are forgotten"
    return "Steps that build on one another"


def _steps_table(board: Chains) -> Table:
    suites = [*board.suites]
    rows = [["base", *cells(board.means(board.base), suites), ""]]
    for step in board.columns:
        rows.append([step.label, *cells(board.means(step), suites), cell(board.distance(step), NATS)])
    caption = (
        "The model's scores after each step, and its distance to base in nats per token. Brackets are 95 % "
        "intervals over prompts, and over seeds if there are several."
    )
    columns = [
        "step",
        *[f"{name}\n{suite.role}" for name, suite in board.suites.items()],
        "distance\nto base",
    ]
    return Table("After each step", columns, rows, caption)


def _chains_table(board: Chains) -> Table:
    rows = []
    for chain in board.chains:
        rows.append([chain.name, *[cell(figure, SCORE) for figure in board.figures(chain).values()]])
    for one, other in board.pairs:
        changes = board.differences(one, other).values()
        name = f"{one.name}\nminus {other.name}"
        rows.append([name, *[cell(change, CHANGE) for change in changes], ""])
    caption = (
        "Average: the mean at the end of all retention suites and learned domains. Forgetting: how far they "
        "lie below their best score "
        "before the last step, including base's retention. Backward transfer: how far earlier domains have "
        "moved since they were learned. Differences are in points, paired by prompt and seed."
    )
    return Table("Chains", ["chain", "average", "forgetting", "backward transfer"], rows, caption)


def _kept_table(board: Chains) -> Table:
    rows = [[step, teacher, suite, cell(share)] for step, teacher, suite, share in board.kept]
    caption = (
        "The step's share of the teacher's gain over base, or over a higher floor, on the suite that the "
        "teacher learned."
    )
    return Table("Kept from each teacher", ["step", "teacher", "suite", "kept"], rows, caption)
