"""A prompt, its completion, the request that an engine fulfils, and how a request is cut into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from opdcl.data.examples import Example

Engine = Literal["slab", "graph", "generate"]

# Sampler and forward pass disagree about a token where they differ about its probability by more than this
# factor.
MISMATCH_RATIO = 2


@dataclass(frozen=True)
class Prompt:
    """What a model is asked, and in a recovery all that is known about it.

    `ids` are the token ids that the student sees. `teacher` is the name of the prompt's own teacher, or ""
    for the stream's. `context` is what that teacher sees in place of `ids`, if it differs. `number` is the
    position of its row in the stream, by which a reward finds the document. `answer` is given in place of
    one that the teacher writes.
    """

    ids: list[int]
    teacher: str = ""
    context: list[int] | None = None
    number: int = 0
    answer: list[int] | None = None

    @property
    def shown(self) -> list[int]:
        """The token ids that the teacher sees."""
        return self.context or self.ids


@dataclass
class Rollout:
    """A prompt and its sampled completion.

    `completion_ids` ends with an end-of-sequence id if and only if `finished`; `logprobs` holds the sampler's
    log-probability (nats, at the sampling temperature) of each of its tokens and is empty under greedy
    decoding. `reward` is the suite scorer's, `advantage` its distance from the group's mean in standard
    deviations. If it `recurs`, other steps learn from it too; `states_NH` are then its frozen teacher's last
    hidden states before each completion token, `(N, H)`, once the teacher has read it.
    """

    prompt: Prompt
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False
    reward: float | None = None
    advantage: float = 0.0
    recurs: bool = False
    states_NH: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def prompt_ids(self) -> list[int]:
        return self.prompt.ids

    @property
    def example(self) -> Example:
        """The prompt and its completion as the student learns them."""
        return Example.of(self.prompt_ids, self.completion_ids)

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


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

    def batches(self, rollouts: list[Rollout]) -> Iterator[list[int]]:
        """Yield the indices of rollouts that run together, the shortest first."""
        order = sorted(range(len(rollouts)), key=lambda i: rollouts[i].length)
        widths = [rollouts[i].length + self.max_new_tokens for i in order]
        for part in cut(widths, self.batch_size, self.weights):
            yield order[part]


def cut(widths: Sequence[int], max_rows: int, weights: float) -> list[slice]:
    """Cut sequences, sorted by width, into the batches that read the least per decoding step.

    Each batch reads the weights once, and for each sequence as many keys and values as its widest has. So a
    few long prompts run separately as soon as padding the others costs more than reading the weights again.
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
