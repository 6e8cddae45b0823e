"""Compare runs, and write the comparison as Markdown, HTML and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from opdcl.errors import UsageError
from opdcl.results import arm_scores, continual
from opdcl.results.report import render
from opdcl.results.tables import view
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.layout import RunDir
from opdcl.sanitize import harmless


def compare(runs: list[RunDir]) -> dict[str, Any]:
    """Return the comparison of two or more runs, with the stable keys of `opdcl compare --json`.

    Runs that build on one another are compared step by step (`opdcl.results.continual`).

    Raises:
        UsageError: A run is named twice, has no results, or was not measured like the others.
    """
    if len(runs) < 2:
        hint = "opdcl compare RUN RUN; opdcl report RUN shows one"
        raise UsageError("a comparison needs at least two runs", hint)
    paths = [run.path.resolve() for run in runs]
    if twice := next((run.path for i, run in enumerate(runs) if paths[i] in paths[:i]), None):
        raise UsageError(f"{twice} is named twice", "name each run once")
    method = continual if continual.build_on_one_another(runs) else arm_scores
    # Names and settings come from outside; a file cannot hold a lone surrogate.
    comparison: dict[str, Any] = json.loads(harmless(json.dumps(method.compare(runs), ensure_ascii=False)))
    return comparison


def refuse_folder(folder: Path) -> None:
    """Refuse a path where no folder can be made, before anything is computed."""
    existing = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    if not existing.is_dir():
        raise UsageError(f"{existing} is a file", "choose another folder with -o")


def write(comparison: dict[str, Any], folder: Path) -> list[Path]:
    """Write `compare.md`, `compare.html` and `compare.json` into a folder; return their paths."""
    from opdcl.results import plots

    layout = view(comparison)
    svg = getattr(plots, layout.plot)(comparison)
    context = {"view": layout, "notes": comparison["notes"], "faults": comparison["faults"], "svg": svg}
    text, page, data = (folder / f"compare.{ending}" for ending in ("md", "html", "json"))
    write_atomic(text, render("compare.md", context))
    write_atomic(page, render("compare.html", context))
    write_json(data, comparison)
    return [text, page, data]
