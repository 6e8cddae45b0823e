"""The measurements of a run: for every suite, state and prompt a row, and its numbers as columns.

A score does not show how an answer is written. Answers that run on until the token limit meet "at least 80
words" more often than good ones, so a model that no longer stops can score like base. So each row also says
whether its answer ends, how long it is, how much of it is repetition, and whether it keeps to the script.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.shipped import shipped_suites
from opdcl.errors import UsageError
from opdcl.repetition import REPEATED_WORD, distinct, repetition
from opdcl.results.intervals import Clusters
from opdcl.results.origins import count_learned, learned_by, line_of
from opdcl.results.status import HEADLINE_ROLES, ROLES, STATES
from opdcl.rundir.layout import RunDir, read_result, read_samples

# What a suite measures, if its name does not read well in a sentence.
PLAIN_WORDS = {
    **dict.fromkeys(("instructions", "instructions_quick", "ifeval"), "instruction following"),
    **dict.fromkeys(("handbook", "handbook_quick"), "the handbook"),
}
# The metric of questions with answers, which is that of a user's rows, and their name beside shipped suites.
OF_QUESTIONS, YOUR_ROWS = "token_f1", "your test rows"

# What is measured of how an answer is written.
OF_ANSWERS = ("ended", "tokens", "repetition", "script")

# Scripts that one language mixes.
FAMILIES = {"HIRAGANA": "CJK", "KATAKANA": "CJK"}

# Results round their scores to six digits.
ROUNDING = 1e-6

Row = dict[str, Any]


@dataclass(frozen=True)
class MeasuredSuite:
    """One suite's results on the prompts that every measured state answered, in one order."""

    name: str
    role: str
    metric: str | None
    results: dict[str, Row]
    """State -> the content of `evals/<state>/<suite>.json`."""
    rows: dict[str, list[Row]]
    """State -> sample rows; row i is the same prompt in every state."""
    unpaired: int = 0
    """Number of prompts left out because a measured state did not answer them."""
    faults: list[str] = field(default_factory=list)
    """Which scores are no numbers; a state with one counts as not measured."""
    learned: int = 0
    """How many prompts are those of rows that the run, or one that it builds on, has learned."""

    @property
    def complete(self) -> bool:
        return set(self.rows) == set(STATES)

    @property
    def missing(self) -> list[str]:
        """The states that are not measured."""
        return [state for state in STATES if state not in self.rows]

    @property
    def floor(self) -> float | None:
        """The best headline score of a content-free answer, or None if it was not measured."""
        answers = [answer for found in self._floors for answer in found.values()]
        return max((answer[self.metric] for answer in answers if self.metric in answer), default=None)

    @property
    def floor_is(self) -> str:
        """What reaches the floor, as texts name it: a content-free answer, or in multiple choice a guess."""
        return "a guess" if any("chance" in found for found in self._floors) else "a content-free answer"

    @property
    def _floors(self) -> list[dict[str, dict[str, float]]]:
        """Of each result, content-free answer -> metric -> score."""
        return [result.get("floor") or {} for result in self.results.values()]

    @property
    def measured(self) -> list[Row]:
        """The rows of the first measured state, which have the prompts."""
        return next(iter(self.rows.values()), [])

    @property
    def asked(self) -> tuple[str | None, list[tuple]]:
        """The metric; number, text and answer of each prompt. Equal where two runs were asked the same."""
        return self.metric, [(row["doc_id"], row["prompt"], row.get("target")) for row in self.measured]

    @property
    def description(self) -> dict[str, Any]:
        """Role, metric and number of prompts, as comparisons list a suite."""
        return {"role": self.role, "metric": self.metric, "n": len(self.measured)}

    @property
    def plain(self) -> str:
        is_own = self.metric == OF_QUESTIONS and self.name not in shipped_suites()
        return YOUR_ROWS if is_own else PLAIN_WORDS.get(self.name, self.name)

    @property
    def clusters(self) -> np.ndarray | None:
        """The cluster of each prompt, such as the fact that a question is about; None if all differ.

        The same prompt twice is one cluster: it has the same answer. The same answer to two prompts is none:
        many questions about different things are answered by yes, or by two.
        """
        ids: dict[str, int] = {}
        clusters = []
        for row in self.measured:
            name = f"cluster {row['cluster']}" if row.get("cluster") else row["prompt"]
            clusters.append(ids.setdefault(name, len(ids)))
        return np.array(clusters) if len(ids) < len(clusters) else None

    @property
    def groups(self) -> list[str]:
        """The groups of prompts that are told apart, such as `seen` and `unseen`."""
        return sorted({row["group"] for row in self.measured if row.get("group")})

    def only(self, group: str) -> MeasuredSuite:
        """Return the suite on the prompts of one group, without results that hold for all prompts."""
        places = [i for i, row in enumerate(self.measured) if row.get("group") == group]
        return replace(self, rows={s: [rows[i] for i in places] for s, rows in self.rows.items()}, results={})

    def parts(self, state: str) -> list[list[float]]:
        """Return the headline scores of each prompt: usually one; several at IFEval's instruction level."""
        assert self.metric
        return _parts(row["scores"][self.metric] for row in self.rows[state])

    def values(self, state: str) -> np.ndarray:
        """Return `(N,)` numbers whose mean is the metric: prompts with more parts weigh more."""
        return _weighted(self.parts(state))

    def column(self, state: str, name: str = "score") -> np.ndarray | None:
        """Return `(N,)` numbers of a state, one per prompt; None where one of them is not measured.

        `score`: what `values` returns. `distance`, `forward` and `reverse`: from base, in nats per token.
        `ended`: the answer ended before its token limit. `tokens`: its length. `repetition`: the share of its
        4-grams of words that occurred earlier in it. `distinct`: the share of its 2-grams that no other
        answer has. `script`: its letters are mostly of the script of the prompt or of base's answer;
        languages that share a script are not told apart, for which answers are too short. The length and
        whether it ended include a thought before the answer, the others do not.
        """
        rows = self.rows.get(state, [])
        if name == "score":
            return self.values(state) if rows else None
        if name in ("distance", "forward", "reverse"):
            numbers = [row["scores"][name] for row in rows]
        elif name in ("ended", "tokens"):
            numbers = [row.get(name) for row in rows]
        elif any(row.get("response") is None or "likelihoods" in row for row in rows):
            return None  # where likelihoods were compared, the response is a choice, which nobody wrote
        elif name == "script":
            numbers = [*map(_keeps_to_the_script, rows, self.rows.get("base", rows))]
        else:
            words = [REPEATED_WORD.findall(row["response"]) for row in rows]
            numbers = distinct(words) if name == "distinct" else [repetition([own]) for own in words]
        return np.array(numbers, float) if rows and None not in numbers else None

    def floor_values(self) -> np.ndarray | None:
        """Return the `(N,)` scores of the best content-free answer, or None if they were not stored."""
        stored = [rows for rows in self.rows.values() if all("floor" in row for row in rows)]
        floors = [_weighted(_parts(row["floor"] for row in rows)) for rows in stored]
        return max(floors, key=lambda scores: scores.mean(), default=None)


class States(NamedTuple):
    """The scores of the three models on one suite, `(N,)` or `(S, N)`."""

    base: np.ndarray
    tuned: np.ndarray
    recovered: np.ndarray | None
    floor: np.ndarray | None = None
    """The scores of the best content-free answer to each prompt, if they were measured."""
    clusters: Clusters = None

    def above_floor(self, state: np.ndarray) -> np.ndarray:
        """Return a state's scores, or those of the floor if it scores higher: they take no skill."""
        return state if self.floor is None or self.floor.mean() <= state.mean() else self.floor


def stacked(columns: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return the numbers of one run as `(N,)`, of several as `(S, N)`; None unless all are measured."""
    measured = [column for column in columns if column is not None]
    if not measured or len(measured) < len(columns):
        return None
    return measured[0] if len(measured) == 1 else np.stack(measured)


def pooled(suites: Sequence[MeasuredSuite], state: str, name: str = "score") -> np.ndarray | None:
    """Return a column of one suite in one or several runs, which answered the same prompts."""
    return stacked([suite.column(state, name) for suite in suites])


def floors_of(suites: Sequence[MeasuredSuite]) -> np.ndarray | None:
    """Return the scores of the best content-free answer in one or several runs, or None if one has none."""
    return stacked([suite.floor_values() for suite in suites])


def states_of(suites: Sequence[MeasuredSuite]) -> States | None:
    """Return the scores of one suite in one or several runs, or None unless base and tuned are measured."""
    base, tuned, recovered = (pooled(suites, state) for state in STATES)
    if base is None or tuned is None:
        return None
    return States(base, tuned, recovered, floors_of(suites), suites[0].clusters)


def response_values(suite: MeasuredSuite, state: str) -> dict[str, np.ndarray]:
    """Return the columns of how a state's answers are written, by name, as far as they are measured."""
    columns = {name: suite.column(state, name) for name in OF_ANSWERS}
    return {name: column for name, column in columns.items() if column is not None}


def script_of(text: str) -> str:
    """Return the script of most letters of a text, such as `LATIN`; "" without letters."""
    scripts: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if character.isalpha():
            script = unicodedata.name(character, "").split(" ")[0]
            scripts[FAMILIES.get(script, script)] += count
    return scripts.most_common(1)[0][0] if scripts else ""


def _keeps_to_the_script(row: Row, of_base: Row) -> bool:
    expected = ("", script_of(row["prompt"]), script_of(of_base.get("response") or ""))
    return script_of(row["response"]) in expected


def _as_list(score: Any) -> list[Any]:
    return score if isinstance(score, list) else [score]


def _parts(scores: Iterable[Any]) -> list[list[float]]:
    return [[float(part) for part in _as_list(score)] for score in scores]


def _weighted(parts: list[list[float]]) -> np.ndarray:
    sums = np.array([sum(of_prompt) for of_prompt in parts])
    count = sum(len(of_prompt) for of_prompt in parts)
    return sums * len(parts) / count


def load_suites(run: RunDir) -> list[MeasuredSuite]:
    """Load every suite that is configured or measured, in the order of the configuration."""
    evaluation = section(run, "eval")
    roles = {}
    for role in ROLES:
        for name in evaluation.get(role) or []:
            roles[name] = role
    for path in sorted(run.evals.glob("*/*.json")):
        if path.parent.name in STATES and path.stem != CLOSENESS:
            roles.setdefault(path.stem, str(read_result(path).get("role", "control")))
    suites = [_load(run, name, role) for name, role in roles.items()]
    learned = learned_by(*line_of(run))
    return [replace(suite, learned=count_learned(suite.measured, learned)) for suite in suites]


def headline_of(suites: Sequence[MeasuredSuite]) -> dict[str, MeasuredSuite]:
    """Return the first retention suite and the first domain suite, by role; the verdict depends on them."""
    headline: dict[str, MeasuredSuite] = {}
    for suite in suites:
        if suite.role in HEADLINE_ROLES:
            headline.setdefault(suite.role, suite)
    return headline


def load_closeness(run: RunDir) -> MeasuredSuite:
    """Return the states' answers and distances, paired by prompt, as a suite of the metric `distance`."""
    return _load(run, CLOSENESS, CLOSENESS)


def _load(run: RunDir, name: str, role: str) -> MeasuredSuite:
    """Load one suite's results; without any, a suite without rows."""
    results: dict[str, Row] = {}
    answers: dict[str, dict[tuple, Row]] = {}
    faults: list[str] = []
    for state in STATES:
        if not run.eval_result(state, name).exists():
            continue
        result = read_result(run.eval_result(state, name))
        rows = read_samples(run.eval_samples(state, name))
        fault = _wrong_scores(rows, result["metric"]) or _mismatch(rows, result)
        if fault:
            faults.append(f"{name}, {state}: {fault}")
        elif rows:
            results[state] = result
            # Each task of a group counts its documents from 0, so the prompt is part of the key.
            answers[state] = {(row["doc_id"], row["prompt"]): row for row in rows}
    if not results:
        return MeasuredSuite(name, role, None, {}, {}, faults=faults)
    asked = [set(by_prompt) for by_prompt in answers.values()]
    shared = set.intersection(*asked)
    if not shared:
        problem = f"{' and '.join(results)} have no prompt in common, so they cannot be compared"
        raise UsageError(f"suite {name}: {problem}", f"opdcl eval {run.path} --force")
    order = sorted(shared, key=lambda key: (str(type(key[0])), *key))
    first = next(iter(results.values()))
    return MeasuredSuite(
        name=name,
        role=str(first.get("role", role)),
        metric=first["metric"],
        results=results,
        rows={state: [by_prompt[key] for key in order] for state, by_prompt in answers.items()},
        unpaired=len(set.union(*asked)) - len(shared),
        faults=faults,
    )


def _wrong_scores(rows: list[Row], metric: str) -> str:
    """Name the first prompt whose score or floor is no number, and count the others; empty without one."""
    wrong = {}
    for row in rows:
        scores = [*_as_list(row.get("scores", {}).get(metric)), *_as_list(row.get("floor", 0))]
        for score in scores:
            if not isinstance(score, int | float) or not math.isfinite(score):
                wrong[row["doc_id"]] = "missing" if score is None else f"{score}, not a number"
                break
    if not wrong:
        return ""
    prompt, fault = next(iter(wrong.items()))
    others = f" (and those of {len(wrong) - 1} more prompts)" if len(wrong) > 1 else ""
    return f"the score of prompt {prompt} is {fault}{others}"


def _mismatch(rows: list[Row], result: Row) -> str:
    """Say how the samples of a result contradict its own number of answers or scores; empty if they agree."""
    n = result["n"]
    if len(rows) != n:
        return f"there are {len(rows)} answers, and its result was made from {n}"
    for metric, recorded in result["metrics"].items():
        scores = [row["scores"].get(metric) for row in rows]
        if metric != result["metric"] and scores.count(None) == n:
            continue  # its samples do not keep it
        parts = [part for score in scores for part in _as_list(score)]
        if not parts or not all(isinstance(part, int | float) for part in parts):
            return f"its answers give {metric} as no number, and its result says {recorded}"
        found = float(sum(parts)) / len(parts)
        if not isinstance(recorded, int | float) or abs(found - recorded) > ROUNDING:
            return f"its answers give {metric} as {found:.6g}, and its result says {recorded}"
    return ""


def section(run: RunDir, name: str) -> dict:
    """Return one section of the run's workflow; empty if the workflow leaves it out."""
    return run.settings().get(name) or {}
