"""How several runs are shown side by side: words, tables and a picture; in the terminal, as Markdown and as one HTML page."""

from __future__ import annotations

from typing import Any, NamedTuple

from opdcl.results.format import percent, span

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
    notes = (
        ["With one seed an interval covers the choice of prompts, not the training seed."]
        if 1 in counts
        else []
    )
    if few := sorted(n for n in counts if 1 < n < 5):
        notes.append(
            f"Over {' or '.join(map(str, few))} seeds an interval is too narrow: of the variance between n seeds the "
            "bootstrap sees (n - 1) / n."
        )
    return notes
