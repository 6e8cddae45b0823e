"""Lay out a run's results for terminal and report: tables, bars of the headline scores, facts at the top."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from opdcl.config.shipped import SHIPPED_DATA
from opdcl.results import format
from opdcl.results.closeness import MEASURES
from opdcl.results.format import Unit, cell, metric_words
from opdcl.results.scores import section
from opdcl.results.status import HEADLINE_ROLES, NON_INFERIORITY_MARGIN, STATES
from opdcl.results.tables import WRITING, Table, by_state, different_raw, distances, with_rows, writing_rows
from opdcl.results.writing import MARGINS
from opdcl.rundir.layout import RunDir

RELATIVE = Unit("{:+.0f}", 100, " %")
MARGIN = f"{100 * NON_INFERIORITY_MARGIN:g}"
GROUP_NOTE = "Seen: types of constraints that also occur in the recovery prompts. Unseen: types that do not."
# Where the axis of a pair of bars may end.
AXES = (0.05, 0.1, 0.25, 0.5, 1.0)


def bars(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one block of bars per headline suite that is measured; positions are in percent of the axis."""
    blocks = []
    for role in HEADLINE_ROLES:
        name = summary["headline"][role]
        suite = summary["suites"][name] if name else {}
        measured = [suite[state] for state in STATES if suite.get(state)]
        if not measured:
            continue
        highest = max(estimate["high"] for estimate in measured)
        axis = next((end for end in AXES if end >= highest), 1.0)
        rows = []
        for state in STATES:
            at = {key: _at(value, axis) for key, value in suite[state].items()}
            rows.append({"state": state, "score": suite[state], "at": at})
        title = f"{name}, {metric_words(suite['metric'])}, {suite['n']} prompts"
        floor = suite["floor"] and _at(suite["floor"], axis)
        blocks.append({"role": role, "title": title, "axis": axis, "floor": floor, "rows": rows})
    return blocks


def _at(score: float, axis: float) -> str:
    return f"{100 * min(max(score / axis, 0), 1):.1f}"


def terminal_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Return the score table for a terminal: suite and metric, n, floor, and each state with its interval."""
    rows = []
    for name, suite in summary["suites"].items():
        if suite["n"]:
            floor = "" if suite["floor"] is None else format.percent(suite["floor"])
            rows.append([f"{name}\n{suite['metric']}", str(suite["n"]), floor, *by_state(suite)])
            if suite["role"] == "retention":
                rows += [[label, "", "", *cells] for label, *cells in writing_rows(suite["writing"])]
    ratios = {}
    if near := summary["closeness"]:
        floor = "" if near["floor"] is None else f"{near['floor']:.3f}"
        rows.append(["distance to base\nnats per token", str(near["n"]), floor, *distances(near)])
        ratios["C"] = near
    for label, key, start in (("R", "recovery", "tuned"), ("D", "domain_retention", "base")):
        ratios[label] = summary[key]
        ratios[f"{label} from {start}"] = summary[f"{key}_raw"] if different_raw(summary, key) else None
    return rows + [[label, "", "", "", "", text] for label, ratio in ratios.items() if (text := cell(ratio))]


def main_tables(summary: dict[str, Any]) -> list[Table]:
    """Return the scores, those of each group of prompts, and closeness to base."""
    near = [closeness_table(summary["closeness"])] if summary["closeness"] else []
    if not any(suite["n"] for suite in summary["suites"].values()):
        return near
    rows = []
    for name, suite in summary["suites"].items():
        metric = f": {metric_words(suite['metric'])}, {_size(suite)}" if suite["n"] else ""
        rows.append([f"{name}\n{suite['role']}{metric}", *by_state(suite)])
        if suite["role"] == "retention":
            rows += _writing_rows(name, suite)
    caption = (
        "Brackets are 95 % intervals over prompts, for one training seed. The floor is the score of the best "
        "content-free answer, such as a copy of the prompt; in multiple choice, of a guess. Answers that do "
        "not end were cut at the token limit. A repeated 4-gram is four words in a row that occurred earlier "
        "in the same answer."
    )
    return [Table("Scores", ["suite", *STATES], rows, caption), *with_rows([_groups_table(summary)]), *near]


def _groups_table(summary: dict[str, Any]) -> Table:
    rows = []
    for name, group in summary["groups"].items():
        raw, ratio = different_raw(group), cell(group["recovery"])
        ratio += f"; from tuned {raw}" if raw else ""
        rows.append([f"{name}\n{_size(group)}", *by_state(group), ratio])
    note = GROUP_NOTE if {*summary["groups"]} == {"seen", "unseen"} else ""
    return Table("Scores by group of prompts", [summary["headline"]["retention"], *STATES, "R"], rows, note)


def closeness_table(near: dict[str, Any]) -> Table:
    """Return the distances of the states from base, and how their sampled answers are written."""
    labels = {
        "distance": "distance to base\nnats per token",
        "forward": "forward KL\non base's answers",
        "reverse": "reverse KL\non the state's own answers",
    }
    rows = [[label, *distances(near, name)] for name, label in labels.items()]
    written: dict[str, dict[str, Any]] = {}
    for state in STATES:
        written[state] = {MEASURES[key]: value for key, value in near[state].items() if key in MEASURES}
    rows += writing_rows(written)
    caption = (
        f"{near['n']} prompts that no stage has learned from, answered at temperature 1. "
        "Both models give their distributions at every token of base's answers and of the state's own. The "
        "distance is the larger divergence; base's own is the noise of 16-bit arithmetic."
    )
    return Table("Closeness to base", ["", *STATES], rows, caption)


def _size(scores: dict[str, Any]) -> str:
    floor = "" if scores["floor"] is None else f", floor {format.percent(scores['floor'])}"
    return f"{scores['n']} prompts{floor}"


def _writing_rows(name: str, suite: dict[str, Any]) -> list[list[str]]:
    return [[f"{label}\n{name}", *cells] for label, *cells in writing_rows(suite["writing"])]


def detail_tables(summary: dict[str, Any]) -> list[Table]:
    """Return what few readers look up: differences, teacher ceiling, all metrics, and cost."""
    rows = []
    for name, suite in summary["suites"].items():
        rows += _metric_rows(name, suite)
    caption = "The names in small print are those of the JSON."
    metrics = Table("All metrics", ["metric", *STATES], rows, caption)
    rows = [[stage, *_cost_cells(spent)] for stage, spent in summary["cost"].items()]
    cost = Table("Cost", ["stage", "time, min:s", "tokens", "peak memory"], rows)
    return with_rows([_differences_table(summary), _ceiling_table(summary["ceiling"]), metrics, cost])


def _differences_table(summary: dict[str, Any]) -> Table:
    """Return the paired differences on the retention suite, in points."""
    tests, rows = summary["tests"], []
    for pair, p in tests["mcnemar"].items():
        if change := tests[pair]:
            p_value = "n/a" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
            rows.append([pair.replace("_minus_", " - "), *_in_points(change), p_value])
    for measure, change in tests["writing"].items():
        if change:
            unit = RELATIVE if measure == "tokens" else format.CHANGE
            rows.append([f"{WRITING[measure][0]}, recovered - base", *_in_points(change, unit), "n/a"])
    caption = (
        f"“Recovered” means that the interval of recovered - base lies above -{MARGIN} points, and that "
        "its answers are shown to be like base's: in the share that ends and in repetition, within "
        f"{100 * MARGINS['ended']:g} points, and in length, within {MARGINS['tokens']:.0%}. A large "
        "p-value alone never counts."
    )
    suite = summary["headline"]["retention"]
    if drop := tests["detectable_drop"]:
        prompts = summary["suites"][suite]["n"]
        caption += (
            f" {prompts} prompts like these show a drop from base to tuned four times in five, if it is "
            f"{100 * drop:.1f} points or more."
        )
    columns = [suite, "points", "95 % interval", "McNemar p"]
    return Table("Differences on the same prompts", columns, rows, caption)


def _ceiling_table(ceiling: dict[str, dict]) -> Table:
    rows = []
    for name, gap in ceiling.items():
        place = gap["place"]
        if place == "not shown":
            # To find no difference does not make the student level.
            seen = f"{gap['n']} prompts can show {100 * gap['detectable']:.1f} points"
            place = f"not shown to differ: {seen}"
        rows.append([name, gap["teacher"], *_in_points(gap), place])
    caption = (
        f"Level means shown to be at most {MARGIN} points worse. Level or above: the student has learned "
        "all that this teacher can give; only another teacher or a reward can improve it. Below: more "
        "can be recovered."
    )
    columns = ["suite", "teacher", "points\nstudent - teacher", "95 % interval", "the student is"]
    return Table("Teacher ceiling", columns, rows, caption)


def _metric_rows(name: str, suite: dict[str, Any]) -> list[list[str]]:
    headline = {state: suite[state]["value"] for state in STATES if suite[state]}
    rows = []
    for metric, values in ({suite["metric"]: headline} | suite["metrics"]).items():
        if values:
            found = map(values.get, STATES)
            scores = ["" if value is None else format.score(value) for value in found]
            rows.append([f"{metric_words(metric)}\n{name}: {metric}", *scores])
    # The table of scores has these lines for the retention suites.
    return rows if suite["role"] == "retention" else rows + _writing_rows(name, suite)


def _cost_cells(spent: dict[str, Any]) -> list[str]:
    if not spent:
        return ["not run", "", ""]
    tokens = f"{spent['tokens']:,}"
    return [format.clock(spent["seconds"]), tokens, format.memory(spent["peak_memory_bytes"])]


def _in_points(change: dict[str, float], unit: Unit = format.CHANGE) -> list[str]:
    value, low, high = (f"{unit.number(change[key])}{unit.name}" for key in ("value", "low", "high"))
    return [value, f"{low} to {high}"]


def made(run: RunDir, manifest: dict[str, Any], base_model: str) -> dict[str, str]:
    """Return what a reader asks first: which model, what it learned, on what machine, when."""
    size = (manifest.get("base") or {}).get("parameters")
    device = manifest.get("device") or {}
    finetune, recover = (run.stage_record(stage) and section(run, stage) for stage in ("finetune", "recover"))
    data, rows = finetune.get("data"), run.stage_record("finetune").get("rows")
    prompts = [_short_name(recover[s]) for s in ("general", "domain") if isinstance(recover.get(s), str)]
    minutes = manifest.get("seconds") and f"in {max(1, round(manifest['seconds'] / 60))} minutes"
    cores = device.get("kind") == "cpu" and device.get("cores")
    machine = f"on {cores} cores" if cores else device.get("name") and f"on {device['name']}"
    facts = {
        "Model": _short_name(base_model) + (f", {_count(size)} parameters" if size else ""),
        "Started from": _short_name(run.settings().get("start") or ""),
        "Fine-tuned on": data and _short_name(str(data)) + (f", {rows:,} rows" if rows else ""),
        "Recovered with prompts of": " and ".join(prompts),
        "Made": manifest["created"]
        and ", ".join([_date(manifest["created"]), " ".join(filter(None, [minutes, machine]))]).rstrip(", "),
    }
    return {label: value for label, value in facts.items() if value}


def _short_name(source: str) -> str:
    """Return the last part of a path, since a report may be shown to others; shipped data have no path."""
    return source if source in SHIPPED_DATA else source.rstrip("/").rsplit("/", 1)[-1]


def _count(parameters: int) -> str:
    size, unit = (parameters / 1e9, "B") if parameters >= 1e9 else (parameters / 1e6, "M")
    return f"{size:.0f} {unit}" if size >= 10 else f"{size:.1f} {unit}"


def _date(created: str) -> str:
    """Format `2026-11-23T01:35:24Z` as `23 November 2026`."""
    day = datetime.fromisoformat(created.replace("Z", "+00:00"))
    return f"{day.day} {day:%B %Y}"
