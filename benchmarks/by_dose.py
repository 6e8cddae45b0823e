"""Tables of comparisons that tell an arm's dose (equal, fast, author, larger, documents).

Intervals are over prompts. Base and a plain fine-tune are those of the first run that was made of each seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from arm_tables import effort, written_by
from one_seed import NATS, PERCENT, name_of, share
from page_cells import NOT_MEASURED, end_of, from_json, read, rows_of, unbroken

from opdcl.results.format import Unit, interval
from opdcl.results.intervals import difference

POINTS = Unit("{:+.0f}", 100)

# Of each record: what base's and the first run's tuned model are called, and its arms.
ARMS = {
    "equal": {
        "tuned": "a plain fine-tune",
        "recovered": "**the same, then a recovery of 64 steps**",
        "off": "the same recovery, base writes all answers",
        "replay-256": "a fine-tune with 23 % replay, no recovery",
        "osf-1e-4": "orthogonal subspaces (OSF) in place of LoRA",
    },
    "fast": {
        "tuned": "a plain fine-tune",
        "scaled": "the same times 0.4, no training",
        "projected": "**the same, projected, no training**",
        "before": "64 steps from the scaled one, the student in the second half",
        "half": "**32 steps from the projected one, the student in the second half**",
        "fast": "32 steps from the projected one, the student from the first step",
    },
    "larger": {"tuned": "a plain fine-tune", "larger": "**the same, then a recovery of 48 steps**"},
    "documents": {
        "documents": "the documents alone",
        "documents-then": "the documents, then a recovery of 32 steps",
        "mix": "the documents and 30 % replay",
        "mix-then": "**30 % replay, then a recovery of 32 steps**",
    },
}
PAIRS = {
    "recovery - replay": ("recovered", "replay-256"),
    "the student writes half - base writes all": ("recovered", "off"),
}


def one_seed(record: str) -> str:
    """Return what each arm of a record reached: dose, time, distance, scores, length and ends."""
    rows, names = read(record).get("rows", []), ARMS[record]
    if not rows:
        return NOT_MEASURED
    several = len({row["seed"] for row in rows}) > 1
    table = []
    for seed in sorted({row["seed"] for row in rows}):
        of_seed = {row["arm"]: row for row in rows if row["seed"] == seed}
        first = next(of_seed[arm] for arm in names if arm in of_seed)
        shown = [("base", first, "base")]
        if "tuned" in names:
            shown.append((names["tuned"], first, "tuned"))
        shown += [(names[arm], of_seed[arm], end_of(of_seed[arm])) for arm in names if arm in of_seed]
        for words, row, state in shown:
            table.append([words + f", seed {seed}" * several, *cells_of(row, state)])
    domain = name_of(rows[0], "domain").removesuffix("_quick")
    columns = ["model", "general answers", "training", "distance, nats", "instructions, %", f"{domain}, %"]
    return rows_of([*columns, "tokens", "answers that end, %"], unbroken(table, 1))


def cells_of(row: dict[str, Any], state: str) -> list[str]:
    if state == "base":
        spent = ["", ""]
    else:
        spent = [f"{answers_of(row, state):,}", effort([row], "" if state == end_of(row) else state)[1]]
    distance = interval(from_json(row["closeness"]["distance"][state]), NATS) if state != "base" else "0.00"
    scores = [interval(share(row, [name_of(row, role)], state), PERCENT) for role in ("retention", "domain")]
    length, ends = written_by(row, state)
    return [*spent, distance, *scores, f"{length:.0f}", f"{ends:.0f}"]


def answers_of(row: dict[str, Any], state: str) -> int:
    """Return on how many general answers the student saw base's distribution, until it was in that state."""
    stages = [dose for stage, dose in row["dose"].items() if state != "tuned" or stage == "finetune"]
    return sum(of["answers"] for dose in stages for of in dose["graded"].get("general", {}).values())


def equal_pairs() -> str:
    """Return the differences of two arms of benchmarks/equal.yaml, on the same seed and prompts."""
    found = {(row["arm"], row["seed"]): row for row in read("equal").get("rows", [])}
    table = []
    for words, (first, second) in PAIRS.items():
        for seed in sorted(seed for arm, seed in found if arm == first and (second, seed) in found):
            ours, theirs = found[first, seed], found[second, seed]
            near = [values(row, "distance") for row in (ours, theirs)]
            cells = [interval(difference(*near), Unit("{:+.2f}"))]
            far = [f"{100 * (one > 1).mean():.0f}" for one in near]
            for role in ("retention", "domain"):
                cells.append(interval(difference(*(values(row, role) for row in (ours, theirs))), POINTS))
            table.append([words, str(seed), cells[0], " / ".join(far), *cells[1:]])
    columns = ["first - second", "seed", "distance, nats", "requests above 1 nat, %"]
    columns += ["instructions, points", "handbook, points"]
    return rows_of(columns, unbroken(table, 1)) if table else NOT_MEASURED


def values(row: dict[str, Any], what: str) -> np.ndarray:
    """Return a number for each prompt: the distance to base, or the scores of the suite of a role."""
    state = end_of(row)
    if what == "distance":
        suite = next(name for name, of in row["prompts"].items() if "distance" in of.get(state, {}))
        return np.array(row["prompts"][suite][state]["distance"])
    return np.array(row["prompts"][name_of(row, what)][state]["score"])
