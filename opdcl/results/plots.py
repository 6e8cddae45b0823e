"""The report's plots as inline SVG: numbers in, text out. Colours are CSS variables, so light and dark both work."""

from __future__ import annotations

import io
import itertools
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Matplotlib wants real colours: each of these stands for the CSS variable it is replaced by in the finished SVG.
PAINT = {
    name: f"#{10 + i:02x}fe{60 + i:02x}"
    for i, name in enumerate(
        ("ink", "muted", "rule", "paper", "base", "tuned", "recovered", "general", "domain")
    )
}

SHAPES = {"base": "s", "tuned": "v", "recovered": "o"}

# The arms of a comparison; the numbers of shapes and of colours have no common factor, so 28 arms look different.
ARM_SHAPES = "oD^PX*p"

ARM_COLOURS = ("recovered", "domain", "general", "ink")

# Small on purpose: 324 points wide, so that 9-point text stays readable on a telephone.
WIDTH, HEIGHT = 4.5, 3.3


@contextmanager
def _figure(rows: int = 1, height: float = HEIGHT) -> Iterator[tuple[Figure, list[Axes]]]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "opdcl",
        "font.size": 9,
        "axes.edgecolor": PAINT["rule"],
        "axes.labelcolor": PAINT["muted"],
        "axes.titlecolor": PAINT["ink"],
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": PAINT["rule"],
        "grid.linewidth": 0.6,
        "text.color": PAINT["ink"],
        "xtick.color": PAINT["rule"],
        "xtick.labelcolor": PAINT["muted"],
        "ytick.labelcolor": PAINT["muted"],
        "ytick.left": False,
        "lines.linewidth": 1.6,
        "lines.solid_capstyle": "round",
        "figure.facecolor": "none",
        "axes.facecolor": "none",
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, list(figure.subplots(rows, sharex=True, squeeze=False)[:, 0])


def _svg(figure: Figure, name: str, description: str) -> str:
    """Render as an `<svg>` element for HTML: no metadata, no namespace URLs, ids that no other plot uses."""
    out = io.StringIO()
    with warnings.catch_warnings():
        # Matplotlib only measures the text; the browser draws it, with a font that has the glyph.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| (width|height)="[\d.]+pt"', "", svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for variable, colour in PAINT.items():
        svg = svg.replace(colour, f"var(--{variable})")
    # The page's own typeface; it is narrower than the one that matplotlib measured, so nothing collides.
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)


def _whole_steps(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))


def finetune_loss(rows: list[dict]) -> str | None:
    """Plot the fine-tune's loss over optimizer steps; None where there are fewer than two points."""
    points = [(r["step"], r["loss"]) for r in rows if "step" in r and r.get("loss") is not None]
    if len(points) < 2:
        return None
    steps, losses = zip(*points, strict=True)
    with _figure() as (figure, (axes,)):
        axes.plot(steps, losses, color=PAINT["tuned"])
        axes.plot(steps[-1], losses[-1], "o", color=PAINT["tuned"], markersize=4)
        _label(axes, f"{losses[-1]:.2f}", (steps[-1], losses[-1]), (6, 0), ha="left", va="center")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("optimizer step")
        axes.set_title("Loss in nats per answer token")
        _whole_steps(axes)
        return _svg(figure, "loss", f"Fine-tune loss from {losses[0]:.2f} to {losses[-1]:.2f}")


def recovery_kl(rows: list[dict], teachers: dict[str, str]) -> str | None:
    """Plot KL(student, teacher) per stream, one panel each: faint in training, strong on held-out prompts.

    Args:
        rows: The stage's metrics.
        teachers: What to call the teacher of each stream.
    """
    training = [r for r in rows if r.get("stream") and r.get("kl") is not None]
    held_out = [r for r in rows if r.get("validation")]
    if not training and not held_out:
        return None
    best = max((r["step"] for r in held_out if r["validation"].get("best")), default=None)
    with _figure(rows=2, height=1.25 * HEIGHT) as (figure, panels):
        for axes, (stream, teacher) in zip(panels, teachers.items(), strict=True):
            colour = PAINT[stream]
            seen = [(r["step"], r["kl"]) for r in training if r["stream"] == stream]
            checked = [
                (r["step"], r["validation"][f"{stream}_kl"])
                for r in held_out
                if r["validation"].get(f"{stream}_kl") is not None
            ]
            axes.plot(*_columns(seen), color=colour, alpha=0.35, linewidth=1.1, marker=".", markersize=4)
            axes.plot(*_columns(checked), color=colour, marker="o", markersize=4)
            for step, value in checked:
                if step == best:
                    axes.plot(step, value, "o", markersize=10, markerfacecolor="none", color=PAINT["ink"])
            if checked:
                step, value = checked[-1]
                _label(
                    axes,
                    f"held-out {value:.2f}",
                    (step, value),
                    (0, 9),
                    ha="right",
                    va="bottom",
                    color=colour,
                )
            top = max((v for _, v in seen + checked), default=0.0) or 1.0
            axes.set_ylim(-0.04 * top, 1.12 * top)
            axes.set_title(f"{stream.capitalize()} prompts, teacher {teacher}: KL in nats per token")
            _whole_steps(axes)
        panels[-1].set_xlabel("optimizer step")
        return _svg(figure, "kl", "KL to the teacher per stream over the steps of recovery")


def tradeoff(summary: dict[str, Any]) -> str | None:
    """Plot domain (x) against retention (y) with 95 % intervals; None unless two states have both."""
    names = [summary["headline"][role] for role in ("domain", "retention")]
    if None in names:
        return None
    suites = [summary["suites"][name] for name in names]
    points = {s: [suite[s] for suite in suites] for s in SHAPES if all(suite[s] for suite in suites)}
    if len(points) < 2:
        return None
    with _figure() as (figure, (axes,)):
        axes.grid(True, axis="both")
        centres = {s: [100 * e["value"] for e in both] for s, both in points.items()}
        for start, end in zip(list(centres)[:-1], list(centres)[1:], strict=True):
            axes.annotate(
                "",
                centres[end],
                centres[start],
                arrowprops={
                    "arrowstyle": "->",
                    "color": PAINT["muted"],
                    "linewidth": 0.8,
                    "shrinkA": 7,
                    "shrinkB": 7,
                },
            )
        for state, (x, y) in points.items():
            _cross(axes, x, y, fmt=SHAPES[state], color=PAINT[state])
        axes.margins(0.16)
        left, right = axes.get_xlim()
        lowest = min(centres, key=lambda state: centres[state][1])
        for state, (x, y) in centres.items():
            # Towards the middle in x, so that no label leaves the plot; away from the arrows in y.
            side, ha = (-7, "right") if x > left + 0.6 * (right - left) else (7, "left")
            above, va = (-6, "top") if state == lowest else (6, "bottom")
            _label(axes, state, (x, y), (side, above), ha=ha, va=va, color=PAINT[state])
        axes.set_xlabel(f"domain: {_plain(names[0])} (%)")
        axes.set_title(f"Retention: {_plain(names[1])} (%)")
        text = "; ".join(f"{s} {y:.0f} % at {x:.0f} % domain" for s, (x, y) in centres.items())
        return _svg(figure, "tradeoff", f"Retention against domain: {text}")


def frontier(found: dict[str, Any]) -> str | None:
    """Plot domain (x) against retention (y) of a comparison's base, tuned and arms, and the alpha-curve; None below two points."""
    names = [found["headline"][role] for role in ("domain", "retention")]
    rows = [row for row in (*found["references"], *found["arms"]) if row["domain"] and row["retention"]]
    if None in names or len(rows) < 2:
        return None
    # A legend leaves out what begins with an underscore.
    labels = [_plain(row["name"]).lstrip("_") for row in rows]
    columns = 2 if max(map(len, labels)) <= 20 else 1
    arms = zip(itertools.cycle(ARM_SHAPES), itertools.cycle(ARM_COLOURS), strict=True)
    curve = found["alpha_curve"]
    lines = (
        {"alpha-curve": ("-", curve), "its mixtures": ("--", [p for p in curve if p["edge"]])}
        if curve
        else {}
    )
    with _figure(height=HEIGHT + 0.2 * -(-(len(rows) + len(lines)) // columns)) as (figure, (axes,)):
        axes.grid(True, axis="both")
        for name, (line, points) in lines.items():
            places = [(100 * point["domain"], 100 * point["retention"]) for point in points]
            axes.plot(*_columns(places), color=PAINT["muted"], linestyle=line, linewidth=0.9, label=name)
        for row, label in zip(rows, labels, strict=True):
            shape, colour = (SHAPES[row["state"]], row["state"]) if "state" in row else next(arms)
            colour = "muted" if row.get("method") == "interpolate" else colour
            _cross(axes, row["domain"], row["retention"], fmt=shape, color=PAINT[colour], label=label)
        axes.margins(0.08)
        axes.set_xlabel(f"domain: {_plain(names[0])} (%)")
        axes.set_title(f"Retention: {_plain(names[1])} (%)")
        figure.legend(loc="outside lower left", ncols=columns, frameon=False)
        text = "; ".join(
            f"{label} {100 * row['retention']['value']:.0f} % at {100 * row['domain']['value']:.0f} % domain"
            for row, label in zip(rows, labels, strict=True)
        )
        return _svg(figure, "frontier", escape(f"Retention against domain: {text}"))


def steps(found: dict[str, Any]) -> str | None:
    """Plot every suite from base through the steps of each chain, one panel each; None without chains."""
    scores = {step["name"]: step["scores"] for step in found["steps"]}
    suites = [n for n in found["suites"] if n in found["base"]]
    if not found["chains"] or not suites:
        return None
    longest = max(len(chain["steps"]) for chain in found["chains"])
    with _figure(rows=len(suites), height=0.55 * HEIGHT * len(suites) + 0.25 * len(found["chains"])) as (
        figure,
        panels,
    ):
        for axes, suite in zip(panels, suites, strict=True):
            for i, (chain, shape, colour) in enumerate(
                zip(found["chains"], itertools.cycle(ARM_SHAPES), itertools.cycle(ARM_COLOURS), strict=False)
            ):
                points = [(0, found["base"][suite])] + [
                    (x, scores[n][suite]) for x, n in enumerate(chain["steps"], 1) if suite in scores[n]
                ]
                xs = [x + 0.06 * i for x, _ in points]
                ys, lows, highs = ([100 * e[k] for _, e in points] for k in ("value", "low", "high"))
                bars = [
                    [y - low for y, low in zip(ys, lows, strict=True)],
                    [high - y for y, high in zip(ys, highs, strict=True)],
                ]
                axes.errorbar(
                    xs,
                    ys,
                    yerr=bars,
                    fmt=f"{shape}-",
                    color=PAINT[colour],
                    markersize=5,
                    linewidth=1.2,
                    label=_plain(chain["steps"][-1]).lstrip("_"),
                )
            axes.set_title(f"{_plain(suite)} (%)")
            axes.set_ylim(bottom=0)
        panels[-1].set_xticks(range(longest + 1), ["base", *(f"step {i}" for i in range(1, longest + 1))])
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=1, frameon=False)
        return _svg(figure, "steps", "Score of every suite after each step")


def _cross(axes: Axes, x: dict[str, float], y: dict[str, float], **style: Any) -> None:
    """Mark the point of two estimates, in percent, with both intervals."""
    axes.errorbar(
        100 * x["value"],
        100 * y["value"],
        xerr=[[100 * (x["value"] - x["low"])], [100 * (x["high"] - x["value"])]],
        yerr=[[100 * (y["value"] - y["low"])], [100 * (y["high"] - y["value"])]],
        markersize=7,
        linewidth=1.2,
        **style,
    )


def _plain(name: str) -> str:
    """Return a suite's name without `$`, which would start a formula, or characters that fonts and XML lack."""
    return "".join(c for c in name if c.isprintable() and c not in "$\\")[:40]


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _label(axes: Axes, text: str, at: tuple, offset: tuple[int, int], **style: Any) -> None:
    axes.annotate(text, at, offset, textcoords="offset points", fontweight="bold", **style)
