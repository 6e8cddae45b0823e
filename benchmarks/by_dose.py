"""Tables of comparisons that tell an arm's dose (equal, fast, rate, larger, documents).

Of one or two seeds, each has its rows, with intervals over prompts; of more, a row is the mean over them,
with Student's intervals. Base and a plain fine-tune are those of the first run that was made of each seed.
"""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

import numpy as np
from arm_tables import effort, written_by
from one_seed import NATS, PERCENT, name_of, share
from page_cells import NOT_MEASURED, end_of, from_json, of_seeds, read, rows_of, unbroken

from opdcl.results.format import Unit, interval
from opdcl.results.intervals import difference

POINTS = Unit("{:+.0f}", 100)
# From how many seeds on a table shows their means.
SEVERAL = 3

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
    "words": {
        "tuned": "a plain fine-tune",
        "projected": "the same, projected, no training",
        "off": "32 steps from there, base writes all general answers",
        "half": "**32 steps, base writes half of them, then the student**",
        "quarter": "half as well, a quarter of reverse KL where the student writes",
        "on": "32 steps, the student writes all",
        "on-greedy": "the student writes all, greedily",
        "jsd": "the student writes all, JSD",
        "reverse": "the student writes all, reverse KL",
        "policy": "the student writes all, policy gradient at the sampled token",
        "imitate": "base writes all, its texts are imitated",
        "few-off": "base writes all, once, to 16 prompts",
        "few-on": "the student writes all, anew, to the same 16",
        "replay-30": "a fine-tune with 30 % replay, no recovery",
    },
    "owner": {"tuned": "the adapter", "start": "its start, no training", "owner": "**repaired in 24 steps**"},
    "words_larger": {
        "tuned": "a plain fine-tune",
        "off": "24 steps, base writes all general answers",
        "half": "**24 steps, the student the second half**",
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
    "equal": {
        "recovery - replay": ("recovered", "replay-256"),
        "the student writes half - base writes all": ("recovered", "off"),
    },
    "fast": {
        "projected - scaled, no training": ("projected", "scaled"),
        "32 steps from the projected start - 64 from the scaled one": ("half", "before"),
    },
    "words": {
        "the student writes half - base writes all": ("half", "off"),
        "the student writes all - base writes all": ("on", "off"),
        "a quarter of reverse KL - none, the student writes half": ("quarter", "half"),
        "the student greedily - at temperature 1": ("on-greedy", "on"),
        "JSD - forward KL, the student writes": ("jsd", "on"),
        "reverse KL - forward KL, the student writes": ("reverse", "on"),
        "policy gradient - forward KL, the student writes": ("policy", "on"),
        "base's distribution - its texts imitated": ("off", "imitate"),
        "16 prompts, base writes once - 128 prompts": ("few-off", "off"),
        "16 prompts, the student writes anew - base once": ("few-on", "few-off"),
        "the student writes half - 30 % replay": ("half", "replay-30"),
    },
    "words_larger": {"the student writes half - base writes all": ("half", "off")},
}


def by_arm(record: str) -> str:
    """Return what each arm of a record reached: dose, time, distance, scores, length and ends."""
    rows, names = [row for row in read(record).get("rows", []) if row["suites"]], ARMS[record]
    if not rows:
        return NOT_MEASURED
    seeds = sorted({row["seed"] for row in rows})
    shown: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for seed in seeds:
        of_seed = {row["arm"]: row for row in rows if row["seed"] == seed}
        first = next(of_seed[arm] for arm in names if arm in of_seed)
        found = [("base", first, "base")]
        if "tuned" in names:
            found.append((names["tuned"], first, "tuned"))
        found += [(names[arm], of_seed[arm], end_of(of_seed[arm])) for arm in names if arm in of_seed]
        for words, row, state in found:
            label = words + f", seed {seed}" * (1 < len(seeds) < SEVERAL)
            shown.setdefault(label, []).append((row, state))
    if len(seeds) < SEVERAL:
        table = [[words, *cells_of(*measured[0])] for words, measured in shown.items()]
    else:
        places = {words: i for i, words in enumerate(["base", *names.values()])}
        table = [
            [f"{words}; {len(measured)} seed{'s' * (len(measured) > 1)}", *mean_cells(measured)]
            for words, measured in sorted(shown.items(), key=lambda item: places[item[0]])
        ]
    domain = name_of(rows[0], "domain").removesuffix("_quick")
    columns = ["model", "general answers", "their tokens", "training", "distance, nats", "instructions, %"]
    return rows_of([*columns, f"{domain}, %", "tokens", "end, %", "greedy ones end, %"], unbroken(table, 1))


def cells_of(row: dict[str, Any], state: str) -> list[str]:
    distance = interval(from_json(row["closeness"]["distance"][state]), NATS) if state != "base" else "0.00"
    scores = [interval(share(row, [name_of(row, role)], state), PERCENT) for role in ("retention", "domain")]
    return [
        *spent_on([(row, state)]),
        distance,
        *scores,
        *(f"{value:.0f}" for value in writing_of(row, state)),
    ]


def mean_cells(measured: list[tuple[dict[str, Any], str]]) -> list[str]:
    """Return the cells of one model, of which each seed has a row: means over the seeds."""
    distances = [row["closeness"]["distance"][state]["value"] for row, state in measured]
    scores = [
        of_seeds([100 * row["suites"][name_of(row, role)][state] for row, state in measured], 0)
        for role in ("retention", "domain")
    ]
    written = [fmean(of) for of in zip(*(writing_of(*each) for each in measured), strict=True)]
    return [*spent_on(measured), of_seeds(distances, 2), *scores, *(f"{value:.0f}" for value in written)]


def writing_of(row: dict[str, Any], state: str) -> tuple[float, float, float]:
    """Return tokens and ends of a state's sampled answers, and ends of its greedy ones to instructions."""
    return *written_by(row, state), 100 * fmean(row["prompts"][name_of(row, "retention")][state]["ended"])


def spent_on(measured: list[tuple[dict[str, Any], str]]) -> list[str]:
    """Return dose and time of a model, the median of its seeds."""
    state = measured[0][1]
    if state == "base":
        return ["", "", ""]
    dose = [f"{median(graded(*each, of) for each in measured):,.0f}" for of in ("answers", "tokens")]
    rows = [row for row, _ in measured]
    return [*dose, effort(rows, "" if state == end_of(rows[0]) else state)[1]]


def graded(row: dict[str, Any], state: str, what: str) -> int:
    """Return on how many general answers, or tokens, the student saw base's distribution until that state."""
    stages = [dose for stage, dose in row["dose"].items() if state != "tuned" or stage == "finetune"]
    return sum(of[what] for dose in stages for of in dose["graded"].get("general", {}).values())


def paired(record: str) -> str:
    """Return the differences of two arms of a record, on the same seeds and prompts."""
    found = {(row["arm"], row["seed"]): row for row in read(record).get("rows", [])}
    table = []
    for words, (first, second) in PAIRS[record].items():
        seeds = sorted(seed for arm, seed in found if arm == first and (second, seed) in found)
        both = {seed: (found[first, seed], found[second, seed]) for seed in seeds}
        for group in [seeds] if len(seeds) >= SEVERAL else [[seed] for seed in seeds]:
            pairs = [both[seed] for seed in group]
            cells = [differences(pairs, what) for what in ("distance", "retention", "domain")]
            arms = zip(*pairs, strict=True)
            far = [fmean(100 * (values(row, "distance") > 1).mean() for row in arm) for arm in arms]
            label = str(group[0]) if len(group) == 1 else f"{len(group)} seeds"
            table.append([words, label, cells[0], " / ".join(f"{share:.0f}" for share in far), *cells[1:]])
    columns = ["first - second", "seed", "distance, nats", "requests above 1 nat, %", "instructions, points"]
    return rows_of([*columns, "handbook, points"], unbroken(table, 1)) if table else NOT_MEASURED


def differences(pairs: list[tuple[dict[str, Any], dict[str, Any]]], what: str) -> str:
    """Return how far apart two arms are: over the prompts of one seed, or over several seeds."""
    scale, digits = (1, 2) if what == "distance" else (100, 0)
    if len(pairs) == 1:
        unit = Unit("{:+.2f}") if what == "distance" else POINTS
        return interval(difference(*(values(row, what) for row in pairs[0])), unit)
    return of_seeds([scale * (values(a, what) - values(b, what)).mean() for a, b in pairs], digits)


def values(row: dict[str, Any], what: str) -> np.ndarray:
    """Return a number for each prompt: the distance to base, or the scores of the suite of a role."""
    state = end_of(row)
    if what == "distance":
        suite = next(name for name, of in row["prompts"].items() if "distance" in of.get(state, {}))
        return np.array(row["prompts"][suite][state]["distance"])
    return np.array(row["prompts"][name_of(row, what)][state]["score"])
