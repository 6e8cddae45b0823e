"""How near two texts are in wording: the cosine of their tf-idf vectors over content words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

# Words that carry grammar, or the form of a question, and not what it is about.
GRAMMAR = """
    a an the this that these those there here it its he him his she her hers they them their we us our you
    your i me my who whom whose what which when where why how if whether then than as so not no nor or and
    but only just also too of in on at to from for by with about into onto out up down off over under per
    during before after until between is are was were be been being am do does did done has have had
    having can could will would shall should may might must need let s t re ve ll d one any some all each
    every both much many more most such own tell say know name named names called far long old often
    please
"""
STOP_WORDS = frozenset(GRAMMAR.split())


def words(text: str) -> list[str]:
    """Return the words of a text in any script; where words are not spaced (CJK), its characters."""
    pattern = r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W_]+"
    return re.findall(pattern, text.lower().replace("\u2019", "'").replace("'s", ""))


def stem(word: str) -> str:
    """Cut off common endings, so that `painted` and `paint` are the same wording."""
    for ending in ("ings", "ing", "ies", "ied", "ers", "er", "ed", "es", "s", "ly"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word.removesuffix(ending).rstrip("e")
    return word.rstrip("e")


def request_of(prompt: str) -> str:
    """Return the first sentence of a prompt: the request without the constraints that follow it."""
    return re.split(r"(?<=[.?!])\s|\n", prompt)[0]


def similarity(texts: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """Return the cosine of every text (row) with every other (column), between 0 and 1.

    Texts are bags of stemmed content words. A word weighs log((1 + n) / (1 + n_word)) + 1 for each time that
    it occurs, where n_word of all n texts have it. Pairs of words are left out: a copy in another order would
    be missed.
    """
    import numpy as np

    bags = [Counter(stem(w) for w in words(t) if w not in STOP_WORDS) for t in [*texts, *others]]
    texts_with = Counter(word for bag in bags for word in bag)
    weight = {word: np.log((1 + len(bags)) / (1 + n)) + 1 for word, n in texts_with.items()}
    # Words of the others alone count in their lengths, and need no column.
    column = {word: i for i, word in enumerate(dict.fromkeys(w for bag in bags[: len(texts)] for w in bag))}
    vectors = np.zeros((len(bags), len(column)), dtype=np.float32)
    for row, bag in zip(vectors, bags, strict=True):
        length = np.sqrt(sum((times * weight[word]) ** 2 for word, times in bag.items()))
        for word in bag.keys() & column.keys():
            row[column[word]] = bag[word] * weight[word] / length
    return vectors[: len(texts)] @ vectors[len(texts) :].T


def nearest(prompts: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """Return how near the nearest of the others is to each prompt, by whole prompts and by their requests."""
    import numpy as np

    requests = [request_of(p) for p in others]
    whole = similarity(prompts, [*others, *requests])
    bare = similarity([request_of(p) for p in prompts], [*others, *requests])
    return np.maximum(whole, bare).max(axis=1)
