"""How several runs are shown side by side: words, tables and a picture; in the terminal, as Markdown and as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from opdcl.errors import UsageError
from opdcl.rundir import write_atomic, write_json
from opdcl.text import harmless, markdown, percent, span

MISSING = "\N{EN DASH}"


class Table(NamedTuple):
    """What a table shows; a cell's second line is its interval, or another small addition."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str


class Figure(NamedTuple):
    """A picture: the function of `opdcl.plots` that draws it from the results, between a title and a caption."""

    title: str
    plot: str
    caption: str


class View(NamedTuple):
    """All that is shown of a comparison, beside its notes."""

    lead: str
    """What is compared, in one sentence."""
    tables: list[Table]
    details: list[Table]
    """Further tables, which a terminal has no room for."""
    figure: Figure


def view(found: dict[str, Any]) -> View:
    """Return how results are shown: those of arms side by side, or of steps that build on one another."""
    from opdcl import comparison, lineage

    return (lineage if "chains" in found else comparison).view(found)


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
        parts += [f"## {table.title}", "\n".join([line(table.columns), rule, *map(line, table.rows)]), table.caption]
    return "\n\n".join(parts) + "\n"


def _html(shown: View, found: dict[str, Any]) -> str:
    from markupsafe import Markup

    from opdcl import plots
    from opdcl.reports import environment

    svg = getattr(plots, shown.figure.plot)(found)
    return environment(harmless, escape=True).get_template("compare.html.j2").render(
        lead=shown.lead, notes=found["notes"], tables=[*shown.tables, *shown.details], missing=MISSING,
        figure=svg and Markup(svg), heading=shown.figure.title, caption=shown.figure.caption,
    )  # fmt: skip


def score_cell(estimate: dict | None) -> str:
    """Show a score in percent over its interval; nothing where there is none."""
    return f"{percent(estimate['value'])}\n{span(estimate)}" if estimate else ""


def points_cell(estimate: dict | None) -> str:
    """Show a difference in points over its interval; nothing where there is none."""
    if not estimate:
        return ""
    value, low, high = (f"{100 * estimate[k]:+.1f}" for k in ("value", "low", "high"))
    return f"{value}\n[{low}, {high}]"


def measured_on(found: dict[str, Any]) -> str:
    """Name the suites with their sizes."""
    suites = [f"{name} ({suite['n']} prompts)" for name, suite in found["suites"].items()]
    return " and ".join([*([", ".join(suites[:-1])] if suites[1:] else []), *suites[-1:]])


def notes_on_seeds(counts: set[int]) -> list[str]:
    """Return what to know of intervals over so many seeds."""
    notes = ["With one seed an interval covers the choice of prompts, not the training seed."] if 1 in counts else []
    if few := sorted(n for n in counts if 1 < n < 5):
        notes.append(
            f"Over {' or '.join(map(str, few))} seeds an interval is too narrow: of the variance between n seeds the "
            "bootstrap sees (n - 1) / n."
        )
    return notes
