"""Runs side by side: compared, and written as Markdown, HTML and JSON; or a folder of them, a line each."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from opdcl.errors import UsageError
from opdcl.faults import translate
from opdcl.results import format
from opdcl.results.arms import Arms, Board, Column, Further, compare_arms
from opdcl.results.chains import Chains, build_on_one_another, compare_chains
from opdcl.results.estimates import Verdict
from opdcl.results.format import CHANGE, MISSING, NATS, SCORE, Table, Unit, cell
from opdcl.results.intervals import Estimate
from opdcl.results.measurements import MeasuredSuite, Row
from opdcl.results.render import arms_document, chains_document, render_page, run_document
from opdcl.results.samples import Group, answers_by_run
from opdcl.results.sections import Page
from opdcl.results.status import HEADLINE_ROLES, STATES
from opdcl.results.summary import Results
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.layout import RunDir, owner_of
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
    suites = [
        f"{suite.name} ({len(suite.measured)} prompts)" for suite in board.suites.values() if suite.rows
    ]
    measured = " and ".join(filter(None, [", ".join(suites[:-1]), *suites[-1:]]))
    if isinstance(board, Arms):
        heading, how = _difference_of(board), "compared on"
        tables = [_scores_table(board), _closeness_table(board), _rivals_table(board)]
        tables += [*[_further_table(*found) for found in board.further], _settings_table(board)]
    else:
        heading, how = _end_of(board), "steps that build on one another, measured on"
        tables = [_steps_table(board), _chains_table(board), _kept_table(board)]
    return Page(
        name="Comparison",
        verdict=Verdict(heading, f"{names}: {how} {measured}."),
        sections=[table for table in tables if table.rows],
        faults=board.faults,
        notes=board.notes,
    )


def _difference_of(board: Arms) -> str:
    """Compare the first arm with every other one, in retention and on the domain, in one sentence."""
    first, *others = board.columns
    if not others:
        return _alone(first)
    clauses: list[str] = []
    for role, where in WHERE.items():
        changes = [found[role] for found in board.against_first.values() if role in found]
        if changes:
            clause = _compared(changes[0]) if len(others) == 1 else _count(changes)
            clauses.append(clause.format("it" if clauses else others[0].name) + where)
    if not clauses:
        return "Not measured yet"
    if all(clause.startswith("not shown") for clause in clauses):
        rest = others[0].name if len(others) == 1 else f"the {len(others)} other arms"
        return f"No difference between {first.name} and {rest} is shown"
    return f"{first.name} is " + "; ".join(clauses)


def _alone(arm: Column) -> str:
    """Sum up the only arm: the same run with several seeds."""
    ratios = {"R": arm.findings.recovery, "D": arm.findings.domain_retention}
    known = [f", {name} = {format.interval(ratio)}" for name, ratio in ratios.items() if ratio]
    return f"{arm.seeds} seeds: {arm.findings.status}{''.join(known)}"


def _count(changes: list[Estimate]) -> str:
    above = sum(change.low > 0 for change in changes)
    below = sum(change.high < 0 for change in changes)
    if not above and not below:
        return f"not shown to differ from any of {len(changes)} other arms"
    return f"above {above or 'none'} and below {below or 'none'} of {len(changes)} other arms"


def _end_of(board: Chains) -> str:
    """Name the difference of the first two chains at the end, or what one chain has forgotten."""
    for one, other, average, _ in board.differences:
        if average:
            return f"{one} is {_compared(average).format(other)} at the end, on average over all suites"
    for chain in board.chains:
        if forgetting := chain.figures["forgetting"]:
            if forgetting.low <= 0:
                return f"{chain.name}: no forgetting is shown"
            return f"{chain.name}: {format.points(forgetting.value).lstrip('+')} points are forgotten"
    return "Steps that build on one another"


def _compared(change: Estimate) -> str:
    """Say how far apart two models are; `{}` stands for the second one."""
    size = f"{abs(100 * change.value):.1f} points"
    if change.low > 0:
        return f"{size} above {{}}"
    return f"{size} below {{}}" if change.high < 0 else "not shown to differ from {}"


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
            shown = [cell(last["median"], NATS), cell(last["domain_manner"], format.SHARE), cell(near.c)]
            rows.append([arm.label, *format.distance_cells(near.states, near.n), *shown])
    caption = (
        "The mean distance of each state from base, in nats per token, on answers at temperature 1; that of "
        "base is noise. Median and share in domain style are the last model's. C is the share of the "
        "distance that is gone, counted from tuned or from base's answers to unrelated prompts, whichever is "
        "nearer."
    )
    return Table("Closeness to base", ["arm", *STATES, "median", format.IN_DOMAIN_STYLE, "C"], rows, caption)


def _rivals_table(board: Arms) -> Table:
    rivals = board.against_first.items()
    rows = [[name, *_cells(changes, HEADLINE_ROLES, CHANGE)] for name, changes in rivals if changes]
    caption = (
        "Differences on the same prompts, in points. If an interval contains zero, the difference may be "
        "chance. Each interval stands for itself: of twenty, one may exclude zero by chance."
    )
    title = f"{board.columns[0].name} minus each other arm"
    return Table(title, ["arm", *HEADLINE_ROLES], rows, caption)


def _further_table(suite: MeasuredSuite, scored: list[Further]) -> Table:
    columns = ["arm", *STATES, *(["D"] if suite.role == "domain" else [])]
    rows = [[arm, *format.by_state(states), cell(kept)][: len(columns)] for arm, states, kept in scored]
    words, n = format.metric_words(suite.metric or ""), len(suite.measured)
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


def _steps_table(board: Chains) -> Table:
    suites = [*board.suites]
    rows = [["base", *_cells(board.means(board.base), suites), ""]]
    for step in board.columns:
        rows.append([step.label, *_cells(board.means(step), suites), cell(step.distance, NATS)])
    caption = (
        "The model's scores after each step, and its distance to base in nats per token. Brackets are 95 % "
        "intervals over prompts, and over seeds if there are several."
    )
    named = [f"{name}\n{suite.role}" for name, suite in board.suites.items()]
    return Table("After each step", ["step", *named, "distance\nto base"], rows, caption)


def _chains_table(board: Chains) -> Table:
    rows = [[chain.name, *[cell(found, SCORE) for found in chain.figures.values()]] for chain in board.chains]
    for one, other, *changes in board.differences:
        rows.append([f"{one}\nminus {other}", *[cell(change, CHANGE) for change in changes], ""])
    caption = (
        "Average: the mean at the end of all retention suites and learned domains. Forgetting: how far they "
        "lie below their best score before the last step, including base's retention. Backward transfer: how "
        "far earlier domains have moved since they were learned. Differences are in points, paired by prompt "
        "and seed."
    )
    return Table("Chains", ["chain", "average", "forgetting", "backward transfer"], rows, caption)


def _kept_table(board: Chains) -> Table:
    rows = [[*names, cell(kept)] for *names, kept in board.kept]
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


def list_runs(folder: Path) -> tuple[Table, list[dict[str, Any]]]:
    """Return the runs in a folder, as a table and as plain data, the latest first. A damaged one says so.

    Raises:
        UsageError: There is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", "opdcl run quickstart  # makes runs/quickstart")
    found = []
    for run in map(RunDir, sorted(folder.iterdir())):
        if run.is_run():
            try:
                found.append(_line(run))
            except Exception as fault:  # one folder must not hide the others
                error = translate(fault)
                cells = [str(run.path), f"damaged: {error}", *[MISSING] * 3, ""]
                found.append((cells, {"run": str(run.path), "damaged": str(error)}))
    found.sort(key=lambda line: line[1].get("begun", ""), reverse=True)
    columns = ["run", "state", "R", "D", "distance, nats", "begun"]
    return Table("", columns, [cells for cells, _ in found]), [data for _, data in found]


def _line(run: RunDir) -> tuple[list[str], dict[str, Any]]:
    """Return a run's cells, and its data: R, D and distance as in `opdcl report RUN --json`."""
    results = Results(run)
    summary, state = results.summary, _state_of(results)
    begun, document = run.read_manifest().get("created") or "", run_document(summary)
    distance = None
    if near := summary.closeness:
        distance = next(found["distance"] for state in reversed(STATES) if (found := near.states[state]))
    ratios = [summary.findings.recovery, summary.findings.domain_retention]
    cells = [str(run.path), state, *(format.value(ratio) if ratio else MISSING for ratio in ratios)]
    cells.append(format.value(distance, NATS) if distance else MISSING)
    cells.append(f"{datetime.fromisoformat(begun):%Y-%m-%d %H:%M}" if begun else "")
    data = {"run": str(run.path), "state": state, "begun": begun}
    data |= {key: document[key] for key in ("verdict", "recovery", "domain_retention")}
    return cells, data | {"distance": distance.value if distance else None}


def _state_of(results: Results) -> str:
    """Return what a run is doing, where it stopped, or which adapter it has last."""
    is_running = bool(owner_of(results.run))
    for stage in results.run.stages():
        if not stage.is_done():
            return f"{'running' if is_running else 'stopped in'} {stage.name}, {stage.progress()}"
    if is_running:
        return "running eval"
    if results.alone:
        return "base alone"
    return next(reversed(results.run.adapters()), "not begun")
