"""How near two texts are in wording: the cosine of their tf-idf vectors over content words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

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

# Texts that are compared with all others at once: their similarities have to fit into memory.
TEXTS_AT_ONCE = 256


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
    return re.split(r"(?<=[.?!\u061f\u06d4\u0964])\s|(?<=[\u3002\uff01\uff1f])|\n", prompt)[0]


def content_words(text: str) -> list[str]:
    """Return the stems of the words of a text that say what it is about, in their order."""
    return [stem(word) for word in words(text) if word not in STOP_WORDS]


def similarity(texts: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """Return the cosine of every text (row) with every other (column), between 0 and 1.

    Texts are bags of stemmed content words. A word weighs log((1 + n) / (1 + n_word)) + 1 for each time that
    it occurs, where n_word of all n texts have it. Pairs of words are left out: a copy in another order would
    be missed.
    """
    import numpy as np

    if (vectors := _vectors([*texts, *others])) is None:
        return np.zeros((len(texts), len(others)), np.float32)
    return (vectors[: len(texts)] @ vectors[len(texts) :].T).toarray()


def pairs_alike(texts: Sequence[str], least: float) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield block by block the pairs of texts that are at least so similar: both numbers, and how similar."""
    if (vectors := _vectors(texts)) is None:
        return
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        near = (vectors[start : start + TEXTS_AT_ONCE] @ vectors.T).tocoo()
        found = near.data >= least
        yield near.row[found] + start, near.col[found], near.data[found]


def _vectors(texts: Sequence[str]) -> Any:
    """Return the tf-idf vectors of texts as rows; None without any content word, which is refused."""
    import numpy as np
    from sklearn.feature_extraction.text import TfidfVectorizer

    if not any(map(content_words, texts)):
        return None
    return TfidfVectorizer(analyzer=content_words, dtype=np.float32).fit_transform(texts)
