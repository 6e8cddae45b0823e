"""Pick samples for the report: prompts whose outcome the fine-tune changed."""

from __future__ import annotations

from typing import Any

from opdcl.results.format import cut
from opdcl.results.scores import Suite

SAMPLES_PER_GROUP = 4

LONGEST_HEAD, LONGEST_PROMPT, LONGEST_ANSWER = 90, 900, 700


def pick_samples(suite: Suite) -> list[dict[str, Any]]:
    """Return prompts whose outcome the fine-tune changed, grouped by their outcome after recovery."""
    if not {"base", "tuned"} <= set(suite.rows):
        return []
    # Several parts must all pass; one fractional score passes from a half on.
    needed = 1.0 if any(len(parts) != 1 for parts in suite.parts("base")) else 0.5
    shares = {state: [sum(p) / max(len(p), 1) for p in suite.parts(state)] for state in suite.rows}
    passed = {state: [share >= needed for share in values] for state, values in shares.items()}
    lost = suite.role == "retention"
    outcomes = enumerate(zip(passed["base"], passed["tuned"], strict=True))
    changed = [i for i, (base, tuned) in outcomes if base == lost and tuned != base]
    title = "Lost by the fine-tune" if lost else "Learned by the fine-tune"
    groups = {title: changed}
    if "recovered" in suite.rows:
        good, bad = ("regained by recovery", "not regained") if lost else ("kept by recovery", "lost again")
        groups = {
            f"{title}, {word}": [i for i in changed if passed["recovered"][i] == ok]
            for word, ok in ((good, True), (bad, False))
        }
    rows = []
    for title, indices in groups.items():
        samples = [_sample(suite, i, shares, passed) for i in indices[:SAMPLES_PER_GROUP]]
        rows.append({"title": title, "count": len(indices), "of": len(changed), "samples": samples})
    return rows


def _sample(suite: Suite, i: int, shares: dict[str, list], passed: dict[str, list]) -> dict[str, Any]:
    """Return one prompt with its expected answer and the answer of every state."""
    row = suite.rows["base"][i]
    line = " ".join(str(row["prompt"]).split())
    answers = []
    for state, rows in suite.rows.items():
        share, ok = shares[state][i], passed[state][i]
        mark = ("pass" if ok else "fail") if share in (0, 1) else f"{100 * share:.0f} %"
        text = cut(str(rows[i].get("response") or ""), LONGEST_ANSWER)
        answers.append({"state": state, "text": text, "passed": ok, "mark": mark})
    return {
        "number": row["doc_id"],
        "head": line if len(line) <= LONGEST_HEAD else f"{line[:LONGEST_HEAD]}…",
        "prompt": cut(str(row["prompt"]), LONGEST_PROMPT),
        "target": cut(str(row["target"]), LONGEST_ANSWER) if row.get("target") else None,
        "answers": answers,
    }
