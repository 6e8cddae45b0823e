"""A prompt, its completion, the request that an engine fulfils, and how a request is cut into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from opdcl.types import Rollout

Engine = Literal["slab", "graph", "generate"]

# Sampler and forward pass disagree about a token where they differ about its probability by more than this
# factor.
MISMATCH_RATIO = 2


@dataclass(frozen=True)
class Request:
    """What an engine has to fulfil, apart from the prompts; see `sample` for fields without a docstring."""

    max_new_tokens: int
    eos_ids: Sequence[int]
    temperature: float
    seed: int
    batch_size: int
    total: int
    """Number of rollouts in all processes."""
    weights: float
    """How many cached tokens a decoding step reads in the time that it takes to read the model's weights."""
    on_finished: Callable[[list[Rollout]], None] | None = None
    max_unfinished: int = 0
    stopped: Callable[[], bool] = bool  # which returns False

    def batches(self, rollouts: list[Rollout]) -> Iterator[list[int]]:
        """Yield the indices of rollouts that run together, the shortest first."""
        order = sorted(range(len(rollouts)), key=lambda i: rollouts[i].length)
        widths = [rollouts[i].length + self.max_new_tokens for i in order]
        for part in cheapest_batches(widths, self.batch_size, self.weights):
            yield order[part]


def cheapest_batches(widths: Sequence[int], max_rows: int, weights: float) -> list[slice]:
    """Cut sequences, sorted by width, into the batches that cost least, of a decoding step or a pass.

    Each batch reads the weights once, which costs `weights` tokens, and for each sequence as many tokens as
    its widest has. So a few long prompts run separately as soon as padding the others costs more than that.
    """
    # By number of sequences: the least cost of cutting them, and the start of their last batch.
    costs, starts = [0.0], [0]
    for end, width in enumerate(widths, 1):
        cost, start = min(
            (costs[start] + weights + (end - start) * width, start)
            for start in range(max(0, end - max_rows), end)
        )
        costs.append(cost)
        starts.append(start)
    parts: list[slice] = []
    end = len(widths)
    while end:
        parts.append(slice(starts[end], end))
        end = starts[end]
    return parts[::-1]
