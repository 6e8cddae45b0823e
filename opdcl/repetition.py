"""How much a text repeats itself: one definition for sampled tokens and for the words of an answer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def repetition(sequences: Sequence[Sequence[Hashable]], n: int = 4) -> float:
    """Return the share of n-grams that occurred earlier in the same sequence, over all sequences."""
    total = distinct = 0
    for items in sequences:
        grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
        total += len(grams)
        distinct += len(set(grams))
    return 1 - distinct / total if total else 0.0
