"""Gates: whether a run is shown to meet a requirement, shown to miss it, or neither.

A gate compares its requirement with the whole 95 % interval, unless `gates.bound` is `estimate`. So a
harmless run is refused by chance in at most 2.5 % of cases, and one that was measured on few prompts is not
waved through.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.load import load
from opdcl.errors import GateError, InconclusiveError, OpdclError, UsageError
from opdcl.results import stats
from opdcl.results.format import DISTANCE, POINTS, interval
from opdcl.results.scores import Suite, headline_of
from opdcl.results.status import FAULT, NO_DROP
from opdcl.results.summary import Results
from opdcl.results.verdict import why_no_domain_retention, why_no_recovery
from opdcl.rundir.layout import RunDir
from opdcl.rundir.verify import verify

# A verdict in the JSON of a report: the gate, its outcome, and a sentence for people. Outcomes are `passed`,
# `missed` and `inconclusive`.
Record = dict[str, str]

RATIOS = {"recovery": "R", "domain_retention": "D", "closeness": "C"}
VALUES = ("value", "low", "high")

# The difference that is found four times in five, in halves of its interval.
FOUND = (1.96 + 0.84) / 1.96

# Beyond this number of prompts a suite that decides will not be written.
MOST_PROMPTS = 100_000


def judge(gates: Mapping[str, Any], summary: dict[str, Any], suites: Sequence[Suite]) -> list[Record]:
    """Return what each gate of a workflow says about a run's stored scores.

    Raises:
        UsageError: `max_drop` names a suite that the run does not have.
    """
    by_estimate = gates.get("bound") == "estimate"
    required = {key: gates[key] for key in RATIOS if gates.get(key) is not None}
    found = [_ratio(key, least, summary, suites, by_estimate) for key, least in required.items()]
    if gates.get("max_drop") is not None:
        found += _drops(gates["max_drop"], summary, suites, by_estimate)
    if summary["status"] == FAULT:
        found = [_undecided(record["gate"], f"{record['gate']}: {summary['verdict']}") for record in found]
    return found


def _undecided(gate: str, why: str) -> Record:
    return {"gate": gate, "outcome": "inconclusive", "sentence": why}


def _decided(gate: str, excess: Sequence[float], by_estimate: bool, sentence: str) -> Record:
    """Judge by how far a requirement is exceeded: a value, and the two ends of its interval."""
    decisive = excess[:1] if by_estimate else excess[1:]
    outcome = "inconclusive"
    if all(end >= 0 for end in decisive):
        outcome = "passed"
    elif all(end < 0 for end in decisive):
        outcome = "missed"
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


def _ratio(
    key: str, required: float, summary: dict[str, Any], suites: Sequence[Suite], by_estimate: bool
) -> Record:
    """Judge R, D or C, of which more is better."""
    name, ratio = f"{key} ({RATIOS[key]})", summary[key]
    if ratio and ratio["value"] is not None:
        sentence = f"{name} is {interval(ratio)}, required {required:g}"
        return _decided(key, [ratio[k] - required for k in VALUES], by_estimate, sentence)
    harm = summary["tests"]["recovered_minus_base"]
    if key == "recovery" and summary["no_recovery_because"] == NO_DROP and harm and harm["high"] < 0:
        sentence = f"{name} is not known, but recovered - base is {interval(harm, POINTS)}"
        return {"gate": key, "outcome": "missed", "sentence": sentence}
    if key == "closeness":
        why = (ratio or {}).get("why") or "it is not measured"
    elif key == "domain_retention":
        why = why_no_domain_retention(headline_of(suites).get("domain"))
    elif summary["retention_status"] == "no measurable forgetting":
        sentence = f"{name}: there was no measurable forgetting to recover from"
        return {"gate": key, "outcome": "passed", "sentence": sentence}
    else:
        why = why_no_recovery(summary)
    return _undecided(key, f"{name} is not known: {why}")


def _drops(
    limits: float | Mapping[str, float],
    summary: Mapping[str, Any],
    suites: Sequence[Suite],
    by_estimate: bool,
) -> Iterator[Record]:
    """Judge how far the last measured state lies below base on each suite, and its distance to base."""
    retention = {suite.name: suite for suite in suites if suite.role == "retention"}
    if not isinstance(limits, Mapping):
        limits = dict.fromkeys(retention, limits)
    if unknown := sorted(limits.keys() - retention.keys() - {CLOSENESS}):
        known = ", ".join([*retention, CLOSENESS])
        raise UsageError(
            f"gates.max_drop names no retention suite of this run: {unknown[0]}", f"it has {known}"
        )
    for name, limit in limits.items():
        if name == CLOSENESS:
            yield _distance(summary, limit, by_estimate)
        else:
            yield _drop(retention[name], limit, by_estimate)
    if not limits:
        yield _undecided("max_drop", "max_drop: no retention suite is measured")


def _drop(suite: Suite, limit: float, by_estimate: bool) -> Record:
    gate, state = f"max_drop {suite.name}", suite.latest
    if "base" not in suite.rows or state is None:
        fault = suite.faults[0] if suite.faults else "base and tuned are not both measured"
        return _undecided(gate, f"{suite.name}: {fault}")
    change = vars(stats.difference(suite.values(state), suite.values("base"), suite.clusters))
    prompts = len(suite.prompts)
    said = f"{suite.name}: {state} - base is {interval(change, POINTS)}, n = {prompts}, allowed -{limit:g}"
    value, low, high = (100 * change[key] for key in VALUES)
    record = _decided(gate, [value + limit, low + limit, high + limit], by_estimate, said)
    if record["outcome"] == "inconclusive":
        record["sentence"] += f"; {_prompts_that_decide(prompts, (high - low) / 2, value + limit)}"
    return record


def _distance(summary: Mapping[str, Any], limit: float, by_estimate: bool) -> Record:
    """Judge the distance to base, in nats per token."""
    near, gate = summary["closeness"], "max_drop closeness"
    state = next((s for s in ("recovered", "tuned") if near and near[s].get("distance")), None)
    if state is None:
        return _undecided(gate, "closeness is not measured: eval.closeness names its prompts")
    found = near[state]["distance"]
    said = f"closeness: {state} is {interval(found, DISTANCE)} from base, allowed {limit:g}"
    return _decided(gate, [limit - found[k] for k in VALUES], by_estimate, said)


def _prompts_that_decide(prompts: int, half_width: float, excess: float) -> str:
    """Say how many prompts would decide, if the drop is as large as it was measured."""
    if not excess or (needed := math.ceil(prompts * (FOUND * half_width / excess) ** 2)) > MOST_PROMPTS:
        return "it lies at the limit, and no number of prompts would decide"
    return f"about {needed:,} prompts would decide"


def judge_again(run: RunDir, file: Path) -> dict[str, Any]:
    """Return a run's summary, with what the gates of a YAML file say about its stored scores.

    Raises:
        UsageError: There is no such file, or it sets no gate.
        OpdclError: A result, an adapter or the base is not what the run recorded.
    """
    if not file.is_file():
        raise UsageError(f"{file} is no file", "--gates names a YAML file with a section `gates`")
    required = load([str(file)])[0].gates.model_dump()
    if all(value is None for key, value in required.items() if key != "bound"):
        raise UsageError(f"{file} sets no gate", "gates: {max_drop: 5}")
    if changed := next((finding for finding in verify(run) if not finding.ok), None):
        message = f"{run.path}: {changed.what}: {changed.finding}; scores of something else prove nothing"
        raise OpdclError(
            message, f"opdcl verify {run.path}  # lists all; opdcl eval RUN --force measures again"
        )
    results = Results(run)
    return results.summary | {"gates": judge(required, results.summary, results.suites)}
