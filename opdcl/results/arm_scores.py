"""Compare arms: their scores, their closeness to base and the settings that differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from opdcl.results import closeness, stats, writing
from opdcl.results.arms import (
    Arm,
    Member,
    as_key,
    first_measured,
    load_arms,
    mismatch,
    notes_of_runs,
    seed_notes,
)
from opdcl.results.scores import Suite, states_of
from opdcl.results.status import HEADLINE_ROLES, STATES
from opdcl.results.verdict import writing_sentences
from opdcl.rundir.layout import RunDir


def compare(runs: list[RunDir]) -> dict[str, Any]:
    """Return the comparison of runs that do not build on one another, pooled over seeds into arms."""
    arms = load_arms(runs)
    members = [member for arm in arms for member in arm.members]
    base, tuned = (_references(state, arms) for state in ("base", "tuned"))
    rows = [_arm_row(arm) for arm in arms]
    notes = _add_closeness(arms, rows)
    headline = [(role, first_measured(members, role).headline.get(role)) for role in HEADLINE_ROLES]
    differences = _differences(arms)
    against_first = []
    for rival in arms[1:]:
        row: dict[str, Any] = {"name": rival.name}
        for role in HEADLINE_ROLES:
            row[role] = arms[0].minus(rival, role)
        against_first.append(row)
    faults = [f"{m.run.path}: {fault}" for m in members for fault in m.summary["faults"]]
    return {
        "headline": {role: suite.name if suite else None for role, suite in headline},
        "suites": {suite.name: suite.description for _, suite in headline if suite and suite.rows},
        "references": base + tuned,
        "arms": rows,
        "against_first": against_first,
        "further": _further(arms),
        "differences": differences,
        "faults": faults,
        "notes": [
            *faults,
            *_reference_notes(base, tuned),
            *_writing_notes(rows),
            *_setting_notes(arms, differences),
            *_unfinished_notes(arms),
            *notes,
            *notes_of_runs({str(member.run.path): member.summary["notes"] for member in members}),
            *seed_notes({row["seeds"] for row in rows}),
        ],
    }


def _references(state: str, arms: list[Arm]) -> list[dict[str, Any]]:
    """Return one row per different result of base or tuned; an arm over several fine-tunes has several."""
    results: list[dict[str, np.ndarray]] = []
    # Arm name -> indices of the results that its runs have.
    ids: dict[str, tuple[int, ...]] = {}
    for arm in arms:
        measured = [scores for member in arm.pooled if (scores := member.scores(state))]
        ids[arm.name] = tuple(sorted({_index(results, scores) for scores in measured}))
    groups = list(dict.fromkeys(filter(None, ids.values())))
    rows = []
    for group in groups:
        names = [name for name, indices in ids.items() if indices == group]
        row: dict[str, Any] = {
            "state": state,
            "name": f"{state} of {', '.join(names)}" if len(groups) > 1 else state,
            "arms": names,
            "results": len(group),
        }
        for role in HEADLINE_ROLES:
            found = [results[i][role] for i in group if role in results[i]]
            clusters = next((c for arm in arms if (c := arm.clusters(role)) is not None), None)
            row[role] = stats.mean(np.stack(found), clusters).as_dict() if found else {}
        rows.append(row)
    return rows


def _index(results: list[dict[str, np.ndarray]], scores: dict[str, np.ndarray]) -> int:
    """Return the index of the result in which every prompt has the same score; without one, add it."""
    for index, result in enumerate(results):
        if all((result[role] == scores[role]).all() for role in result.keys() & scores.keys()):
            result |= scores
            return index
    results.append(scores)
    return len(results) - 1


def _arm_row(arm: Arm) -> dict[str, Any]:
    """Return an arm's numbers; an estimate that is not measured is empty, a ratio without meaning is None."""
    tests = writing.compared_with_base(arm.suites("retention"))
    return {
        "name": arm.name,
        "method": arm.settings.get("recover.method"),
        "seeds": len(arm.pooled),
        **{role: arm.estimate(role) for role in HEADLINE_ROLES},
        **stats.outcome(
            states_of(arm.suites("retention")), states_of(arm.suites("domain")), writing.alike(tests)
        ),
        "writing": tests,
        "runs": [_run_row(member) for member in arm.members],
    }


def _run_row(member: Member) -> dict[str, Any]:
    suites = member.summary["suites"]
    scores = {role: suites[suite.name]["recovered"] for role, suite in member.headline.items()}
    return {
        "path": str(member.run.path),
        "seeds": member.seeds,
        **{role: scores.get(role, {}) for role in HEADLINE_ROLES},
        **{key: member.summary[key] for key in ("recovery", "domain_retention", "status")},
        "missing": member.missing,
    }


def _further(arms: list[Arm]) -> list[dict[str, Any]]:
    """Return the arms' scores on each further suite that all finished runs answered on the same prompts."""
    finished, members = [], []
    for arm in arms:
        if not any(member.missing for member in arm.pooled):
            finished.append(arm)
            members += arm.pooled
    tables = []
    for name, suite in members[0].further.items() if members else ():
        others = [member.further.get(name) for member in members]
        if all(s and s.complete and not mismatch(suite.role, s, suite) for s in others):
            rows = [_further_row(arm, name) for arm in finished]
            tables.append({"name": name, **suite.description, "arms": rows})
    return tables


def _further_row(arm: Arm, name: str) -> dict[str, Any]:
    suites = [member.further[name] for member in arm.pooled]
    states = states_of(suites)
    assert states
    row: dict[str, Any] = {"name": arm.name}
    for state in STATES:
        row[state] = stats.mean(getattr(states, state), states.clusters).as_dict()
    kept = stats.domain_retention(states) if suites[0].role == "domain" else None
    return row | {"domain_retention": kept and kept.as_dict()}


def _add_closeness(arms: list[Arm], rows: list[dict[str, Any]]) -> list[str]:
    """Add closeness to base to each row, None if it is not measured; name arms with other prompts."""
    notes: list[str] = []
    first: list[Suite] = []
    for arm, row in zip(arms, rows, strict=True):
        suites = [member.near for member in arm.pooled if member.near.rows]
        first = first or suites[:1]
        same = all(suite.prompts == first[0].prompts for suite in suites)
        row["closeness"] = closeness.summarise(suites) if same and len(suites) == len(arm.pooled) else None
        if not same:
            notes.append(f"{arm.name}: its closeness to base was measured on other prompts.")
    return notes


def _differences(arms: list[Arm]) -> dict[str, dict[str, Any]]:
    """Return setting -> arm -> value for the settings that differ; an arm without the key is left out."""
    differences: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(key for arm in arms for key in arm.settings):
        # If an arm lacks a section, its flat keys hold the section's name alone.
        section_name = key.split(".")[0]
        having = [arm for arm in arms if section_name not in arm.settings]
        values = {arm.name: arm.settings[key] for arm in having if key in arm.settings}
        if key == section_name:
            if having:
                differences[key] = {arm.name: "given" if arm in having else "left out" for arm in arms}
        elif len(values) < len(having) or len({as_key(value) for value in values.values()}) > 1:
            differences[key] = values
    return differences


def _reference_notes(base: list[dict], tuned: list[dict]) -> list[str]:
    notes = []
    for state, results in (("base", base), ("tuned", tuned)):
        if len(results) > 1:
            different = f"The arms have {len(results)} different results of {state}"
            notes.append(f"{different}: each arm's R and D refer to its own.")
    return notes


def _writing_notes(rows: list[dict]) -> list[str]:
    """Say of each arm what keeps it from writing as well as base."""
    found = {row["name"]: writing_sentences(row["writing"], row["retention_status"]) for row in rows}
    return [f"{name}: {' '.join(sentences)}" for name, sentences in found.items() if sentences]


def _setting_notes(arms: list[Arm], differences: dict[str, dict]) -> list[str]:
    notes = []
    harmless = {f"eval.{option}" for option in (*HEADLINE_ROLES, "control", "limit")}
    options = {key: ".".join(key.split(".")[:2]) for key in differences if key.startswith("eval.")}
    if measuring := [key for key, option in options.items() if option not in harmless]:
        notes.append(f"The arms were measured with different settings ({', '.join(measuring)}).")
    settings = [as_key(arm.settings) for arm in arms]
    repeated = [arm.name for arm, key in zip(arms, settings, strict=True) if settings.count(key) > 1]
    if repeated:
        names, reason = ", ".join(repeated), "the settings are equal and some seeds occur twice"
        notes.append(f"{names}: {reason}, so the runs are not pooled.")
    return notes


def _unfinished_notes(arms: list[Arm]) -> list[str]:
    return [
        f"{member.run.path} is not finished: no result of {', '.join(member.missing)}"
        + ("." if member in arm.pooled else f", and is left out of {arm.name}.")
        for arm in arms
        for member in arm.members
        if member.missing
    ]
