"""The tables of comparisons whose intervals are over prompts, because they have one seed or two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from page_cells import NOT_MEASURED, end_of, from_json, ratio, read, rows_of, unbroken

from opdcl.results.format import Unit, interval
from opdcl.results.intervals import Estimate, mean

PERCENT, NATS = Unit("{:.0f}", 100), Unit("{:.2f}", least=0)

# Those of benchmarks/systems.yaml.
SYSTEMS = {
    "ours": "the default",
    "ema": "a running mean of the student guards the domain",
    "reinforced": "after the default: a reward for constraints that are kept",
    "feedback-slow": "after the default: the student that is told what was wrong teaches itself",
    "self-distilled": "the default after a fine-tune by self-distillation",
    "staff": "a specialist, tuned on one half of the handbook",
    "site": "a specialist, tuned on the other half",
    "one": "both specialists into one student, which began as the first",
}

# Those of benchmarks/contradictions.yaml and contradictions_near.yaml.
CONTRADICTIONS = {
    "then": "a plain fine-tune, then the recovery",
    "near": "the same, half of its general prompts near the domain, of both kinds",
    "elsewhere": "the same, half of its general prompts about elsewhere",
    "mix-70": "70 % replay, no recovery",
    "mix-70-then": "the same, then the recovery",
}


@dataclass(frozen=True)
class Round:
    """What a run of rounds.json reached; the questions of several domains are one sample."""

    row: dict[str, Any]
    number: int
    known: Estimate
    """Share of the questions about all domains so far that recovered answers."""
    left: Estimate | None
    """Share of those about earlier domains that tuned answers, before the recovery; None in round 1."""
    followed: Estimate
    """Share of the instructions that recovered follows."""
    distance: Estimate


def rounds_of(teacher: str) -> list[Round]:
    """Return the finished rounds of a teacher, `original` or `last`; the first is the same for both."""
    rows = {row["arm"]: row for row in read("rounds").get("rows", ())}
    rows["last-1"] = rows.get("original-1")
    found = []
    for number in range(1, 6):
        if row := rows.get(f"{teacher}-{number}"):
            domains = [f"d{i}" for i in range(1, number + 1)]
            found.append(
                Round(
                    row=row,
                    number=number,
                    known=share(row, domains, "recovered"),
                    left=share(row, domains[:-1], "tuned") if number > 1 else None,
                    followed=share(row, [name_of(row, "retention")], "recovered"),
                    distance=from_json(row["closeness"]["distance"]["recovered"]),
                )
            )
    return found


def name_of(row: dict[str, Any], role: str) -> str:
    """Return the first suite of a role: the one that R or D is about."""
    return next(name for name, suite in row["suites"].items() if suite["role"] == role)


def share(row: dict[str, Any], suites: list[str], state: str) -> Estimate:
    """Return a state's mean score over the prompts of some suites; prompts about one fact are a cluster."""
    scores: list[float] = []
    facts: list[str] = []
    for name in suites:
        of_suite = row["prompts"][name][state]["score"]
        scores += of_suite
        facts += [f"{name} {cluster}" for cluster in row["clusters"].get(name, range(len(of_suite)))]
    return mean(np.array(scores), np.unique(facts, return_inverse=True)[1])


def rounds() -> str:
    """Return what is known and kept after each of five domains, by the teacher of the general prompts."""
    table = []
    for teacher, words in {"original": "the original", "last": "the last model"}.items():
        for one in rounds_of(teacher):
            if (teacher, one.number) == ("last", 1):
                continue
            row, instructions = one.row, interval(one.followed, PERCENT)
            cells = [interval(one.distance, NATS), ratio(row["recovery"]), instructions]
            cells += [ratio(row["domain_retention"]), interval(one.left, PERCENT) if one.left else ""]
            table.append([f"{one.number}, {words}", *cells, interval(one.known, PERCENT)])
    columns = ["round, teacher", "distance, nats", "R", "instructions, %", "D, new domain"]
    columns += ["earlier domains before the recovery, %", "all domains so far after it, %"]
    return rows_of(columns, unbroken(table, 1))


def systems() -> str:
    return by_prompts("systems", SYSTEMS)


def contradictions() -> str:
    return by_prompts("contradictions", CONTRADICTIONS)


def by_prompts(record: str, names: dict[str, str]) -> str:
    """Return the figures of each run of a record at its end, with intervals over prompts."""
    table = []
    rows = read(record).get("rows", ())
    several = len({row["seed"] for row in rows}) > 1
    for arm, words in names.items():
        for row in rows:
            if row["arm"] == arm:
                table.append([words + f", seed {row['seed']}" * several, *cells_of(row)])
    columns = ["model", "distance, nats", "R", "instructions, %", "D", "domain, %", "beside it, %"]
    return rows_of([*columns, "tokens", "ends, %"], unbroken(table, 1)) if table else NOT_MEASURED


def cells_of(row: dict[str, Any]) -> list[str]:
    end = end_of(row)
    written = row["closeness"]["written"][end]
    scores = []
    for role in ("retention", "domain", "control"):
        scores.append(interval(share(row, [name_of(row, role)], end), PERCENT))
    cells = [interval(from_json(row["closeness"]["distance"][end]), NATS), ratio(row["recovery"]), scores[0]]
    cells += [ratio(row["domain_retention"]), *scores[1:]]
    return [*cells, f"{written['length']:.0f}", f"{100 * written['ended']:.0f}"]
