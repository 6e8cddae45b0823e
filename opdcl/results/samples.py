"""Pick the prompts that a report shows, with the answers of all states."""

from __future__ import annotations

from typing import Any

import numpy as np

from opdcl.results import format, writing
from opdcl.results.scores import Suite

SAMPLES_PER_GROUP = 4
LONGEST_PROMPT, LONGEST_ANSWER = 900, 700
# In a pull request.
SHORT_PROMPT, SHORT_ANSWER = 120, 160
# A base answer of fewer words says little.
FEWEST_WORDS = 10
RULE = (
    "Prompts whose outcome the fine-tune changed, chosen by a rule, not by hand: first those where every "
    f"answer ends and repeats nothing, then by the length of base's answer, from {FEWEST_WORDS} words on."
)


def pick_samples(suite: Suite) -> list[dict[str, Any]]:
    """Return prompts whose outcome the fine-tune changed, grouped by their outcome after recovery."""
    if not {"base", "tuned"} <= set(suite.rows):
        return []
    shares, passed = _outcomes(suite)
    lost = suite.role == "retention"
    changed = []
    for i, (base, tuned) in enumerate(zip(passed["base"], passed["tuned"], strict=True)):
        if base == lost and tuned != base:
            changed.append(i)
    changed.sort(key=_readability(suite).__getitem__)
    title = "Lost by the fine-tune" if lost else "Learned by the fine-tune"
    groups = {title: changed}
    if "recovered" in suite.rows:
        good, bad = ("regained by recovery", "not regained") if lost else ("kept by recovery", "lost again")
        groups = {
            f"{title}, {good}": [i for i in changed if passed["recovered"][i]],
            f"{title}, {bad}": [i for i in changed if not passed["recovered"][i]],
        }
    rows = []
    for title, indices in groups.items():
        samples = [_sample(suite, i, shares, passed) for i in indices[:SAMPLES_PER_GROUP]]
        rows.append({"title": title, "count": len(indices), "of": len(changed), "samples": samples})
    return rows


def _outcomes(suite: Suite) -> tuple[dict[str, list[float]], dict[str, list[bool]]]:
    """Return the share of its score that each state reaches on each prompt, and whether it passes."""
    # Several parts must all pass; one fractional score passes from a half on.
    needed = 1.0 if any(len(parts) != 1 for parts in suite.parts("base")) else 0.5
    shares, passed = {}, {}
    for state in suite.rows:
        shares[state] = [sum(parts) / max(len(parts), 1) for parts in suite.parts(state)]
        passed[state] = [share >= needed for share in shares[state]]
    return shares, passed


def pick_examples(samples: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Take the first sample of each suite out of its groups, for the top of the report."""
    examples = []
    for name, groups in samples.items():
        if group := next((group for group in groups if group["samples"]), None):
            examples.append(group | {"suite": name, "sample": group["samples"].pop(0)})
    return examples


def worst_samples(suite: Suite, count: int) -> dict[str, Any] | None:
    """Return the prompts on which the last measured state falls furthest below base, and how many do."""
    state = suite.latest
    if state is None or "base" not in suite.rows:
        return None
    gaps = suite.values(state) - suite.values("base")
    order = [int(i) for i in gaps.argsort(kind="stable") if gaps[i] < 0]
    rows = []
    for i in order[:count]:
        base, answer = suite.rows["base"][i], suite.rows[state][i]
        rows.append(
            {
                "prompt": _line(_question(base), SHORT_PROMPT),
                "state": state,
                "answer": _line(answer.get("response"), SHORT_ANSWER),
                "base": _line(base.get("response"), SHORT_ANSWER),
            }
        )
    return {"prompts": rows, "lost": len(order), "total": len(gaps), "suite": suite.name}


def _question(row: dict[str, Any]) -> str:
    """Return the question: in a conversation, the last one."""
    return str(row.get("question", row["prompt"]))


def _whole_or_ends(row: dict[str, Any]) -> str:
    """Return a prompt; of a long conversation, its beginning and its last question."""
    prompt, question = str(row["prompt"]), _question(row)
    if question == prompt or len(prompt) <= LONGEST_PROMPT:
        return format.cut(prompt, LONGEST_PROMPT)
    return f"{format.cut(prompt, LONGEST_PROMPT // 3)}\n\n{format.cut(question, LONGEST_PROMPT // 2)}"


def _line(text: Any, longest: int) -> str:
    """Return a text on one line, cut to a length."""
    return format.cut(" ".join(str(text or "nothing").split()), longest)


def _readability(suite: Suite) -> list[tuple[bool, bool, int, int]]:
    """Return a sort key per prompt, by `RULE`."""
    # Whether an answer of any state was truncated or repeats itself, where that is recorded.
    unclean = np.zeros(len(suite.measured), bool)
    for state in suite.rows:
        written = writing.values(suite, state)
        if "ended" in written:
            unclean |= written["ended"] < 1
        if "repetition" in written:
            unclean |= written["repetition"] > 0
    keys = []
    for i, row in enumerate(suite.rows["base"]):
        answer = str(row.get("response") or "")
        keys.append((bool(unclean[i]), len(answer.split()) < FEWEST_WORDS, len(answer), i))
    return keys


def _sample(suite: Suite, i: int, shares: dict[str, list], passed: dict[str, list]) -> dict[str, Any]:
    """Return one prompt with its expected answer and the answer of every state."""
    row = suite.rows["base"][i]
    answers = []
    for state, rows in suite.rows.items():
        share, ok = shares[state][i], passed[state][i]
        mark = ("pass" if ok else "fail") if share in (0, 1) else f"{100 * share:.0f} %"
        text = format.cut(str(rows[i].get("response") or ""), LONGEST_ANSWER)
        answers.append({"state": state, "text": text, "passed": ok, "mark": mark})
    return {
        "number": row["doc_id"],
        "prompt": _whole_or_ends(row),
        "target": format.cut(str(row["target"]), LONGEST_ANSWER) if row.get("target") else None,
        "answers": answers,
    }
