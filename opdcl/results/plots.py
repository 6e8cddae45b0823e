"""Plot reports and comparisons as inline SVG. Colours are CSS variables, for light and dark pages."""

from __future__ import annotations

import io
import itertools
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from opdcl.results.intervals import Estimate
from opdcl.results.summary import validations_of

STYLE = Path(__file__).parent / "templates" / "figure.mplstyle"

# Matplotlib needs real colours; CSS variables replace them in the finished SVG.
PAINT = {
    "ink": "#0afe3c",
    "muted": "#0bfe3d",
    "rule": "#0cfe3e",
    "paper": "#0dfe3f",
    "base": "#0efe40",
    "tuned": "#0ffe41",
    "recovered": "#10fe42",
    "general": "#11fe43",
    "domain": "#12fe44",
}

SHAPES = {"base": "s", "tuned": "v", "recovered": "o"}
# For the arms of a comparison: 7 shapes and 4 colours have no common factor, so 28 arms look different.
ARM_SHAPES = "oD^PX*p"
ARM_COLOURS = ("recovered", "domain", "general", "ink")

# Width and height in inches. A phone shows 259 points at 324 pixels, so 9-point text stays readable there.
NARROW = (3.6, 2.9)
# The main plot has half a desktop page.
WIDE, TALL = 4.1, 3.1
LEGEND_LINE = 0.2
# The curves of one stream's KL, and their styles.
TRAINING, HELD_OUT, OWN = "training batches", "held-out answers", "the student's own"
CURVES: dict[str, dict[str, Any]] = {
    TRAINING: {"alpha": 0.35, "linewidth": 1.1, "marker": ".", "markersize": 4},
    HELD_OUT: {"marker": "o", "markersize": 4},
    OWN: {"linestyle": ":"},
}
# Step and KL of each point.
Points = list[tuple[float, float]]
# In nats. A smaller KL, such as tuned's to itself, lies on the lower edge of the logarithmic axis.
SMALLEST_KL = 0.001


@dataclass(frozen=True)
class Mark:
    """A model in a figure of retention against domain."""

    name: str
    domain: Estimate
    retention: Estimate
    shape: str
    colour: str

    @property
    def centre(self) -> tuple[float, float]:
        """Domain and retention in percent."""
        return 100 * self.domain.value, 100 * self.retention.value

    @property
    def label(self) -> str:
        """Its name in a legend, which omits labels that begin with an underscore."""
        return _plain(self.name).lstrip("_")


def recovery_kl(rows: list[dict], teachers: dict[str, str]) -> list[Markup]:
    """Plot KL(student, teacher) over the steps, one figure for each stream that has points.

    A faint line is training, a strong one the teacher's held-out answers, a dotted one the student's own.
    They begin where the student started; a dashed level is tuned, if it started elsewhere. The axis is
    logarithmic: what matters at the end is small beside the beginning.

    `teachers` maps each stream to the name of its teacher.
    """
    measured, best, tuned = validations_of(rows)
    figures = []
    for stream, teacher in teachers.items():
        trained = [row for row in rows if row.get("kl") is not None and row.get("stream") == stream]
        curves = {
            TRAINING: [(row["step"], row["kl"]) for row in trained],
            HELD_OUT: _points(measured, f"{stream}_kl"),
            OWN: _points(measured, "own_kl") if stream == "general" else [],
        }
        if not any(curves.values()):
            continue
        with _figure(*NARROW) as figure:
            axes = figure.subplots()
            _plot_curves(axes, PAINT[stream], curves, tuned.get(f"{stream}_kl"), best)
            axes.set_title(f"{stream.capitalize()} prompts: KL to {_plain(teacher)} (nats)")
            axes.set_xlabel("optimizer step")
            figure.legend(loc="outside lower left", ncols=2, frameon=False)
            figures.append(_svg(figure, f"kl-{stream}", f"KL to the teacher of {stream} prompts, by step"))
    return figures


def _points(measured: dict[int, dict[str, float]], key: str) -> Points:
    return [(step, found[key]) for step, found in measured.items() if found.get(key) is not None]


def _plot_curves(
    axes: Axes, colour: str, curves: dict[str, Points], tuned: float | None, best: int | None
) -> None:
    """Draw one stream's curves; `tuned` is the KL of tuned, None if the student started there."""
    values = [value for points in curves.values() for _, value in points]
    lowest = max(min(values if tuned is None else [*values, tuned]), SMALLEST_KL)
    highest = max(*values, tuned or 0, 2 * lowest)
    raised = {}  # no KL is below the lower edge of the axis
    for label, points in curves.items():
        raised[label] = [(step, max(value, lowest)) for step, value in points]
        if points:
            axes.plot(*zip(*raised[label], strict=True), label=label, color=colour, **CURVES[label])
    if tuned is not None:
        level = max(tuned, lowest)
        axes.axhline(level, label="tuned", color=PAINT["muted"], linestyle="--", linewidth=0.9)
    ring: dict[str, Any] = {"marker": "o", "markersize": 10, "markerfacecolor": "none", "color": PAINT["ink"]}
    for step, value in raised[HELD_OUT]:
        if step == best:
            axes.plot(step, value, label="adapter kept", linestyle="none", **ring)
    if curves[HELD_OUT]:
        style: dict[str, Any] = {"fontweight": "bold", "color": colour, "ha": "right", "va": "bottom"}
        text, place = f"{curves[HELD_OUT][-1][1]:.2f}", raised[HELD_OUT][-1]
        axes.annotate(text, place, (0, 9), textcoords="offset points", **style)
    axes.set_yscale("log")
    axes.set_ylim(lowest / 1.4, 1.4 * highest)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest < 100 * lowest else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda kl, _: f"{kl:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def frontier(names: dict[str, str], marks: list[Mark]) -> Markup | None:
    """Plot the marks of references and arms, named in a legend; None below two marks.

    `names` says in words what retention and domain are measured by.
    """
    if len(names) < 2 or len(marks) < 2:
        return None
    columns = 2 if max(len(mark.label) for mark in marks) <= 20 else 1
    with _figure(WIDE, TALL + LEGEND_LINE * math.ceil(len(marks) / columns)) as figure:
        axes = figure.subplots()
        axes.grid(True, axis="both")
        axes.margins(0.08)
        axes.set_xlabel(f"Domain: {_plain(names['domain'])} (%)")
        axes.set_title(f"Retention: {_plain(names['retention'])} (%)")
        shown = []
        for i, mark in enumerate(marks):
            x, y = mark.centre
            shown.append(f"{mark.label} {y:.0f} % at {x:.0f} % domain")
            # The mark at the place of others is larger, or it would hide them.
            size = 7 + 6 * sum(math.dist((x, y), other.centre) < 1 for other in marks[:i])
            across, up = (
                [[100 * (score.value - score.low)], [100 * (score.high - score.value)]]
                for score in (mark.domain, mark.retention)
            )
            style: dict[str, Any] = {
                "fmt": mark.shape,
                "color": PAINT[mark.colour],
                "linewidth": 1.2,
                "markersize": size,
            }
            axes.errorbar([x], [y], xerr=across, yerr=up, label=mark.label, markerfacecolor="none", **style)
        figure.legend(loc="outside lower left", ncols=columns, frameon=False)
        return _svg(figure, "frontier", escape(f"Retention against domain: {'; '.join(shown)}"))


def arm_styles() -> Iterator[tuple[str, str]]:
    """Yield shapes and colours for the marks of arms."""
    return zip(itertools.cycle(ARM_SHAPES), itertools.cycle(ARM_COLOURS), strict=True)


def _plain(name: str) -> str:
    """Return a name without `$`, which starts a formula, and without characters that fonts or XML lack."""
    return "".join(c for c in name if c.isprintable() and c not in "$\\")[:40]


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    with mpl.rc_context(fname=STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Figure, name: str, description: str) -> Markup:
    """Render as an `<svg>` element for HTML: no metadata, no namespace URLs, ids that no other plot uses."""
    out = io.StringIO()
    with warnings.catch_warnings():
        # Matplotlib only measures the text; the browser draws it, in a font that has the glyph.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| (width|height)="[\d.]+pt"', "", svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for variable, colour in PAINT.items():
        svg = svg.replace(colour, f"var(--{variable})")
    # The page's own font is narrower than the one that matplotlib measured, so nothing collides.
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{description}"', 1))
