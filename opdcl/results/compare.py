"""Compare runs, and write the comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from opdcl.errors import UsageError
from opdcl.results import arms, continual
from opdcl.results.format import markdown
from opdcl.results.tables import MISSING, View
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.layout import RunDir
from opdcl.sanitize import harmless


def compare(runs: list[RunDir]) -> dict[str, Any]:
    """Return the comparison of two or more runs, with the stable keys of `opdcl compare --json`.

    Runs that build on one another have learned different things; of these, `opdcl.results.continual` says what each step left.

    Raises:
        UsageError: A run is named twice, has no results, or was not measured like the others.
    """
    if len(runs) < 2:
        raise UsageError(
            "a comparison needs at least two runs", "opdcl compare RUN RUN; opdcl report RUN shows one"
        )
    paths = [run.path.resolve() for run in runs]
    if twice := next((run.path for i, run in enumerate(runs) if paths[i] in paths[:i]), None):
        raise UsageError(f"{twice} is named twice", "name each run once")
    if continual.build_on_one_another(runs):
        return cleaned(continual.compare(runs))
    return cleaned(arms.compare(runs))


def cleaned(found: dict[str, Any]) -> dict[str, Any]:
    """Return results whose names and settings, which come from outside, can be written: a lone surrogate could not."""
    harmlessly: dict[str, Any] = json.loads(harmless(json.dumps(found, ensure_ascii=False)))
    return harmlessly


def view(found: dict[str, Any]) -> View:
    """Return how results are shown: those of arms side by side, or of steps that build on one another."""

    return (continual if "chains" in found else arms).view(found)


def refuse_folder(folder: Path) -> None:
    """Refuse a place where no folder can be made, before anything is computed."""
    there = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    if not there.is_dir():
        raise UsageError(f"{there} is a file", "choose another folder with -o")


def write(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write `compare.md`, `compare.html` and `compare.json` into a folder; return their paths."""
    page, text, data = (folder / f"compare.{ending}" for ending in ("html", "md", "json"))
    shown = view(found)
    write_atomic(text, _markdown(shown, found["notes"]))
    write_atomic(page, _html(shown, found))
    write_json(data, found)
    return [text, page, data]


def _markdown(shown: View, notes: list[str]) -> str:
    def line(cells: list[str]) -> str:
        return f"| {' | '.join(markdown(cell) or MISSING for cell in cells)} |"

    parts = ["# Comparison", f"**{markdown(shown.lead)}**", *(f"> {markdown(note)}" for note in notes)]
    for table in (*shown.tables, *shown.details):
        rule = f"| --- |{' ---: |' * (len(table.columns) - 1)}"
        parts += [
            f"## {table.title}",
            "\n".join([line(table.columns), rule, *map(line, table.rows)]),
            table.caption,
        ]
    return "\n\n".join(parts) + "\n"


def _html(shown: View, found: dict[str, Any]) -> str:
    from markupsafe import Markup

    from opdcl.results import plots
    from opdcl.results.report import environment

    svg = getattr(plots, shown.figure.plot)(found)
    return (
        environment(harmless, escape=True)
        .get_template("compare.html.j2")
        .render(
            lead=shown.lead,
            notes=found["notes"],
            tables=[*shown.tables, *shown.details],
            missing=MISSING,
            figure=svg and Markup(svg),
            heading=shown.figure.title,
            caption=shown.figure.caption,
        )
    )
