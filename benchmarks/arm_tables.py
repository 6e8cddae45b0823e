"""The tables of arms that `pieces.py` has kept: means over seeds of scores, R, C and D."""

from __future__ import annotations

import re
from statistics import fmean, median
from typing import Any

from page_cells import NOT_MEASURED, end_of, of_seeds, ratio, read, rows_of, unbroken

# Rows and epochs of the quickstart's fine-tune, and the general rows of one step of its recovery.
ROWS, EPOCHS, GENERAL_ROWS = 210, 4, 8
# How many of a fine-tune's rows are replayed, in percent, where the name of the arm does not say it.
REPLAY_SHARES = {"mix-kl": 30, "mix-kl-then": 30, "mix-70": 70, "mix-70-then": 70}

# What recoveries are compared by: shares, or the scores themselves where a fine-tune has no recovery.
SHARES = ("R", "D")
SCORES = ("instructions, %", "handbook, %")

# Those of benchmarks/replay.yaml and replay_more.yaml, beside the recovery alone.
REPLAYED = {
    "half": "a plain fine-tune, then the recovery",
    "mix-kl": "a fine-tune with 30 % replay, no recovery",
    "mix-kl-then": "the same, then the recovery",
    "mix-70": "a fine-tune with 70 % replay, the default; no recovery",
    "mix-70-then": "the same, then the recovery",
}

# Those of benchmarks/decided.yaml.
DECIDED = {
    "half": "**a plain fine-tune, then the recovery**",
    "start-alone": "the recovery's starting point, a scaled adapter, without training",
    "mix-kl": "a fine-tune with 30 % replay, no recovery",
    "mix-kl-then": "**the same, then the recovery**",
}
DECIDED_PAIRS = {
    "recovery - 30 % replay alone": ("half", "mix-kl"),
    "30 % replay, then recovery - recovery": ("mix-kl-then", "half"),
    "30 % replay, then recovery - replay alone": ("mix-kl-then", "mix-kl"),
}
REPLAY_PAIRS = {
    "70 % replay, no recovery - recovery": ("mix-70", "half"),
    "70 % replay, then recovery - recovery": ("mix-70-then", "half"),
    "70 % replay, then recovery - no recovery": ("mix-70-then", "mix-70"),
}
START_PAIRS = {"half - none": ("half", "off"), "all - none": ("on", "off"), "half - all": ("half", "on")}


def figures(row: dict[str, Any], columns: tuple[str, ...] = SHARES, state: str | None = None) -> list[float]:
    """Return a state's figures: distance, those of two columns, short questions, length, ends.

    The state is that of the run's end, unless it is named.
    """
    end = state or end_of(row)
    score_of = {suite["role"]: 100 * suite[end] for suite in row["suites"].values()}
    two = [score_of["retention"], score_of["domain"]]
    if columns == SHARES:
        two = [row[key]["value"] for key in ("recovery", "domain_retention")]
    return [row["closeness"]["distance"][end]["value"], *two, score_of["control"], *written_by(row, end)]


def cells_of(figures_of_seeds: list[list[float]], columns: tuple[str, ...] = SHARES) -> list[str]:
    """Return a cell for each figure: its mean over the seeds, with an interval."""
    digits = [2, *([2, 2] if columns == SHARES else [0, 0]), 1, 0, 0]
    values = zip(*figures_of_seeds, strict=True)
    return [of_seeds([*of_one], places) for of_one, places in zip(values, digits, strict=True)]


def replayed() -> str:
    """Return what a fine-tune with replayed rows reaches, alone and before the recovery."""
    rows = read("replay")["rows"]
    seeds = {row["seed"] for row in rows}
    plain = [row for row in read("start")["rows"] if row["seed"] in seeds]
    return reached_by(plain + rows, REPLAYED, SCORES)


def decided() -> str:
    """Return what recovery, replay and both reach, beside base and the plain fine-tune."""
    rows = read("decided")["rows"]
    table = reached_by(rows, DECIDED, SCORES).splitlines()
    plain = [row for row in rows if row["arm"] == "half"]
    for place, (state, words) in enumerate({"base": "base", "tuned": "a plain fine-tune"}.items(), start=2):
        cells = [*effort(plain, state), *cells_of([figures(row, SCORES, state) for row in plain], SCORES)]
        table.insert(
            place, rows_of([], [[words, str(len(plain)), *unbroken([cells], 0)[0]]]).splitlines()[-1]
        )
    return "\n".join(table)


def reached_by(
    rows_of_arms: list[dict[str, Any]], names: dict[str, str], columns: tuple[str, ...] = SHARES
) -> str:
    """Return the figures of named arms: means over the seeds of each."""
    found = [row for row in rows_of_arms if row["arm"] in names]
    table = []
    for arm, words in names.items():
        rows = [row for row in found if row["arm"] == arm]
        if rows:
            cells = cells_of([figures(row, columns) for row in rows], columns)
            table.append([words, str(len(rows)), *(effort(rows) if columns != SHARES else []), *cells])
    lengths, ends = zip(*[written_by(row, "base") for row in found], strict=True)
    writing = [f"tokens, base {fmean(lengths):.0f}", f"answers that end, %, base {fmean(ends):.0f}"]
    efforts = ["general answers", "training"] if columns != SHARES else []
    head = ["recovery", "seeds", *efforts, "distance, nats", *columns, "short questions, %", *writing]
    return rows_of(head, unbroken(table, 1))


def effort(rows: list[dict[str, Any]], state: str = "") -> list[str]:
    """Return on how many general answers an arm saw base's distribution, and how long it trained.

    `state` is base or tuned where these are meant instead of the model at the runs' end. The time is the
    median over the seeds, because runs shared their machines.
    """
    if state == "base":
        return ["0", ""]
    stages = ("finetune",) if state == "tuned" else ("finetune", "recover")
    seconds = median(sum(row["stages"].get(stage, 0) for stage in stages) for row in rows)
    answers = 0 if state == "tuned" else general_answers(rows[0])
    return [f"{answers:,}", f"{seconds / 60:.0f} min" if seconds > 120 else f"{seconds:.0f} s"]


def general_answers(row: dict[str, Any]) -> int:
    """Return how many times a run saw base's distribution of an answer: replayed in each epoch, or graded."""
    share, epochs = REPLAY_SHARES.get(row["arm"], 0), EPOCHS
    if named := re.fullmatch(r"mix-(\d+)-(\d+)", row["arm"]):
        share, epochs = int(named[1]), int(named[2])
    steps = sum(count for author, count in row["written_by"].items() if author.startswith("general"))
    return round(ROWS * share / (100 - share)) * epochs + GENERAL_ROWS * steps


def pairs(records: list[str], named: dict[str, tuple[str, str]], columns: tuple[str, ...] = SHARES) -> str:
    """Return how far two arms lie apart, on the same prompts and seeds."""
    found = {(row["arm"], row["seed"]): row for name in records for row in read(name)["rows"]}
    table = []
    for words, (one, other) in named.items():
        seeds = [seed for arm, seed in found if arm == one and (other, seed) in found]
        differences = []
        for seed in seeds:
            ours, theirs = (compared(found[arm, seed], columns) for arm in (one, other))
            differences.append([a - b for a, b in zip(ours, theirs, strict=True)])
        if seeds:
            table.append([words, str(len(seeds)), *cells_of(differences, columns)])
    gaps = ("tokens, gap to base", "ends, gap to base, points")
    head = ["first - second", "seeds", "distance, nats", *columns, "short questions, %", *gaps]
    return rows_of(head, unbroken(table, 1))


def compared(row: dict[str, Any], columns: tuple[str, ...]) -> list[float]:
    """Return a run's figures, of length and ends how far they lie from base's."""
    *shares, length, ends = figures(row, columns)
    base_length, base_ends = written_by(row, "base")
    return [*shares, abs(length - base_length), abs(ends - base_ends)]


def reached() -> str:
    """Return what the quickstart's recovery reaches, beside its rivals: means over the seeds, one machine."""
    words = by_arm(read("words")["rows"])
    models = {
        "base": ("half", "base"),
        "tuned": ("half", "tuned"),
        "tuned, repaired without training": ("projected", "recovered"),
        "**tuned, then recovered**": ("half", "recovered"),
    }
    table = []
    for name, (arm, state) in models.items():
        rows = words[arm]
        near = of_seeds([row["closeness"]["distance"][state]["value"] for row in rows], 2)
        suites = ("instructions_quick", "handbook_quick")
        cells = [of_seeds(scores(rows, suite, state), 0) for suite in suites]
        end = "" if state == end_of(rows[0]) else state
        table.append([name, *cells, near, *effort(rows, end)])
    columns = ["model", "instructions followed, %", "handbook known, %", "distance to base, nats a token"]
    return rows_of([*columns, "general answers learned from", "training"], table)


def by_arm(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    arms: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    return arms


def written_by(row: dict[str, Any], state: str) -> tuple[float, float]:
    """Return the mean length in tokens of a state's sampled answers, and the share that ends in percent."""
    written = row["closeness"]["written"][state]
    return written["length"], 100 * written["ended"]


def families() -> str:
    """Return what the second model scored on each data set, with the time and memory of its whole run."""
    found = read("gemma")
    table = []
    for row in found["rows"] if found else ():
        suites = {suite["role"]: (name, suite) for name, suite in row["suites"].items()}
        cells = []
        for role in ("retention", "control", "domain"):
            name, suite = suites[role]
            scores = " / ".join(f"{100 * suite[s]:.1f}" for s in ("base", "tuned", "recovered"))
            cells.append(f"`{name}`, n = {suite['n']}<br>{scores}")
        ratios = [row[key] for key in ("recovery", "closeness", "domain_retention")]
        cells += ["none" if not one or one["value"] is None else ratio(one) for one in ratios]
        written = row["closeness"]["written"]
        cells.append(" / ".join(f"{written[s]['length']:.0f}" for s in ("base", "tuned", "recovered")))
        cells.append(" / ".join(f"{100 * written[s]['ended']:.0f}" for s in ("base", "tuned", "recovered")))
        cells.append(f"{row['seconds'] / 60:.0f} min, {row['peak_memory_bytes'] / 2**30:.1f} GiB")
        table.append([row["arm"], *cells])
    columns = ["data, 1 seed", "retention, %", "control, %", "domain, %", "R", "C", "D"]
    columns += ["tokens", "answers that end, %", "whole run"]
    return rows_of(columns, table) if table else NOT_MEASURED


def scores(rows: list[dict[str, Any]], suite: str, state: str) -> list[float]:
    return [100 * row["suites"][suite][state] for row in rows]
