"""Compare runs, and write the comparison as Markdown, HTML and JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from opdcl.errors import UsageError
from opdcl.results import arms, chains
from opdcl.results.arms import MOST_RUNS, Arms
from opdcl.results.board import Board
from opdcl.results.chains import Chains
from opdcl.results.render import arms_document, chains_document, render_page
from opdcl.results.sections import Page
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.layout import RunDir
from opdcl.sanitize import harmless

Compared = Arms | Chains


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
    return chains.compare_chains(runs) if chains.build_on_one_another(runs) else arms.compare_arms(runs)


def plain(board: Compared) -> dict[str, Any]:
    """Return a comparison with the stable keys of `opdcl compare --json`."""
    document = chains_document(board) if isinstance(board, Chains) else arms_document(board)
    # Names and settings come from outside; a file cannot hold a lone surrogate.
    return dict(json.loads(harmless(json.dumps(document, ensure_ascii=False))))


def comparison_page(board: Compared) -> Page:
    """Lay out a comparison: arms side by side, or steps that build on one another."""
    return chains.chains_page(board) if isinstance(board, Chains) else arms.arms_page(board)


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
        page, svg = replace(page, answers=arms.answers(board)), arms.figure(board)
        left_out = [arm.name for arm in board.columns[MOST_RUNS:]]
    more = {"svg": svg, "left_out": left_out, "several": len(board.columns) > 1}
    text, html, data = (folder / f"compare.{ending}" for ending in ("md", "html", "json"))
    write_atomic(text, render_page("compare.md", page))
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
