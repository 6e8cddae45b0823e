"""How a model writes, from the answers of a suite: whether they end, their length, repetition and script.

A score does not show this. Answers that run on until the token limit meet "at least 80 words" more often than
good ones, so a model that no longer stops can score like base.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from opdcl.repetition import repetition
from opdcl.results.scores import Suite

if TYPE_CHECKING:
    import numpy as np

    from opdcl.results.stats import Status

# How far above base's the recovered model's share of cut answers, and of repeated 4-grams, may lie: one in
# twenty. With 500 prompts a paired test shows this four times in five, if one pair in six differs.
MARGINS = {"cut": 0.05, "repetition": 0.05}

# Scripts that one language mixes.
FAMILIES = {"HIRAGANA": "CJK", "KATAKANA": "CJK"}

# A word; in scripts that put no spaces between words, a character.
WORD = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]|[^\s\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+")


def values(suite: Suite, state: str) -> dict[str, np.ndarray]:
    """Return measure -> `(N,)` numbers, one per prompt, for what the rows of a state tell.

    `ended`: the answer ended before its token limit. `tokens`: its length. `repetition`: the share of its
    4-grams of words that occurred earlier in it. `script`: its letters are mostly of the script of the prompt
    or of base's answer; languages that share a script are not told apart, for which answers are too short.
    The first two include a thought before the answer, the others do not.
    """
    import numpy as np

    rows = suite.rows.get(state, [])
    columns: dict[str, list[Any]] = {
        "ended": [row.get("ended") for row in rows],
        "tokens": [row.get("tokens") for row in rows],
    }
    # Where likelihoods were compared, the response is a choice, which nobody wrote.
    if rows and all(row.get("response") is not None and "likelihoods" not in row for row in rows):
        answers = [row["response"] for row in rows]
        columns["repetition"] = [repetition([WORD.findall(answer)]) for answer in answers]
        references = [row.get("response") for row in suite.rows.get("base", rows)]
        columns["script"] = [
            script_of(answer) in ("", script_of(row["prompt"]), script_of(reference or ""))
            for answer, row, reference in zip(answers, rows, references, strict=True)
        ]
    return {
        name: np.array(column, float) for name, column in columns.items() if column and None not in column
    }


def estimates(suite: Suite) -> dict[str, dict[str, dict[str, float]]]:
    """Return state -> measure -> estimate of its mean over prompts."""
    from opdcl.results import stats

    return {
        state: {name: stats.mean(x, suite.clusters).as_dict() for name, x in values(suite, state).items()}
        for state in suite.rows
    }


def compared_with_base(suites: Sequence[Suite]) -> dict[str, dict[str, Any] | None]:
    """Return, for cut answers and repetition, how recovered compares with base; None if not measured.

    `base` and `recovered` are the two shares, and `value` with its interval is their difference. `shown`:
    recovered is worse by `at_most`, which is less than `margin`. `worse`: it is measurably worse.

    Args:
        suites: One suite, or the same one of several training seeds.
    """
    from opdcl.results import stats

    tests: dict[str, dict[str, Any] | None] = dict.fromkeys(MARGINS)
    for name, margin in MARGINS.items():
        scores = [_stacked(suites, state, name) for state in ("base", "recovered")]
        if scores[0] is not None and scores[1] is not None:
            base, recovered = scores
            clusters = suites[0].clusters
            shown = stats.non_inferiority(recovered, base, clusters, margin, higher_is_better=False)
            change = stats.difference(recovered, base, clusters)
            levels = {"base": float(base.mean()), "recovered": float(recovered.mean())}
            tests[name] = {**levels, **change.as_dict(), **shown.as_dict(), "worse": change.low > 0}
    return tests


def status_with(tests: dict[str, dict[str, Any] | None], status: Status) -> Status:
    """Return the status; `recovered` only if the answers are shown to be written as well as base's."""
    as_good = all(test["shown"] for test in tests.values() if test)
    return "partly recovered" if status == "recovered" and not as_good else status


def _stacked(suites: Sequence[Suite], state: str, name: str) -> np.ndarray | None:
    """Return a measure of a state, `(S, N)`, or None if a suite lacks it."""
    import numpy as np

    columns = [values(suite, state) for suite in suites]
    if name == "cut":
        columns = [c | ({"cut": 1 - c["ended"]} if "ended" in c else {}) for c in columns]
    return np.stack([c[name] for c in columns]) if columns and all(name in c for c in columns) else None


def script_of(text: str) -> str:
    """Return the script of most letters of a text, such as `LATIN`; "" without letters."""
    scripts: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if character.isalpha():
            script = unicodedata.name(character, "").split(" ")[0]
            scripts[FAMILIES.get(script, script)] += count
    return scripts.most_common(1)[0][0] if scripts else ""
