"""The words of texts: which an answer adds to its prompt, in any spelling, and how near two wordings are.

Nearness is the cosine of their tf-idf vectors over content words. Answers that add nothing give a suite its
floor: it shows something of a model only as far as the model is above the best of them.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
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

# A hyphen between letters does not split a word: otherwise a copy with hyphens would have words of its own.
WHOLE_WORD = re.compile(r"[^\W_]+(?:['\u2019\u2010\u2011-][^\W_]+)*")

# Two words that share this many first letters are forms of one word; a word of at least `WHOLE` letters
# inside a longer one makes that a compound of it.
BEGINNING, WHOLE = 5, 4

CONSTANT_ANSWER = "I am happy to help. Please tell me more about what you need."

# Number of parts of a suite; which targets are frequent is learned from the other parts.
FOLDS = 5


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


def own_text(prompt: str, answer: str) -> str:
    """Return an answer without the words of its prompt, in any form, and without lone marks."""
    said = spellings(prompt)
    text = WHOLE_WORD.sub(lambda found: "" if _is_said(found[0], said) else found[0], _visible(answer))
    return " ".join(part for part in text.split() if WHOLE_WORD.search(part))


def own_words(prompt: str, answer: str) -> set[str]:
    """Return the stems of the content words that an answer adds to its prompt.

    Single letters and mixtures of letters and digits do not count: they may be a prompt's word in disguise.
    """
    said = spellings(prompt)
    own: set[str] = set()
    for found in WHOLE_WORD.findall(_visible(answer)):
        if not _is_said(found, said):
            own.update(stem(word) for word in words(found) if _has_content(word))
    return own - {stem(word) for word in words(prompt)}


def _has_content(word: str) -> bool:
    is_lone_letter = len(word) == 1 and word.isascii()
    return word.isalpha() and not is_lone_letter and word not in STOP_WORDS


def spellings(text: str) -> frozenset[str]:
    """Return the words of a text, each as `_plain` writes it."""
    return frozenset(_plain(found) for found in WHOLE_WORD.findall(_visible(text)))


def _visible(text: str) -> str:
    """Return a text without characters that nobody sees, such as spaces of no width."""
    return "".join(letter for letter in text if unicodedata.category(letter) != "Cf")


def _is_said(word: str, said: frozenset[str]) -> bool:
    """Return whether all parts of a word are those of a prompt, or the whole is one of its words."""
    if _is_form_of_any(word, said):
        return True
    parts = words(word)
    return len(parts) > 1 and all(_is_form_of_any(part, said) for part in parts)


def _is_form_of_any(word: str, said: frozenset[str]) -> bool:
    plain = _plain(word)
    return any(_is_form_of(plain, other) for other in said)


@functools.lru_cache(maxsize=4096)
def _plain(word: str) -> str:
    """Return the stem of a word without case, marks, accents and doubled letters."""
    letters = unicodedata.normalize("NFKD", word.lower().replace("'s", "").replace("\u2019s", ""))
    plain = "".join(letter for letter in letters if letter.isalnum())
    return stem(re.sub(r"(.)\1+", r"\1", plain))


@functools.lru_cache(maxsize=1 << 16)
def _is_form_of(word: str, other: str) -> bool:
    """Return whether a word is another one in another form or spelling, a part of it, or made of it."""
    if word == other or (len(word) > 1 and word in other) or (len(other) >= WHOLE and other in word):
        return True
    if word[:BEGINNING] == other[:BEGINNING] and min(len(word), len(other)) >= BEGINNING:
        return True
    # Two edits turn a short word into nearly any other.
    shorter = min(len(word), len(other))
    return within(word, other, min(2, (shorter - 1) // 2))


def within(word: str, other: str, edits: int) -> bool:
    """Return whether at most `edits` insertions, deletions or substitutions turn one word into the other."""
    while word and other and word[0] == other[0]:
        word, other = word[1:], other[1:]
    if not word or not other:
        return len(word) + len(other) <= edits
    if edits <= 0 or abs(len(word) - len(other)) > edits:
        return False
    return (
        within(word[1:], other, edits - 1)
        or within(word, other[1:], edits - 1)
        or within(word[1:], other[1:], edits - 1)
    )


def copied_run(prompt: str, answer: str) -> int:
    """Return the length, in words, of the longest passage of the prompt that the answer repeats."""
    return SequenceMatcher(None, words(prompt), words(answer), autojunk=False).find_longest_match().size


def content_free(
    prompts: Sequence[str], targets: Sequence[str] = (), clusters: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Return the answers without content by name, one per prompt.

    Args:
        prompts: What is asked.
        targets: The expected answers, if any. What is frequent is learned from other prompts only.
        clusters: What each prompt is about; prompts of one cluster have one target.
    """
    answers = {
        "empty": [""] * len(prompts),
        "constant": [CONSTANT_ANSWER] * len(prompts),
        "copy": [*prompts],
        "first sentence": [request_of(prompt) for prompt in prompts],
    }
    if any(targets):
        answers["frequent target"] = _frequent_targets(targets, clusters or [*map(str, range(len(prompts)))])
    return answers


def _frequent_targets(targets: Sequence[str], clusters: Sequence[str]) -> list[str]:
    """Return for each prompt the most frequent target of the parts that its cluster is not in."""
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    parts = [numbers[cluster] % FOLDS for cluster in clusters]
    most_frequent = []
    for left_out in range(FOLDS):
        counts = Counter(target for target, part in zip(targets, parts, strict=True) if part != left_out)
        most_frequent.append(counts.most_common(1)[0][0] if counts else "")
    return [most_frequent[part] for part in parts]
