"""Compare runs, and write the comparison as Markdown, HTML and JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from opdcl.errors import UsageError
from opdcl.results import arm_scores, arm_tables, continual
from opdcl.results.arm_scores import Comparison as Arms
from opdcl.results.arm_scores import RunRow
from opdcl.results.continual import Comparison as Chains
from opdcl.results.document import arms_document, chains_document
from opdcl.results.report import render
from opdcl.results.samples import Group, side_by_side
from opdcl.results.scores import Row, Suite, load_suite
from opdcl.results.status import STATES
from opdcl.results.tables import View
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.layout import RunDir
from opdcl.sanitize import harmless

Compared = Arms | Chains

# Of how many runs the page has answers: more have no room beside one another.
MOST_RUNS = 6


def compare(runs: Sequence[RunDir]) -> Compared:
    """Return the comparison of two or more runs.

    Runs that build on one another are compared step by step (`opdcl.results.continual`).

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
    if continual.build_on_one_another(runs):
        return continual.compare(runs)
    return arm_scores.compare(runs)


def plain(comparison: Compared) -> dict[str, Any]:
    """Return a comparison with the stable keys of `opdcl compare --json`."""
    document = chains_document(comparison) if isinstance(comparison, Chains) else arms_document(comparison)
    # Names and settings come from outside; a file cannot hold a lone surrogate.
    return dict(json.loads(harmless(json.dumps(document, ensure_ascii=False))))


def view(comparison: Compared) -> View:
    """Lay out a comparison: arms side by side, or steps that build on one another."""
    return continual.view(comparison) if isinstance(comparison, Chains) else arm_tables.view(comparison)


def refuse_folder(folder: Path) -> None:
    """Refuse a run directory, and a path where no folder can be made, before anything is computed."""
    existing = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    if not existing.is_dir():
        raise UsageError(f"{existing} is a file", "choose another folder with -o")
    if RunDir(folder).is_run():
        raise UsageError(
            f"{folder} is a run directory, and keeps no comparison", "choose another folder with -o"
        )


def write(comparison: Compared, folder: Path) -> list[Path]:
    """Write `compare.md`, `compare.html` and `compare.json` into a folder; return their paths."""
    context: dict[str, Any] = {"view": view(comparison), "comparison": comparison}
    if isinstance(comparison, Chains):
        paths = [path for step in comparison.steps for path in step.runs]
        context |= {"svg": None, "answers": {}, "left_out": []}
    else:
        paths = [run.path for arm in comparison.arms for run in arm.runs]
        shown = _runs_to_show(comparison)
        context |= {"svg": arm_tables.figure(comparison), "answers": _answers(comparison, shown)}
        context["left_out"] = [arm.name for arm in comparison.arms[MOST_RUNS:]]
    context["reports"] = _reports(paths, folder)
    text, page, data = (folder / f"compare.{ending}" for ending in ("md", "html", "json"))
    write_atomic(text, render("compare.md", context))
    write_atomic(page, render("compare.html", context))
    write_json(data, plain(comparison))
    return [text, page, data]


def _runs_to_show(comparison: Arms) -> dict[str, RunRow]:
    """Return the runs whose answers stand side by side: the first of each arm; of one arm alone, its runs."""
    if len(comparison.arms) == 1:
        runs = {Path(run.path).name: run for run in comparison.arms[0].runs}
    else:
        runs = {arm.name: arm.runs[0] for arm in comparison.arms}
    shown = {}
    for name, run in [*runs.items()][:MOST_RUNS]:
        # A run may be called like a model.
        shown[f"{name} (run)" if name in STATES else name] = run
    return shown


def _answers(comparison: Arms, runs: dict[str, RunRow]) -> dict[str, list[Group]]:
    """Return each headline suite's prompts with the answers of base and of the runs' last models."""
    found = {}
    for role, name in comparison.headline.items():
        if name is None:
            continue
        rows: dict[str, list[Row]] = {}
        for label, run in runs.items():
            suite = load_suite(RunDir(Path(run.path)), name, role)
            if {"base", run.state} <= suite.rows.keys() and run.state != "base":
                rows.setdefault("base", suite.rows["base"])
                rows[label] = suite.rows[run.state]
        if len(rows) > 2:
            groups = side_by_side(Suite(name, role, comparison.suites[name]["metric"], {}, rows))
            if groups:
                found[name] = groups
    return found


def _reports(paths: Sequence[str], folder: Path) -> dict[str, str]:
    """Return run -> link to its report, as seen from the folder, for runs that have one."""
    links = {}
    for path in paths:
        report = RunDir(Path(path)).reports[1]
        if report.is_file():
            place = os.path.relpath(report.resolve(), folder.resolve())
            links[path] = quote(os.fsencode(place))
    return links
