"""Measured models side by side, such as arms: runs that do not build on one another, pooled over seeds.

Each arm is a column of a board, with the scores of its runs' last models; base and tuned are references. The
steps of `opdcl.results.chains` are columns too.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from opdcl.errors import UsageError
from opdcl.results import ratios
from opdcl.results.intervals import Estimate, difference, mean
from opdcl.results.measurements import MeasuredSuite, section, stacked, states_of
from opdcl.results.origins import START, as_key, count_learned, learned_by, line_of, without_seed
from opdcl.results.ratios import Closeness, Findings, ResponseTests, findings
from opdcl.results.status import HEADLINE_ROLES, STATES
from opdcl.results.summary import Results
from opdcl.results.verdict import unlike_base
from opdcl.rundir.hashes import Identity
from opdcl.rundir.layout import RunDir

# Settings of the evaluation that do not change how a suite is measured.
HARMLESS = {f"eval.{option}" for option in (*HEADLINE_ROLES, "control", "limit")}

# The suites of a comparison by name; the headline suites of arms by role.
Suites = dict[str, MeasuredSuite]

# The findings of a model that has no R and no D of its own.
NOTHING_FOUND = findings(None, None)


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
    counted: list[Results] = field(default_factory=list)
    """Those behind its numbers: the finished ones, or all if none is finished."""
    findings: Findings = NOTHING_FOUND
    writing: ResponseTests = field(default_factory=dict)
    closeness: Closeness | None = None
    learned: str | None = None
    """Of a step: the domain suite that it learned, where that is known."""

    @property
    def distance(self) -> Estimate | None:
        """How far it is from base, in nats per token."""
        return self.closeness.states[self.state].get("distance") if self.closeness else None

    @property
    def label(self) -> str:
        return f"{self.name}\n{self.seeds} seed{'s' if self.seeds > 1 else ''}"


@dataclass(frozen=True)
class Board:
    """Suites, and the models that were measured on them, each in one column."""

    suites: Suites
    columns: list[Column]
    faults: list[str]
    notes: list[str]
    """They begin with the faults."""

    def means(self, column: Column) -> dict[str, Estimate]:
        """Return a model's score on each suite that it is measured on."""
        measured = {name: suite for name, suite in self.suites.items() if name in column.scores}
        return {name: mean(column.scores[name], suite.clusters).rounded() for name, suite in measured.items()}


class Further(NamedTuple):
    """What an arm scores on a suite beside the headline suites."""

    arm: str
    states: dict[str, Estimate]
    """Without those that are not measured."""
    kept: Estimate | None
    """D, if the suite is one of the domain."""


@dataclass(frozen=True)
class Arms(Board):
    """Arms side by side, on the headline suites, which are here by role."""

    references: list[Column]
    """Base and tuned; of an arm over several fine-tunes, the mean of several."""
    differences: dict[str, dict[str, Any]]
    """Setting -> arm -> value, of the settings that differ."""

    @property
    def headline(self) -> dict[str, str | None]:
        return {role: self.suites[role].name if role in self.suites else None for role in HEADLINE_ROLES}

    @property
    def further(self) -> list[tuple[MeasuredSuite, list[Further]]]:
        """Every further suite that all finished arms answered on the same prompts, and their scores on it."""
        finished = [arm for arm in self.columns if not any(run.missing for run in arm.counted)]
        runs = [run for arm in finished for run in arm.counted]
        found = []
        for suite in runs[0].suites if runs else []:
            if suite not in runs[0].headline.values() and all(_answered(run, suite) for run in runs):
                found.append((suite, [_on_further(arm, suite) for arm in finished]))
        return found

    @property
    def against_first(self) -> dict[str, dict[str, Estimate]]:
        """Other arm -> role -> how much higher the first one scores on the same prompts, where both do."""
        first, *others = self.columns
        found: dict[str, dict[str, Estimate]] = {arm.name: {} for arm in others}
        for arm in others:
            for role in first.scores.keys() & arm.scores.keys():
                change = difference(first.scores[role], arm.scores[role], self.suites[role].clusters)
                found[arm.name][role] = change.rounded()
        return found


def compare_arms(runs: Sequence[RunDir]) -> Arms:
    """Return the comparison of runs that do not build on one another.

    Raises:
        UsageError: A run has no results, or was not measured like the others.
    """
    members = [Results(run) for run in runs]
    for member in members:
        if not any(suite.rows for suite in member.headline.values()):
            hint = f"opdcl eval {shlex.quote(member.path)}"
            raise UsageError(f"{member.path} has no results yet", hint)
    _name_origins(members)
    suites = {}
    for role in HEADLINE_ROLES:
        measured = (member for member in members if role in member.headline and member.headline[role].rows)
        model = next(measured, members[0])
        for other in members:
            if reason := _mismatch(role, other.headline.get(role), model.headline.get(role)):
                pair = f"{other.path} and {model.path}"
                raise UsageError(f"{pair} cannot be compared: {reason}", _remedy(model, other))
        if role in model.headline:
            suites[role] = model.headline[role]
    arms = []
    groups = pool(members, lambda run: as_key(run.seeds))
    # The numbers of an arm are those of its finished runs, or of all if none is finished.
    counted = {name: [run for run in group if not run.missing] or group for name, group in groups.items()}
    near = next((run.near.asked for runs in counted.values() for run in runs if run.near.rows), None)
    for name, group in groups.items():
        arms.append(_with_findings(pooled_column(name, group, counted[name], suites, near)))
    references = [*_references("base", arms), *_references("tuned", arms)]
    differences = _differences(arms)
    faults, of_runs = said_by(members)
    notes = _notes(arms, references, differences, near) + of_runs + seed_notes({arm.seeds for arm in arms})
    return Arms(suites, arms, faults, faults + notes, references, differences)


def _name_origins(members: list[Results]) -> None:
    """Put names in place of the paths of adapters, and hashes behind names that several of them have."""
    known: dict[tuple[str, str], set[str]] = {}
    for member in members:
        for key, origin in member.origins.items():
            member.settings[key] = without_seed(Path(member.settings[key]).name, member.seeds)
            known.setdefault((key, member.settings[key]), set()).add(origin)
    for member in members:
        for key, origin in member.origins.items():
            if len(known[key, member.settings[key]]) > 1:
                member.settings[key] += f" ({Identity(origin).key[:8]})"


def _mismatch(role: str, one: MeasuredSuite | None, other: MeasuredSuite | None) -> str:
    """Say why two suites of a role cannot be compared; empty if they can, or if one is not measured yet."""
    name, other_name = (suite.name if suite else "none" for suite in (one, other))
    if name != other_name:
        return f"their {role} suites are {name} and {other_name}"
    if not (one and other and one.rows and other.rows) or one.asked == other.asked:
        return ""
    if one.metric != other.metric:
        return f"{name} is scored by {one.metric} and by {other.metric}"
    if len(one.measured) != len(other.measured):
        return f"{name} was answered on {len(one.measured)} and on {len(other.measured)} prompts"
    return f"{name} has other prompts, or answers to them, in the two runs"


def _remedy(model: Results, other: Results) -> str:
    """Return the command that measures one run as the other was measured; never on what it has learned."""
    evaluation, learned = section(model.run, "eval"), learned_by(*line_of(other.run))
    for suite in model.headline.values():
        if count := count_learned(suite.measured, learned):
            known = f"{other.path} has learned {count} of the {len(suite.measured)} prompts of {suite.name}"
            return f"{known}: measure both on rows that neither has, opdcl eval RUN --domain TEST.jsonl"
    words = ["opdcl", "eval", other.path]
    for role, suite in model.headline.items():
        words += [f"--{role}", suite.name]
        if file := (evaluation.get("data") or {}).get(suite.name):
            words += ["--data", f"{suite.name}={file}"]
    limit = evaluation.get("limit")
    words += ["--limit", str(limit)] if limit else ["--set", "eval.limit=null"]
    return shlex.join(words)


def scores_of(runs: Sequence[Results], suite: str, state: str = "") -> np.ndarray | None:
    """Return the scores of a state, by default the last of each run; None unless all are measured."""
    named = [(run.named.get(suite), state or run.end) for run in runs]
    return stacked([own.column(measured) if own else None for own, measured in named])


def pooled_column(
    name: str, members: list[Results], counted: list[Results], suites: Suites, near: tuple | None
) -> Column:
    """Return the last model of some runs, of which only those `counted` are behind its numbers.

    It has a closeness if all of these measured it on the prompts of `near`, the `asked` of a suite.
    """
    distances = [run.near for run in counted]
    scores = {key: scores_of(counted, suite.name) for key, suite in suites.items()}
    return Column(
        name=name,
        state=members[0].end,
        seeds=len(counted),
        scores={key: found for key, found in scores.items() if found is not None},
        members=members,
        counted=counted,
        closeness=ratios.closeness_of(distances) if all(suite.asked == near for suite in distances) else None,
    )


def _with_findings(arm: Column) -> Column:
    """Return an arm with what follows from its scores."""
    headlines = [run.headline for run in arm.counted]
    retention, domain = ([own[role] for own in headlines if role in own] for role in HEADLINE_ROLES)
    tests = ratios.compared_with_base(retention)
    found = findings(states_of(retention), states_of(domain), ratios.alike(tests))
    return replace(arm, findings=replace(found, status=arm.members[0].status(found)), writing=tests)


def _references(state: str, arms: list[Column]) -> list[Column]:
    """Return a column for each different result of base or tuned."""
    results: list[dict[str, np.ndarray]] = []
    # The results that the runs of an arm have, by their numbers -> the names of the arms.
    arms_of: dict[tuple[int, ...], list[str]] = {}
    for arm in arms:
        # The end of a run is its arm's own column.
        runs = [run for run in arm.counted if state != run.end]
        own = ({r: s.values(state) for r, s in run.headline.items() if state in s.rows} for run in runs)
        if found := {_index(results, scores) for scores in own if scores}:
            arms_of.setdefault(tuple(sorted(found)), []).append(arm.name)
    references = []
    for indices, names in arms_of.items():
        measured = defaultdict(list)
        for index in indices:
            for role, scores in results[index].items():
                measured[role].append(scores)
        name = state if len(names) == len(arms) else f"{state} of {', '.join(names)}"
        means = {role: np.stack(scores) for role, scores in measured.items()}
        references.append(Column(name, state, len(indices), means))
    return references


def _index(results: list[dict[str, np.ndarray]], scores: dict[str, np.ndarray]) -> int:
    """Return the index of the result in which every prompt has the same score; without one, add it."""
    for index, result in enumerate(results):
        if all((result[role] == scores[role]).all() for role in result.keys() & scores.keys()):
            result |= scores
            return index
    results.append(scores)
    return len(results) - 1


def _answered(member: Results, suite: MeasuredSuite) -> bool:
    """Return whether a run's last model answered the prompts of another run's suite."""
    own = member.named.get(suite.name)
    return own is not None and member.end in own.rows and own.asked == suite.asked


def _on_further(arm: Column, suite: MeasuredSuite) -> Further:
    """Return an arm's scores on a further suite, of all its states, and D if it is one of the domain."""
    scores = {state: scores_of(arm.counted, suite.name, state) for state in STATES}
    means = {s: mean(found, suite.clusters).rounded() for s, found in scores.items() if found is not None}
    own = [run.named[suite.name] for run in arm.counted if suite.role == "domain"]
    return Further(arm.name, means, findings(None, states_of(own)).domain_retention)


def _differences(arms: list[Column]) -> dict[str, dict[str, Any]]:
    """Return setting -> arm -> value for the settings that differ; an arm without the key is left out."""
    settings = {arm.name: arm.members[0].settings for arm in arms}
    differences: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(key for of_arm in settings.values() for key in of_arm):
        # If an arm lacks a section, its flat keys hold the section's name alone. The start is in no section.
        of_section = key.split(".")[0]
        having = [name for name, of_arm in settings.items() if key == START or of_section not in of_arm]
        values = {name: settings[name][key] for name in having if key in settings[name]}
        if key == of_section != START:
            values = {name: "given" if name in having else "left out" for name in settings if having}
        if len(values) < len(having) or len({as_key(value) for value in values.values()}) > 1:
            differences[key] = values
    return differences


def _notes(
    arms: list[Column], references: list[Column], differences: dict[str, dict[str, Any]], near: tuple | None
) -> list[str]:
    """Say what sets arms apart besides their scores, and what is not measured yet, or on other prompts."""
    notes = []
    for state, count in Counter(reference.state for reference in references).items():
        if count > 1:
            different = f"The arms have {count} different results of {state}"
            notes.append(f"{different}: each arm's R and D refer to its own.")
    notes += [f"{arm.name}: {'; '.join(said)}." for arm in arms if (said := unlike_base(arm.writing))]
    evaluation = [key for key in differences if key.startswith("eval.")]
    if measuring := [key for key in evaluation if ".".join(key.split(".")[:2]) not in HARMLESS]:
        notes.append(f"The arms were measured with different settings ({', '.join(measuring)}).")
    settings = [as_key(arm.members[0].settings) for arm in arms]
    if repeated := [arm.name for arm, key in zip(arms, settings, strict=True) if settings.count(key) > 1]:
        names, reason = ", ".join(repeated), "the settings are equal and some seeds occur twice"
        notes.append(f"{names}: {reason}, so the runs are not pooled.")
    for arm in arms:
        for member in arm.members:
            if member.missing:
                what = f"{member.path} is not finished: no result of {', '.join(member.missing)}"
                left_out = "" if member in arm.counted else f", and is left out of {arm.name}"
                notes.append(f"{what}{left_out}.")
    for arm in arms:
        if any(run.near.rows and run.near.asked != near for run in arm.counted):
            notes.append(f"{arm.name}: its closeness to base was measured on other prompts.")
    return notes


def said_by(members: Sequence[Results]) -> tuple[list[str], list[str]]:
    """Return faults and notes of several runs; a note that all of them have appears once, without paths."""
    faults: list[str] = []
    runs_of: dict[str, list[str]] = defaultdict(list)
    for member in members:
        summary = member.summary
        faults += [f"{member.path}: {fault}" for fault in summary.faults]
        for note in summary.notes[len(summary.faults) :]:
            runs_of[note].append(member.path)
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


def pool(members: list[Results], seeds_of: Callable[[Results], str]) -> dict[str, list[Results]]:
    """Group runs with the same settings, in the order of their seeds; return name -> group.

    If a seed occurs twice, the group stays apart: one result counted twice makes the interval too narrow.
    """
    groups: dict[str, list[Results]] = defaultdict(list)
    for member in members:
        groups[member.identity].append(member)
    pooled: list[list[Results]] = []
    for group in groups.values():
        is_repeated = len({*map(seeds_of, group)}) < len(group)
        pooled += [[member] for member in group] if is_repeated else [sorted(group, key=seeds_of)]
    names = [_common_name(group) for group in pooled]
    named = {}
    for name, runs in zip(names, pooled, strict=True):
        is_unique = name and names.count(name) == 1
        named[name if is_unique else runs[0].path] = runs
    return named


def _common_name(members: list[Results]) -> str:
    """Return the common start of the run directories' names, up to a hyphen, underscore or dot."""
    parts = [re.split(r"([-_.])", member.place.name) for member in members]
    same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return " ".join("".join(part for part, *_ in same).rstrip("-_.").split())
