"""What the tables of the pages are made of: records, rows, and cells with their intervals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from opdcl.results.format import interval
from opdcl.results.intervals import TWO_SIDED, Estimate, student

HERE = Path(__file__).parent


def read(name: str) -> dict[str, Any]:
    file = HERE / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def rows_of(columns: list[str], rows: list[list[str]], left: int = 1) -> str:
    """Return a Markdown table; all columns but the first `left` are numbers."""
    rule = ["---" if i < left else "---:" for i in range(len(columns))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows))


def from_json(estimate: dict[str, float]) -> Estimate:
    return Estimate(estimate["value"], estimate["low"], estimate["high"])


def ratio(estimate: dict[str, float] | None) -> str:
    return interval(from_json(estimate)) if estimate else ""


def unbroken(rows: list[list[str]], left: int) -> list[list[str]]:
    """Return the rows with cells that break before a bracket, but within no number or interval."""
    number = re.compile(r" (?=%|[-+]?\d|→)|(?<=→) ")
    return [[*row[:left], *(number.sub("\u00a0", cell) for cell in row[left:])] for row in rows]


def of_seeds(values: list[float], digits: int) -> str:
    """Return the mean of one value per seed, and its 95 % interval (Student), or both values of two."""
    centre = fmean(values)
    if len({*values}) == 1:
        return f"{centre:.{digits}f}"
    if len(values) == 2:  # their interval is twelve times as wide as they lie apart
        return ", ".join(f"{value:.{digits}f}" for value in values)
    half = student(TWO_SIDED, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{centre:.{digits}f} [{centre - half:.{digits}f}, {centre + half:.{digits}f}]"


def end_of(row: dict[str, Any]) -> str:
    """Return the state that a recorded run ends with: recovered, or tuned without a recovery."""
    return "recovered" if "recovered" in row["closeness"]["written"] else "tuned"


def seeds_of(number: int) -> str:
    return f"{number} seed{'s' * (number > 1)}"


NOT_MEASURED = "*Not measured yet on the present suites.*"
