"""Plot reports and comparisons as inline SVG. Colours are CSS variables, for light and dark pages."""

from __future__ import annotations

import io
import itertools
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Matplotlib needs real colours; CSS variables replace them in the finished SVG.
VARIABLES = ("ink", "muted", "rule", "paper", "base", "tuned", "recovered", "general", "domain")
PAINT = {name: f"#{10 + i:02x}fe{60 + i:02x}" for i, name in enumerate(VARIABLES)}

SHAPES = {"base": "s", "tuned": "v", "recovered": "o"}
# For the arms of a comparison: 7 shapes and 4 colours have no common factor, so 28 arms look different.
ARM_SHAPES = "oD^PX*p"
ARM_COLOURS = ("recovered", "domain", "general", "ink")

# In inches. A phone shows 259 points at 324 pixels, so 9-point text stays readable there.
WIDTH, HEIGHT = 3.6, 2.7
# The plots that stand in one row.
PANELS = 3.3
# The main plot has half a desktop page.
WIDE, TALL = 4.1, 3.1


@contextmanager
def _figure(
    rows: int = 1, height: float = HEIGHT, width: float = WIDTH
) -> Iterator[tuple[Figure, list[Axes]]]:
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "opdcl",
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.grid.axis": "y",
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.6,
        "lines.solid_capstyle": "round",
        **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left", "ytick.left"), False),
        **dict.fromkeys(("axes.titlecolor", "text.color"), PAINT["ink"]),
        **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color"), PAINT["rule"]),
        **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), PAINT["muted"]),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, list(figure.subplots(rows, sharex=True, squeeze=False)[:, 0])


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


def _label_steps(axes: Axes, title: str) -> None:
    """Title the axes, and mark whole optimizer steps."""
    axes.set_title(title)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))


def finetune_loss(rows: list[dict]) -> Markup | None:
    """Plot the fine-tune's loss over optimizer steps; None with fewer than two points."""
    points = [(r["step"], r["loss"]) for r in rows if "step" in r and r.get("loss") is not None]
    if len(points) < 2:
        return None
    steps, losses = zip(*points, strict=True)
    with _figure(height=PANELS) as (figure, (axes,)):
        axes.plot(steps, losses, color=PAINT["tuned"])
        axes.plot(steps[-1], losses[-1], "o", color=PAINT["tuned"], markersize=4)
        _label(axes, f"{losses[-1]:.2f}", points[-1], (6, 0), ha="left", va="center")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("optimizer step")
        _label_steps(axes, "Loss in nats per answer token")
        return _svg(figure, "loss", f"Fine-tune loss from {losses[0]:.2f} to {losses[-1]:.2f}")


def recovery_kl(rows: list[dict], teachers: dict[str, str]) -> Markup | None:
    """Plot KL(student, teacher) per stream, one panel each.

    A faint line is training, a strong one the teacher's held-out answers, a dotted one the student's own.

    `teachers` maps each stream to the name of its teacher.
    """
    if not any(row.get("validation") or (row.get("stream") and row.get("kl") is not None) for row in rows):
        return None
    with _figure(rows=2, height=PANELS) as (figure, panels):
        for axes, (stream, teacher) in zip(panels, teachers.items(), strict=True):
            _plot_stream(axes, stream, rows)
            _label_steps(axes, f"{stream.capitalize()} prompts: KL to teacher {teacher} (nats)")
        panels[-1].set_xlabel("optimizer step")
        return _svg(figure, "kl", "KL to the teacher per stream over the steps of recovery")


def _plot_stream(axes: Axes, stream: str, rows: list[dict]) -> None:
    colour, held_out = PAINT[stream], [row for row in rows if row.get("validation")]
    best = max((row["step"] for row in held_out if row["validation"].get("best")), default=None)

    def measured(key: str) -> list[tuple[float, float]]:
        found = ((row["step"], row["validation"].get(key)) for row in held_out)
        return [point for point in found if point[1] is not None]

    trained = [
        (row["step"], row["kl"]) for row in rows if row.get("stream") == stream and row.get("kl") is not None
    ]
    validated, own = measured(f"{stream}_kl"), measured("own_kl") if stream == "general" else []
    axes.plot(*_columns(trained), color=colour, alpha=0.35, linewidth=1.1, marker=".", markersize=4)
    axes.plot(*_columns(validated), color=colour, marker="o", markersize=4)
    axes.plot(*_columns(own), color=colour, linestyle=":")
    for step, value in validated:
        if step == best:
            axes.plot(step, value, "o", markersize=10, markerfacecolor="none", color=PAINT["ink"])
    if validated:
        text = f"held-out {validated[-1][1]:.2f}"
        _label(axes, text, validated[-1], (0, 9), ha="right", va="bottom", color=colour)
    top = max((value for _, value in trained + validated + own), default=0.0) or 1.0
    axes.set_ylim(-0.04 * top, 1.12 * top)


def tradeoff(summary: dict[str, Any]) -> Markup | None:
    """Plot domain (x) against retention (y) with 95 % intervals; None unless two states have both."""
    names = [summary["headline"][role] for role in ("domain", "retention")]
    if None in names:
        return None
    suites = [summary["suites"][name] for name in names]
    points = {}
    for state in SHAPES:
        pair = [suite[state] for suite in suites]
        if all(pair):
            points[state] = pair
    if len(points) < 2:
        return None
    with _figure(height=TALL, width=WIDE) as (figure, (axes,)):
        axes.grid(True, axis="both")
        centres = {s: (100 * x["value"], 100 * y["value"]) for s, (x, y) in points.items()}
        arrow = {"arrowstyle": "->", "color": PAINT["muted"], "linewidth": 0.8, "shrinkA": 7, "shrinkB": 7}
        for start, end in itertools.pairwise(centres.values()):
            axes.annotate("", end, start, arrowprops=arrow)
        for state, (x, y) in points.items():
            _cross(axes, x, y, fmt=SHAPES[state], color=PAINT[state])
        if (floor := suites[1]["floor"]) is not None:
            axes.axhline(100 * floor, color=PAINT["muted"], linestyle="--", linewidth=0.9)
            edge = {"xycoords": axes.get_yaxis_transform(), "color": PAINT["muted"]}
            _label(axes, "floor", (1, 100 * floor), (0, 2), ha="right", va="bottom", **edge)
        axes.margins(0.16)
        left, right = axes.get_xlim()
        lowest = min(centres, key=lambda state: centres[state][1])
        for state, (x, y) in centres.items():
            # Labels point to the middle in x, to stay inside the plot, and away from the arrows in y.
            side, ha = (-7, "right") if x > left + 0.6 * (right - left) else (7, "left")
            above, va = (-6, "top") if state == lowest else (6, "bottom")
            _label(axes, state, (x, y), (side, above), ha=ha, va=va, color=PAINT[state])
        return _svg(figure, "tradeoff", _name_axes(axes, names, list(centres.items())))


def _name_axes(axes: Axes, names: list[str], marks: list[tuple[str, tuple[float, float]]]) -> str:
    """Name the axes by their suites; return the description of a figure with these marks."""
    axes.set_xlabel(f"domain: {_plain(names[0])} (%)")
    axes.set_title(f"Retention: {_plain(names[1])} (%)")
    text = "; ".join(f"{name} {y:.0f} % at {x:.0f} % domain" for name, (x, y) in marks)
    return f"Retention against domain: {text}"


def writing(summary: dict[str, Any]) -> Markup | None:
    """Plot how each state's headline answers are written, one panel per measure; None without a measure."""
    suite = summary["suites"].get(summary["headline"]["retention"], {"writing": {}})
    measured = {}
    for measure, title in (("ended", "Answers that end (%)"), ("repetition", "Repeated 4-grams (%)")):
        states = {state: found[measure] for state, found in suite["writing"].items() if measure in found}
        if states:
            measured[title] = states
    if not measured:
        return None
    descriptions = []
    with _figure(rows=len(measured), height=PANELS) as (figure, panels):
        for axes, (title, states) in zip(panels, measured.items(), strict=True):
            shown = []
            for state, estimate in states.items():
                (value,), bars = _bars([estimate])
                style: dict[str, Any] = {"fmt": SHAPES[state], "color": PAINT[state], "markersize": 7}
                axes.errorbar([state], [value], yerr=bars, linewidth=1.2, **style)
                shown.append(f"{state} {value:.0f}")
                offset, colour = (8, 0), PAINT[state]
                _label(axes, f"{value:.0f}", (state, value), offset, ha="left", va="center", color=colour)
            descriptions.append(f"{title}: {', '.join(shown)}")
            axes.set_title(title)
            axes.margins(x=0.2)
            top = 100 * max(0.01, *(estimate["high"] for estimate in states.values()))
            axes.set_ylim(-0.06 * top, 1.2 * top)
        return _svg(figure, "writing", "; ".join(descriptions))


def frontier(comparison: dict[str, Any]) -> Markup | None:
    """Plot domain (x) against retention (y) of references and arms; None below two points."""
    names = [comparison["headline"][role] for role in ("domain", "retention")]
    rows = [r for r in (*comparison["references"], *comparison["arms"]) if r["domain"] and r["retention"]]
    if None in names or len(rows) < 2:
        return None
    # A legend omits labels that begin with an underscore.
    labels = [_plain(row["name"]).lstrip("_") for row in rows]
    columns = 2 if max(map(len, labels)) <= 20 else 1
    styles = _arm_styles()
    height = TALL + 0.2 * math.ceil(len(rows) / columns)
    with _figure(height=height, width=WIDE) as (figure, (axes,)):
        axes.grid(True, axis="both")
        drawn: list[dict[str, Any]] = []
        for row, label in zip(rows, labels, strict=True):
            shape, colour = (SHAPES[row["state"]], row["state"]) if "state" in row else next(styles)
            style: dict[str, Any] = {"fmt": shape, "color": PAINT[colour], "label": label}
            style |= {"markerfacecolor": "none", "markersize": 7 + 6 * _coinciding(row, drawn)}
            _cross(axes, row["domain"], row["retention"], **style)
            drawn.append(row)
        axes.margins(0.08)
        figure.legend(loc="outside lower left", ncols=columns, frameon=False)
        marks = list(zip(labels, map(_centre, rows), strict=True))
        return _svg(figure, "frontier", escape(_name_axes(axes, names, marks)))


def _centre(row: dict[str, Any]) -> tuple[float, float]:
    """Return domain and retention in percent."""
    return 100 * row["domain"]["value"], 100 * row["retention"]["value"]


def _coinciding(row: dict[str, Any], drawn: list[dict[str, Any]]) -> int:
    """Count the drawn marks at the place of a row: its own must be larger, or it would hide them."""
    x, y = _centre(row)
    return sum(abs(x - left) < 1 and abs(y - height) < 1 for left, height in map(_centre, drawn))


def steps(comparison: dict[str, Any]) -> Markup | None:
    """Plot each suite from base through the steps of each chain, in its own panel; None without chains."""
    scores = {step["name"]: step["scores"] for step in comparison["steps"]}
    base, chains = comparison["base"], comparison["chains"]
    suites = [name for name in comparison["suites"] if name in base]
    if not chains or not suites:
        return None
    height = 1.1 * len(suites) + 0.25 * len(chains) + 0.4
    with _figure(rows=len(suites), height=height, width=WIDE) as (figure, panels):
        for axes, suite in zip(panels, suites, strict=True):
            for i, (chain, (shape, colour)) in enumerate(zip(chains, _arm_styles(), strict=False)):
                measured = [(x, scores[n]) for x, n in enumerate(chain["steps"], 1) if suite in scores[n]]
                # Chains are shifted a little, so that their bars do not cover one another.
                places = [0, *[x for x, _ in measured]]
                xs = [x + 0.06 * i for x in places]
                ys, bars = _bars([base[suite], *(step[suite] for _, step in measured)])
                style: dict[str, Any] = {"fmt": f"{shape}-", "color": PAINT[colour], "linewidth": 1.2}
                label = _plain(chain["steps"][-1]).lstrip("_")
                axes.errorbar(xs, ys, yerr=bars, label=label, markersize=5, **style)
            axes.set_title(f"{_plain(suite)} (%)")
            axes.set_ylim(bottom=0)
        longest = max(len(chain["steps"]) for chain in chains)
        panels[-1].set_xticks(range(longest + 1), ["base", *(f"step {i}" for i in range(1, longest + 1))])
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=1, frameon=False)
        return _svg(figure, "steps", "Score of every suite after each step")


def _arm_styles() -> Iterator[tuple[str, str]]:
    return zip(itertools.cycle(ARM_SHAPES), itertools.cycle(ARM_COLOURS), strict=True)


def _bars(estimates: list[dict[str, float]]) -> tuple[list[float], list[list[float]]]:
    """Return values and lengths of the error bars below and above them, in percent."""
    below = [100 * (e["value"] - e["low"]) for e in estimates]
    above = [100 * (e["high"] - e["value"]) for e in estimates]
    return [100 * e["value"] for e in estimates], [below, above]


def _cross(axes: Axes, x: dict[str, float], y: dict[str, float], **style: Any) -> None:
    """Mark the point of two estimates, in percent, with both intervals."""
    (xs, xerr), (ys, yerr) = _bars([x]), _bars([y])
    axes.errorbar(xs, ys, xerr=xerr, yerr=yerr, **{"markersize": 7, "linewidth": 1.2} | style)


def _plain(name: str) -> str:
    """Return a name without `$`, which starts a formula, and without characters that fonts or XML lack."""
    return "".join(c for c in name if c.isprintable() and c not in "$\\")[:40]


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _label(axes: Axes, text: str, at: tuple, offset: tuple[int, int], **style: Any) -> None:
    axes.annotate(text, at, offset, textcoords="offset points", fontweight="bold", **style)
