"""Compare arms: their scores, their distance to the alpha-curve and the settings that differ."""

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

# Arm name -> indices of the different results of a state that its runs have.
ResultIds = dict[str, tuple[int, ...]]


def compare(runs: list[RunDir]) -> dict[str, Any]:
    """Return the comparison of runs that do not build on one another, pooled over seeds into arms."""
    arms = load_arms(runs)
    members = [member for arm in arms for member in arm.members]
    (base, _), (tuned, tuned_ids) = (_references(state, arms) for state in ("base", "tuned"))
    rows = [_arm_row(arm) for arm in arms]
    notes = _add_closeness(arms, rows)
    _add_curve_distances(arms, rows, tuned_ids)
    headline = [(role, first_measured(members, role).headline.get(role)) for role in HEADLINE_ROLES]
    differences = _differences(arms)
    faults = [f"{m.run.path}: {fault}" for m in members for fault in m.summary["faults"]]
    return {
        "headline": {role: suite.name if suite else None for role, suite in headline},
        "suites": {suite.name: suite.description for _, suite in headline if suite and suite.rows},
        "references": base + tuned,
        "arms": rows,
        "against_first": [
            {"name": rival.name, **{role: arms[0].minus(rival, role) for role in HEADLINE_ROLES}}
            for rival in arms[1:]
        ],
        "further": _further(arms),
        "alpha_curve": _alpha_curve(arms, tuned_ids),
        "differences": differences,
        "faults": faults,
        "notes": [
            *faults,
            *_reference_notes(rows, base, tuned),
            *_writing_notes(rows),
            *_setting_notes(arms, differences),
            *_unfinished_notes(arms),
            *notes,
            *notes_of_runs({str(member.run.path): member.summary["notes"] for member in members}),
            *seed_notes({row["seeds"] for row in rows}),
        ],
    }


def _references(state: str, arms: list[Arm]) -> tuple[list[dict[str, Any]], ResultIds]:
    """Return one row per different result of base or tuned, and which results each arm has.

    An arm over several fine-tunes has several.
    """
    results: list[dict[str, np.ndarray]] = []
    ids: ResultIds = {}
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
    return rows, ids


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
        "above_alpha_curve": None,
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
    finished = [arm for arm in arms if not any(member.missing for member in arm.pooled)]
    members = [member for arm in finished for member in arm.pooled]
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


def _add_curve_distances(arms: list[Arm], rows: list[dict], tuned_ids: ResultIds) -> None:
    """Add to each row its paired difference to a point of the alpha-curve and its height above the curve.

    The point is the first arm that scales the same tuned adapter; the curve runs over all such arms.
    """
    curve = [arm for arm in arms if arm.scales_only]
    for arm, row in zip(arms, rows, strict=True):
        rivals = [rival for rival in curve if tuned_ids[rival.name] == tuned_ids[arm.name]]
        rivals = rivals or (curve if len(curve) == 1 else [])
        if arm in curve or not rivals:
            continue
        changes = {role: arm.minus(rivals[0], role) for role in HEADLINE_ROLES}
        points = [arm.point("base"), arm.point("tuned"), *(rival.point() for rival in rivals)]
        measured = [point for point in points if point]
        height: dict[str, float] = {}
        if (own := arm.point()) and len(measured) == len(points):
            height = stats.above_mixtures(own, measured).as_dict()
        if any(changes.values()):
            row["above_alpha_curve"] = {"arm": rivals[0].name, **changes, "at_its_domain": height}


def _alpha_curve(arms: list[Arm], tuned_ids: ResultIds) -> list[dict[str, Any]]:
    """Return base, the scaled adapters and tuned in the order of their domain scores, lowest first.

    `edge` marks the points that no mixture of the others surpasses. With several tuned models there is no
    such curve, and the list is empty.
    """
    curve = [arm for arm in arms if arm.scales_only]
    if not curve or len(set(filter(None, tuned_ids.values()))) > 1:
        return []
    candidates = [arms[0].point("base"), arms[0].point("tuned"), *(arm.point() for arm in curve)]
    points = [point for point in candidates if point]
    edge = stats.upper_edge(points)
    rows = [
        {"domain": float(p.domain.mean()), "retention": float(p.retention.mean()), "edge": i in edge}
        for i, p in enumerate(points)
    ]
    return sorted(rows, key=lambda row: row["domain"])


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


def _reference_notes(rows: list[dict], base: list[dict], tuned: list[dict]) -> list[str]:
    notes = []
    for state, results in (("base", base), ("tuned", tuned)):
        if len(results) > 1:
            different = f"The arms have {len(results)} different results of {state}"
            notes.append(f"{different}: each arm's R and D refer to its own.")
    if len(tuned) > 1 and any(row["above_alpha_curve"] for row in rows):
        notes.append("An arm that starts from another tuned model than the alpha-curve differs by that too.")
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
