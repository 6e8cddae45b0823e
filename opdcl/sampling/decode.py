"""opdcl's own sampler: one decoding loop for large batches of short sequences.

It is faster than `generate` for three reasons: keys and values go into preallocated slabs (no concatenation
per token), finished sequences leave the batch, and the prefix that all prompts share (a system prompt, for
example) is computed once. On a GPU, each step is one CUDA graph (`opdcl.sampling.decoder`).

Randomness is one uniform number per sequence and token, drawn in advance, so a sequence's samples depend
neither on its neighbours in the batch nor on when they finish.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from opdcl import parallel
from opdcl.model.forward import common_prefix
from opdcl.model.hardware import is_out_of_memory, release
from opdcl.sampling.decoder import COLUMNS, Decoder, Layout, bucket, cheapest_batches
from opdcl.words import Rollout

logger = logging.getLogger(__name__)

# With graphs: slabs above this share of the device's memory are not kept between calls.
KEPT_SHARE = 0.1

# Model -> its buffers and graphs.
_KEPT: weakref.WeakKeyDictionary[torch.nn.Module, Decoder] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Request:
    """What an engine has to fulfil, apart from the prompts; see `sample` for fields without a docstring."""

    max_new_tokens: int
    eos_ids: Sequence[int]
    batch_size: int
    total: int
    """Number of rollouts in all processes."""
    weights: float
    """How many cached tokens a decoding step reads in the time that it takes to read the model's weights."""
    temperature: float = 1.0
    seed: int = 0
    on_finished: Callable[[list[Rollout]], None] | None = None
    stopped: Callable[[], bool] = bool  # which returns False

    def batches(self, rollouts: list[Rollout]) -> Iterator[list[int]]:
        """Yield the indices of rollouts that run together, the shortest first."""
        order = sorted(range(len(rollouts)), key=lambda i: rollouts[i].length)
        widths = [rollouts[i].length + self.max_new_tokens for i in order]
        for part in cheapest_batches(widths, self.batch_size, self.weights):
            yield order[part]


def decode(model, rollouts: list[Rollout], request: Request, graphs: bool) -> None:
    """Complete the rollouts in place; every layer of `model` must attend, fully or in a window.

    Args:
        model: A causal language model.
        rollouts: This worker's share.
        request: What they have in common.
        graphs: Decode on CUDA graphs.
    """
    uniform_NT = _uniform_numbers(request)
    # At least one id of each prompt stays outside the shared prefix.
    prefix = common_prefix([r.prompt_ids[:-1] for r in rollouts]) if len(rollouts) > 1 else []
    waiting = deque(request.batches(rollouts))
    while waiting:
        indices = waiting.popleft()
        batch = [rollouts[i] for i in indices]
        layout = Layout(prefix, [r.prompt_ids[len(prefix) :] for r in batch])
        uniform_BT = None if uniform_NT is None else uniform_NT[indices]
        try:
            _decode_batch(model, batch, layout, request, uniform_BT, graphs)
            continue
        except BaseException as fault:
            _KEPT.pop(model, None)  # its state is unknown, and a smaller batch needs smaller buffers
            # Workers with a sharded base run in step, so none may start over alone.
            if not is_out_of_memory(fault) or len(batch) == 1 or parallel.sharded():
                raise
        for rollout in batch:
            rollout.completion_ids, rollout.logprobs, rollout.finished = [], [], False
        release()
        half = len(indices) // 2
        logger.warning("out of memory while sampling: %d sequences at once instead of %d", half, len(indices))
        waiting.extendleft([indices[half:], indices[:half]])
    if graphs and model.device.type == "cuda":
        memory = torch.cuda.get_device_properties(model.device).total_memory
        if _KEPT[model].size > KEPT_SHARE * memory:
            del _KEPT[model]


def _uniform_numbers(request: Request) -> torch.Tensor | None:
    """Return the numbers that this worker's sequences are drawn with, `(N, T)`; None for greedy decoding."""
    if not request.temperature:
        return None
    # Drawn for all workers, so that a sequence gets the same numbers on any of them.
    generator = torch.Generator().manual_seed(request.seed)
    uniform_NT = torch.rand(request.total, request.max_new_tokens, generator=generator)
    return uniform_NT[parallel.rank() :: parallel.worker_count()]


def _decoder(model, layout: Layout, request: Request, graphs: bool) -> Decoder:
    """Return buffers for a batch: with graphs those kept, unless they are too small or the weights moved."""
    rows, capacity = len(layout.tails), layout.end + request.max_new_tokens
    if not graphs:
        return Decoder(model, rows, capacity, request.temperature, in_buckets=False)
    kept = _KEPT.get(model)
    if kept and kept.fits(model, rows, capacity, request.temperature):
        return kept
    rows, capacity = bucket(rows), -(-capacity // COLUMNS) * COLUMNS
    if kept:
        rows, capacity = max(rows, kept.rows), max(capacity, kept.capacity)
        del _KEPT[model], kept  # before the new ones take memory
    _KEPT[model] = Decoder(model, rows, capacity, request.temperature, in_buckets=True)
    return _KEPT[model]


@torch.no_grad()
def _decode_batch(
    model,
    batch: list[Rollout],
    layout: Layout,
    request: Request,
    uniform_BT: torch.Tensor | None,
    graphs: bool,
) -> None:
    """Complete a batch in place."""
    decoder = _decoder(model, layout, request, graphs)
    decoder.start(model, layout, uniform_BT)
    done, seen, drawn = [False] * len(batch), 0, 1
    while True:
        for tokens, logprobs in decoder.drawn(len(batch), seen, drawn):
            _append(batch, done, tokens, logprobs, request)
        running = done.count(False)
        if not running or request.stopped():
            return
        rows, filled = decoder.rows_for(running, len(batch)), layout.end + drawn - 1
        if rows < len(batch):
            indices = sorted(range(len(batch)), key=done.__getitem__)[:rows]
            decoder.keep(indices, filled)
            batch, done = [batch[row] for row in indices], [done[row] for row in indices]
        count = min(decoder.steps_per_look, request.max_new_tokens - drawn)
        decoder.run(model, count, len(batch), filled + count)
        seen, drawn = drawn, drawn + count


def _append(
    batch: list[Rollout], done: list[bool], tokens: list[int], logprobs: list[float], request: Request
) -> None:
    """Append a drawn token to each row that is not done, and report the completions that have ended."""
    ended = []
    for row, (rollout, token) in enumerate(zip(batch, tokens, strict=True)):
        if done[row]:
            continue
        rollout.completion_ids.append(token)
        if request.temperature:
            rollout.logprobs.append(logprobs[row])
        rollout.finished = token in request.eos_ids
        done[row] = rollout.finished or len(rollout.completion_ids) == request.max_new_tokens
        if done[row]:
            ended.append(rollout)
    if request.on_finished and ended:
        request.on_finished(ended)
