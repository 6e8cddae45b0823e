"""Format numbers, and make text from outside harmless, the same way everywhere."""

from __future__ import annotations

import json
import re

from opdcl.sanitize import harmless


def percent(value: float) -> str:
    """Format a fraction as `47.3 %`."""
    return f"{100 * value:.1f} %"


def interval(estimate: dict) -> str:
    """Format a ratio with its interval as `0.98 [0.84, 1.13]`."""
    return f"{value(estimate)} {bounds(estimate)}"


def value(ratio: dict) -> str:
    """Format a ratio without its interval as `0.98`."""
    return f"{ratio['value']:.2f}"


def bounds(ratio: dict) -> str:
    """Format the interval of a ratio as `[0.84, 1.13]`."""
    return f"[{ratio['low']:.2f}, {ratio['high']:.2f}]"


def span(estimate: dict) -> str:
    """Format an interval of a fraction, in percent, as `[42.1, 53.0]`."""
    return f"[{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def points(change: float) -> str:
    """Format a difference of fractions in percentage points, with its sign, as `+4.2`."""
    return f"{100 * change:+.1f}"


def unbroken(text: str) -> str:
    """Keep a number and its percent sign, and an interval, on one line."""
    return re.sub(r" (?=%)|(?<=,) (?=-?\d+(?:\.\d+)?\])", "\N{NO-BREAK SPACE}", text)


def nats(kl: float | None) -> str:
    """Format a KL divergence in nats; an en dash for a stream that was not trained."""
    return "\N{EN DASH}" if kl is None else f"{kl:.3f}"


def cut(text: str, limit: int) -> str:
    """Shorten `text` at a space near `limit`, and say how many characters are left out."""
    if len(text) <= limit * 1.1:
        return text
    end = max(text.rfind(" ", 0, limit), text.rfind("\n", 0, limit))
    end = end if end > limit * 0.8 else limit
    return f"{text[:end]} … ({len(text) - end:,} more characters)"


def markdown(text: str) -> str:
    """Escape `text` so that Markdown shows it literally, on one line."""
    return re.sub(r"([\\`*_<>|~#$&!]|\](?=[(\[:]))", r"\\\1", " ".join(harmless(text).split()))


def code(text: str) -> str:
    """Return `text` as a Markdown code span that its own backticks and pipes cannot close."""
    line = " ".join(harmless(str(text)).split()).replace("|", "¦") or " "
    marks = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{marks} {line} {marks}" if "`" in line else f"{marks}{line}{marks}"


def fence(text: str) -> str:
    """Return `text` as a fenced Markdown block that its own fences cannot close."""
    text = harmless(text)
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{marks}text\n{text}\n{marks}"


def quoted(text: str) -> str:
    """Return `text` as a double-quoted Python string."""
    return json.dumps(harmless(str(text)), ensure_ascii=False)


def score(value: float) -> str:
    """Format a metric: a fraction in percent, any other number (a length, a count) as it is."""
    return percent(value) if 0 <= value <= 1 else f"{value:,.1f}"


def clock(seconds: float) -> str:
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


def duration(seconds: float) -> str:
    """Format an estimated time as `40 s`, `12 min` or `3.4 h`."""
    if seconds < 90:
        return f"{max(10, round(seconds, -1)):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def memory(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
