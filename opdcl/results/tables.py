"""Tables: one value for terminal, notebook, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from opdcl.results.format import LENGTH, NATS, SCORE, SHARE, Unit, cell
from opdcl.results.status import DOMAIN_STYLE, STATES

if TYPE_CHECKING:
    from opdcl.results.intervals import Estimate
    from opdcl.results.ratios import Closeness

# How a share of requests is named, with its definition.
IN_DOMAIN_STYLE = f"answered in domain style\nabove {DOMAIN_STYLE:g} nat per token"

MISSING = "\N{EN DASH}"

# Labels and units of the response statistics.
WRITING = {
    "ended": ("answers that end", SCORE),
    "tokens": ("tokens per answer", LENGTH),
    "repetition": ("repeated 4-grams", SCORE),
    "distinct": ("2-grams that no other answer has", SCORE),
    "script": ("in the prompt's script", SCORE),
}


class Table(NamedTuple):
    """A table; the second line of a cell is its interval or another small addition."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""


def with_rows(tables: Sequence[Table]) -> list[Table]:
    return [table for table in tables if table.rows]


def of_base_alone(table: Table) -> Table:
    """Return a table without the columns of what base alone does not have: other states, and R."""
    kept = []
    for number, column in enumerate(table.columns):
        if column not in (*STATES[1:], "R"):
            kept.append(number)
    rows = []
    for row in table.rows:
        rows.append([row[number] for number in kept])
    return table._replace(columns=[table.columns[number] for number in kept], rows=rows)


def by_state(estimates: Mapping[str, Estimate | None], unit: Unit = SCORE, n: int | None = None) -> list[str]:
    """Return one cell for base, tuned and recovered each, measured on `n` prompts."""
    return [cell(estimates.get(state), unit, n) for state in STATES]


def distance_cells(near: Closeness, name: str = "distance") -> list[str]:
    """Return each state's distance to base, or one direction of it, in nats."""
    return by_state({state: found.get(name) for state, found in near.states.items()}, NATS, near.n)


def distance_rows(near: Closeness) -> list[list[str]]:
    """Return label and cell of each state for its distance: mean, median, and share in domain style."""
    shares = {state: found.get("domain_manner") for state, found in near.states.items()}
    return [
        ["distance to base, mean\nnats per token", *distance_cells(near)],
        ["distance to base, median\nnats per token", *distance_cells(near, "median")],
        [IN_DOMAIN_STYLE, *by_state(shares, SHARE, near.n)],
    ]


def writing_rows(writing: Mapping[str, Mapping[str, Estimate]], n: int) -> list[list[str]]:
    """Return label and cell of each state for every measure that one of them has.

    The script is left out where all answers keep to it.
    """
    rows = []
    for measure, (label, unit) in WRITING.items():
        found = {state: written[measure] for state, written in writing.items() if measure in written}
        if measure == "script" and all(estimate.value == 1 for estimate in found.values()):
            continue
        if found:
            rows.append([label, *by_state(found, unit, n)])
    return rows
