"""The tables of benchmarks/equal.yaml: recovery and replay of as many general answers."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from arm_tables import effort, written_by
from page_cells import NOT_MEASURED, end_of, of_seeds, read, rows_of, unbroken

ARMS = {
    "recovered": "**a plain fine-tune, then a recovery of 64 steps**",
    "off": "the same, base writes all answers",
    "replay-256": "a fine-tune with 23 % replay, no recovery",
}
PAIRS = {
    "recovery - replay": ("recovered", "replay-256"),
    "the student's half - base alone": ("recovered", "off"),
}
DIGITS = (2, 0, 0, 0, 0)
"""Of the figures that `measured` returns."""


def equal() -> str:
    """Return what recovery and replay reach with as many general answers, beside base and tuned."""
    rows = read("equal").get("rows", [])
    plain = [row for row in rows if row["arm"] == "recovered"]
    if not plain:
        return NOT_MEASURED
    table = [line("base", plain, "base"), line("a plain fine-tune", plain, "tuned")]
    for arm, words in ARMS.items():
        found = [row for row in rows if row["arm"] == arm]
        if found:
            table.append(line(words, found, ""))
    return rows_of(["model", "seeds", "general answers", "training", *columns(plain)], unbroken(table, 1))


def equal_pairs() -> str:
    """Return the differences of arms on the same seeds and prompts."""
    found = {(row["arm"], row["seed"]): row for row in read("equal").get("rows", [])}
    table = []
    for words, (first, second) in PAIRS.items():
        seeds = [seed for arm, seed in found if arm == first and (second, seed) in found]
        differences = []
        for seed in seeds:
            ours, theirs = (gaps(found[arm, seed]) for arm in (first, second))
            differences.append([a - b for a, b in zip(ours, theirs, strict=True)])
        if seeds:
            table.append([words, str(len(seeds)), *cells(differences)])
    names = ["distance, nats", "instructions, %", "handbook, %", "tokens, gap to base"]
    names.append("ends, gap to base, points")
    return rows_of(["first - second", "seeds", *names], unbroken(table, 1)) if table else NOT_MEASURED


def line(words: str, rows: list[dict[str, Any]], state: str) -> list[str]:
    """Return the line of a model: base or tuned of these runs, or the model at their ends."""
    spent = ["0", ""] if state == "base" else [f"{answers_of(rows[0], state):,}", effort(rows, state)[1]]
    return [words, str(len(rows)), *spent, *cells([measured(row, state or end_of(row)) for row in rows])]


def answers_of(row: dict[str, Any], state: str) -> int:
    """Return on how many general answers the student saw base's distribution, until it was in that state."""
    stages = [dose for stage, dose in row["dose"].items() if state != "tuned" or stage == "finetune"]
    return sum(of["answers"] for dose in stages for of in dose["graded"].get("general", {}).values())


def columns(rows: list[dict[str, Any]]) -> list[str]:
    length, ends = (fmean(of) for of in zip(*(written_by(row, "base") for row in rows), strict=True))
    names = ["distance, nats", "instructions, %", "handbook, %"]
    return [*names, f"tokens, base {length:.0f}", f"answers that end, %, base {ends:.0f}"]


def cells(figures: list[list[float]]) -> list[str]:
    return [of_seeds([*of], digits) for of, digits in zip(zip(*figures, strict=True), DIGITS, strict=True)]


def measured(row: dict[str, Any], state: str) -> list[float]:
    """Return a state's distance, instructions, handbook, length and ends."""
    score_of = {suite["role"]: 100 * suite[state] for suite in row["suites"].values()}
    distance = row["closeness"]["distance"][state]["value"] if state != "base" else 0.0
    return [distance, score_of["retention"], score_of["domain"], *written_by(row, state)]


def gaps(row: dict[str, Any]) -> list[float]:
    """Return what `measured` does of the run's end, but of length and ends how far they lie from base's."""
    *scores, length, ends = measured(row, end_of(row))
    base_length, base_ends = written_by(row, "base")
    return [*scores, abs(length - base_length), abs(ends - base_ends)]
