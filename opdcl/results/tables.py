"""Lay out a comparison as cells and tables, for the terminal, Markdown and HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from opdcl.results import finding
from opdcl.results.format import CHANGE, LENGTH, NATS, SCORE, Unit, cell, interval, metric_words
from opdcl.results.status import HEADLINE_ROLES, STATES

MISSING = "\N{EN DASH}"

# What is told of how answers are written: its label and unit.
WRITING = {
    "ended": ("answers that end", SCORE),
    "tokens": ("tokens per answer", LENGTH),
    "repetition": ("repeated 4-grams", SCORE),
    "script": ("in the prompt's script", SCORE),
}


class Table(NamedTuple):
    """A table; the second line of a cell is its interval or another small addition."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""


class View(NamedTuple):
    """A comparison laid out, without its notes."""

    finding: str
    """What was found, in one sentence."""
    lead: str
    """One sentence that says what is compared."""
    tables: list[Table]
    details: list[Table]
    """Further tables, for which a terminal has no room."""
    plot: str
    """The function of `opdcl.results.plots` that draws it."""


def view(comparison: dict[str, Any]) -> View:
    """Lay out a comparison: arms side by side, or steps that build on one another."""
    *rest, last = [f"{name} ({suite['n']} prompts)" for name, suite in comparison["suites"].items()] or [""]
    suites = f"{', '.join(rest)} and {last}" if rest else last
    if "chains" in comparison:
        names = ", ".join(step["name"] for step in comparison["steps"])
        lead = f"{names}: steps that build on one another, measured on {suites}."
        tables = [_steps_table(comparison), _chains_table(comparison), _kept_table(comparison["kept"])]
        return View(finding.of_chains(comparison), lead, with_rows(tables), [], "steps")
    arms = comparison["arms"]
    lead = f"{', '.join(arm['name'] for arm in arms)}: compared on {suites}."
    tables = [
        _scores_table(comparison),
        _closeness_table(arms),
        _rivals_table(comparison),
        *map(_further_table, comparison["further"]),
        _settings_table(comparison),
    ]
    return View(finding.of_arms(comparison), lead, with_rows(tables), [_runs_table(arms)], "frontier")


def with_rows(tables: list[Table]) -> list[Table]:
    return [table for table in tables if table.rows]


def by_state(estimates: Mapping[str, dict | None], unit: Unit = SCORE) -> list[str]:
    """Return one cell for base, tuned and recovered each."""
    return [cell(estimates.get(state), unit) for state in STATES]


def distances(near: dict[str, Any], name: str = "distance") -> list[str]:
    """Return each state's distance to base, or one direction of it, in nats."""
    return by_state({state: near[state].get(name) for state in STATES}, NATS)


def writing_rows(writing: dict[str, dict]) -> list[list[str]]:
    """Return label and cell of each state for every measure that one of them has; see `results.writing`.

    The script is left out where all answers keep to it.
    """
    rows = []
    for measure, (label, unit) in WRITING.items():
        found = {state: written[measure] for state, written in writing.items() if measure in written}
        if found and not (measure == "script" and all(e["value"] == 1 for e in found.values())):
            rows.append([label, *by_state(found, unit)])
    return rows


def different_raw(outcome: dict[str, Any], key: str = "recovery") -> str:
    """Format R from tuned alone, or D from base, if the one from the floor differs in print; else empty."""
    ratios = [outcome[k] and interval(outcome[k]) for k in (key, f"{key}_raw")]
    return ratios[1] if all(ratios) and ratios[0] != ratios[1] else ""


def _by_role(row: dict[str, Any], unit: Unit = SCORE) -> list[str]:
    return [cell(row[role], unit) for role in HEADLINE_ROLES]


def _outcome(row: dict[str, Any]) -> list[str]:
    """Return the scores of an arm or a run, its ratios and its status."""
    return [*_by_role(row), cell(row["recovery"]), cell(row["domain_retention"]), row["status"]]


def _setting(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _with_seeds(row: dict[str, Any]) -> str:
    return f"{row['name']}\n{row['seeds']} seed{'s' * (row['seeds'] > 1)}"


def _scores_table(comparison: dict[str, Any]) -> Table:
    names = [f"{role}\n{comparison['headline'][role] or 'no suite'}" for role in HEADLINE_ROLES]
    rows = []
    for row in comparison["references"]:
        name = row["name"] + (f"\nmean of {row['results']}" if row["results"] > 1 else "")
        rows.append([name, *_by_role(row), "", "", ""])
    rows += [[_with_seeds(arm), *_outcome(arm)] for arm in comparison["arms"]]
    caption = (
        "Brackets are 95 % intervals over prompts, and over seeds if an arm has several. R is "
        "the share of the lost score that came back, D the share of the domain gain that was kept. A "
        "missing R or D is not measured, or the loss or gain in its denominator is too small. Both count "
        "from the floor, where that is higher than the start."
    )
    return Table("Scores", ["arm", *names, "R", "D", "status"], rows, caption)


def _closeness_table(arms: list[dict[str, Any]]) -> Table:
    rows = [[_with_seeds(arm), *distances(near), cell(near)] for arm in arms if (near := arm["closeness"])]
    caption = (
        "The distance of each state from base, in nats per token, on answers at temperature 1; base's own is "
        "noise. C is the share of the distance that is gone, counted from tuned or from base's answers to "
        "other prompts, whichever is nearer."
    )
    return Table("Closeness to base", ["arm", *STATES, "C"], rows, caption)


def _rivals_table(comparison: dict[str, Any]) -> Table:
    rivals = [row for row in comparison["against_first"] if row["retention"] or row["domain"]]
    rows = [[row["name"], *_by_role(row, CHANGE)] for row in rivals]
    caption = (
        "Differences on the same prompts, in points. If an interval contains zero, the difference may be "
        "chance. Each interval stands for itself: of twenty, one may exclude zero by chance."
    )
    title = f"{comparison['arms'][0]['name']} minus each other arm"
    return Table(title, ["arm", *HEADLINE_ROLES], rows, caption)


def _further_table(suite: dict[str, Any]) -> Table:
    columns, rows = ["arm", *STATES], [[arm["name"], *by_state(arm)] for arm in suite["arms"]]
    if suite["role"] == "domain":
        columns.append("D")
        rows = [[*row, cell(arm["domain_retention"])] for row, arm in zip(rows, suite["arms"], strict=True)]
    words = metric_words(suite["metric"])
    caption = f"Score: {words}, on {suite['n']} prompts. This suite does not affect the status."
    return Table(f"{suite['name']}, {suite['role']}", columns, rows, caption)


def _settings_table(comparison: dict[str, Any]) -> Table:
    names = [arm["name"] for arm in comparison["arms"]]
    rows = []
    for key, values in comparison["differences"].items():
        rows.append([key, *(_setting(values[name]) if name in values else MISSING for name in names)])
    return Table("Settings that differ", ["setting", *names], rows, "Seeds, names and gates are left out.")


def _runs_table(arms: list[dict[str, Any]]) -> Table:
    rows = []
    for arm in arms:
        for run in arm["runs"]:
            seeds = ", ".join(f"{key} {_setting(value)}" for key, value in run["seeds"].items())
            rows.append([f"{run['path']}\n{seeds}", arm["name"], *_outcome(run)])
    columns = ["run", "arm", *HEADLINE_ROLES, "R", "D", "status"]
    return Table("Runs", columns, rows, "Each run by itself, with the numbers of its own report.")


def _steps_table(comparison: dict[str, Any]) -> Table:
    suites = comparison["suites"]
    rows = [["base", *(cell(comparison["base"].get(name), SCORE) for name in suites)]]
    for step in comparison["steps"]:
        rows.append([_with_seeds(step), *(cell(step["scores"].get(name), SCORE) for name in suites)])
    caption = (
        "The model's scores after each step. Brackets are 95 % intervals over prompts, and "
        "over seeds if there are several."
    )
    columns = ["step", *(f"{name}\n{suite['role']}" for name, suite in suites.items())]
    return Table("After each step", columns, rows, caption)


def _chains_table(comparison: dict[str, Any]) -> Table:
    figures = ("average", "forgetting", "backward_transfer")
    rows = []
    for chain in comparison["chains"]:
        rows.append([chain["name"], *[cell(chain[figure], SCORE) for figure in figures]])
    for change in comparison["differences"]:
        name = f"{change['of']}\nminus {change['against']}"
        rows.append([name, *(cell(change[k], CHANGE) for k in figures[:2]), ""])
    caption = (
        "Average: the mean of all suites at the end. Forgetting: how far they lie below their best score "
        "before the last step, including base's retention. Backward transfer: how far earlier domains have "
        "moved since they were learned. Differences are in points, paired by prompt and seed."
    )
    return Table("Chains", ["chain", "average", "forgetting", "backward transfer"], rows, caption)


def _kept_table(kept: list[dict[str, Any]]) -> Table:
    rows = [[row["step"], row["teacher"], row["suite"], cell(row["kept"])] for row in kept]
    caption = (
        "The step's share of the teacher's gain over base, or over a higher floor, on the suite that the "
        "teacher learned."
    )
    return Table("Kept from each teacher", ["step", "teacher", "suite", "kept"], rows, caption)
