"""Score short answers against gold answers, as SQuAD does. The shipped suites import it too."""

from __future__ import annotations

import re
import string
from collections import Counter


def normalise(text: str) -> str:
    """Lower the case, drop punctuation and articles, and squeeze spaces."""
    text = "".join(" " if c in string.punctuation else c for c in text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(answer: str, gold: str) -> float:
    """Return the harmonic mean of token precision and recall after normalisation."""
    a, g = normalise(answer).split(), normalise(gold).split()
    shared = sum((Counter(a) & Counter(g)).values())
    return 2 * shared / (len(a) + len(g)) if shared else 0.0


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    """Score one answer against the gold answer and its aliases, `doc["answers"]`; the best match counts."""
    answer, golds = results[0], doc["answers"]
    words = normalise(answer)
    return {
        "exact_match": max(float(words == normalise(g)) for g in golds),
        "token_f1": max(token_f1(answer, g) for g in golds),
        "contains": max(float(f" {normalise(g)} " in f" {words} ") for g in golds),
    }
