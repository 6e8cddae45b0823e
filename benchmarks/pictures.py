"""Draw the pictures of docs/evidence.md from their records.

    python benchmarks/pictures.py

- frontier.svg: what is kept against what is learned, of every arm of frontier.json. The recovery, and replay
  with the recovery, have the 95 % interval over the eight seeds of decided.json beside their point on the
  seed of frontier.json.
- dose.svg: the distance to base of replays in frontier.json, and of recoveries in decided.json with their
  intervals, by the general answers on which base's distribution was shown, and by the seconds of training.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import matplotlib

matplotlib.use("svg")
from arm_tables import general_answers
from matplotlib import pyplot
from matplotlib.figure import Figure
from page_cells import HERE, end_of, read

from opdcl.results.intervals import TWO_SIDED, student

RETENTION, DOMAIN = "instructions_quick", "handbook_quick"
# Arms that belong together -> how a line through them is named and drawn, and its points' labels.
LINES = {
    "plain fine-tunes, rate 1e-3": (
        "#b04a2f",
        "o",
        {"plain-1e-3-1": "1 epoch", "plain-1e-3-2": "2", "plain-1e-3-4": "4", "plain-1e-3-8": "8"},
    ),
    "rate 5e-4": ("#d08a5a", "o", {"plain-5e-4-2": "", "plain-5e-4-4": "", "plain-5e-4-8": ""}),
    "rate 2.5e-4": ("#e0b48c", "o", {"plain-25e-5-4": "", "plain-25e-5-8": "", "plain-25e-5-16": ""}),
    "ranks 2 and 8 in place of 32": ("#8a6d3b", "^", {"plain-r2": "", "plain-r8": ""}),
    "the adapter, scaled": (
        "#777777",
        "s",
        {"scaled-30": ".3", "scaled-50": ".5", "scaled-70": ".7", "plain-1e-3-4": ""},
    ),
    "replay in the fine-tune, 4 epochs": (
        "#2f6db0",
        "D",
        {"mix-10-4": "10 %", "mix-30-4": "30 %", "mix-50-4": "50 %", "mix-70-4": "70 %"},
    ),
    "8 epochs": ("#6aa0d8", "D", {"mix-50-8": "50 %", "mix-70-8": "70 %"}),
}
# Arms of decided.json with their interval over seeds.
MEANS = {
    "half": ("recovery of a plain fine-tune", "#1f7a4d"),
    "mix-kl-then": ("30 % replay, then recovery", "#0b3d91"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "images")
    draw(parser.parse_args().out)


def draw(folder: Path) -> None:
    """Write all pictures into a folder."""
    matplotlib.rcParams |= {"svg.hashsalt": "opdcl", "svg.fonttype": "none", "font.size": 10}
    for name, figure in {"frontier": frontier(), "dose": dose()}.items():
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})


def frontier() -> Figure:
    figure, axes = pyplot.subplots(figsize=(8, 5.6), layout="constrained")
    points = {row["arm"]: place(row) for row in read("frontier")["rows"]}
    for name, (colour, shape, arms) in LINES.items():
        x, y = zip(*(points[arm] for arm in arms), strict=True)
        axes.plot(x, y, color=colour, marker=shape, linewidth=1, label=name)
        for arm, label in arms.items():
            axes.annotate(label, points[arm], (6, -11), textcoords="offset points", fontsize=8, color=colour)
    rows = read("decided")["rows"]
    for arm, (name, colour) in MEANS.items():
        x, y = zip(*(place(row) for row in rows if row["arm"] == arm), strict=True)
        bar = student(TWO_SIDED, len(x) - 1) / len(x) ** 0.5
        style = {"fmt": "*", "markersize": 13, "color": colour, "capsize": 3}
        label = f"{name}, {len(x)} seeds"
        axes.errorbar(fmean(x), fmean(y), bar * stdev(y), bar * stdev(x), label=label, **style)
    base = next(100 * row["suites"][RETENTION]["base"] for row in rows if row["arm"] == "half")
    axes.axhline(base, color="#444444", linestyle="--", linewidth=1)
    axes.annotate("base", (0, base), (0, 4), textcoords="offset points", fontsize=9)
    axes.set_xlim(-2, 102)
    axes.set_xlabel("handbook known, %")
    axes.set_ylabel("instructions followed, %")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def dose() -> Figure:
    figure, both = pyplot.subplots(1, 2, figsize=(8, 3.6), layout="constrained", sharey=True)
    rows = {row["arm"]: row for row in read("frontier")["rows"]}
    of_seeds = {arm: [row for row in read("decided")["rows"] if row["arm"] == arm] for arm in MEANS}
    for axes, amount in zip(both, (general_answers, seconds), strict=True):
        for replay in ("replay in the fine-tune, 4 epochs", "8 epochs"):
            colour, shape, arms = LINES[replay]
            x, y = [amount(rows[arm]) for arm in arms], [distance(rows[arm]) for arm in arms]
            axes.plot(x, y, color=colour, marker=shape, linewidth=1, label=replay)
            for label, place in zip(arms.values(), zip(x, y, strict=True), strict=True):
                axes.annotate(label, place, (5, 5), textcoords="offset points", fontsize=8, color=colour)
        for arm, found in of_seeds.items():
            name, colour = MEANS[arm]
            y = [distance(row) for row in found]
            bar = student(TWO_SIDED, len(y) - 1) / len(y) ** 0.5 * stdev(y)
            style = {"fmt": "*", "markersize": 13, "color": colour, "capsize": 3}
            label = f"{name}, {len(y)} seeds"
            axes.errorbar(median(amount(row) for row in found), fmean(y), bar, label=label, **style)
        axes.set(xscale="log", yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_major_formatter("{x:g}")
    both[0].set(xlabel="general answers shown", ylabel="distance to base, nats")
    both[1].set(xlabel="seconds of training", xticks=[20, 40, 100])
    both[1].xaxis.set_minor_formatter("")
    lines = both[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def seconds(row: dict[str, Any]) -> float:
    return sum(row["stages"].get(stage, 0.0) for stage in ("finetune", "recover"))


def distance(row: dict[str, Any]) -> float:
    return row["closeness"]["distance"][end_of(row)]["value"]


def place(row: dict[str, Any]) -> tuple[float, float]:
    """Return what the model at a run's end knows of the domain, and what it follows, in percent."""
    suites = row["suites"]
    end = end_of(row)
    return 100 * suites[DOMAIN][end], 100 * suites[RETENTION][end]


if __name__ == "__main__":
    main()
