"""Gates: whether a run is shown to meet a requirement, shown to miss it, or neither.

A gate compares its requirement with the whole 95 % interval. So a
harmless run is refused by chance in at most 2.5 % of cases, and one that was measured on few prompts is not
waved through.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.load import load
from opdcl.errors import GateError, InconclusiveError, OpdclError, UsageError
from opdcl.results import intervals
from opdcl.results.estimates import Summary
from opdcl.results.format import DISTANCE, POINTS, interval
from opdcl.results.measurements import MeasuredSuite
from opdcl.results.ratios import Closeness
from opdcl.results.status import FAULT, NoRatio, Retention
from opdcl.results.summary import Results
from opdcl.results.verdict import why_no_domain_retention, why_no_ratio
from opdcl.rundir.layout import RunDir
from opdcl.rundir.seals import verify

# A verdict in the JSON of a report: the gate, its outcome, and a sentence for people. Outcomes are `passed`,
# `missed` and `inconclusive`.
Record = dict[str, str]

RATIOS = {"recovery": "R", "domain_retention": "D", "closeness": "C"}

# The difference that is found four times in five, in halves of its interval.
FOUND = (1.96 + 0.84) / 1.96

# Beyond this number of prompts a suite that decides will not be written.
PROMPTS_NEEDED_AT_MOST = 100_000


def judge_gates(gates: Mapping[str, Any], results: Results) -> list[Record]:
    """Return what each gate of a workflow says about a run's stored scores.

    Raises:
        UsageError: `max_drop` names a suite that the run does not have.
    """
    summary = results.summary
    found = [_ratio(key, gates[key], results) for key in RATIOS if gates.get(key) is not None]
    if gates.get("max_drop") is not None:
        found += _drops(gates["max_drop"], results)
    if summary.findings.status == FAULT:
        found = [_record(record["gate"], f"{record['gate']}: {summary.verdict.text}") for record in found]
    return found


def _record(gate: str, sentence: str, low: float = -math.inf, high: float = math.inf) -> Record:
    """Judge by the interval of how far a requirement is exceeded; without one, nothing is decided."""
    outcome = "passed" if low >= 0 else "missed" if high < 0 else "inconclusive"
    return {"gate": gate, "outcome": outcome, "sentence": sentence}


def refuse(verdicts: Sequence[Record], hint: str) -> None:
    """Raise the error of gates that are missed, or else of gates that nothing decides.

    Raises:
        GateError: At least one gate is shown to be missed.
        InconclusiveError: None is, and at least one is neither shown to be met nor to be missed.
    """
    for outcome, error in (("missed", GateError), ("inconclusive", InconclusiveError)):
        if chosen := [verdict["sentence"] for verdict in verdicts if verdict["outcome"] == outcome]:
            raise error(f"gate {outcome}: {'; '.join(chosen)}", hint)


def _ratio(key: str, required: float, results: Results) -> Record:
    """Judge R, D or C; higher is better."""
    summary, name = results.summary, f"{key} ({RATIOS[key]})"
    findings, near, domain = summary.findings, summary.closeness, results.headline.get("domain")
    ratio, why = {
        "recovery": (findings.recovery, why_no_ratio(summary)),
        "domain_retention": (findings.domain_retention, why_no_domain_retention(domain)),
        "closeness": (near and near.c, (near and near.why) or "it is not measured"),
    }[key]
    if ratio:
        said = f"{name} is {interval(ratio)}, required {required:g}"
        return _record(key, said, ratio.low - required, ratio.high - required)
    harm = summary.tests.changes["recovered_minus_base"]
    if key == "recovery" and findings.no_recovery_because is NoRatio.NO_DROP and harm and harm.high < 0:
        said = f"{name} is not known, but recovered - base is {interval(harm, POINTS)}"
        return _record(key, said, harm.low, harm.high)
    if key == "recovery" and findings.retention_status is Retention.NO_FORGETTING:
        return _record(key, f"{name}: there was no measurable forgetting to recover from", low=0)
    return _record(key, f"{name} is not known: {why}")


def _drops(limits: float | Mapping[str, float], results: Results) -> list[Record]:
    """Judge how far the last measured state lies below base on each suite, and its distance to base."""
    retention = {suite.name: suite for suite in results.suites if suite.role == "retention"}
    if not isinstance(limits, Mapping):
        limits = dict.fromkeys(retention, limits)
    if unknown := sorted(limits.keys() - retention.keys() - {CLOSENESS}):
        known = ", ".join([*retention, CLOSENESS])
        raise UsageError(
            f"gates.max_drop names no retention suite of this run: {unknown[0]}", f"it has {known}"
        )
    near, found = results.summary.closeness, []
    for name, limit in limits.items():
        found.append(_distance(near, limit) if name == CLOSENESS else judge_drop(retention[name], limit))
    return found or [_record("max_drop", "max_drop: no retention suite is measured")]


def judge_drop(suite: MeasuredSuite, limit: float) -> Record:
    """Judge how far the last measured state lies below base on a suite; `limit` is in points."""
    gate = f"max_drop {suite.name}"
    state = next((state for state in ("recovered", "tuned") if state in suite.rows), None)
    if "base" not in suite.rows or state is None:
        fault = suite.faults[0] if suite.faults else "base and tuned are not both measured"
        return _record(gate, f"{suite.name}: {fault}")
    change = intervals.difference(suite.values(state), suite.values("base"), suite.clusters)
    value, low, high = (100 * number + limit for number in (change.value, change.low, change.high))
    n = len(suite.measured)
    said = f"{suite.name}: {state} - base is {interval(change, POINTS)}, n = {n}, allowed -{limit:g}"
    record = _record(gate, said, low, high)
    if record["outcome"] == "inconclusive":
        # Of prompts that would decide, if the drop is as large as it was measured.
        needed = n * (FOUND * (high - low) / 2 / value) ** 2 if value else math.inf
        decide = "it lies at the limit, and no number of prompts would decide"
        if needed <= PROMPTS_NEEDED_AT_MOST:
            decide = f"about {math.ceil(needed):,} prompts would decide"
        record["sentence"] += f"; {decide}"
    return record


def _distance(near: Closeness | None, limit: float) -> Record:
    """Judge the distance to base, in nats per token."""
    gate = "max_drop closeness"
    for state in ("recovered", "tuned"):
        if near and near.states[state]:
            found = near.states[state]["distance"]
            said = f"closeness: {state} is {interval(found, DISTANCE)} from base, allowed {limit:g}"
            return _record(gate, said, limit - found.high, limit - found.low)
    return _record(gate, "closeness is not measured: eval.closeness names its prompts")


def judge_again(run: RunDir, file: Path) -> tuple[Summary, list[Record]]:
    """Return a run's summary, and what the gates of a YAML file say about its stored scores.

    Raises:
        UsageError: There is no such file, or it sets no gate.
        OpdclError: A result, an adapter or the base is not what the run recorded.
    """
    if not file.is_file():
        raise UsageError(f"{file} is no file", "--gates names a YAML file with a section `gates`")
    required = load([str(file)])[0].gates.model_dump()
    if all(value is None for value in required.values()):
        raise UsageError(f"{file} sets no gate", "gates: {max_drop: 5}")
    for check in verify(run):
        if not check.ok:
            message = f"{run.path}: {check.what}: {check.finding}; scores of something else prove nothing"
            hint = f"opdcl verify {run.path}  # lists all; opdcl eval {run.path} --force measures again"
            raise OpdclError(message, hint)
    results = Results(run)
    return results.summary, judge_gates(required, results)
