"""How near prompts are to others in wording."""

from collections.abc import Sequence

import numpy as np

from opdcl.data.own_words import request_of, similarity


def nearest(prompts: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """Return how near the nearest of the others is to each prompt, by whole prompts and by their requests."""
    requests = [request_of(p) for p in others]
    whole = similarity(prompts, [*others, *requests])
    bare = similarity([request_of(p) for p in prompts], [*others, *requests])
    return np.maximum(whole, bare).max(axis=1)
