"""opdcl's own sampler: one decoding loop for large batches of short sequences.

It is faster than `generate` for three reasons: keys and values go into preallocated slabs (no concatenation
per token), finished sequences leave the batch, and the prefix that all prompts share (a system prompt, for
example) is computed once.

Randomness is one uniform number per sequence and token, drawn in advance, so a sequence's samples depend
neither on its neighbours in the batch nor on when they finish.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from opdcl import parallel
from opdcl.model.architecture import architecture
from opdcl.model.forward import common_prefix
from opdcl.model.memory import is_out_of_memory, release
from opdcl.sampling.layout import PADDING, Layout, attention_mask
from opdcl.sampling.llama_step import decoding_step

if TYPE_CHECKING:
    from opdcl.sampling.rollout import Request, Rollout

logger = logging.getLogger(__name__)

# Completes a batch, given its layout, the request, how many rollouts may be left unfinished, and the uniform
# numbers `(B, T)` or None; returns how many it left unfinished.
Complete = Callable[[list["Rollout"], Layout, "Request", int, "torch.Tensor | None"], int]

# Rows are dropped from the slabs once a fifth of them is finished: copying the rest then costs less than
# decoding the finished ones.
COMPACT_BELOW = 0.8

# Completions are left unfinished only with more steps than this ahead.
WORTH_LEAVING = 32

# Prompts that run through the model together: enough to use the hardware, few enough to have similar lengths.
PREFILL_ROWS = 32

# Tokens per block of the cumulative sum from which a draw is made.
DRAW_BLOCK = 256


class SlabLayer(CacheLayerMixin):
    """One layer's keys and values in preallocated `(rows, heads, capacity, dim)` slabs."""

    is_sliding = False

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._allocate(key_states, value_states, key_states.shape[0])
        self.is_initialized = True

    def _allocate(self, key: torch.Tensor, value: torch.Tensor, rows: int) -> None:
        self.keys = key.new_empty(rows, key.shape[1], self.capacity, key.shape[-1])
        self.values = value.new_empty(rows, value.shape[1], self.capacity, value.shape[-1])

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def copy_part(self, source: SlabLayer, rows: slice, total: int, prefix: int, end: int) -> None:
        """Copy the prefix of `source` to the left of `rows`, and its tail so that it ends at column `end`.

        The first call allocates `total` rows. A single source row is repeated.
        """
        if not self.is_initialized:
            self._allocate(source.keys, source.values, total)
            # Padding is masked, but masked NaN is still NaN.
            self.keys[:, :, prefix:end].zero_()
            self.values[:, :, prefix:end].zero_()
            self.is_initialized = True
        tail = source.length - prefix
        for slab, part in ((self.keys, source.keys), (self.values, source.values)):
            slab[rows, :, :prefix] = part[:, :, :prefix]
            slab[rows, :, end - tail : end] = part[:, :, prefix : source.length]
        self.length = end

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all but the given rows."""
        key, value, length = self.keys, self.values, self.length
        self._allocate(key, value, len(rows))
        self.keys[:, :, :length] = key[rows, :, :length]
        self.values[:, :, :length] = value[rows, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


def decode(model, rollouts: list[Rollout], request: Request) -> None:
    """Complete the rollouts in place; every layer of `model` must attend, fully or in a window."""
    decode_batches(partial(_decode_batch, model), rollouts, request)


def decode_batches(complete: Complete, rollouts: list[Rollout], request: Request) -> None:
    """Cut the rollouts into batches, and let `complete` decode each."""
    uniform_NT: torch.Tensor | None = None
    if request.temperature:
        # Drawn for all workers, so that a sequence gets the same numbers on any of them.
        generator = torch.Generator().manual_seed(request.seed)
        uniform_NT = torch.rand(request.total, request.max_new_tokens, generator=generator)
        uniform_NT = uniform_NT[parallel.rank() :: parallel.worker_count()]
    # At least one id of each prompt stays outside the shared prefix.
    prefix = common_prefix([r.prompt_ids[:-1] for r in rollouts]) if len(rollouts) > 1 else []
    max_unfinished = request.max_unfinished
    left = deque(request.batches(rollouts))
    while left:
        indices = left.popleft()
        batch = [rollouts[i] for i in indices]
        begun = [len(r.completion_ids) for r in batch]
        layout = Layout(prefix, [(r.prompt_ids + r.completion_ids)[len(prefix) :] for r in batch])
        uniform_BT = None if uniform_NT is None else uniform_NT[indices]
        try:
            max_unfinished -= complete(batch, layout, request, max_unfinished, uniform_BT)
            continue
        except (RuntimeError, MemoryError) as fault:
            # Workers with a sharded base run in step, so none may start over alone.
            if not is_out_of_memory(fault) or len(batch) == 1 or parallel.sharded():
                raise
        for rollout, length in zip(batch, begun, strict=True):
            del rollout.completion_ids[length:], rollout.logprobs[length:]
            rollout.finished = False
        release()
        half = len(indices) // 2
        logger.warning("out of memory while sampling: %d sequences at once instead of %d", half, len(indices))
        left.extendleft([indices[half:], indices[:half]])


@torch.no_grad()
def _decode_batch(
    model, batch: list[Rollout], layout: Layout, request: Request, max_unfinished: int, uniform_BT
) -> int:
    """Complete a batch in place; return how many of its rollouts were left unfinished."""
    device, max_new_tokens = model.device, request.max_new_tokens
    capacity = layout.end + max_new_tokens
    cache = Cache(layers=[SlabLayer(capacity) for _ in range(architecture(model.config).layers)])
    logits_BV = prefill(model, cache, layout)
    key_BC = layout.positions(capacity).to(device)
    position_B = key_BC[:, layout.end - 1]
    run_step = decoding_step(model)
    # In 16 bits the CPU's fast kernels need two rows, so a finished one stays with the last.
    min_rows = 2 if model.dtype.itemsize == 2 else 1
    done = [False] * len(batch)
    for step in range(max_new_tokens):
        uniform_B = None if uniform_BT is None else uniform_BT[:, step].to(device)
        token_B, logprob_B = draw(logits_BV, request.temperature, uniform_B)
        logprobs = [] if logprob_B is None else logprob_B.tolist()
        tokens = token_B.tolist()
        append(batch, done, tokens, logprobs, request)
        running = done.count(False)
        if not running or (running <= max_unfinished and max_new_tokens - step > WORTH_LEAVING):
            break
        rows = max(running, min_rows)
        if rows < COMPACT_BELOW * len(done):
            indices = sorted(range(len(done)), key=done.__getitem__)[:rows]
            batch, done = [batch[row] for row in indices], [done[row] for row in indices]
            uniform_BT = None if uniform_BT is None else uniform_BT[indices]
            keep = torch.tensor(indices, device=device)
            for layer in cache.layers:
                layer.keep(keep)
            token_B, position_B, key_BC = token_B[keep], position_B[keep], key_BC[keep]
        position_B = position_B + 1
        logits_BV = run_step(token_B, position_B, key_BC[:, : cache.get_seq_length() + 1], cache)
    return done.count(False)


def append(
    batch: list[Rollout], done: list[bool], tokens: list[int], logprobs: list[float], request: Request
) -> None:
    """Append a drawn token to each row that is not done, and report the completions that have ended."""
    ended = []
    for row, (rollout, token) in enumerate(zip(batch, tokens, strict=True)):
        if done[row]:
            continue
        rollout.completion_ids.append(token)
        rollout.logprobs += logprobs[row : row + 1]
        rollout.finished = token in request.eos_ids
        done[row] = rollout.finished or len(rollout.completion_ids) == request.max_new_tokens
        ended += [rollout] * done[row]
    if request.on_finished and ended:
        request.on_finished(ended)


def prefill(model, cache: Cache, layout: Layout, batch_rows: int = PREFILL_ROWS) -> torch.Tensor:
    """Fill the slabs with all prompts, which end at `layout.end`; return next-token logits `(B, V)`.

    The prefix runs once. Tails run a few rows at a time, and each of these batches is only as wide as its
    longest tail: one long prompt would otherwise pad all the others.
    """
    device, prefix = model.device, len(layout.prefix)
    shared = Cache(layers=[SlabLayer(prefix) for _ in cache.layers])
    full = architecture(model.config).full_attention  # transformers' own mask then needs no memory
    if prefix:
        position_1P = torch.arange(prefix, device=device)[None]
        model.base_model(
            input_ids=torch.tensor([layout.prefix], device=device),
            attention_mask=None if full else attention_mask(model, position_1P, position_1P),
            position_ids=position_1P,
            past_key_values=shared,
        )
    logits = []
    for start in range(0, len(layout.tails), batch_rows):
        batch = Layout(layout.prefix, layout.tails[start : start + batch_rows])
        ids_BW = torch.zeros(len(batch.tails), batch.width, dtype=torch.long)
        for row, tail in enumerate(batch.tails):
            ids_BW[row, batch.width - len(tail) :] = torch.tensor(tail)
        part = Cache(layers=[SlabLayer(batch.end) for _ in cache.layers])
        for layer, source in zip(part.layers, shared.layers, strict=True):
            if prefix:
                layer.copy_part(source, slice(None), len(batch.tails), prefix, prefix)
        key_BC = batch.positions(batch.end).to(device)
        position_BW = key_BC[:, prefix:]
        output = model(
            input_ids=ids_BW.to(device),
            attention_mask=attention_mask(model, position_BW, key_BC),
            position_ids=position_BW.masked_fill(position_BW == PADDING, 0),
            past_key_values=part,
            # As an index tensor: the copy that it makes avoids one copy of the output head per row.
            logits_to_keep=torch.tensor([batch.width - 1], device=device),
        )
        logits.append(output.logits[:, -1])
        rows = slice(start, start + len(batch.tails))
        for layer, source in zip(cache.layers, part.layers, strict=True):
            layer.copy_part(source, rows, len(layout.tails), prefix, layout.end)
    return torch.cat(logits)


def draw(logits_BV: torch.Tensor, temperature: float, uniform_B: torch.Tensor | None):
    """Draw a token per row by inverting the cumulative distribution; return ids and logprobs, `(B,)`.

    Without uniform numbers the most likely token is taken, and its log-probability is not computed.
    """
    if uniform_B is None:
        return logits_BV.argmax(-1), None
    rows, vocabulary = logits_BV.shape
    # Only the block that contains the draw is summed token by token.
    padded = math.ceil(vocabulary / DRAW_BLOCK) * DRAW_BLOCK
    scaled_BV = logits_BV.new_full((rows, padded), -torch.inf, dtype=torch.float32)
    scaled_BV[:, :vocabulary] = logits_BV
    if temperature != 1:
        scaled_BV /= temperature
    scaled_BV -= scaled_BV.amax(-1, keepdim=True)
    # Unnormalized probabilities; the draw is scaled by their total instead.
    weight_BNW = scaled_BV.exp().view(rows, -1, DRAW_BLOCK)
    block_BN = weight_BNW.sum(-1)
    cumulative_BN = block_BN.cumsum(-1)
    total_B1 = cumulative_BN[:, -1:]
    # Rounding must not move a draw to a block, or to a token of its block, that has no probability.
    draw_B1 = uniform_B[:, None].clamp(max=1 - 1e-6) * total_B1
    # NaN of a broken model lies in no block and draws the last token; its log-probability is NaN too.
    block_B1 = torch.searchsorted(cumulative_BN, draw_B1, right=True).clamp_(max=cumulative_BN.shape[-1] - 1)
    inside_BW = weight_BNW[torch.arange(rows, device=logits_BV.device), block_B1[:, 0]].cumsum(-1)
    rest_B1 = draw_B1 - (cumulative_BN - block_BN).gather(-1, block_B1)
    rest_B1 = torch.minimum(rest_B1.clamp_(min=0), inside_BW[:, -1:] * (1 - 1e-6))
    token_B1 = block_B1 * DRAW_BLOCK + torch.searchsorted(inside_BW, rest_B1, right=True)
    token_B1.clamp_(max=vocabulary - 1)
    return token_B1[:, 0], (scaled_BV.gather(-1, token_B1) - total_B1.log())[:, 0]
