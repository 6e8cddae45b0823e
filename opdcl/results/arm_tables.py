"""Lay out a comparison of arms: its finding in one sentence, its tables and its figure."""

from __future__ import annotations

import json
from typing import Any

from opdcl.results import tables
from opdcl.results.arm_scores import ArmRow, Comparison, Further, Reference
from opdcl.results.format import CHANGE, NATS, SCORE, SHARE, Unit, cell, interval, metric_words
from opdcl.results.intervals import Estimate
from opdcl.results.status import HEADLINE_ROLES, STATES
from opdcl.results.tables import IN_DOMAIN_STYLE, MISSING, Table, View

WHERE = {"retention": " in retention", "domain": " on the domain"}


def view(comparison: Comparison) -> View:
    """Lay out a comparison of arms."""
    names = ", ".join(arm.name for arm in comparison.arms)
    all_tables = [
        _scores_table(comparison),
        _closeness_table(comparison.arms),
        _rivals_table(comparison),
        *map(_further_table, comparison.further),
        _settings_table(comparison),
    ]
    return View(
        finding=finding(comparison),
        lead=f"{names}: compared on {tables.named(comparison.suites)}.",
        tables=tables.with_rows(all_tables),
        details=[_runs_table(comparison.arms)],
    )


def figure(comparison: Comparison) -> str | None:
    """Return a figure of references and arms, retention against domain."""
    from opdcl.results import plots

    styles = plots.arm_styles()
    marks = []
    rows: list[Reference | ArmRow] = [*comparison.references, *comparison.arms]
    for row in rows:
        if len(row.scores) < len(HEADLINE_ROLES):
            continue
        if isinstance(row, Reference):
            shape, colour = plots.SHAPES[row.state], row.state
        else:
            shape, colour = next(styles)
        marks.append(plots.Mark(row.name, row.scores["domain"], row.scores["retention"], shape, colour))
    return plots.frontier(comparison.headline, marks)


def finding(comparison: Comparison) -> str:
    """Compare the first arm with every other one, in retention and on the domain, in one sentence."""
    first, rivals = comparison.arms[0], comparison.against_first
    if not rivals:
        return _alone(first)
    clauses: list[str] = []
    for role in HEADLINE_ROLES:
        changes = [rival.changes[role] for rival in rivals if role in rival.changes]
        if changes:
            clause = tables.compared(changes[0]) if len(rivals) == 1 else _count(changes)
            clauses.append(clause.format("it" if clauses else rivals[0].name) + WHERE[role])
    if not clauses:
        return "Not measured yet"
    if all(clause.startswith("not shown") for clause in clauses):
        others = rivals[0].name if len(rivals) == 1 else f"the {len(rivals)} other arms"
        return f"No difference between {first.name} and {others} is shown"
    return f"{first.name} is " + "; ".join(clauses)


def _alone(arm: ArmRow) -> str:
    """Sum up the only arm: the same run with several seeds."""
    sentence = f"{arm.seeds} seeds: {arm.findings.status}"
    if arm.findings.recovery:
        sentence += f", R = {interval(arm.findings.recovery)}"
    if arm.findings.domain_retention:
        sentence += f", D = {interval(arm.findings.domain_retention)}"
    return sentence


def _count(changes: list[Estimate]) -> str:
    above = sum(change.low > 0 for change in changes)
    below = sum(change.high < 0 for change in changes)
    if not above and not below:
        return f"not shown to differ from any of {len(changes)} other arms"
    return f"above {above or 'none'} and below {below or 'none'} of {len(changes)} other arms"


def _label(arm: ArmRow) -> str:
    return tables.with_seeds(arm.name, arm.seeds)


def _cells(scores: dict[str, Estimate], unit: Unit = SCORE) -> list[str]:
    return [cell(scores.get(role), unit) for role in HEADLINE_ROLES]


def _setting(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _scores_table(comparison: Comparison) -> Table:
    names = [f"{role}\n{comparison.headline[role] or 'no suite'}" for role in HEADLINE_ROLES]
    rows = []
    for reference in comparison.references:
        mean_of = f"\nmean of {reference.results}" if reference.results > 1 else ""
        rows.append([reference.name + mean_of, *_cells(reference.scores), "", "", ""])
    for arm in comparison.arms:
        ratios = [cell(arm.findings.recovery), cell(arm.findings.domain_retention)]
        rows.append([_label(arm), *_cells(arm.scores), *ratios, arm.findings.status])
    caption = (
        "Brackets are 95 % intervals over prompts, and over seeds if an arm has several. R is "
        "the share of the lost score that came back, D the share of the domain gain that was kept. A "
        "missing R or D is not measured, the run has no recovery, or the loss or gain in its denominator is "
        "too small. Both count from the floor, where that is higher than the start."
    )
    return Table("Scores", ["arm", *names, "R", "D", "status"], rows, caption)


def _closeness_table(arms: list[ArmRow]) -> Table:
    rows = []
    for arm in arms:
        if arm.closeness:
            near = arm.closeness
            last = next(state for state in reversed(STATES) if near.states.get(state))
            shown = [cell(near.states[last]["median"], NATS), cell(near.states[last]["domain_manner"], SHARE)]
            rows.append([_label(arm), *tables.distances(near), *shown, cell(near.c)])
    caption = (
        "The mean distance of each state from base, in nats per token, on answers at temperature 1; that of "
        "base is noise. Median and share in domain style are the last model's. C is the share of the "
        "distance that is gone, counted from tuned or from base's answers to unrelated prompts, whichever is "
        "nearer."
    )
    return Table("Closeness to base", ["arm", *STATES, "median", IN_DOMAIN_STYLE, "C"], rows, caption)


def _rivals_table(comparison: Comparison) -> Table:
    rows = [
        [rival.name, *_cells(rival.changes, CHANGE)] for rival in comparison.against_first if rival.changes
    ]
    caption = (
        "Differences on the same prompts, in points. If an interval contains zero, the difference may be "
        "chance. Each interval stands for itself: of twenty, one may exclude zero by chance."
    )
    title = f"{comparison.arms[0].name} minus each other arm"
    return Table(title, ["arm", *HEADLINE_ROLES], rows, caption)


def _further_table(suite: Further) -> Table:
    columns, rows = ["arm", *STATES], [[arm.name, *tables.by_state(arm.states)] for arm in suite.arms]
    if suite.role == "domain":
        columns.append("D")
        for row, arm in zip(rows, suite.arms, strict=True):
            row.append(cell(arm.domain_retention))
    words = metric_words(suite.metric)
    caption = f"Score: {words}, on {suite.n} prompts. This suite does not affect the status."
    return Table(f"{suite.name}, {suite.role}", columns, rows, caption)


def _settings_table(comparison: Comparison) -> Table:
    names = [arm.name for arm in comparison.arms]
    rows = []
    for key, values in comparison.differences.items():
        rows.append([key, *[_setting(values[name]) if name in values else MISSING for name in names]])
    return Table("Settings that differ", ["setting", *names], rows, "Seeds, names and gates are left out.")


def _runs_table(arms: list[ArmRow]) -> Table:
    rows = []
    for arm in arms:
        for run in arm.runs:
            seeds = ", ".join(f"{key} {_setting(value)}" for key, value in run.seeds.items())
            ratios = [cell(run.recovery), cell(run.domain_retention)]
            rows.append([f"{run.path}\n{seeds}", arm.name, *_cells(run.scores), *ratios, run.status])
    columns = ["run", "arm", *HEADLINE_ROLES, "R", "D", "status"]
    return Table("Runs", columns, rows, "Each run by itself, with the numbers of its own report.")
