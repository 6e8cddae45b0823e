"""Load runs as arms: pool runs that differ only in their seeds, refuse runs measured differently."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opdcl.errors import UsageError
from opdcl.results.origins import as_key, is_adapter, origins_of, split_seeds, without_seed
from opdcl.results.scores import Suite, section, values_of
from opdcl.results.status import HEADLINE_ROLES, STATES
from opdcl.results.summary import Results
from opdcl.rundir.identity import Identity
from opdcl.rundir.layout import RunDir


class Member(Results):
    """One run of a comparison: its results, its settings and its seeds, both by flat keys.

    The settings lack those that cannot change a score.
    """

    def __init__(self, run: RunDir):
        super().__init__(run)
        self.named = {suite.name: suite for suite in self.suites}
        self.settings, self.seeds = split_seeds(run)
        self.origins = origins_of(run)

    @property
    def identity(self) -> Identity:
        """All that the seeds of one arm have in common."""
        settings = {key: value for key, value in self.settings.items() if not is_adapter(key)}
        return Identity([settings, self.origins])

    @property
    def path(self) -> str:
        return str(self.run.path)

    @property
    def compared(self) -> str:
        """The last state of the run: recovered, tuned without a recovery, base if it is measured alone."""
        if self.alone:
            return "base"
        return "recovered" if self.run.settings().get("recover") else "tuned"

    @property
    def missing(self) -> list[str]:
        """Describe the headline results that are not measured yet."""
        found = []
        for suite in self.headline.values():
            for state in STATES[: STATES.index(self.compared) + 1]:
                if state not in suite.rows:
                    found.append(f"{state} on {suite.name}")
        return found


@dataclass(frozen=True, eq=False)
class Arm:
    """Runs that differ only in their seeds; in a chain, one step of it."""

    name: str
    members: list[Member]

    @property
    def settings(self) -> dict[str, Any]:
        return self.members[0].settings

    @property
    def pooled(self) -> list[Member]:
        """The runs behind the arm's numbers: the finished ones, or all if none is finished."""
        return [member for member in self.members if not member.missing] or self.members

    def suites(self, name: str) -> list[Suite]:
        """Return a suite's results in the pooled runs; all of them answer the same prompts."""
        return [member.named[name] for member in self.pooled if name in member.named]

    def scores(self, name: str) -> np.ndarray | None:
        """Return `(S, N)` scores of the measured runs on a suite, or None if there is none."""
        state = self.members[0].compared
        return values_of([suite for suite in self.suites(name) if state in suite.rows], state)


def notes_of_runs(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the notes of several runs, given by path; one that all runs have appears once, without paths."""
    runs_of: dict[str, list[str]] = {}
    for path, of_run in notes.items():
        for note in of_run:
            runs_of.setdefault(note, []).append(path)
    found = []
    for note, runs in runs_of.items():
        found.append(note if len(runs) == len(notes) else f"{', '.join(sorted(runs))}: {note}")
    return found


def load_arms(runs: Sequence[RunDir]) -> list[Arm]:
    """Load runs and pool those that differ only in their seeds.

    Raises:
        UsageError: A run has no results, or was not measured like the others.
    """
    members = [Member(run) for run in runs]
    for member in members:
        if not any(suite.rows for suite in member.headline.values()):
            hint = f"opdcl eval {shlex.quote(member.path)}"
            raise UsageError(f"{member.path} has no results yet", hint)
    _name_origins(members)
    _check_comparable(members)
    return pool(members, [m.identity.key for m in members], [as_key(m.seeds) for m in members])


def _name_origins(members: list[Member]) -> None:
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


def first_measured(members: list[Member], role: str) -> Member:
    """Return the first run with results of a role, or the first run if there is none."""
    return next((m for m in members if role in m.headline and m.headline[role].rows), members[0])


def _check_comparable(members: list[Member]) -> None:
    for role in HEADLINE_ROLES:
        model = first_measured(members, role)
        for other in members:
            if reason := mismatch(role, other.headline.get(role), model.headline.get(role)):
                pair = f"{other.path} and {model.path}"
                raise UsageError(f"{pair} cannot be compared: {reason}", _remedy(model, other))


def mismatch(role: str, one: Suite | None, other: Suite | None) -> str:
    """Say why two suites of a role cannot be compared; empty if they can, or if one is not measured yet."""
    name, other_name = (suite.name if suite else "none" for suite in (one, other))
    if name != other_name:
        return f"their {role} suites are {name} and {other_name}"
    if not (one and other and one.rows and other.rows):
        return ""
    if one.metric != other.metric:
        return f"{name} is scored by {one.metric} and by {other.metric}"
    if len(one.prompts) != len(other.prompts):
        return f"{name} was answered on {len(one.prompts)} and on {len(other.prompts)} prompts"
    return "" if one.prompts == other.prompts else f"{name} has different prompts in the two runs"


def _remedy(model: Member, other: Member) -> str:
    """Return the command that measures one run as the other was measured."""
    evaluation = section(model.run, "eval")
    words = ["opdcl", "eval", other.path]
    for role, suite in model.headline.items():
        words += [f"--{role}", suite.name]
        if file := (evaluation.get("data") or {}).get(suite.name):
            words += ["--data", f"{suite.name}={file}"]
    limit = evaluation.get("limit")
    words += ["--limit", str(limit)] if limit else ["--set", "eval.limit=null"]
    return shlex.join(words)


def pool(members: list[Member], settings: list[str], seeds: list[str]) -> list[Arm]:
    """Group runs with the same settings, in the order of their seeds.

    If a seed occurs twice, the group stays apart: one result counted twice makes the interval too narrow.
    """
    groups: dict[str, list[tuple[str, Member]]] = {}
    for member, key, seed in zip(members, settings, seeds, strict=True):
        groups.setdefault(key, []).append((seed, member))
    pooled: list[list[Member]] = []
    for group in groups.values():
        if len({seed for seed, _ in group}) == len(group):
            group.sort(key=lambda pair: pair[0])
            pooled.append([member for _, member in group])
        else:
            pooled += [[member] for _, member in group]
    names = [_common_name(group) for group in pooled]
    arms = []
    for name, runs in zip(names, pooled, strict=True):
        is_unique = name and names.count(name) == 1
        arms.append(Arm(name if is_unique else runs[0].path, runs))
    return arms


def _common_name(members: list[Member]) -> str:
    """Return the common start of the run directories' names, up to a hyphen, underscore or dot."""
    parts = [re.split(r"([-_.])", member.run.path.resolve().name) for member in members]
    shared = ""
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        shared += column[0]
    return " ".join(shared.rstrip("-_.").split())


def seed_notes(counts: set[int]) -> list[str]:
    """Return the caveats of intervals over these numbers of seeds."""
    notes = []
    if 1 in counts:
        notes.append("With one seed an interval covers the choice of prompts, not the training seed.")
    if 2 in counts:
        reason = "two values say little about their spread; three seeds are enough"
        notes.append(f"Intervals over two seeds cover the truth in less than 95 % of cases: {reason}.")
    return notes
