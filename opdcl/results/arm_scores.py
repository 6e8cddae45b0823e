"""Compare arms: their scores, their closeness to base and the settings that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from opdcl.results import closeness, stats, writing
from opdcl.results.arms import Arm, Member, first_measured, load_arms, mismatch, notes_of_runs, seed_notes
from opdcl.results.closeness import Closeness
from opdcl.results.intervals import Estimate
from opdcl.results.origins import START, as_key
from opdcl.results.scores import Suite, states_of, values_of
from opdcl.results.stats import Findings
from opdcl.results.status import ALONE, HEADLINE_ROLES, NO_RECOVERY, STATES, Retention
from opdcl.results.verdict import writing_sentence
from opdcl.results.writing import WritingTests
from opdcl.rundir.layout import RunDir

# Settings of the evaluation that do not change how a suite is measured.
HARMLESS = {f"eval.{option}" for option in (*HEADLINE_ROLES, "control", "limit")}


@dataclass(frozen=True)
class Reference:
    """A result of base or tuned; of an arm over several fine-tunes, the mean of several."""

    state: str
    name: str
    results: int
    scores: dict[str, Estimate]


@dataclass(frozen=True)
class RunRow:
    """One run of an arm, with the numbers of its own report."""

    path: str
    seeds: dict[str, Any]
    state: str
    """The run's last model, whose scores these are: base, tuned or recovered."""
    scores: dict[str, Estimate]
    recovery: Estimate | None
    domain_retention: Estimate | None
    status: str


@dataclass(frozen=True)
class ArmRow:
    """An arm: the scores of its runs' last models, and what follows from them."""

    name: str
    seeds: int
    scores: dict[str, Estimate]
    findings: Findings
    writing: WritingTests
    closeness: Closeness | None
    """None if it is not measured in every run, on the same prompts as in the other arms."""
    runs: list[RunRow]


@dataclass(frozen=True)
class Rival:
    """The first arm minus another one."""

    name: str
    changes: dict[str, Estimate]


@dataclass(frozen=True)
class FurtherRow:
    name: str
    states: dict[str, Estimate]
    domain_retention: Estimate | None


@dataclass(frozen=True)
class Further:
    """A further suite that all finished runs answered on the same prompts."""

    name: str
    role: str
    metric: str
    n: int
    arms: list[FurtherRow]


@dataclass(frozen=True)
class Comparison:
    """Arms side by side. Scores are by role or state, without those that are not measured."""

    headline: dict[str, str | None]
    suites: dict[str, dict[str, Any]]
    references: list[Reference]
    arms: list[ArmRow]
    against_first: list[Rival]
    further: list[Further]
    differences: dict[str, dict[str, Any]]
    """Setting -> arm -> value, of the settings that differ."""
    faults: list[str]
    notes: list[str]


def compare(runs: Sequence[RunDir]) -> Comparison:
    """Return the comparison of runs that do not build on one another, pooled over seeds into arms."""
    arms = load_arms(runs)
    members = [member for arm in arms for member in arm.members]
    headline: dict[str, Suite] = {}
    for role in HEADLINE_ROLES:
        suite = first_measured(members, role).headline.get(role)
        if suite:
            headline[role] = suite
    near = next((m.near for arm in arms for m in arm.pooled if m.near.rows), None)
    rows = [_arm_row(arm, headline, near) for arm in arms]
    references = _references("base", arms, headline) + _references("tuned", arms, headline)
    differences = _differences(arms)
    faults = [f"{member.path}: {fault}" for member in members for fault in member.summary.faults]
    of_runs = {}
    for member in members:
        summary = member.summary
        of_runs[member.path] = [note for note in summary.notes if note not in summary.faults]
    return Comparison(
        headline={role: headline[role].name if role in headline else None for role in HEADLINE_ROLES},
        suites={suite.name: suite.description for suite in headline.values() if suite.rows},
        references=references,
        arms=rows,
        against_first=[Rival(arm.name, _minus(arms[0], arm, headline)) for arm in arms[1:]],
        further=_further(arms),
        differences=differences,
        faults=faults,
        notes=[
            *faults,
            *_reference_notes(references),
            *_writing_notes(rows),
            *_setting_notes(arms, differences),
            *_unfinished_notes(arms),
            *_closeness_notes(arms, near),
            *notes_of_runs(of_runs),
            *seed_notes({row.seeds for row in rows}),
        ],
    )


def _arm_row(arm: Arm, headline: Mapping[str, Suite], near: Suite | None) -> ArmRow:
    scores: dict[str, Estimate] = {}
    states = {}
    for role, suite in headline.items():
        found = arm.scores(suite.name)
        if found is not None:
            scores[role] = stats.mean(found, suite.clusters).rounded()
        states[role] = states_of(arm.suites(suite.name))
    retention = headline.get("retention")
    tests = writing.compared_with_base(arm.suites(retention.name) if retention else [])
    measured = [member.near for member in arm.pooled if member.near.rows]
    findings = stats.findings(states.get("retention"), states.get("domain"), writing.alike(tests))
    findings = replace(findings, status=_status(arm.members[0], findings.status))
    is_whole = near is not None and len(measured) == len(arm.pooled) and _same_prompts(measured, near)
    return ArmRow(
        name=arm.name,
        seeds=len(arm.pooled),
        scores=scores,
        findings=findings,
        writing=tests,
        closeness=closeness.summarise(measured) if is_whole else None,
        runs=[_run_row(member) for member in arm.members],
    )


def _run_row(member: Member) -> RunRow:
    scores: dict[str, Estimate] = {}
    findings = member.summary.findings
    for role, suite in member.headline.items():
        states = member.summary.suites[suite.name].states
        if member.compared in states:
            scores[role] = states[member.compared]
    return RunRow(
        path=member.path,
        seeds=member.seeds,
        state=member.compared,
        scores=scores,
        recovery=findings.recovery,
        domain_retention=findings.domain_retention,
        status=_status(member, findings.status),
    )


def _status(member: Member, status: str) -> str:
    """Return a status, or why there can be none: the run has no recovery, or not even a fine-tune."""
    ends = {"base": ALONE, "tuned": NO_RECOVERY}
    return ends.get(member.compared, status) if status == Retention.NOT_MEASURED else status


def _same_prompts(measured: list[Suite], first: Suite) -> bool:
    return all(suite.prompts == first.prompts for suite in measured)


def _references(state: str, arms: list[Arm], headline: Mapping[str, Suite]) -> list[Reference]:
    """Return one reference per different result of base or tuned."""
    results: list[dict[str, np.ndarray]] = []
    # The results that the runs of an arm have, by their numbers -> the names of the arms.
    arms_of: dict[tuple[int, ...], list[str]] = {}
    for arm in arms:
        found = set()
        for member in arm.pooled:
            own = member.headline.items()
            scores = {role: suite.values(state) for role, suite in own if state in suite.rows}
            # The end of a run is its arm's own row.
            if scores and state != member.compared:
                found.add(_index(results, scores))
        if found:
            arms_of.setdefault(tuple(sorted(found)), []).append(arm.name)
    references = []
    for indices, names in arms_of.items():
        means: dict[str, Estimate] = {}
        for role, suite in headline.items():
            measured = [results[i][role] for i in indices if role in results[i]]
            if measured:
                means[role] = stats.mean(np.stack(measured), suite.clusters).rounded()
        name = state if len(names) == len(arms) else f"{state} of {', '.join(names)}"
        references.append(Reference(state, name, len(indices), means))
    return references


def _index(results: list[dict[str, np.ndarray]], scores: dict[str, np.ndarray]) -> int:
    """Return the index of the result in which every prompt has the same score; without one, add it."""
    for index, result in enumerate(results):
        if all((result[role] == scores[role]).all() for role in result.keys() & scores.keys()):
            result |= scores
            return index
    results.append(scores)
    return len(results) - 1


def _minus(one: Arm, other: Arm, headline: Mapping[str, Suite]) -> dict[str, Estimate]:
    """Return the paired differences of two arms, where both are measured."""
    changes: dict[str, Estimate] = {}
    for role, suite in headline.items():
        own, theirs = one.scores(suite.name), other.scores(suite.name)
        if own is not None and theirs is not None:
            changes[role] = stats.difference(own, theirs, suite.clusters).rounded()
    return changes


def _further(arms: list[Arm]) -> list[Further]:
    """Return every further suite that all finished runs answered on the same prompts."""
    finished: list[Arm] = []
    members: list[Member] = []
    for arm in arms:
        if not any(member.missing for member in arm.pooled):
            finished.append(arm)
            members += arm.pooled
    found = []
    for suite in members[0].suites if members else ():
        if members[0].headline.get(suite.role) is suite:
            continue
        if all(_answered(member, suite) for member in members):
            rows = [_further_row(arm, suite.name) for arm in finished]
            found.append(Further(suite.name, **suite.description, arms=rows))
    return found


def _answered(member: Member, suite: Suite) -> bool:
    """Return whether a run's last model answered the prompts of another run's suite."""
    own = member.named.get(suite.name)
    return own is not None and member.compared in own.rows and not mismatch(suite.role, own, suite)


def _further_row(arm: Arm, name: str) -> FurtherRow:
    suites = arm.suites(name)
    scores: dict[str, Estimate] = {}
    for state in STATES:
        found = values_of(suites, state)
        if found is not None:
            scores[state] = stats.mean(found, suites[0].clusters).rounded()
    states = states_of(suites) if suites[0].role == "domain" else None
    kept = stats.domain_retention(states) if states else None
    return FurtherRow(arm.name, scores, kept and kept.rounded())


def _differences(arms: list[Arm]) -> dict[str, dict[str, Any]]:
    """Return setting -> arm -> value for the settings that differ; an arm without the key is left out."""
    keys: dict[str, None] = {}
    for arm in arms:
        keys |= dict.fromkeys(arm.settings)
    differences: dict[str, dict[str, Any]] = {}
    for key in keys:
        # If an arm lacks a section, its flat keys hold the section's name alone.
        section_name = key.split(".")[0]
        is_value = key == START  # every other key without a dot names a section
        having = [arm for arm in arms if is_value or section_name not in arm.settings]
        values = {arm.name: arm.settings[key] for arm in having if key in arm.settings}
        if key == section_name and not is_value:
            if having:
                differences[key] = {arm.name: "given" if arm in having else "left out" for arm in arms}
        elif len(values) < len(having) or len({as_key(value) for value in values.values()}) > 1:
            differences[key] = values
    return differences


def _closeness_notes(arms: list[Arm], near: Suite | None) -> list[str]:
    notes = []
    for arm in arms:
        measured = [member.near for member in arm.pooled if member.near.rows]
        if near and not _same_prompts(measured, near):
            notes.append(f"{arm.name}: its closeness to base was measured on other prompts.")
    return notes


def _reference_notes(references: list[Reference]) -> list[str]:
    notes = []
    for state in ("base", "tuned"):
        count = sum(reference.state == state for reference in references)
        if count > 1:
            different = f"The arms have {count} different results of {state}"
            notes.append(f"{different}: each arm's R and D refer to its own.")
    return notes


def _writing_notes(rows: list[ArmRow]) -> list[str]:
    """Say of each arm what keeps it from writing as well as base."""
    notes = []
    for row in rows:
        if sentence := writing_sentence(row.writing):
            notes.append(f"{row.name}: {sentence}")
    return notes


def _setting_notes(arms: list[Arm], differences: dict[str, dict]) -> list[str]:
    notes = []
    measuring = []
    for key in differences:
        if key.startswith("eval.") and ".".join(key.split(".")[:2]) not in HARMLESS:
            measuring.append(key)
    if measuring:
        notes.append(f"The arms were measured with different settings ({', '.join(measuring)}).")
    settings = [as_key(arm.settings) for arm in arms]
    repeated = [arm.name for arm, key in zip(arms, settings, strict=True) if settings.count(key) > 1]
    if repeated:
        names, reason = ", ".join(repeated), "the settings are equal and some seeds occur twice"
        notes.append(f"{names}: {reason}, so the runs are not pooled.")
    return notes


def _unfinished_notes(arms: list[Arm]) -> list[str]:
    notes = []
    for arm in arms:
        for member in arm.members:
            if member.missing:
                what = f"{member.path} is not finished: no result of {', '.join(member.missing)}"
                left_out = "" if member in arm.pooled else f", and is left out of {arm.name}"
                notes.append(f"{what}{left_out}.")
    return notes
