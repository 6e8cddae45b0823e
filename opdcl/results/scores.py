"""Load the scores of a run: one suite at a time, paired by prompt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from opdcl.config.evaluate import CLOSENESS
from opdcl.errors import UsageError
from opdcl.results.stats import States
from opdcl.results.status import HEADLINE_ROLES, ROLES, STATES
from opdcl.rundir.layout import RunDir
from opdcl.rundir.records import read_result, read_samples

# What a suite measures, if its name does not read well in a sentence.
PLAIN_WORDS = dict.fromkeys(("instructions", "instructions_quick", "ifeval"), "instruction following")

# Results round their scores to six digits.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Suite:
    """One suite's results on the prompts that every measured state answered, in one order."""

    name: str
    role: str
    metric: str | None
    results: dict[str, dict]
    """State -> the content of `evals/<state>/<suite>.json`."""
    rows: dict[str, list[dict]]
    """State -> sample rows; row i is the same prompt in every state."""
    unpaired: int
    """Number of prompts left out because a measured state did not answer them."""
    faults: list[str] = field(default_factory=list)
    """Which scores are no numbers; a state with one counts as not measured."""

    @property
    def complete(self) -> bool:
        return set(self.rows) == set(STATES)

    @property
    def latest(self) -> str | None:
        """The state that a user would ship: recovered, or tuned if nothing is recovered."""
        return next((state for state in ("recovered", "tuned") if state in self.rows), None)

    @property
    def floor(self) -> float | None:
        """The best headline score of a content-free answer, or None if it was not measured."""
        answers = [scores for r in self.results.values() for scores in (r.get("floor") or {}).values()]
        return max((scores[self.metric] for scores in answers if self.metric in scores), default=None)

    @property
    def floor_is(self) -> str:
        """What reaches the floor, as texts name it: a content-free answer, or in multiple choice a guess."""
        by_chance = any("chance" in (r.get("floor") or {}) for r in self.results.values())
        return "a guess" if by_chance else "a content-free answer"

    @property
    def measured(self) -> list[dict]:
        """The rows of the first measured state, which tell of the prompts."""
        return next(iter(self.rows.values()), [])

    @property
    def prompts(self) -> list[tuple]:
        """The number and text of each prompt, in the order of the rows."""
        return [(row["doc_id"], row["prompt"]) for row in self.measured]

    @property
    def description(self) -> dict[str, Any]:
        """Role, metric and number of prompts, as comparisons list a suite."""
        return {"role": self.role, "metric": self.metric, "n": len(self.prompts)}

    @property
    def plain(self) -> str:
        return PLAIN_WORDS.get(self.name, self.name)

    def parts(self, state: str) -> list[list[float]]:
        """Return the headline scores of each prompt: usually one; several at IFEval's instruction level."""
        assert self.metric
        return _parts(row["scores"][self.metric] for row in self.rows[state])

    def values(self, state: str) -> np.ndarray:
        """Return `(N,)` numbers whose mean is the metric: prompts with more parts weigh more."""
        return _weighted(self.parts(state))

    @property
    def clusters(self) -> np.ndarray | None:
        """The cluster of each prompt, such as the fact that a question is about; None if all differ.

        The same prompt twice is one cluster: it has the same answer. The same answer to two prompts is none:
        many questions about different things are answered by yes, or by two.
        """
        names = [
            f"cluster {row['cluster']}" if row.get("cluster") else row["prompt"] for row in self.measured
        ]
        ids = {name: i for i, name in enumerate(dict.fromkeys(names))}
        return np.array([ids[name] for name in names]) if len(ids) < len(names) else None

    @property
    def groups(self) -> list[str]:
        """The groups of prompts that are told apart, such as `seen` and `unseen`."""
        return sorted({row["group"] for row in self.measured if row.get("group")})

    def only(self, group: str) -> Suite:
        """Return the suite on the prompts of one group."""
        chosen = {}
        for state, rows in self.rows.items():
            chosen[state] = [row for row in rows if row.get("group") == group]
        return replace(self, rows=chosen)

    def floor_values(self) -> np.ndarray | None:
        """Return the `(N,)` scores of the best content-free answer, or None if they were not stored."""
        floors = []
        for rows in self.rows.values():
            stored = [row["floor"] for row in rows if "floor" in row]
            if len(stored) == len(rows):
                floors.append(_weighted(_parts(stored)))
        return max(floors, key=lambda scores: float(scores.mean()), default=None)

    def states(self) -> States | None:
        """Return the scores of base, tuned and recovered, or None unless all three are measured."""
        return states_of([self])


def stacked(columns: Sequence[Any]) -> np.ndarray:
    """Return the numbers of one run as `(N,)`, of several as `(S, N)`."""
    array = np.array(columns, float)
    return array[0] if len(array) == 1 else array


def values_of(suites: Sequence[Suite], state: str) -> np.ndarray | None:
    """Return a state's scores on one suite in one or several runs, or None unless all are measured."""
    measured = [suite.values(state) for suite in suites if state in suite.rows]
    return stacked(measured) if measured and len(measured) == len(suites) else None


def floors_of(suites: Sequence[Suite]) -> np.ndarray | None:
    """Return the scores of the best content-free answer in one or several runs, or None if one has none."""
    stored = [floor for suite in suites if (floor := suite.floor_values()) is not None]
    return stacked(stored) if stored and len(stored) == len(suites) else None


def states_of(suites: Sequence[Suite]) -> States | None:
    """Return the scores of one suite in one or several runs, or None unless all three states are measured."""
    base, tuned, recovered = (values_of(suites, state) for state in STATES)
    if base is None or tuned is None or recovered is None:
        return None
    return States(base, tuned, recovered, floors_of(suites), suites[0].clusters)


def _parts(scores: Iterable[Any]) -> list[list[float]]:
    parts = []
    for score in scores:
        several = score if isinstance(score, list) else [score]
        parts.append([float(part) for part in several])
    return parts


def _weighted(parts: list[list[float]]) -> np.ndarray:
    return np.array([sum(p) for p in parts]) * len(parts) / sum(len(p) for p in parts)


def load_suites(run: RunDir) -> list[Suite]:
    """Load every suite that is configured or measured, in the order of the configuration."""
    evaluation = section(run, "eval")
    roles = {suite: role for role in ROLES for suite in evaluation.get(role) or []}
    for path in sorted(run.evals.glob("*/*.json")):
        if path.parent.name in STATES and path.stem != CLOSENESS:
            roles.setdefault(path.stem, str(read_result(path).get("role", "control")))
    return [load_suite(run, name, role) for name, role in roles.items()]


def headline_of(suites: Sequence[Suite]) -> dict[str, Suite]:
    """Return the first retention suite and the first domain suite, by role; the verdict depends on them."""
    first = {suite.role: suite for suite in reversed(suites)}
    return {role: first[role] for role in HEADLINE_ROLES if role in first}


def load_suite(run: RunDir, name: str, role: str) -> Suite:
    """Load one suite's results; without any, a suite without rows."""
    results: dict[str, dict] = {}
    answers: dict[str, dict[tuple, dict]] = {}
    faults: list[str] = []
    for state in STATES:
        if not run.eval_result(state, name).exists():
            continue
        result = read_result(run.eval_result(state, name))
        rows = read_samples(run.eval_samples(state, name))
        wrong = {row["doc_id"]: fault for row in rows if (fault := _score_fault(row, result["metric"]))}
        if wrong:
            (prompt, fault), *more = wrong.items()
            others = f" (and those of {len(more)} more prompts)" if more else ""
            faults.append(f"{name}, {state}: the score of prompt {prompt} is {fault}{others}")
        elif mismatch := _mismatch(rows, result):
            faults.append(f"{name}, {state}: {mismatch}")
        # Each task of a group counts its documents from 0, so the prompt is part of the key.
        elif by_key := {(row["doc_id"], row["prompt"]): row for row in rows}:
            results[state], answers[state] = result, by_key
    if not results:
        return Suite(name, role, None, {}, {}, 0, faults)
    asked = [set(by_key) for by_key in answers.values()]
    shared = set.intersection(*asked)
    if not shared:
        problem = f"{' and '.join(results)} have no prompt in common, so they cannot be compared"
        raise UsageError(f"suite {name}: {problem}", f"opdcl eval {run.path} --force")
    order = sorted(shared, key=lambda key: (str(type(key[0])), *key))
    paired = {}
    for state, by_key in answers.items():
        paired[state] = [by_key[key] for key in order]
    first = next(iter(results.values()))
    return Suite(
        name,
        str(first.get("role", role)),
        first["metric"],
        results,
        paired,
        len(set.union(*asked)) - len(shared),
        faults,
    )


def _mismatch(rows: list[dict[str, Any]], result: dict[str, Any]) -> str:
    """Say how the samples of a result contradict its own number of answers or scores; empty if they agree."""
    n = result["n"]
    if len(rows) != n:
        return f"there are {len(rows)} answers, and its result was made from {n}"
    for metric, recorded in result["metrics"].items():
        scores = [row["scores"].get(metric) for row in rows]
        if metric != result["metric"] and scores.count(None) == n:
            continue  # its samples do not keep it
        found = _mean(scores)
        if found is None or not isinstance(recorded, int | float) or abs(found - recorded) > ROUNDING:
            said = "no number" if found is None else f"{found:.6g}"
            return f"its answers give {metric} as {said}, and its result says {recorded}"
    return ""


def _mean(scores: list[Any]) -> float | None:
    """Return the mean over prompts, or over all parts where a prompt has a list; None if one is no number."""
    parts = [part for score in scores for part in (score if isinstance(score, list) else [score])]
    if not parts or not all(isinstance(part, int | float) for part in parts):
        return None
    return float(sum(parts)) / len(parts)


def _score_fault(row: dict[str, Any], metric: str) -> str:
    """Say what is wrong with the score of a sample, or with its floor; empty if both are numbers."""
    for score in (row.get("scores", {}).get(metric), row.get("floor", 0)):
        for part in score if isinstance(score, list) else [score]:
            if part is None:
                return "missing"
            if not isinstance(part, int | float) or not math.isfinite(part):
                return f"{part}, not a number"
    return ""


def section(run: RunDir, name: str) -> dict:
    """Return one section of the run's workflow; empty if the workflow leaves it out."""
    return run.settings().get(name) or {}
