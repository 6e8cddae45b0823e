"""Load runs as arms: pool runs that differ only in their seeds, refuse runs measured differently."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.load import flatten
from opdcl.config.workflow import WITHOUT_MEANING
from opdcl.errors import UsageError
from opdcl.results.scores import Suite, section, values_of
from opdcl.results.stats import Clusters, difference, mean
from opdcl.results.status import HEADLINE_ROLES, STATES
from opdcl.results.summary import Results, summary_of
from opdcl.rundir.layout import RunDir

SEEDS = {"seed", "data_seed"}

# Workflow sections that cannot change a score.
IGNORED = {"name", "description", "gates", "arms", "seeds"}


class Member(Results):
    """One run of an arm: its results, its settings and its seeds, both by flat keys.

    The settings lack those that cannot change a score.
    """

    def __init__(self, run: RunDir):
        super().__init__(run)
        if not any(suite.rows for suite in self.headline.values()):
            raise UsageError(f"{run.path} has no results yet", f"opdcl eval {shlex.quote(str(run.path))}")
        self.settings, self.seeds = split_seeds(run)
        for name in ("finetune", "recover"):
            # The same path may have held other rows when another run was made.
            for key, value in (run.stage_record(name).get("inputs") or {}).items():
                if key.startswith("content of ") and not key.endswith(".adapter"):
                    self.settings[f"{name}.{key}"] = str(value)[:12]
        for key, place in self.settings.items():
            if place and (key == "start" or key.endswith(".adapter")):
                self.settings[key] = _without_seed(place, self.seeds)

    @property
    def missing(self) -> list[str]:
        """Describe the headline results that are not measured yet."""
        suites = self.headline.values()
        return [f"{state} on {s.name}" for s in suites for state in STATES if state not in s.rows]

    @property
    def further(self) -> dict[str, Suite]:
        """Every suite but the headline's, by name."""
        return {s.name: s for s in self.suites if self.headline.get(s.role) is not s}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The summary of the headline alone, with the faults and notes of every suite."""
        summary = summary_of(self, list(self.headline.values()))
        for key, of_all_suites in (("faults", self.faults), ("notes", self.remarks)):
            summary[key] = [*dict.fromkeys([*summary[key], *of_all_suites])]
        return summary

    def scores(self, state: str) -> dict[str, np.ndarray]:
        """Return role -> `(N,)` scores of a state, for the roles that are measured."""
        return {role: suite.values(state) for role, suite in self.headline.items() if state in suite.rows}


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seeds."""

    name: str
    members: list[Member]

    @property
    def settings(self) -> dict[str, Any]:
        return self.members[0].settings

    @property
    def pooled(self) -> list[Member]:
        """The runs behind the arm's numbers: the finished ones, or all if none is finished."""
        return [m for m in self.members if not m.missing] or self.members

    def suites(self, role: str) -> list[Suite]:
        """Return a headline suite's results in the pooled runs; all of them answer the same prompts."""
        return [member.headline[role] for member in self.pooled if role in member.headline]

    def clusters(self, role: str) -> Clusters:
        return next((suite.clusters for suite in self.suites(role) if suite.rows), None)

    def scores(self, role: str, state: str = "recovered") -> np.ndarray | None:
        """Return the scores of the measured runs, or None if there is none."""
        return values_of([suite for suite in self.suites(role) if state in suite.rows], state)

    def estimate(self, role: str) -> dict[str, float]:
        """Return the estimated score of recovered; empty if it is not measured."""
        scores = self.scores(role)
        return {} if scores is None else mean(scores, self.clusters(role)).as_dict()

    def minus(self, rival: Arm, role: str) -> dict[str, float]:
        """Return the paired difference to another arm; empty if one of them is not measured."""
        own, other = self.scores(role), rival.scores(role)
        return {} if own is None or other is None else difference(own, other, self.clusters(role)).as_dict()


def notes_of_runs(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the notes of several runs, given by path; one that all runs have appears once, without paths."""
    runs_of: dict[str, list[str]] = {}
    for path, of_run in notes.items():
        for note in of_run:
            runs_of.setdefault(note, []).append(path)
    return [
        note if len(runs) == len(notes) else f"{', '.join(sorted(runs))}: {note}"
        for note, runs in runs_of.items()
    ]


def load_arms(runs: list[RunDir]) -> list[Arm]:
    """Load runs and pool those that differ only in their seeds.

    Raises:
        UsageError: A run has no results, or was not measured like the others.
    """
    members = [Member(run) for run in runs]
    _check_comparable(members)
    groups = pool(runs, [as_key(m.settings) for m in members], [as_key(m.seeds) for m in members])
    member_of = {member.run: member for member in members}
    arms = []
    for name, group in groups.items():
        arms.append(Arm(name, [member_of[run] for run in group]))
    return arms


def _without_seed(place: str, seeds: dict[str, Any]) -> str:
    """Return the name of a start or teacher run without its seed: all seeds of an arm have equal settings."""
    name = Path(place).name
    return next((name.removesuffix(f"-{seed}") for seed in seeds.values() if name.endswith(f"-{seed}")), name)


def first_measured(members: list[Member], role: str) -> Member:
    """Return the first run with results of a role, or the first run if there is none."""
    return next((m for m in members if role in m.headline and m.headline[role].rows), members[0])


def _check_comparable(members: list[Member]) -> None:
    for role in HEADLINE_ROLES:
        model = first_measured(members, role)
        for other in members:
            if reason := mismatch(role, other.headline.get(role), model.headline.get(role)):
                pair = f"{other.run.path} and {model.run.path}"
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
    words = ["opdcl", "eval", str(other.run.path)]
    for role, suite in model.headline.items():
        words += [f"--{role}", suite.name]
        if file := (evaluation.get("data") or {}).get(suite.name):
            words += ["--data", f"{suite.name}={file}"]
    limit = evaluation.get("limit")
    return shlex.join([*words, *(["--limit", str(limit)] if limit else ["--set", "eval.limit=null"])])


def split_seeds(run: RunDir) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's settings that can change a score, as flat keys, and its seeds."""
    settings = flatten({key: value for key, value in run.settings().items() if key not in IGNORED})
    option = {key: key.rsplit(".", 1)[-1] for key in settings}
    seeds = {key: settings[key] for key in settings if option[key] in SEEDS}
    # Closeness has prompts of its own, and changes no score.
    ignored = SEEDS | WITHOUT_MEANING | {CLOSENESS}
    return {k: v for k, v in settings.items() if option[k] not in ignored}, seeds


def pool(runs: list[RunDir], settings: list[str], seeds: list[str]) -> dict[str, list[RunDir]]:
    """Group runs with the same settings, in the order of their seeds; return group name -> runs.

    If a seed occurs twice, the group stays apart: one result counted twice makes the interval too narrow.
    """
    groups: dict[str, list[tuple[str, RunDir]]] = {}
    for run, key, seed in zip(runs, settings, seeds, strict=True):
        groups.setdefault(key, []).append((seed, run))
    pooled: list[list[RunDir]] = []
    for group in groups.values():
        if len({seed for seed, _ in group}) == len(group):
            pooled.append([run for _, run in sorted(group, key=lambda pair: pair[0])])
        else:
            pooled += [[run] for _, run in group]
    names = [_common_name(group) for group in pooled]
    return {
        name if name and names.count(name) == 1 else str(group[0].path): group
        for name, group in zip(names, pooled, strict=True)
    }


def _common_name(runs: list[RunDir]) -> str:
    """Return the common start of the run directories' names, up to a hyphen, underscore or dot."""
    parts = [re.split(r"([-_.])", run.path.resolve().name) for run in runs]
    shared = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return " ".join("".join(column[0] for column in shared).rstrip("-_.").split())


def as_key(value: Any) -> str:
    """Return a text that is equal for equal settings."""
    return json.dumps(value, sort_keys=True)


def seed_notes(counts: set[int]) -> list[str]:
    """Return the caveats of intervals over these numbers of seeds."""
    notes = []
    if 1 in counts:
        notes.append("With one seed an interval covers the choice of prompts, not the training seed.")
    if 2 in counts:
        reason = "two values say little about their spread; three seeds are enough"
        notes.append(f"Intervals over two seeds cover the truth in less than 95 % of cases: {reason}.")
    return notes
