"""Load runs as arms: pool runs that differ only in their seeds, refuse runs measured differently."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.load import flatten
from opdcl.config.workflow import WITHOUT_MEANING
from opdcl.errors import UsageError
from opdcl.results import closeness
from opdcl.results.scores import HEADLINE_ROLES, STATES, Suite, headline_of, load_suites, section
from opdcl.results.stats import Clusters, Point, States
from opdcl.results.summary import summarise
from opdcl.rundir.layout import RunDir

SEEDS = {"seed", "data_seed"}

# Workflow sections that cannot change a score.
IGNORED = {"name", "description", "gates", "arms", "seeds"}


@dataclass(frozen=True, eq=False)
class Member:
    """One run of an arm: its settings and its results."""

    run: RunDir
    settings: dict[str, Any]
    """Flat key -> value, without seeds and without settings that cannot change a score."""
    seeds: dict[str, Any]
    """The training seeds by their flat keys."""
    suites: dict[str, Suite]
    """Role -> headline suite, if the run has one."""
    further: dict[str, Suite]
    """Name -> every other suite."""
    near: Suite
    """Closeness to base; without rows if it was not measured."""

    @property
    def missing(self) -> list[str]:
        """Describe the headline results that are not measured yet."""
        suites = self.suites.values()
        return [f"{state} on {s.name}" for s in suites for state in STATES if state not in s.rows]

    @cached_property
    def summary(self) -> dict[str, Any]:
        return summarise(self.run, list(self.suites.values()))

    def scores(self, state: str) -> dict[str, np.ndarray]:
        """Return role -> `(N,)` scores of a state, for the roles that are measured."""
        return {role: suite.values(state) for role, suite in self.suites.items() if state in suite.rows}


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seeds."""

    name: str
    members: list[Member]

    @property
    def settings(self) -> dict[str, Any]:
        return self.members[0].settings

    @property
    def scales_only(self) -> bool:
        """Whether the arm is a point of the alpha-curve: it scales the tuned adapter and trains nothing."""
        return bool(self.settings.get("recover.method") == "interpolate")

    @property
    def pooled(self) -> list[Member]:
        """The runs behind the arm's numbers: the finished ones, or all if none is finished."""
        return [m for m in self.members if not m.missing] or self.members

    def clusters(self, role: str) -> Clusters:
        """Return the clusters of a role's prompts; all runs answer the same ones."""
        measured = [m.suites[role] for m in self.pooled if role in m.suites and m.suites[role].rows]
        return measured[0].clusters if measured else None

    def scores(self, role: str, state: str = "recovered") -> np.ndarray | None:
        """Return `(seeds, N)` scores, or None if no run is measured."""
        measured = [scores[role] for m in self.pooled if role in (scores := m.scores(state))]
        return np.stack(measured) if measured else None

    def point(self, state: str = "recovered") -> Point | None:
        """Return the domain and the retention scores, or None unless both are measured."""
        domain, retention = self.scores("domain", state), self.scores("retention", state)
        if domain is None or retention is None:
            return None
        return Point(domain, retention, self.clusters("domain"), self.clusters("retention"))

    def states(self, role: str) -> States | None:
        """Return the scores of base, tuned and recovered, or None unless all three are measured."""
        suites = [m.suites[role] for m in self.pooled if role in m.suites]
        return pooled_states(suites) if len(suites) == len(self.pooled) else None


def pooled_states(suites: list[Suite]) -> States | None:
    """Return the `(S, N)` scores of one suite in several runs, or None unless all states are measured."""
    if not all(suite.complete for suite in suites):
        return None
    base, tuned, recovered = (np.stack([s.values(state) for s in suites]) for state in STATES)
    floors = [floor for s in suites if (floor := s.floor_values()) is not None]
    floor = np.stack(floors) if len(floors) == len(suites) else None
    return States(base, tuned, recovered, floor, suites[0].clusters)


def load_arms(runs: list[RunDir]) -> list[Arm]:
    """Load runs and pool those that differ only in their seeds.

    Raises:
        UsageError: A run has no results, or was not measured like the others.
    """
    members = [_load(run) for run in runs]
    _check_comparable(members)
    groups = pool(runs, [as_key(m.settings) for m in members], [as_key(m.seeds) for m in members])
    member_of = {member.run: member for member in members}
    return [Arm(name, [member_of[run] for run in group]) for name, group in groups.items()]


def _load(run: RunDir) -> Member:
    settings, seeds = split_seeds(run)
    for name in ("finetune", "recover"):
        # The same path may have held other rows when another run was made.
        for key, value in (run.stage_record(name).get("inputs") or {}).items():
            if key.startswith("content of ") and not key.endswith(".adapter"):
                settings[f"{name}.{key}"] = str(value)[:12]
    for key, place in settings.items():
        if place and (key == "start" or key.endswith(".adapter")):
            settings[key] = _without_seed(place, seeds)
    suites = load_suites(run)
    headline = headline_of(suites)
    if not any(suite.rows for suite in headline.values()):
        raise UsageError(f"{run.path} has no results yet", f"opdcl eval {shlex.quote(str(run.path))}")
    further = {suite.name: suite for suite in suites if headline.get(suite.role) is not suite}
    return Member(run, settings, seeds, headline, further, closeness.load(run))


def _without_seed(place: str, seeds: dict[str, Any]) -> str:
    """Return the name of a start or teacher run without its seed: all seeds of an arm have equal settings."""
    name = Path(place).name
    return next((name.removesuffix(f"-{seed}") for seed in seeds.values() if name.endswith(f"-{seed}")), name)


def first_measured(members: list[Member], role: str) -> Member:
    """Return the first run with results of a role, or the first run if there is none."""
    return next((m for m in members if role in m.suites and m.suites[role].rows), members[0])


def _check_comparable(members: list[Member]) -> None:
    for role in HEADLINE_ROLES:
        model = first_measured(members, role)
        for other in members:
            if reason := mismatch(role, other.suites.get(role), model.suites.get(role)):
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
    for role, suite in model.suites.items():
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
