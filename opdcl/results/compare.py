"""Compare runs, and write the comparison as Markdown, HTML and JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from opdcl.errors import UsageError
from opdcl.results.arms import Arms, Board, Column, compare_arms
from opdcl.results.chains import Chains, build_on_one_another, compare_chains
from opdcl.results.estimates import Verdict
from opdcl.results.format import (
    CHANGE,
    IN_DOMAIN_STYLE,
    MISSING,
    NATS,
    SCORE,
    SHARE,
    Table,
    Unit,
    by_state,
    cell,
    distance_cells,
    interval,
    metric_words,
    points,
    with_rows,
)
from opdcl.results.intervals import Estimate
from opdcl.results.measurements import MeasuredSuite, Row
from opdcl.results.render import arms_document, chains_document, render_page
from opdcl.results.samples import Group, answers_by_run
from opdcl.results.sections import Page
from opdcl.results.status import HEADLINE_ROLES, STATES
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.layout import RunDir
from opdcl.sanitize import harmless

Compared = Arms | Chains

WHERE = {"retention": " in retention", "domain": " on the domain"}

# Of how many runs the page has answers: more have no room beside one another.
MOST_RUNS = 6


def compare_runs(runs: Sequence[RunDir]) -> Compared:
    """Return the comparison of two or more runs.

    Runs that build on one another are compared step by step (`opdcl.results.chains`).

    Raises:
        UsageError: A run is named twice, has no results, or was not measured like the others.
    """
    if len(runs) < 2:
        hint = "opdcl compare RUN RUN; opdcl report RUN shows one"
        raise UsageError("a comparison needs at least two runs", hint)
    seen = set()
    for run in runs:
        if run.path.resolve() in seen:
            raise UsageError(f"{run.path} is named twice", "name each run once")
        seen.add(run.path.resolve())
    return compare_chains(runs) if build_on_one_another(runs) else compare_arms(runs)


def plain(board: Compared) -> dict[str, Any]:
    """Return a comparison with the stable keys of `opdcl compare --json`."""
    document = chains_document(board) if isinstance(board, Chains) else arms_document(board)
    # Names and settings come from outside; a file cannot hold a lone surrogate.
    return dict(json.loads(harmless(json.dumps(document, ensure_ascii=False))))


def refuse_folder(folder: Path) -> None:
    """Refuse a run directory, and a path where no folder can be made, before anything is computed."""
    existing = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    if not existing.is_dir():
        raise UsageError(f"{existing} is a file", "choose another folder with -o")
    if RunDir(folder).is_run():
        raise UsageError(
            f"{folder} is a run directory, and keeps no comparison", "choose another folder with -o"
        )


def write_comparison(board: Compared, folder: Path) -> list[Path]:
    """Write `compare.md`, `compare.html` and `compare.json` into a folder; return their paths."""
    page, svg, left_out = comparison_page(board), None, []
    if isinstance(board, Arms):
        page, svg = replace(page, answers=_answers(board)), _figure(board)
        left_out = [arm.name for arm in board.columns[MOST_RUNS:]]
    more = {"svg": svg, "left_out": left_out, "several": len(board.columns) > 1}
    text, html, data = (folder / f"compare.{ending}" for ending in ("md", "html", "json"))
    write_atomic(text, render_page("page.md", page, form="compare"))
    write_atomic(html, render_page("page.html", page, reports=_reports(board, folder), **more))
    write_json(data, plain(board))
    return [text, html, data]


def _reports(board: Board, folder: Path) -> dict[str, str]:
    """Return run -> link to its report, as seen from the folder, for runs that have one."""
    links = {}
    for member in (member for column in board.columns for member in column.members):
        report = member.run.reports[1]
        if report.is_file():
            place = os.path.relpath(report.resolve(), folder.resolve())
            links[member.path] = quote(os.fsencode(place))
    return links


def comparison_page(board: Compared) -> Page:
    """Lay out a comparison: arms side by side, or steps that build on one another."""
    names = ", ".join(column.name for column in board.columns)
    if isinstance(board, Arms):
        heading, how = _difference_of(board), "compared on"
        tables = [_scores_table(board), _closeness_table(board), _rivals_table(board)]
        tables += [*[_further_table(board, suite) for suite in board.further], _settings_table(board)]
    else:
        heading, how = _end_of(board), "steps that build on one another, measured on"
        tables = [_steps_table(board), _chains_table(board), _kept_table(board)]
    return Page(
        name="Comparison",
        verdict=Verdict(heading, f"{names}: {how} {board.measured}."),
        sections=with_rows(tables),
        faults=board.faults,
        notes=board.notes,
    )


def _difference_of(board: Arms) -> str:
    """Compare the first arm with every other one, in retention and on the domain, in one sentence."""
    first, *others = board.columns
    if not others:
        return _alone(first)
    clauses: list[str] = []
    for role in HEADLINE_ROLES:
        changes = [found[role] for found in board.against_first.values() if role in found]
        if changes:
            clause = _compared(changes[0]) if len(others) == 1 else _count(changes)
            clauses.append(clause.format("it" if clauses else others[0].name) + WHERE[role])
    if not clauses:
        return "Not measured yet"
    if all(clause.startswith("not shown") for clause in clauses):
        rest = others[0].name if len(others) == 1 else f"the {len(others)} other arms"
        return f"No difference between {first.name} and {rest} is shown"
    return f"{first.name} is " + "; ".join(clauses)


def _alone(arm: Column) -> str:
    """Sum up the only arm: the same run with several seeds."""
    ratios = {"R": arm.findings.recovery, "D": arm.findings.domain_retention}
    known = [f", {name} = {interval(ratio)}" for name, ratio in ratios.items() if ratio]
    return f"{arm.seeds} seeds: {arm.findings.status}{''.join(known)}"


def _count(changes: list[Estimate]) -> str:
    above = sum(change.low > 0 for change in changes)
    below = sum(change.high < 0 for change in changes)
    if not above and not below:
        return f"not shown to differ from any of {len(changes)} other arms"
    return f"above {above or 'none'} and below {below or 'none'} of {len(changes)} other arms"


def _setting(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _scores_table(board: Arms) -> Table:
    rows = []
    for reference in board.references:
        mean_of = f"\nmean of {reference.seeds}" if reference.seeds > 1 else ""
        scores = _cells(board.means(reference), HEADLINE_ROLES)
        rows.append([reference.name + mean_of, *scores, "", "", ""])
    for arm in board.columns:
        ratios = [cell(arm.findings.recovery), cell(arm.findings.domain_retention)]
        rows.append([arm.label, *_cells(board.means(arm), HEADLINE_ROLES), *ratios, arm.findings.status])
    caption = (
        "Brackets are 95 % intervals over prompts, and over seeds if an arm has several. R is "
        "the share of the lost score that came back, D the share of the domain gain that was kept. A "
        "missing R or D is not measured, the run has no recovery, or the loss or gain in its denominator is "
        "too small. Both count from the floor, where that is higher than the start."
    )
    names = [f"{role}\n{name or 'no suite'}" for role, name in board.headline.items()]
    return Table("Scores", ["arm", *names, "R", "D", "status"], rows, caption)


def _closeness_table(board: Arms) -> Table:
    rows = []
    for arm in board.columns:
        if near := arm.closeness:
            last = next(near.states[state] for state in reversed(STATES) if near.states.get(state))
            shown = [cell(last["median"], NATS), cell(last["domain_manner"], SHARE), cell(near.c)]
            rows.append([arm.label, *distance_cells(near.states, near.n), *shown])
    caption = (
        "The mean distance of each state from base, in nats per token, on answers at temperature 1; that of "
        "base is noise. Median and share in domain style are the last model's. C is the share of the "
        "distance that is gone, counted from tuned or from base's answers to unrelated prompts, whichever is "
        "nearer."
    )
    return Table("Closeness to base", ["arm", *STATES, "median", IN_DOMAIN_STYLE, "C"], rows, caption)


def _rivals_table(board: Arms) -> Table:
    rivals = board.against_first.items()
    rows = [[name, *_cells(changes, HEADLINE_ROLES, CHANGE)] for name, changes in rivals if changes]
    caption = (
        "Differences on the same prompts, in points. If an interval contains zero, the difference may be "
        "chance. Each interval stands for itself: of twenty, one may exclude zero by chance."
    )
    title = f"{board.columns[0].name} minus each other arm"
    return Table(title, ["arm", *HEADLINE_ROLES], rows, caption)


def _further_table(board: Arms, suite: MeasuredSuite) -> Table:
    is_domain, rows = suite.role == "domain", []
    for arm in board.finished:
        scores, kept = board.on_further(arm, suite)
        rows.append([arm.name, *by_state(scores), *([cell(kept)] if is_domain else [])])
    columns = ["arm", *STATES, *(["D"] if is_domain else [])]
    words, n = metric_words(suite.metric or ""), len(suite.measured)
    caption = f"Score: {words}, on {n} prompts. This suite does not affect the status."
    return Table(f"{suite.name}, {suite.role}", columns, rows, caption)


def _settings_table(board: Arms) -> Table:
    names = [arm.name for arm in board.columns]
    rows = []
    for key, values in board.differences.items():
        rows.append([key, *[_setting(values[name]) if name in values else MISSING for name in names]])
    return Table("Settings that differ", ["setting", *names], rows, "Seeds, names and gates are left out.")


def _figure(board: Arms) -> str | None:
    """Return a figure of references and arms, retention against domain."""
    from opdcl.results import plots

    styles, marks = plots.arm_styles(), []
    for column in (*board.references, *board.columns):
        if len(column.scores) == len(HEADLINE_ROLES):
            is_arm, at = column in board.columns, board.means(column)
            shape, colour = next(styles) if is_arm else (plots.SHAPES[column.state], column.state)
            marks.append(plots.Mark(column.name, at["domain"], at["retention"], shape, colour))
    return plots.frontier({role: suite.plain for role, suite in board.suites.items()}, marks)


def _end_of(board: Chains) -> str:
    """Name the difference of the first two chains at the end, or what one chain has forgotten."""
    for one, other in board.pairs:
        if average := board.differences(one, other)["average"]:
            size = _compared(average).format(other.name)
            return f"{one.name} is {size} at the end, on average over all suites"
    for chain in board.chains:
        if forgetting := board.figures(chain)["forgetting"]:
            if forgetting.low <= 0:
                return f"{chain.name}: no forgetting is shown"
            return f"{chain.name}: {points(forgetting.value).lstrip('+')} points are forgotten"
    return "Steps that build on one another"


def _steps_table(board: Chains) -> Table:
    suites = [*board.suites]
    rows = [["base", *_cells(board.means(board.base), suites), ""]]
    for step in board.columns:
        rows.append([step.label, *_cells(board.means(step), suites), cell(board.distance(step), NATS)])
    caption = (
        "The model's scores after each step, and its distance to base in nats per token. Brackets are 95 % "
        "intervals over prompts, and over seeds if there are several."
    )
    named = [f"{name}\n{suite.role}" for name, suite in board.suites.items()]
    return Table("After each step", ["step", *named, "distance\nto base"], rows, caption)


def _chains_table(board: Chains) -> Table:
    rows = []
    for chain in board.chains:
        rows.append([chain.name, *[cell(figure, SCORE) for figure in board.figures(chain).values()]])
    for one, other in board.pairs:
        changes = board.differences(one, other).values()
        name = f"{one.name}\nminus {other.name}"
        rows.append([name, *[cell(change, CHANGE) for change in changes], ""])
    caption = (
        "Average: the mean at the end of all retention suites and learned domains. Forgetting: how far they "
        "lie below their best score before the last step, including base's retention. Backward transfer: how "
        "far earlier domains have moved since they were learned. Differences are in points, paired by prompt "
        "and seed."
    )
    return Table("Chains", ["chain", "average", "forgetting", "backward transfer"], rows, caption)


def _kept_table(board: Chains) -> Table:
    rows = [[step, teacher, suite, cell(share)] for step, teacher, suite, share in board.kept]
    caption = (
        "The step's share of the teacher's gain over base, or over a higher floor, on the suite that the "
        "teacher learned."
    )
    return Table("Kept from each teacher", ["step", "teacher", "suite", "kept"], rows, caption)


def _answers(board: Arms) -> dict[str, list[Group]]:
    """Return each headline suite's prompts with the answers of base and of the runs' last models.

    Of each arm the first run is shown; of one arm alone, all runs.
    """
    runs = {arm.name: arm.members[0] for arm in board.columns}
    if len(runs) == 1:
        runs = {Path(run.path).name: run for run in board.columns[0].members}
    found = {}
    for role, suite in board.suites.items():
        rows: dict[str, list[Row]] = {}
        for name, run in [*runs.items()][:MOST_RUNS]:
            own = run.headline[role].rows
            if {"base", run.end} <= own.keys() and run.end != "base":
                rows.setdefault("base", own["base"])
                # A run may be called like a model.
                rows[f"{name} (run)" if name in STATES else name] = own[run.end]
        if len(rows) > 2 and (groups := answers_by_run(replace(suite, results={}, rows=rows))):
            found[suite.name] = groups
    return found


def _cells(estimates: Mapping[str, Estimate], names: Sequence[str], unit: Unit = SCORE) -> list[str]:
    return [cell(estimates.get(name), unit) for name in names]


def _compared(change: Estimate) -> str:
    """Say how far apart two models are; `{}` stands for the second one."""
    size = f"{abs(100 * change.value):.1f} points"
    if change.low > 0:
        return f"{size} above {{}}"
    return f"{size} below {{}}" if change.high < 0 else "not shown to differ from {}"
