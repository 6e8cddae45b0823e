"""Answers without content: the score that a suite gives to them is its floor.

A suite shows something of a model only as far as the model is above the best of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from opdcl.data.similarity import request_of

CONSTANT_ANSWER = "I am happy to help. Please tell me more about what you need."

# Number of parts of a suite; which targets are frequent is learned from the other parts.
FOLDS = 5


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
