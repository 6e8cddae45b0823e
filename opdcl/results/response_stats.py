"""Statistics on the answers of a suite: whether they end, their length, repetition and script.

A score does not show this. Answers that run on until the token limit meet "at least 80 words" more often than
good ones, so a model that no longer stops can score like base.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opdcl.repetition import WORD, repetition
from opdcl.results import stats
from opdcl.results.scores import MeasuredSuite, stacked
from opdcl.results.stats import Clusters, Estimate

# How far the recovered model's share of answers that end, and of repeated 4-grams, may lie from base's, and
# its mean length, as a share of base's.
MARGINS = {"ended": 0.05, "repetition": 0.05, "tokens": 0.10}

# Scripts that one language mixes.
FAMILIES = {"HIRAGANA": "CJK", "KATAKANA": "CJK"}


@dataclass(frozen=True)
class ResponseTest(Estimate):
    """Recovered minus base in one measure; of the length, relative to base's.

    `shown`: the whole interval lies within the margin, so the two are shown to be alike. `different`: it
    excludes zero. If both hold, they differ by less than matters.
    """

    base: float
    recovered: float
    margin: float
    shown: bool
    different: bool


ResponseTests = dict[str, ResponseTest | None]


def response_values(suite: MeasuredSuite, state: str) -> dict[str, np.ndarray]:
    """Return measure -> `(N,)` numbers, one per prompt, from the rows of a state.

    `ended`: the answer ended before its token limit. `tokens`: its length. `repetition`: the share of its
    4-grams of words that occurred earlier in it. `script`: its letters are mostly of the script of the prompt
    or of base's answer; languages that share a script are not told apart, for which answers are too short.
    The first two include a thought before the answer, the others do not.
    """
    rows = suite.rows.get(state, [])
    columns: dict[str, list[Any]] = {
        "ended": [row.get("ended") for row in rows],
        "tokens": [row.get("tokens") for row in rows],
    }
    # Where likelihoods were compared, the response is a choice, which nobody wrote.
    if rows and all(row.get("response") is not None and "likelihoods" not in row for row in rows):
        columns["repetition"] = [repetition([WORD.findall(row["response"])]) for row in rows]
        columns["script"] = []
        for row, reference in zip(rows, suite.rows.get("base", rows), strict=True):
            expected = ("", script_of(row["prompt"]), script_of(reference.get("response") or ""))
            columns["script"].append(script_of(row["response"]) in expected)
    return {
        name: np.array(column, float) for name, column in columns.items() if column and None not in column
    }


def measures(suites: Sequence[MeasuredSuite], state: str) -> dict[str, np.ndarray]:
    """Return the values of one suite in one or several runs, for the measures that all runs have."""
    columns = [response_values(suite, state) for suite in suites]
    found = {}
    for name in columns[0] if columns else ():
        if all(name in column for column in columns):
            found[name] = stacked([column[name] for column in columns])
    return found


def estimates(suite: MeasuredSuite) -> dict[str, dict[str, Estimate]]:
    """Return state -> measure -> estimate of its mean over prompts."""
    found: dict[str, dict[str, Estimate]] = {}
    for state in suite.rows:
        found[state] = {}
        for name, column in response_values(suite, state).items():
            found[state][name] = stats.mean(column, suite.clusters).rounded()
    return found


def compared_with_base(suites: Sequence[MeasuredSuite]) -> ResponseTests:
    """Return `equivalences` of recovered and base on one suite, or on the same one of several seeds."""
    clusters = suites[0].clusters if suites else None
    return equivalences(measures(suites, "base"), measures(suites, "recovered"), clusters)


def equivalences(
    base: dict[str, np.ndarray], recovered: dict[str, np.ndarray], clusters: Clusters = None
) -> ResponseTests:
    """Test whether recovered writes as base does: two one-sided tests per measure; None if not measured."""
    tests: ResponseTests = {}
    for name, margin in MARGINS.items():
        tests[name] = None
        if name not in base or name not in recovered:
            continue
        ours, theirs = recovered[name], base[name]
        change: Estimate | None
        if name == "tokens":
            change = stats.ratio(ours - theirs, theirs, clusters)
        else:
            change = stats.difference(ours, theirs, clusters)
        if change:
            tests[name] = ResponseTest(
                **vars(change.rounded()),
                base=float(theirs.mean()),
                recovered=float(ours.mean()),
                margin=margin,
                shown=-margin < change.low and change.high < margin,
                different=not change.low <= 0 <= change.high,
            )
    return tests


def alike(tests: ResponseTests) -> bool:
    """Return whether recovered is shown to write as base does, in all that was measured."""
    return all(test.shown for test in tests.values() if test)


def script_of(text: str) -> str:
    """Return the script of most letters of a text, such as `LATIN`; "" without letters."""
    scripts: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if character.isalpha():
            script = unicodedata.name(character, "").split(" ")[0]
            scripts[FAMILIES.get(script, script)] += count
    return scripts.most_common(1)[0][0] if scripts else ""
