"""Score short answers against gold answers, as SQuAD does. The shipped suites import it too."""

from __future__ import annotations

import re
import string
from collections import Counter


def normalise(text: str) -> str:
    """Lower the case, drop punctuation and articles, and squeeze spaces."""
    text = "".join(" " if c in string.punctuation else c for c in text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(answer: str, gold: str, question: str = "") -> float:
    """Return the harmonic mean of token precision and recall, of what the question has not said already.

    The question's words count in neither text. A gold answer without any other word, such as one of two
    things that the question names, is compared as a whole, and scored by how far the answer is above the
    question: a copy gets 0 and the gold answer 1.
    """
    a, g, q = (normalise(text).split() for text in (answer, gold, question))
    if new := [word for word in g if word not in q]:
        return _f1([word for word in a if word not in q], new)
    copied = _f1(q, g)
    return max(0.0, _f1(a, g) - copied) / (1 - copied) if copied < 1 else float(a == g)


def _f1(a: list[str], g: list[str]) -> float:
    shared = sum((Counter(a) & Counter(g)).values())
    return 2 * shared / (len(a) + len(g)) if shared else 0.0


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    """Score one answer against the gold answer and its aliases, `doc["answers"]`; the best match counts.

    An answer that also contains one of `doc["others"]`, the answers to questions of the same kind, does not
    count as containing its own: a list of colours names every colour.
    """
    answer, golds, question = results[0], doc["answers"], doc.get("question", "")
    words = normalise(answer)
    listed = any(f" {normalise(other)} " in f" {words} " for other in doc.get("others") or [])
    return {
        "exact_match": max(float(words == normalise(g)) for g in golds),
        "token_f1": max(token_f1(answer, g, question) for g in golds),
        "contains": max(float(f" {normalise(g)} " in f" {words} " and not listed) for g in golds),
    }
