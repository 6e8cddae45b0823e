"""The JSON documents of a run and of a comparison, key by key: scripts rely on these keys and their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opdcl.results.status import HEADLINE_ROLES, STATES
from opdcl.results.summary import Results
from opdcl.rundir.layout import RunDir

if TYPE_CHECKING:
    from opdcl.results import arm_scores, continual
    from opdcl.results.closeness import Closeness
    from opdcl.results.intervals import Estimate
    from opdcl.results.result_types import Scores, Summary
    from opdcl.results.stats import Findings
    from opdcl.results.writing import WritingTests

Document = dict[str, Any]


def summarise(run: RunDir) -> Document:
    """Return the results of a finished or unfinished run as JSON has them."""
    return run_document(Results(run).summary)


def run_document(summary: Summary) -> Document:
    """Return the results of a run with the keys of `opdcl report RUN --json`."""
    suites, groups, tests = {}, {}, summary.tests
    for name, suite in summary.suites.items():
        measured = {"role": suite.role, "metric": suite.metric, "metrics": suite.metrics}
        writing = {state: _estimates(found) for state, found in suite.writing.items()}
        suites[name] = _scores(suite) | measured | {"writing": writing}
    for name, group in summary.groups.items():
        ratios = {"recovery": group.recovery, "recovery_raw": group.recovery_raw}
        groups[name] = _scores(group) | _estimates(ratios)
    return {
        "verdict": summary.verdict,
        "further": summary.further,
        "to_do": summary.to_do,
        "name": summary.name,
        "alone": summary.alone,
        "headline": summary.headline,
        "suites": suites,
        **_findings(summary.findings),
        "closeness": _closeness(summary.closeness),
        "groups": groups,
        "tests": _estimates(vars(tests.changes))
        | {"detectable_drop": tests.detectable_drop, "writing": _writing(tests.writing)},
        "cost": summary.cost,
        "faults": summary.faults,
        "notes": summary.notes,
    }


def arms_document(comparison: arm_scores.Comparison) -> Document:
    """Return arms side by side, with the keys of `opdcl compare --json`."""
    references, rivals, further = [], [], []
    for reference in comparison.references:
        named = {"state": reference.state, "name": reference.name, "results": reference.results}
        references.append(named | _measured(HEADLINE_ROLES, reference.scores))
    for rival in comparison.against_first:
        rivals.append({"name": rival.name, **_measured(HEADLINE_ROLES, rival.changes)})
    for suite in comparison.further:
        named = {"name": suite.name, "role": suite.role, "metric": suite.metric, "n": suite.n}
        rows = []
        for row in suite.arms:
            kept = {"domain_retention": _estimate(row.domain_retention)}
            rows.append({"name": row.name, **_measured(STATES, row.states), **kept})
        further.append(named | {"arms": rows})
    return {
        "headline": comparison.headline,
        "suites": comparison.suites,
        "references": references,
        "arms": [_arm(arm) for arm in comparison.arms],
        "against_first": rivals,
        "further": further,
        "differences": comparison.differences,
        "faults": comparison.faults,
        "notes": comparison.notes,
    }


def chains_document(comparison: continual.Comparison) -> Document:
    """Return steps that build on one another, with the keys of `opdcl compare --json`."""
    steps, chains, differences, kept = [], [], [], []
    for step in comparison.steps:
        named = {"name": step.name, "seeds": step.seeds, "runs": step.runs}
        steps.append(named | {"scores": _estimates(step.scores), "distance": _estimate(step.distance)})
    for chain in comparison.chains:
        figures = {"average": chain.average, "forgetting": chain.forgetting}
        figures["backward_transfer"] = chain.backward_transfer
        chains.append({"name": chain.name, "seeds": chain.seeds, **_estimates(figures)})
    for pair in comparison.differences:
        figures = {"average": pair.average, "forgetting": pair.forgetting}
        differences.append({"of": pair.of, "against": pair.against, **_estimates(figures)})
    for row in comparison.kept:
        named = {"step": row.step, "teacher": row.teacher, "suite": row.suite}
        kept.append(named | {"kept": _estimate(row.kept)})
    return {
        "suites": comparison.suites,
        "base": _estimates(comparison.base),
        "steps": steps,
        "chains": chains,
        "differences": differences,
        "kept": kept,
        "faults": comparison.faults,
        "notes": comparison.notes,
    }


def _arm(arm: arm_scores.ArmRow) -> Document:
    scores, runs = _measured(HEADLINE_ROLES, arm.scores), []
    for run in arm.runs:
        named = {"path": run.path, "seeds": run.seeds, "state": run.state}
        ratios = _estimates({"recovery": run.recovery, "domain_retention": run.domain_retention})
        runs.append(named | _measured(HEADLINE_ROLES, run.scores) | ratios | {"status": run.status})
    more = {"writing": _writing(arm.writing), "closeness": _closeness(arm.closeness), "runs": runs}
    return {"name": arm.name, "seeds": arm.seeds} | scores | _findings(arm.findings) | more


def _findings(found: Findings) -> Document:
    statuses = {"status": found.status, "retention_status": found.retention_status.value}
    general = _estimates({"recovery": found.recovery, "recovery_raw": found.recovery_raw})
    shown = {**vars(found.non_inferiority)} if found.non_inferiority else None
    because = found.no_recovery_because and found.no_recovery_because.value
    why = {"no_recovery_because": because, "non_inferiority": shown}
    ratios = {"domain_retention": found.domain_retention, "domain_retention_raw": found.domain_retention_raw}
    return statuses | {"domain_status": found.domain_status.value} | general | why | _estimates(ratios)


def _closeness(near: Closeness | None) -> Document | None:
    if near is None:
        return None
    c = _estimate(near.c) or dict.fromkeys(("value", "low", "high"))
    why = {"raw": _estimate(near.raw), "why": near.why, "floor": near.floor, "noise": near.noise}
    states = {state: _estimates(found) for state, found in near.states.items()}
    return {"n": near.n} | c | why | states | {"writing": _writing(near.writing), "seconds": near.seconds}


def _scores(scores: Scores) -> Document:
    return {"n": scores.n, "floor": scores.floor, **_measured(STATES, scores.states)}


def _writing(tests: WritingTests) -> Document:
    """Return measure -> what a test of it found: an estimate with the fields of `WritingTest`."""
    return {measure: {**vars(test)} if test else None for measure, test in tests.items()}


def _measured(names: Sequence[str], estimates: Mapping[str, Estimate]) -> Document:
    """Return all names with their estimates, and what is not measured as empty."""
    return {name: _estimate(estimates.get(name)) or {} for name in names}


def _estimates(estimates: Mapping[str, Estimate | None]) -> Document:
    return {name: _estimate(estimate) for name, estimate in estimates.items()}


def _estimate(estimate: Estimate | None) -> Document | None:
    if estimate is None:
        return None
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}
