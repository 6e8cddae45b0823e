"""Gates: whether a run is shown to meet a requirement, shown to miss it, or neither.

A gate compares its requirement with the whole 95 % interval, unless `gates.bound` is `estimate`. So a
harmless run is refused by chance in at most 2.5 % of cases, and one that was measured on few prompts is not
waved through.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.load import load
from opdcl.errors import GateError, InconclusiveError, OpdclError, UsageError
from opdcl.results.scores import Suite, headline_of, load_suites
from opdcl.results.status import FAULT
from opdcl.results.summary import summarise
from opdcl.results.verdict import why_no_domain_retention, why_no_recovery
from opdcl.rundir.layout import RunDir
from opdcl.rundir.verify import verify

Outcome = Literal["passed", "missed", "inconclusive"]

# A verdict in the JSON of a report.
Record = dict[str, str]

RATIOS = {"recovery": "R", "domain_retention": "D", "closeness": "C"}

# The difference that is found four times in five, in halves of its interval.
FOUND = (1.96 + 0.84) / 1.96

# Beyond this number of prompts a suite that decides will not be written.
MOST_PROMPTS = 100_000


@dataclass(frozen=True)
class Verdict:
    """What one gate says, with the sentence for people."""

    gate: str
    outcome: Outcome
    sentence: str


def judge(gates: Mapping[str, Any], summary: dict[str, Any], suites: Sequence[Suite]) -> list[Record]:
    """Return what each gate of a workflow says about a run's stored scores.

    Raises:
        UsageError: `max_drop` names a suite that the run does not have.
    """
    by_estimate = gates.get("bound") == "estimate"
    domain = headline_of(list(suites)).get("domain")
    required = {key: gates[key] for key in RATIOS if gates.get(key) is not None}
    found = [_ratio(key, least, summary, domain, by_estimate) for key, least in required.items()]
    if gates.get("max_drop") is not None:
        found += _drops(gates["max_drop"], summary, suites, by_estimate)
    if summary["status"] == FAULT:
        found = [
            Verdict(verdict.gate, "inconclusive", f"{verdict.gate}: {summary['verdict']}")
            for verdict in found
        ]
    return [asdict(verdict) for verdict in found]


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
    key: str, required: float, summary: dict[str, Any], domain: Suite | None, by_estimate: bool
) -> Verdict:
    """Judge R, D or C, of which more is better."""
    name, value = f"{key} ({RATIOS[key]})", summary[key]
    if value is None or value["value"] is None:
        if key == "recovery" and summary["retention_status"] == "no measurable forgetting":
            return Verdict(key, "passed", f"{name}: there was no measurable forgetting to recover from")
        return Verdict(key, "inconclusive", f"{name} is not known: {_why_unknown(key, summary, domain)}")
    low, high = (value["value"],) * 2 if by_estimate else (value["low"], value["high"])
    outcome = _outcome(low - required, high - required)
    said = f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
    return Verdict(key, outcome, f"{name} is {said}, required {required:g}")


def _why_unknown(key: str, summary: dict[str, Any], domain: Suite | None) -> str:
    if key == "closeness":
        return (summary["closeness"] or {}).get("why") or "it is not measured"
    return why_no_recovery(summary) if key == "recovery" else why_no_domain_retention(domain)


def _drops(
    limits: float | Mapping[str, float],
    summary: Mapping[str, Any],
    suites: Sequence[Suite],
    by_estimate: bool,
) -> Iterator[Verdict]:
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
        yield Verdict("max_drop", "inconclusive", "max_drop: no retention suite is measured")


def _drop(suite: Suite, limit: float, by_estimate: bool) -> Verdict:
    from opdcl.results import stats

    gate = f"max_drop {suite.name}"
    state = suite.latest
    if "base" not in suite.rows or state is None:
        fault = suite.faults[0] if suite.faults else "base and tuned are not both measured"
        return Verdict(gate, "inconclusive", f"{suite.name}: {fault}")
    change = stats.difference(suite.values(state), suite.values("base"), suite.clusters)
    value, low, high = (100 * x for x in (change.value, change.low, change.high))
    outcome = _outcome(*((value + limit,) * 2 if by_estimate else (low + limit, high + limit)))
    said = f"{suite.name}: {state} - base is {value:+.1f} points [{low:+.1f}, {high:+.1f}]"
    said += f", n = {len(suite.prompts)}, allowed -{limit:g}"
    if outcome == "inconclusive":
        said += f"; {_prompts_that_decide(len(suite.prompts), (high - low) / 2, value + limit)}"
    return Verdict(gate, outcome, said)


def _distance(summary: Mapping[str, Any], limit: float, by_estimate: bool) -> Verdict:
    """Judge the distance to base, in nats per token."""
    near, gate = summary["closeness"], "max_drop closeness"
    state = next((s for s in ("recovered", "tuned") if near and near[s].get("distance")), None)
    if state is None:
        return Verdict(gate, "inconclusive", "closeness is not measured: eval.closeness names its prompts")
    found = near[state]["distance"]
    low, high = (found["value"],) * 2 if by_estimate else (found["low"], found["high"])
    said = (
        f"closeness: {state} is {found['value']:.3f} nats per token [{found['low']:.3f}, {found['high']:.3f}]"
    )
    return Verdict(gate, _outcome(limit - high, limit - low), f"{said} from base, allowed {limit:g}")


def _outcome(low: float, high: float) -> Outcome:
    """Judge the interval of how far a requirement is exceeded."""
    if math.isnan(low) or math.isnan(high):
        return "inconclusive"
    return "passed" if low >= 0 else "missed" if high < 0 else "inconclusive"


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
    suites = load_suites(run)
    summary = summarise(run, suites)
    return summary | {"gates": judge(required, summary, suites)}
