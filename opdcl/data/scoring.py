"""Score short answers against gold answers, as SQuAD does, in any script. Shipped suites import it too."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import lru_cache

from opdcl.repetition import UNSPACED

# The kinds of characters that ASCII has as punctuation, signs of currency and mathematics among them.
MARKS = {"Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "Sc", "Sk", "Sm"}
# Letters that are written where an apostrophe is meant, the degree sign, and a space of no width.
MORE_MARKS = "\u02b9\u02bb\u02bc\u02bd\u00b0\u200b"
# What a writer may leave out: vowel points of Hebrew and Arabic, the stretching of Arabic words, and what
# says whether a sign is drawn in colours.
OPTIONAL = re.compile("[\u0591-\u05c7\u0610-\u061a\u0640\u064b-\u0652\u0670\u06d6-\u06ed\ufe00-\ufe0f]")
# A letter that is a word, with its vowels and tones.
LETTER = re.compile(rf"[{UNSPACED}][^\w\s]*")


def normalise(text: str) -> str:
    """Lower the case, drop punctuation and articles, and squeeze spaces.

    Different spellings of one text become one: composed and decomposed letters, full width, digits of any
    script. In scripts without spaces each letter is a word. A text of nothing else keeps its articles, and
    one of nothing but punctuation its punctuation.
    """
    spelt = _spelt(unicodedata.normalize("NFKC", _spelt(text)).casefold())
    words = LETTER.sub(r" \g<0> ", re.sub(r"\b(a|an|the)\b", " ", spelt))
    return next((" ".join(kept.split()) for kept in (words, spelt) if kept.strip()), text.strip())


def _spelt(text: str) -> str:
    return "".join(map(_as_compared, text))


@lru_cache(maxsize=1 << 14)
def _as_compared(char: str) -> str:
    """Return what stands for a character when answers are compared: a blank for punctuation."""
    kind, form = unicodedata.category(char), unicodedata.decomposition(char)
    if kind in MARKS or char in MORE_MARKS:
        return " "
    if kind == "Cf" or OPTIONAL.match(char):
        return ""
    if kind == "Nd":
        return str(unicodedata.decimal(char))
    if kind == "So":  # a trade mark says nothing; any other sign is a word
        return " " if form.startswith("<super>") else f" {char} "
    # 10² is not 102, and 2½ is not 21/2.
    return f" {char}" if kind == "No" and form.startswith(("<super>", "<fraction>")) else char


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
