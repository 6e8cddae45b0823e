"""How much a text repeats itself: one definition for sampled tokens and for the words of an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


def repetition(sequences: Sequence[Sequence[Hashable]], n: int = 4) -> float:
    """Return the share of n-grams that occurred earlier in the same sequence, over all sequences."""
    counts = [Counter(tuple(items[i : i + n]) for i in range(len(items) - n + 1)) for items in sequences]
    total = sum(count.total() for count in counts)
    return 1 - sum(map(len, counts)) / total if total else 0.0
