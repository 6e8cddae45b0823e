"""One sampled completion, and what an engine is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Engine = Literal["slab", "generate", "continuous"]


@dataclass
class Rollout:
    """One sampled completion.

    `completion_ids` ends with an end-of-sequence id if and only if `finished`; `logprobs` holds the sampler's own
    log-probability (nats, at the sampling temperature) of each of its tokens, and is empty under greedy decoding.
    `reward` is what a suite's scorer gave it, `advantage` how much more that is than its group got, in standard deviations,
    `step_reward` the mean of all that were sampled for its step, whether learned from or not;
    `teacher_prompt_ids` is what its teacher sees in place of the prompt, where that is this completion's alone.
    """

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False
    reward: float | None = None
    advantage: float = 0.0
    step_reward: float = 0.0
    teacher_prompt_ids: list[int] | None = None


@dataclass(frozen=True)
class Request:
    """What an engine is asked for, the prompts apart: see `sample`. `total` is how many there are in all processes."""

    max_new_tokens: int
    eos_ids: Sequence[int]
    temperature: float
    seed: int
    batch_size: int
    on_finished: Callable[[list[Rollout]], None] | None
    total: int
    weights: float
    """How many cached tokens a decoding step reads in the time that it takes to read the model's weights."""
    max_unfinished: int = 0

    def batches(self, rollouts: list[Rollout]) -> Iterator[list[int]]:
        """Yield the indices that run together, the shortest so far first."""
        lengths = [len(r.prompt_ids) + len(r.completion_ids) for r in rollouts]
        order = sorted(range(len(rollouts)), key=lengths.__getitem__)
        for part in cut([lengths[i] + self.max_new_tokens for i in order], self.batch_size, self.weights):
            yield order[part]


def cut(widths: Sequence[int], most: int, weights: float) -> list[slice]:
    """Cut sequences, given by rising width, into the batches of at most `most` that read the least per decoding step.

    Each batch reads the weights once, and for every sequence as many keys and values as its widest has. So a few long prompts
    among many short ones run by themselves as soon as the padding would cost more than the weights read once more.
    """
    least, begins = [0.0], [0]
    for end, width in enumerate(widths, 1):
        cost, begin = min(
            (least[begin] + weights + (end - begin) * width, begin)
            for begin in range(max(0, end - most), end)
        )
        least.append(cost)
        begins.append(begin)
    parts: list[slice] = []
    end = len(widths)
    while end:
        parts.append(slice(begins[end], end))
        end = begins[end]
    return parts[::-1]


def repetition(completions: Sequence[list[int]], n: int = 4) -> float:
    """Return the share of n-grams that occurred before in the same completion."""
    grams = [Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)) for ids in completions]
    total = sum(g.total() for g in grams)
    return 1 - sum(len(g) for g in grams) / total if total else 0.0
