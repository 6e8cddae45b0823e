"""How much a text repeats itself, or others, in tokens or words; and what a word is in every script."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise

# The letters of scripts that put no spaces between words, for an expression's brackets: Thai and Lao;
# Burmese, Khmer, Javanese and their neighbours; Kana; Han.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\ua980-\ua9ff\uaa60-\uaadf"
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
# A word; in these scripts, a letter.
REPEATED_WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")


def repetition(sequences: Sequence[Sequence[Hashable]], n: int = 4) -> float:
    """Return the share of n-grams that occurred earlier in the same sequence, over all sequences."""
    total = distinct = 0
    for items in sequences:
        grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
        total += len(grams)
        distinct += len(set(grams))
    return 1 - distinct / total if total else 0.0


def distinct(sequences: Sequence[Sequence[Hashable]]) -> list[float]:
    """Return for each sequence the share of its different 2-grams that no other sequence has.

    Beginning and end are part of them, so that short texts count too: of equal texts it is 0. It falls with
    the number of sequences, so it is compared on the same prompts only. After distinct-2, arXiv 1510.03055.
    """
    pairs = [set(pairwise([None, *items, None])) for items in sequences]
    holders = Counter(pair for own in pairs for pair in own)
    return [sum(holders[pair] == 1 for pair in own) / len(own) for own in pairs]
