"""Compare runs, and write the comparison as Markdown, HTML and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opdcl.errors import UsageError
from opdcl.results import arm_scores, arm_tables, continual
from opdcl.results.arm_scores import Comparison as Arms
from opdcl.results.continual import Comparison as Chains
from opdcl.results.plain import as_json
from opdcl.results.report import render
from opdcl.results.tables import View
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.layout import RunDir
from opdcl.sanitize import harmless

Compared = Arms | Chains


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
    # Names and settings come from outside; a file cannot hold a lone surrogate.
    data: dict[str, Any] = json.loads(harmless(json.dumps(as_json(comparison), ensure_ascii=False)))
    return data


def view(comparison: Compared) -> View:
    """Lay out a comparison: arms side by side, or steps that build on one another."""
    if isinstance(comparison, Chains):
        return continual.view(comparison)
    return arm_tables.view(comparison)


def refuse_folder(folder: Path) -> None:
    """Refuse a path where no folder can be made, before anything is computed."""
    existing = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    if not existing.is_dir():
        raise UsageError(f"{existing} is a file", "choose another folder with -o")


def write(comparison: Compared, folder: Path) -> list[Path]:
    """Write `compare.md`, `compare.html` and `compare.json` into a folder; return their paths."""
    figure = None if isinstance(comparison, Chains) else arm_tables.figure(comparison)
    context = {"view": view(comparison), "comparison": comparison, "svg": figure}
    text, page, data = (folder / f"compare.{ending}" for ending in ("md", "html", "json"))
    write_atomic(text, render("compare.md", context))
    write_atomic(page, render("compare.html", context))
    write_json(data, plain(comparison))
    return [text, page, data]
