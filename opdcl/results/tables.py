"""Lay out a comparison as cells, tables and one figure, for the terminal, Markdown and HTML."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from opdcl.results import finding
from opdcl.results.format import interval, percent, points, span
from opdcl.results.scores import HEADLINE_ROLES, STATES, metric_words

MISSING = "\N{EN DASH}"

FRONTIER = (
    "Each mark is one arm. The arms with no other one both above and to the right of them form the frontier: "
    "there, more retention costs domain score, and the other way round. An arm inside the frontier is beaten "
    "on both."
)

# What is told of how answers are written, and its label.
WRITING = {
    "ended": "answers that end",
    "tokens": "tokens per answer",
    "repetition": "repeated 4-grams",
    "script": "in the prompt's script",
}
CHAINS = (
    "Each panel is one suite, each line one chain of steps, and all chains begin at base. A chain forgets a "
    "suite if it ends below the best score that it had there before."
)


class Table(NamedTuple):
    """A table; the second line of a cell is its interval or another small addition."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str


class Figure(NamedTuple):
    """A figure; `plot` names the function of `opdcl.results.plots` that draws it."""

    title: str
    plot: str
    caption: str
    explanation: str = ""
    """How to read it, in more than a caption."""


class View(NamedTuple):
    """A comparison laid out, without its notes."""

    finding: str
    """What was found, in one sentence."""
    lead: str
    """One sentence that says what is compared."""
    tables: list[Table]
    details: list[Table]
    """Further tables, for which a terminal has no room."""
    figure: Figure


def view(comparison: dict[str, Any]) -> View:
    """Lay out a comparison: arms side by side, or steps that build on one another."""
    chains = "chains" in comparison
    names = ", ".join(row["name"] for row in comparison["steps" if chains else "arms"])
    if chains:
        caption = "A falling line means forgetting. Bars are 95 % intervals."
        lead = f"{names}: steps that build on one another, measured on {_suite_names(comparison)}."
        figure = Figure("From step to step", "steps", caption, CHAINS)
        return View(finding.of_chains(comparison), lead, _chain_tables(comparison), [], figure)
    caption = (
        "Up and to the right is better. Bars are 95 % intervals. Arms that coincide lie inside one another."
    )
    lead = f"{names}: compared on {_suite_names(comparison)}."
    figure = Figure("Retention against domain", "frontier", caption, FRONTIER)
    tables, details = _arm_tables(comparison)
    return View(finding.of_arms(comparison), lead, tables, details, figure)


def score_cell(estimate: dict | None) -> str:
    """Format a score in percent over its interval; empty without an estimate."""
    return f"{percent(estimate['value'])}\n{span(estimate)}" if estimate else ""


def writing_rows(writing: dict[str, dict]) -> list[list[str]]:
    """Return label and cell of each state for every measure that one of them has; see `results.writing`.

    The script is left out where all answers keep to it.
    """
    rows = []
    for measure, label in WRITING.items():
        found = [writing.get(state, {}).get(measure) for state in STATES]
        if any(found) and not (measure == "script" and all(e["value"] == 1 for e in found if e)):
            rows.append([label, *(length_cell(e) if measure == "tokens" else score_cell(e) for e in found)])
    return rows


def length_cell(estimate: dict | None) -> str:
    """Format a mean length over its interval; empty without an estimate."""
    if not estimate:
        return ""
    value, low, high = (f"{estimate[key]:.0f}" for key in ("value", "low", "high"))
    return f"{value}\n[{low}, {high}]"


def distance_cell(estimate: dict | None) -> str:
    """Format a distance in nats over its interval; empty without an estimate."""
    if not estimate:
        return ""
    value, low, high = (f"{max(estimate[key], 0.0):.3f}" for key in ("value", "low", "high"))
    return f"{value}\n[{low}, {high}]"


def ratio_cell(estimate: dict | None) -> str:
    """Format R or D over its interval; empty without an estimate."""
    return interval(estimate).replace(" [", "\n[", 1) if estimate else ""


def closeness_cell(near: dict) -> str:
    """Format C over its interval; empty if there is none."""
    return "" if near["value"] is None else ratio_cell(near)


def different_raw(outcome: dict[str, Any], key: str = "recovery") -> str:
    """Format R from tuned alone, or D from base, if the one from the floor differs in print; else empty."""
    ratios = [outcome[k] and interval(outcome[k]) for k in (key, f"{key}_raw")]
    return ratios[1] if all(ratios) and ratios[0] != ratios[1] else ""


def _points_cell(estimate: dict | None) -> str:
    if not estimate:
        return ""
    return f"{points(estimate['value'])}\n[{points(estimate['low'])}, {points(estimate['high'])}]"


def _setting_cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _seed_count(row: dict[str, Any]) -> str:
    return f"{row['name']}\n{row['seeds']} seed{'s' * (row['seeds'] > 1)}"


def _suite_names(comparison: dict[str, Any]) -> str:
    """List the suites with their sizes."""
    *rest, last = [f"{name} ({suite['n']} prompts)" for name, suite in comparison["suites"].items()] or [""]
    return f"{', '.join(rest)} and {last}" if rest else last


def _arm_tables(comparison: dict[str, Any]) -> tuple[list[Table], list[Table]]:
    """Return the main tables, and those for which a terminal has no room."""
    tables = [_scores_table(comparison)]
    if any(row["closeness"] for row in comparison["arms"]):
        tables.append(_closeness_table(comparison["arms"]))
    if rivals := [row for row in comparison["against_first"] if row["retention"] or row["domain"]]:
        first = comparison["arms"][0]["name"]
        rows = [[row["name"], *(_points_cell(row[role]) for role in HEADLINE_ROLES)] for row in rivals]
        caption = (
            "Differences on the same prompts, in points. If an interval contains zero, the difference may be "
            "chance. Each interval stands for itself: of twenty, one may exclude zero by chance."
        )
        tables.append(Table(f"{first} minus each other arm", ["arm", *HEADLINE_ROLES], rows, caption))
    if any(row["above_alpha_curve"] for row in comparison["arms"]):
        tables.append(_curve_table(comparison))
    for suite in comparison["further"]:
        ratio = ["D"] if suite["role"] == "domain" else []
        rows = [
            [
                arm["name"],
                *(score_cell(arm[s]) for s in STATES),
                *(ratio_cell(arm["domain_retention"]) for _ in ratio),
            ]
            for arm in suite["arms"]
        ]
        words = metric_words(suite["metric"])
        caption = f"Score: {words}, on {suite['n']} prompts. This suite does not affect the status."
        tables.append(Table(f"{suite['name']}, {suite['role']}", ["arm", *STATES, *ratio], rows, caption))
    if comparison["differences"]:
        names = [row["name"] for row in comparison["arms"]]
        rows = [
            [key, *(_setting_cell(values[name]) if name in values else MISSING for name in names)]
            for key, values in comparison["differences"].items()
        ]
        caption = "Seeds, names and gates are left out."
        tables.append(Table("Settings that differ", ["setting", *names], rows, caption))
    return tables, [_runs_table(comparison)]


def _closeness_table(rows: list[dict[str, Any]]) -> Table:
    cells = [
        [_seed_count(row), *(distance_cell(near[s].get("distance")) for s in STATES), closeness_cell(near)]
        for row in rows
        if (near := row["closeness"])
    ]
    caption = (
        "The distance of each state from base, in nats per token, on answers at temperature 1; base's own is "
        "noise. C is the share of the distance that is gone, counted from tuned or from base's answers to "
        "other prompts, whichever is nearer."
    )
    return Table("Closeness to base", ["arm", *STATES, "C"], cells, caption)


def _scores_table(comparison: dict[str, Any]) -> Table:
    headline = comparison["headline"]
    columns = ["arm", *(f"{role}\n{headline[role] or 'no suite'}" for role in HEADLINE_ROLES)]
    rows = []
    for row in comparison["references"]:
        name = row["name"] + (f"\nmean of {row['results']}" if row["results"] > 1 else "")
        rows.append([name, *(score_cell(row[role]) for role in HEADLINE_ROLES), "", "", ""])
    rows += [[_seed_count(row), *_headline_cells(row)] for row in comparison["arms"]]
    caption = (
        "Brackets are 95 % intervals over prompts, and over seeds if an arm has several. R is "
        "the share of the lost score that came back, D the share of the domain gain that was kept. A "
        "missing R or D is not measured, or the loss or gain in its denominator is too small. Both count "
        "from the floor, where that is higher than the start."
    )
    return Table("Scores", [*columns, "R", "D", "status"], rows, caption)


def _headline_cells(row: dict[str, Any]) -> list[str]:
    ratios = [ratio_cell(row[key]) for key in ("recovery", "domain_retention")]
    return [*(score_cell(row[role]) for role in HEADLINE_ROLES), *ratios, row["status"]]


def _curve_table(comparison: dict[str, Any]) -> Table:
    keys = ("at_its_domain", "retention", "domain")
    rows = [
        [row["name"], *(_points_cell(above[key]) for key in keys), above["arm"]]
        for row in comparison["arms"]
        if (above := row["above_alpha_curve"])
    ]
    caption = (
        "The alpha-curve consists of straight lines from base, over the tuned adapter scaled without "
        "training, to tuned: two models can be mixed by choosing between their answers at random. The first "
        "column is the distance in retention from the curve at the arm's own domain score. The next two are "
        "the differences, on the same prompts, to one point of the curve. If an interval contains zero, the "
        "difference may be chance."
    )
    columns = ["arm", "retention\nat its domain", "retention\nto the point", "domain\nto the point", "point"]
    return Table("Above the alpha-curve, in points", columns, rows, caption)


def _runs_table(comparison: dict[str, Any]) -> Table:
    rows = []
    for row in comparison["arms"]:
        for run in row["runs"]:
            seeds = ", ".join(f"{key} {_setting_cell(value)}" for key, value in run["seeds"].items())
            rows.append([f"{run['path']}\n{seeds}", row["name"], *_headline_cells(run)])
    columns = ["run", "arm", "retention", "domain", "R", "D", "status"]
    return Table("Runs", columns, rows, "Each run by itself, with the numbers of its own report.")


def _chain_tables(comparison: dict[str, Any]) -> list[Table]:
    """Return the matrix of scores, the chains with their differences, and what is kept from each teacher."""
    suites, base = comparison["suites"], comparison["base"]
    rows = [["base", *(score_cell(base.get(name)) for name in suites)]]
    for step in comparison["steps"]:
        rows.append([_seed_count(step), *(score_cell(step["scores"].get(name)) for name in suites)])
    caption = (
        "The model's scores after each step. Brackets are 95 % intervals over prompts, and "
        "over seeds if there are several."
    )
    columns = ["step", *(f"{name}\n{suite['role']}" for name, suite in suites.items())]
    tables = [Table("After each step", columns, rows, caption)]
    if comparison["chains"]:
        tables.append(_chains_table(comparison))
    if comparison["kept"]:
        keys = ("step", "teacher", "suite")
        rows = [[*(row[key] for key in keys), ratio_cell(row["kept"])] for row in comparison["kept"]]
        caption = (
            "The step's share of the teacher's gain over base, or over a higher floor, on the suite that the "
            "teacher learned."
        )
        tables.append(Table("Kept from each teacher", ["step", "teacher", "suite", "kept"], rows, caption))
    return tables


def _chains_table(comparison: dict[str, Any]) -> Table:
    figures = ("average", "forgetting", "backward_transfer")
    rows = [[chain["name"], *(score_cell(chain[key]) for key in figures)] for chain in comparison["chains"]]
    rows += [
        [f"{d['of']}\nminus {d['against']}", _points_cell(d["average"]), _points_cell(d["forgetting"]), ""]
        for d in comparison["differences"]
    ]
    caption = (
        "Average: the mean of all suites at the end. Forgetting: how far they lie below their best score "
        "before the last step, including base's retention. Backward transfer: how far earlier domains have "
        "moved since they were learned. Differences are in points, paired by prompt and seed."
    )
    return Table("Chains", ["chain", "average", "forgetting", "backward transfer"], rows, caption)
