"""Lay out a run's results for terminal and report: tables, bars of the headline scores, facts at the top."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from opdcl.config.shipped import SHIPPED_DATA
from opdcl.results import format
from opdcl.results.format import CHANGE, Unit, cell, metric_words
from opdcl.results.measurements import section
from opdcl.results.origins import as_named
from opdcl.results.ratios import MARGINS
from opdcl.results.status import HEADLINE_ROLES, NON_INFERIORITY_MARGIN, STATES
from opdcl.results.tables import (
    WRITING,
    Table,
    by_state,
    distance_cells,
    distance_rows,
    of_base_alone,
    writing_rows,
)
from opdcl.rundir.layout import RunDir

if TYPE_CHECKING:
    from opdcl.results.estimates import Scores, Summary
    from opdcl.results.intervals import Estimate
    from opdcl.results.ratios import Closeness

RELATIVE = Unit("{:+.0f}", 100, " %")
MARGIN = f"{100 * NON_INFERIORITY_MARGIN:g}"
WHAT_C_IS = (
    "C is 1 for base, and 0 for a model as far from it as what it is compared with: tuned, or base's answers "
    "to unrelated prompts, whichever is nearer."
)
GROUP_NOTE = "Seen: types of constraints that also occur in the recovery prompts. Unseen: types that do not."
# Where the axis of a pair of bars may end.
AXES = (0.05, 0.1, 0.25, 0.5, 1.0)


def bars(summary: Summary) -> list[dict[str, Any]]:
    """Return one block of bars per headline suite that is measured; positions are in percent of the axis."""
    blocks = []
    for role in HEADLINE_ROLES:
        suite = summary.headline_suite(role)
        if suite is None or not suite.states:
            continue
        highest = max(estimate.high for estimate in suite.states.values())
        axis = next((end for end in AXES if end >= highest), 1.0)
        title = f"{summary.headline[role]}, {metric_words(suite.metric or '')}, {suite.n} prompts"
        shown = ("base",) if summary.alone else STATES
        rows: dict[str, dict[str, Any]] = {state: {} for state in shown}
        for state, estimate in suite.states.items():
            at = {end: _at(value, axis) for end, value in vars(estimate).items()}
            rows[state] = at | {"score": estimate.value}
        floor = suite.floor and _at(suite.floor, axis)
        block = {"role": role, "title": title, "axis": axis, "floor": floor, "rows": rows}
        blocks.append(block | {"lines": [] if format.is_few(suite.n) else ["halo", "span"]})
    return blocks


def _at(score: float, axis: float) -> str:
    return f"{100 * min(max(score / axis, 0), 1):.1f}"


def terminal_tables(summary: Summary) -> list[Table]:
    """Return the score table for a terminal, if there are scores."""
    table = Table("", ["suite", "n", "floor", *STATES], terminal_rows(summary), "")
    return _shown(summary, [table])


def _shown(summary: Summary, tables: list[Table]) -> list[Table]:
    """Return the tables with rows, and with the columns that the run has."""
    return [of_base_alone(table) if summary.alone else table for table in tables if table.rows]


def brief_table(summary: Summary) -> list[Table]:
    """Return what a terminal shows at the end of a run: the headline suites and the distance to base."""
    rows = []
    for role in ("retention", "domain"):
        suite = summary.headline_suite(role)
        if suite and suite.n:
            rows.append([f"{summary.headline[role]}\n{suite.n} prompts", *by_state(suite.states, n=suite.n)])
    if near := summary.closeness:
        rows.append([f"distance to base, nats\n{near.n} requests", *distance_cells(near)])
    return _shown(summary, [Table("", ["", *STATES], rows)])


def terminal_rows(summary: Summary) -> list[list[str]]:
    """Return suite and metric, n, floor, and each state with its interval."""
    rows = []
    for name, suite in summary.suites.items():
        if suite.n:
            floor = "" if suite.floor is None else format.percent(suite.floor)
            rows.append([f"{name}\n{suite.metric}", str(suite.n), floor, *by_state(suite.states, n=suite.n)])
            if suite.role == "retention":
                for label, *cells in writing_rows(suite.writing, suite.n):
                    rows.append([label, "", "", *cells])
    if near := summary.closeness:
        floor = "" if near.floor is None else f"{near.floor:.3f}"
        (label, *means), *others = distance_rows(near)
        rows.append([label, str(near.n), floor, *means])
        rows += [[label, "", "", *cells] for label, *cells in others]
    found = summary.findings
    ratios = {"R": (found.recovery, "retention"), "D": (found.domain_retention, "domain")}
    for label, (ratio, role) in ratios.items():
        if ratio:
            rows.append([label, "", "", "", "", cell(ratio, n=summary.prompts_of(role))])
    return rows


def main_tables(summary: Summary) -> list[Table]:
    """Return the scores, those of each group of prompts, and closeness to base."""
    near = [closeness_table(summary.closeness)] if summary.closeness else []
    if not any(suite.n for suite in summary.suites.values()):
        return near
    rows = []
    for name, suite in summary.suites.items():
        label = f"{name}\n{suite.role}"
        if suite.n:
            label += f": {metric_words(suite.metric or '')}, {suite.size}"
        rows.append([label, *by_state(suite.states, n=suite.n)])
        if suite.role == "retention":
            rows += _writing_rows(name, suite)
    caption = (
        "Brackets are 95 % intervals over prompts, for one training seed. The floor is the score of the best "
        "content-free answer, such as a copy of the prompt; in multiple choice, of a guess. Answers that do "
        "not end were cut at the token limit. A repeated 4-gram is four words in a row that occurred earlier "
        "in the same answer."
    )
    scores = Table("Scores", ["suite", *STATES], rows, caption)
    return _shown(summary, [scores, _groups_table(summary), *near])


def _groups_table(summary: Summary) -> Table:
    rows = []
    for name, (group, found) in summary.groups.items():
        label, ratio = f"{name}\n{group.size}", cell(found.recovery, n=group.n)
        rows.append([label, *by_state(group.states, n=group.n), ratio])
    note = GROUP_NOTE if set(summary.groups) == {"seen", "unseen"} else ""
    columns = [summary.headline["retention"] or "", *STATES, "R"]
    return Table("Scores by group of prompts", columns, rows, note)


def closeness_table(near: Closeness) -> Table:
    """Return the distances of the states from base, and how their sampled answers are written."""
    rows = [
        *distance_rows(near),
        ["forward KL\non base's answers", *distance_cells(near, "forward")],
        ["reverse KL\non the state's own answers", *distance_cells(near, "reverse")],
        *([f"{label}\nsampled", *cells] for label, *cells in writing_rows(near.how_written, near.n)),
    ]
    if near.c:
        rows.append([f"C\ncompared with {near.start}", "", "", cell(near.c, n=near.n)])
    caption = (
        f"{near.n} prompts that no stage has learned from, answered at temperature 1. "
        "Both models give their distributions at every token of base's answers and of the state's own. The "
        "distance of a request is the larger divergence; base's own is the noise of 16-bit arithmetic. "
    )
    caption += f"There is no C: {near.why}." if near.why else WHAT_C_IS
    return Table("Closeness to base", ["", *STATES], rows, caption)


def _writing_rows(name: str, suite: Scores) -> list[list[str]]:
    small = f"{name}, {suite.decoding}"
    return [[f"{label}\n{small}", *cells] for label, *cells in writing_rows(suite.writing, suite.n)]


def detail_tables(summary: Summary) -> list[Table]:
    """Return what few readers look up: differences, all metrics, and cost."""
    rows = []
    for name, suite in summary.suites.items():
        rows += _metric_rows(name, suite)
    caption = "The names in small print are those of the JSON."
    metrics = Table("All metrics", ["metric", *STATES], rows, caption)
    rows = [[stage, *_cost_cells(spent)] for stage, spent in summary.cost.items()]
    cost = Table("Cost", ["stage", "time, min:s", "tokens", "peak memory"], rows)
    spent = summary.cost.get("recover", {}).get("parts", {})
    rows = [[part, format.clock(seconds)] for part, seconds in spent.items()]
    parts = Table("Time of the recovery", ["part", "min:s"], rows)
    tables = [_differences_table(summary), metrics, cost, _dose_table(summary.cost), parts]
    return _shown(summary, tables)


def _differences_table(summary: Summary) -> Table:
    """Return the paired differences on the retention suite, in points."""
    prompts, rows = summary.prompts_of("retention"), []
    for pair, change in summary.changes.items():
        if change and not pair.startswith("domain"):
            rows.append([pair.replace("_minus_", " - "), *_in_points(change, prompts)])
    for measure, test in summary.writing.items():
        if test:
            unit = RELATIVE if measure == "tokens" else CHANGE
            label = f"{WRITING[measure][0]}, recovered - base"
            rows.append([label, *_in_points(test, prompts, unit)])
    caption = (
        f"“Recovered” means that the interval of recovered - base lies above -{MARGIN} points, and that "
        "its answers are shown to be like base's: in the share that ends and in repetition, within "
        f"{100 * MARGINS['ended']:g} points, and in length, within {MARGINS['tokens']:.0%}."
    )
    suite = summary.headline_suite("retention")
    if suite and summary.detectable_drop:
        caption += (
            f" {suite.n} prompts like these show a drop from base to tuned four times in five, if it is "
            f"{100 * summary.detectable_drop:.1f} points or more."
        )
    columns = [summary.headline["retention"] or "", "points", "95 % interval"]
    return Table("Differences on the same prompts", columns, rows, caption)


def _metric_rows(name: str, suite: Scores) -> list[list[str]]:
    headline = {state: score.value for state, score in suite.states.items()}
    rows = []
    for metric, values in ({suite.metric or "": headline} | suite.metrics).items():
        if values:
            scores = [format.score(values[state]) if state in values else "" for state in STATES]
            rows.append([f"{metric_words(metric)}\n{name}: {metric}", *scores])
    # The table of scores has these lines for the retention suites.
    return rows if suite.role == "retention" else rows + _writing_rows(name, suite)


def _dose_table(cost: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return what each training learned from, by stream and author."""
    rows = []
    for stage, spent in cost.items():
        for stream, authors in spent.get("graded", {}).items():
            for author, graded in authors.items():
                rows.append([stage, stream, author, f"{graded['answers']:,}", f"{graded['tokens']:,}"])
    caption = "What was learned from: an answer counts each time that a step learns from it."
    return Table("Dose", ["stage", "prompts", "answers by", "answers", "tokens"], rows, caption)


def _cost_cells(spent: Mapping[str, Any]) -> list[str]:
    if not spent:
        return ["not run", "", ""]
    tokens = f"{spent['tokens']:,}"
    return [format.clock(spent["seconds"]), tokens, format.memory(spent["peak_memory_bytes"])]


def _in_points(change: Estimate, n: int, unit: Unit = CHANGE) -> list[str]:
    """Return the cells of a difference and of its interval; over `n` prompts there may be too few for one."""
    value, low, high = (f"{unit.number(x)}{unit.name}" for x in (change.value, change.low, change.high))
    return [value, f"{n} prompts are too few" if format.is_few(n) else f"{low} to {high}"]


def made(run: RunDir, manifest: dict[str, Any], base_model: str) -> dict[str, str]:
    """Return what a reader asks first: which model, what it learned, on what machine, when."""
    facts = {"Model": _short_name(base_model)}
    if size := (manifest.get("base") or {}).get("parameters"):
        facts["Model"] += f", {_count(size)} parameters"
    if start := run.settings().get("start"):
        facts["Started from"] = _short_name(start)
    record = run.stage_record("finetune")
    data = section(run, "finetune").get("data")
    if record and data:
        facts["Fine-tuned on"] = _short_name(as_named(run, str(data)))
        if record.get("rows"):
            facts["Fine-tuned on"] += f", {record['rows']:,} rows"
    if run.stage_record("recover"):
        recover = section(run, "recover")
        sources = [recover.get(stream) for stream in ("general", "domain")]
        if prompts := [_short_name(as_named(run, s)) for s in sources if isinstance(s, str)]:
            facts["Recovered with prompts of"] = " and ".join(prompts)
    if manifest["created"]:
        where = _where(manifest)
        day = datetime.fromisoformat(manifest["created"].replace("Z", "+00:00"))
        facts["Made"] = f"{day.day} {day:%B %Y}" + (f", {where}" if where else "")
    return {label: value for label, value in facts.items() if value}


def _where(manifest: dict[str, Any]) -> str:
    """Return how long a run took, and on what machine."""
    device, words = manifest.get("device") or {}, []
    if manifest.get("seconds"):
        words.append(f"in {max(1, round(manifest['seconds'] / 60))} minutes")
    if device.get("kind") == "cpu" and device.get("cores"):
        words.append(f"on {device['cores']} cores")
    elif device.get("name"):
        words.append(f"on {device['name']}")
    return " ".join(words)


def _short_name(source: str) -> str:
    """Return the last part of a path, since a report may be shown to others; shipped data have no path."""
    return source if source in SHIPPED_DATA else source.rstrip("/").rsplit("/", 1)[-1]


def _count(parameters: int) -> str:
    size, unit = (parameters / 1e9, "B") if parameters >= 1e9 else (parameters / 1e6, "M")
    return f"{size:.0f} {unit}" if size >= 10 else f"{size:.1f} {unit}"
