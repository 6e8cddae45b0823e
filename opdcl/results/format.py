"""Numbers as text, and tables of them: one value for terminal, notebook, Markdown and HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from opdcl.results.status import DOMAIN_STYLE, FEWEST_PROMPTS, STATES

if TYPE_CHECKING:
    from opdcl.results.intervals import Estimate

MISSING = "\N{EN DASH}"

# How a share of requests is named, with its definition.
IN_DOMAIN_STYLE = f"answered in domain style\nabove {DOMAIN_STYLE:g} nat per token"

# Metrics in words; files and JSON keep the keys.
METRIC_WORDS = {
    "passed": "all constraints kept",
    "prompt_level_strict_acc": "all constraints kept",
    "exact_match": "exact answers",
    "token_f1": "word overlap",
    "acc": "correct answers",
    "acc_norm": "correct answers, corrected for length",
}


class Unit(NamedTuple):
    """How the numbers of an estimate are written."""

    form: str
    factor: int = 1
    name: str = ""
    """What follows the value, but not its bounds."""
    least: float = -math.inf

    def number(self, value: float) -> str:
        return self.form.format(max(self.factor * value, self.least))


RATIO = Unit("{:.2f}")
SCORE = Unit("{:.1f}", 100, " %")
SHARE = Unit("{:.0f}", 100, " %")
CHANGE = Unit("{:+.1f}", 100)
POINTS = CHANGE._replace(name=" points")
LENGTH = Unit("{:.0f}")
DISTANCE = Unit("{:.3f}", name=" nats per token")
# A table names its unit elsewhere, and noise below zero is no distance.
NATS = Unit("{:.3f}", least=0.0)


def interval(estimate: Estimate, unit: Unit = RATIO, n: int | None = None) -> str:
    """Format an estimate with its interval, as `0.98 [0.84, 1.13]` or `47.3 % [42.1, 53.0]`.

    It is the value alone over too few prompts, `n`.
    """
    return value(estimate, unit) + ("" if is_few(n) else f" {bounds(estimate, unit)}")


def is_few(n: int | None) -> bool:
    """Return whether `n` prompts are too few for an interval; None stands for enough."""
    return n is not None and n < FEWEST_PROMPTS


def value(estimate: Estimate, unit: Unit = RATIO) -> str:
    """Format an estimate without its interval, as `0.98`."""
    return f"{unit.number(estimate.value)}{unit.name}"


def bounds(estimate: Estimate, unit: Unit = RATIO) -> str:
    """Format the interval of an estimate, as `[0.84, 1.13]`."""
    return f"[{unit.number(estimate.low)}, {unit.number(estimate.high)}]"


def cell(estimate: Estimate | None, unit: Unit = RATIO, n: int | None = None) -> str:
    """Format an estimate over its interval, as `47.3 %` over `[42, 53]`: narrow. It is empty without one."""
    if estimate is None:
        return ""
    is_range = not is_few(n) and unit.number(estimate.low) != unit.number(estimate.high)
    ends = bounds(estimate, SHARE if unit is SCORE else unit)
    return value(estimate, unit) + (f"\n{ends}" if is_range else "")


def metric_words(metric: str) -> str:
    """Return a metric's name as people read it, with the filter of answers by which it is."""
    name, _, chain = metric.partition(",")
    return METRIC_WORDS.get(name, name.replace("_", " ")) + (f", by {chain}" if chain else "")


def percent(fraction: float) -> str:
    """Format a fraction as `47.3 %`."""
    return f"{SCORE.number(fraction)} %"


def points(change: float) -> str:
    """Format a difference of fractions in percentage points, with its sign, as `+4.2`."""
    return CHANGE.number(change)


def shorten(text: str, limit: int) -> str:
    """Shorten `text` at a space near `limit`, and say how many characters are left out."""
    if len(text) <= limit * 1.1:
        return text
    end = max(text.rfind(" ", 0, limit), text.rfind("\n", 0, limit))
    end = end if end > limit * 0.8 else limit
    return f"{text[:end]} … ({len(text) - end:,} more characters)"


def clock(seconds: float) -> str:
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


def duration(seconds: float) -> str:
    """Format an estimated time as `40 s`, `12 min` or `3.4 h`."""
    if seconds < 90:
        return f"{max(10, round(seconds, -1)):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def time_range(least: float, most: float) -> str:
    """Format two estimated times as `about 12 to 19 min` or `at most 5.1 h`, rounded outwards."""
    unit, step, part = ("s", 10, 10.0) if most < 90 else ("min", 60, 1.0) if most < 5400 else ("h", 360, 0.1)
    low, high = math.floor(least / step) * part, math.ceil(most / step) * part
    return f"about {low:.3g} to {high:.3g} {unit}" if low else f"at most {high:.3g} {unit}"


def memory(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


class Table(NamedTuple):
    """A table; the second line of a cell is its interval or another small addition."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""


def by_state(estimates: Mapping[str, Estimate | None], unit: Unit = SCORE, n: int | None = None) -> list[str]:
    """Return one cell for base, tuned and recovered each, measured on `n` prompts."""
    return [cell(estimates.get(state), unit, n) for state in STATES]


def distance_cells(states: Mapping[str, Mapping[str, Estimate]], n: int) -> list[str]:
    """Return each state's distance to base."""
    return by_state({state: found.get("distance") for state, found in states.items()}, NATS, n)
