"""A board: suites by measured models, paired by prompt. Arms and chains are two ways to lay one out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from opdcl.results import intervals, ratios
from opdcl.results.format import SCORE, Unit, cell
from opdcl.results.intervals import Estimate
from opdcl.results.measurements import MeasuredSuite, stacked
from opdcl.results.ratios import Closeness, Findings, ResponseTests
from opdcl.results.summary import Results

# The findings of a model that has no R and no D of its own.
NOTHING_FOUND = ratios.findings(None, None)


@dataclass(frozen=True, eq=False)
class Column:
    """A measured model: the last of an arm or of a step, or base or tuned beside them."""

    name: str
    state: str
    """Base, tuned or recovered; of an arm or step, the last state of its runs."""
    seeds: int
    """Of how many results its scores are the mean."""
    scores: dict[str, np.ndarray]
    """Suite -> `(S, N)` scores, for the suites that are measured."""
    members: list[Results] = field(default_factory=list)
    """Its runs, which differ only in their seeds. A reference, base or tuned, has none of its own."""
    pooled: list[Results] = field(default_factory=list)
    """Those behind its numbers: the finished ones, or all if none is finished."""
    findings: Findings = NOTHING_FOUND
    writing: ResponseTests = field(default_factory=dict)
    closeness: Closeness | None = None

    @property
    def label(self) -> str:
        return f"{self.name}\n{self.seeds} seed{'s' if self.seeds > 1 else ''}"


@dataclass(frozen=True)
class Board:
    """Suites, and the models that were measured on them, each in one column."""

    suites: dict[str, MeasuredSuite]
    """By name; the headline suites of arms by role."""
    columns: list[Column]
    faults: list[str]
    notes: list[str]
    """They begin with the faults."""

    def means(self, column: Column) -> dict[str, Estimate]:
        """Return a model's score on each suite that it is measured on."""
        found = {}
        for name, scores in column.scores.items():
            found[name] = intervals.mean(scores, self.suites[name].clusters).rounded()
        return found

    def changes(self, one: Column, other: Column) -> dict[str, Estimate]:
        """Return the paired difference of two models on each suite that both are measured on."""
        found = {}
        for name, suite in self.suites.items():
            if name in one.scores and name in other.scores:
                change = intervals.difference(one.scores[name], other.scores[name], suite.clusters)
                found[name] = change.rounded()
        return found

    @property
    def measured(self) -> str:
        """The suites with results, as `a (40 prompts), b (9 prompts) and c (40 prompts)`."""
        named = [f"{s.name} ({len(s.measured)} prompts)" for s in self.suites.values() if s.rows]
        return " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]]))


def cells(estimates: Mapping[str, Estimate], names: Sequence[str], unit: Unit = SCORE) -> list[str]:
    return [cell(estimates.get(name), unit) for name in names]


def scores_of(runs: Sequence[Results], suite: str, state: str = "") -> np.ndarray | None:
    """Return the scores of a state, by default the last of each run; None unless all are measured."""
    columns = []
    for run in runs:
        found, wanted = run.named.get(suite), state or run.end
        if found is None or wanted not in found.rows:
            return None
        columns.append(found.values(wanted))
    return stacked(columns) if columns else None


def compared(change: Estimate) -> str:
    """Say how far apart two models are; `{}` stands for the second one."""
    size = f"{abs(100 * change.value):.1f} points"
    if change.low > 0:
        return f"{size} above {{}}"
    return f"{size} below {{}}" if change.high < 0 else "not shown to differ from {}"


def said_by(members: Sequence[Results]) -> tuple[list[str], list[str]]:
    """Return faults and notes of several runs; a note that all of them have appears once, without paths."""
    faults: list[str] = []
    runs_of: dict[str, list[str]] = {}
    for member in members:
        summary = member.summary
        faults += [f"{member.path}: {fault}" for fault in summary.faults]
        for note in summary.notes:
            if note not in summary.faults:
                runs_of.setdefault(note, []).append(member.path)
    notes = []
    for note, runs in runs_of.items():
        notes.append(note if len(runs) == len(members) else f"{', '.join(sorted(runs))}: {note}")
    return faults, notes


def seed_notes(counts: set[int]) -> list[str]:
    """Return the caveats of intervals over these numbers of seeds."""
    notes = []
    if 1 in counts:
        notes.append("With one seed an interval covers the choice of prompts, not the training seed.")
    if 2 in counts:
        reason = "two values say little about their spread; three seeds are enough"
        notes.append(f"Intervals over two seeds cover the truth in less than 95 % of cases: {reason}.")
    return notes


def pool(members: list[Results], seeds: list[str]) -> dict[str, list[Results]]:
    """Group runs with the same settings, in the order of their seeds; return name -> group.

    If a seed occurs twice, the group stays apart: one result counted twice makes the interval too narrow.
    """
    groups: dict[str, list[tuple[str, Results]]] = {}
    for member, seed in zip(members, seeds, strict=True):
        groups.setdefault(member.identity, []).append((seed, member))
    pooled: list[list[Results]] = []
    for group in groups.values():
        if len({seed for seed, _ in group}) == len(group):
            group.sort(key=lambda pair: pair[0])
            pooled.append([member for _, member in group])
        else:
            pooled += [[member] for _, member in group]
    names = [_common_name(group) for group in pooled]
    named = {}
    for name, runs in zip(names, pooled, strict=True):
        is_unique = name and names.count(name) == 1
        named[name if is_unique else runs[0].path] = runs
    return named


def _common_name(members: list[Results]) -> str:
    """Return the common start of the run directories' names, up to a hyphen, underscore or dot."""
    parts = [re.split(r"([-_.])", member.place.name) for member in members]
    shared = ""
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        shared += column[0]
    return " ".join(shared.rstrip("-_.").split())
