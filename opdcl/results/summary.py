"""Summarise a run: run directory -> scores, R, D, tests, cost and the verdict. No model is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from opdcl.errors import UsageError
from opdcl.results import closeness, notes, stats, verdict, writing
from opdcl.results.intervals import Clusters, Estimate
from opdcl.results.result_types import Changes, Figures, Group, Scores, SuiteScores, Summary, Tests
from opdcl.results.scores import Suite, headline_of, load_suites, states_of
from opdcl.results.status import HEADLINE_ROLES, STATES
from opdcl.rundir.files import RESTORE
from opdcl.rundir.layout import RunDir
from opdcl.rundir.seals import changes

PAIRS = (("tuned", "base"), ("recovered", "tuned"), ("recovered", "base"))


class Results:
    """The results that a run left on disk, read once."""

    def __init__(self, run: RunDir):
        with _damage_is_named(run):
            self.run = run
            self.suites = load_suites(run)
            self.near = closeness.load(run)
        self.headline = headline_of(self.suites)
        self.alone = _is_alone(run)

    @cached_property
    def summary(self) -> Summary:
        with _damage_is_named(self.run):
            retention, domain = (self.headline.get(role) for role in HEADLINE_ROLES)
            inert = notes.inert(self.suites)
            return verdict.conclude(self.figures, retention, domain, self.run.settings(), inert)

    @cached_property
    def figures(self) -> Figures:
        with _damage_is_named(self.run):
            return _figures(self)


@contextlib.contextmanager
def _damage_is_named(run: RunDir) -> Iterator[None]:
    """Name the file that has changed where the results cannot be computed from what it holds now."""
    try:
        yield
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as fault:
        for name, problem in changes(run).items():
            message = f"{run.path / name} {problem} since opdcl wrote it, and no report can be made from it"
            raise UsageError(message, RESTORE) from fault
        raise


def _figures(results: Results) -> Figures:
    run, suites, near = results.run, results.suites, results.near
    headline = {role: results.headline.get(role) for role in HEADLINE_ROLES}
    retention, domain = headline["retention"], headline["domain"]
    tests = _tests(retention, domain)
    distance = closeness.summarise([near])
    faults = notes.inert(suites) + notes.faults_of(run, [*suites, near])
    remarks = list(faults)
    for suite in suites:
        remarks += notes.suite_notes(suite)
    return Figures(
        name=run.settings().get("name") or run.path.name,
        alone=results.alone,
        headline={role: suite.name if suite else None for role, suite in headline.items()},
        suites={suite.name: _suite_scores(suite) for suite in suites},
        findings=stats.findings(
            states_of([retention]) if retention else None,
            states_of([domain]) if domain else None,
            writing.alike(tests.writing),
        ),
        closeness=distance,
        groups=_groups(retention),
        tests=tests,
        cost=_cost(run, [*suites, near]),
        faults=faults,
        notes=remarks + notes.recovery_notes(run),
    )


def _is_alone(run: RunDir) -> bool:
    """Return whether a run measures base alone: it has no fine-tune, and is not to have one."""
    planned = [key for key in ("start", "finetune", "recover") if run.settings().get(key)]
    return not planned and not run.adapters()


def _suite_scores(suite: Suite) -> SuiteScores:
    metrics: dict[str, dict[str, float]] = {}
    for state, result in suite.results.items():
        for metric, value in result["metrics"].items():
            if metric != suite.metric:
                metrics.setdefault(metric, {})[state] = value
    return SuiteScores(
        **vars(_scores(suite)),
        role=suite.role,
        metric=suite.metric,
        metrics=metrics,
        writing=writing.estimates(suite),
    )


def _scores(suite: Suite) -> Scores:
    """Return the number of prompts, the floor, and the estimated score of each measured state."""
    floor = suite.floor_values()
    states: dict[str, Estimate] = {}
    for state in STATES:
        if state in suite.rows:
            states[state] = _estimate(suite, state).rounded()
    return Scores(len(suite.measured), suite.floor if floor is None else float(floor.mean()), states)


def _estimate(suite: Suite, state: str) -> Estimate:
    parts = suite.parts(state)
    if any(len(of_prompt) != 1 for of_prompt in parts):
        return stats.clustered_mean(parts, suite.clusters)
    return stats.mean(suite.values(state), suite.clusters)


def _groups(retention: Suite | None) -> dict[str, Group]:
    """Return the headline's scores and R for each group of prompts; empty unless there are several groups."""
    groups: dict[str, Group] = {}
    if retention and len(retention.groups) > 1:
        for name in retention.groups:
            suite = retention.only(name)
            found = stats.findings(states_of([suite]), None)
            groups[name] = Group(
                **vars(_scores(suite)), recovery=found.recovery, recovery_raw=found.recovery_raw
            )
    return groups


def _tests(retention: Suite | None, domain: Suite | None) -> Tests:
    changes: dict[str, Estimate | None] = {}
    for later, earlier in PAIRS:
        name = f"{later}_minus_{earlier}"
        changes[name] = _change(retention, later, earlier)
        changes[f"domain_{name}"] = _change(domain, later, earlier)
    pair = _pair(retention, "tuned", "base")
    return Tests(
        changes=Changes(**changes),
        detectable_drop=stats.detectable_difference(*pair) if pair else None,
        writing=writing.compared_with_base([retention] if retention else []),
    )


def _change(suite: Suite | None, later: str, earlier: str) -> Estimate | None:
    pair = _pair(suite, later, earlier)
    return stats.difference(*pair).rounded() if pair else None


def _pair(suite: Suite | None, later: str, earlier: str) -> tuple[np.ndarray, np.ndarray, Clusters] | None:
    """Return the scores of two states and the clusters of their prompts, or None if one is not measured."""
    if suite is None or not {later, earlier} <= suite.rows.keys():
        return None
    return suite.values(later), suite.values(earlier), suite.clusters


def further_teachers(recover: dict[str, Any]) -> list[str]:
    """Return the names of teachers that grade a part of the domain prompts, by the settings of a recovery."""
    of_streams = recover.get("general_teacher"), recover.get("domain_teacher")
    teachers = (recover.get("teachers") or {}).items()
    return [name for name, teacher in teachers if name not in of_streams or teacher.get("prompts")]


def _cost(run: RunDir, suites: list[Suite]) -> dict[str, dict[str, Any]]:
    """Return seconds, tokens and peak memory per stage; empty if a stage is not finished.

    A training also has its dose, unless an earlier version has recorded it: answers and tokens that were
    graded, by stream and author, and the seconds of its parts.
    """
    costs: dict[str, dict[str, Any]] = {}
    for stage in ("finetune", "recover"):
        spent = run.stage_record(stage).get("cost") or {}
        costs[stage] = _total([spent]) | {key: spent[key] for key in ("graded", "parts") if spent.get(key)}
    results = [result for suite in suites for result in suite.results.values()]
    return costs | {"eval": _total([result.get("cost") for result in results])}


def _total(found: list[dict[str, float] | None]) -> dict[str, float]:
    costs = [cost for cost in found if cost]
    if not costs:
        return {}
    return {
        "seconds": sum(cost["seconds"] for cost in costs),
        "tokens": sum(cost["tokens"] for cost in costs),
        "peak_memory_bytes": max(cost["peak_memory_bytes"] for cost in costs),
    }
