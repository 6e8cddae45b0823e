"""The JSON documents of a run and of a comparison, key by key: scripts rely on these keys and their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opdcl.results.status import HEADLINE_ROLES, STATES
from opdcl.results.summary import Results
from opdcl.rundir.layout import RunDir

if TYPE_CHECKING:
    from opdcl.results.arms import Arms, Column
    from opdcl.results.chains import Chains
    from opdcl.results.estimates import Scores, Summary
    from opdcl.results.intervals import Estimate
    from opdcl.results.ratios import Closeness, Findings, ResponseTests

Document = dict[str, Any]


def summarise(run: RunDir) -> Document:
    """Return the results of a finished or unfinished run as JSON has them."""
    return run_document(Results(run).summary)


def run_document(summary: Summary) -> Document:
    """Return the results of a run with the keys of `opdcl report RUN --json`."""
    suites, groups = {}, {}
    for name, suite in summary.suites.items():
        measured = {"role": suite.role, "metric": suite.metric, "metrics": suite.metrics}
        writing = {state: _estimates(found) for state, found in suite.writing.items()}
        suites[name] = _scores(suite) | measured | {"writing": writing}
    for name, (group, found) in summary.groups.items():
        ratios = {"recovery": found.recovery, "recovery_raw": found.recovery_raw}
        groups[name] = _scores(group) | _estimates(ratios)
    return {
        "verdict": summary.verdict.text,
        "further": summary.verdict.further,
        "to_do": summary.verdict.to_do,
        "name": summary.name,
        "alone": summary.alone,
        "headline": summary.headline,
        "suites": suites,
        **_findings(summary.findings),
        "closeness": _closeness(summary.closeness),
        "groups": groups,
        "tests": _estimates(summary.changes)
        | {"detectable_drop": summary.detectable_drop, "writing": _writing(summary.writing)},
        "cost": summary.cost,
        "faults": summary.faults,
        "notes": summary.notes,
    }


def arms_document(board: Arms) -> Document:
    """Return arms side by side, with the keys of `opdcl compare --json`."""
    references, further = [], []
    for column in board.references:
        named = {"state": column.state, "name": column.name, "results": column.seeds}
        references.append(named | _measured(HEADLINE_ROLES, board.means(column)))
    for suite in board.further:
        rows = []
        for column in board.finished:
            states, kept = board.on_further(column, suite)
            shown = _measured(STATES, states) | {"domain_retention": _estimate(kept)}
            rows.append({"name": column.name, **shown})
        further.append({"name": suite.name, **suite.description, "arms": rows})
    rivals = board.against_first.items()
    return {
        "headline": board.headline,
        "suites": {suite.name: suite.description for suite in board.suites.values() if suite.rows},
        "references": references,
        "arms": [_arm(column, board.means(column)) for column in board.columns],
        "against_first": [{"name": name, **_measured(HEADLINE_ROLES, found)} for name, found in rivals],
        "further": further,
        "differences": board.differences,
        "faults": board.faults,
        "notes": board.notes,
    }


def _arm(arm: Column, means: Mapping[str, Estimate]) -> Document:
    scores, runs = _measured(HEADLINE_ROLES, means), []
    for run in arm.members:
        found = run.summary.findings
        named = {"path": run.path, "seeds": run.seeds, "state": run.end}
        ratios = _estimates({"recovery": found.recovery, "domain_retention": found.domain_retention})
        status = {"status": run.status(found)}
        runs.append(named | _measured(HEADLINE_ROLES, run.ends) | ratios | status)
    more = {"writing": _writing(arm.writing), "closeness": _closeness(arm.closeness), "runs": runs}
    return {"name": arm.name, "seeds": arm.seeds} | scores | _findings(arm.findings) | more


def chains_document(board: Chains) -> Document:
    """Return steps that build on one another, with the keys of `opdcl compare --json`."""
    steps, chains, differences, kept = [], [], [], []
    for step in board.columns:
        named = {"name": step.name, "seeds": step.seeds, "runs": [run.path for run in step.members]}
        measured = {"scores": _estimates(board.means(step)), "distance": _estimate(board.distance(step))}
        steps.append(named | measured)
    for chain in board.chains:
        named = {"name": chain.name, "seeds": len(chain.lines)}
        chains.append(named | _estimates(board.figures(chain)))
    for one, other in board.pairs:
        named = {"of": one.name, "against": other.name}
        differences.append(named | _estimates(board.differences(one, other)))
    for name, teacher, suite, share in board.kept:
        kept.append({"step": name, "teacher": teacher, "suite": suite, "kept": _estimate(share)})
    return {
        "suites": {name: suite.description for name, suite in board.suites.items()},
        "base": _estimates(board.means(board.base)),
        "steps": steps,
        "chains": chains,
        "differences": differences,
        "kept": kept,
        "faults": board.faults,
        "notes": board.notes,
    }


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


def _writing(tests: ResponseTests) -> Document:
    """Return measure -> what a test of it found: an estimate with the fields of `ResponseTest`."""
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
