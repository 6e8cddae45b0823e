"""The sampler of our own: one decoding loop over transformers' forward pass, for large batches of short sequences.

It is faster than `generate` there for three reasons: keys and values go into preallocated slabs (no concatenation per
token), finished sequences leave the batch, and the prefix that all prompts share (a system prompt, say) is computed
once.

Randomness is one uniform number per sequence and token, drawn beforehand, so what a sequence samples depends neither
on its neighbours in the batch nor on when they finish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from opdcl import parallel
from opdcl.model.forward import common_prefix
from opdcl.sampling.llama_step import decoding_step

if TYPE_CHECKING:
    from opdcl.sampling.rollout import Request, Rollout


# Rows are dropped from the slabs once a fifth of them is finished: copying the survivors then costs less than
# decoding the finished ones.
COMPACT_BELOW = 0.8

# Steps that may be ahead of a completion that is left unfinished; for fewer it is not worth beginning again with its prompt.
WORTH_LEAVING = 32

# Prompts that run through the model together: enough to fill it, few enough to be of like length.
PREFILL_ROWS = 32

# Tokens that a draw passes over at once.
DRAW_BLOCK = 256


class SlabLayer(CacheLayerMixin):
    """Keys and values of one layer in preallocated `(rows, heads, capacity, dim)` slabs, filled from the left."""

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

    def start_from(self, source: SlabLayer, rows: int) -> None:
        """Begin with the single row of `source` (the shared prefix), repeated to `rows` rows."""
        self._allocate(source.keys, source.values, rows)
        self.keys[:, :, : source.length] = source.keys[:, :, : source.length]
        self.values[:, :, : source.length] = source.values[:, :, : source.length]
        self.length, self.is_initialized = source.length, True

    def take(self, source: SlabLayer, rows: slice, total: int, prefix: int, end: int) -> None:
        """Copy a part's prefix to the left and its tail so that it ends at column `end`, into the given rows."""
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
    """Complete the rollouts in place; every layer of `model` must be plain full attention."""
    generator = torch.Generator().manual_seed(request.seed)
    uniform_NT = None
    if request.temperature:
        # Those of all processes are drawn, so that each sequence gets its own, whoever completes it.
        uniform_NT = parallel.my_share(torch.rand(request.total, request.max_new_tokens, generator=generator))
    prefix = _shared_prefix([r.prompt_ids for r in rollouts])
    max_unfinished = request.max_unfinished
    for rows in request.batches(rollouts):
        batch = [rollouts[i] for i in rows]
        _decode_batch(
            model, batch, prefix, request, max_unfinished, None if uniform_NT is None else uniform_NT[rows]
        )
        max_unfinished -= sum(
            not r.finished and len(r.completion_ids) < request.max_new_tokens for r in batch
        )


def _shared_prefix(prompts: Sequence[list[int]]) -> list[int]:
    """Return the ids with which every prompt begins; at least one id of each prompt stays outside."""
    return common_prefix([p[:-1] for p in prompts]) if len(prompts) > 1 else []


@torch.no_grad()
def _decode_batch(
    model,
    rollouts: list[Rollout],
    prefix: list[int],
    request: Request,
    max_unfinished: int,
    uniform_BT: torch.Tensor | None,
) -> None:
    device, max_new_tokens, eos_ids = model.device, request.max_new_tokens, set(request.eos_ids)
    tails = [(r.prompt_ids + r.completion_ids)[len(prefix) :] for r in rollouts]
    width = max(len(t) for t in tails)
    capacity = len(prefix) + width + max_new_tokens
    cache = Cache(
        layers=[SlabLayer(capacity) for _ in range(model.config.get_text_config().num_hidden_layers)]
    )

    # Layout of a row: shared prefix, left padding, its own tail, completion. Padding is masked everywhere.
    visible_BC = torch.ones(len(tails), capacity, dtype=torch.bool)
    for row, tail in enumerate(tails):
        visible_BC[row, len(prefix) : len(prefix) + width - len(tail)] = False
    visible_BC = visible_BC.to(device)
    logits_BV = _prefill(model, cache, prefix, tails, width)
    position_B = torch.tensor([len(prefix) + len(tail) - 1 for tail in tails], device=device)
    run_step = decoding_step(model)
    # In 16 bits a finished row keeps the last one company: a processor's fast kernels are not for a single one. fp32 has them.
    fewest = 2 if model.dtype.itemsize == 2 else 1
    live = list(range(len(rollouts)))  # row of the batch -> index of its rollout
    done = [False] * len(rollouts)
    for step in range(max_new_tokens):
        uniform_B = None if uniform_BT is None else uniform_BT[live, step].to(device)
        token_B, logprob_B = _draw(logits_BV, request.temperature, uniform_B)
        ended = []
        for row, token in enumerate(token_B.tolist()):
            if done[row]:
                continue
            rollout = rollouts[live[row]]
            rollout.completion_ids.append(token)
            rollout.finished = token in eos_ids
            done[row] = rollout.finished or len(rollout.completion_ids) == max_new_tokens
            ended += [rollout] * done[row]
        if logprob_B is not None:
            for row, logprob in enumerate(logprob_B.tolist()):
                if len(rollouts[live[row]].logprobs) < len(rollouts[live[row]].completion_ids):
                    rollouts[live[row]].logprobs.append(logprob)
        if request.on_finished and ended:
            request.on_finished(ended)
        if all(done) or (done.count(False) <= max_unfinished and max_new_tokens - step > WORTH_LEAVING):
            return
        rows = max(done.count(False), fewest)
        if rows < COMPACT_BELOW * len(done):
            kept = sorted(range(len(done)), key=done.__getitem__)[:rows]
            live, done = [live[row] for row in kept], [done[row] for row in kept]
            keep = torch.tensor(kept, device=device)
            for layer in cache.layers:
                layer.keep(keep)
            token_B, position_B, visible_BC = token_B[keep], position_B[keep], visible_BC[keep]
        position_B = position_B + 1
        filled = cache.get_seq_length() + 1
        logits_BV = run_step(token_B, position_B, visible_BC[:, :filled], cache)


def _prefill(model, cache: Cache, prefix: list[int], tails: list[list[int]], width: int) -> torch.Tensor:
    """Fill the slabs with all prompts, their tails ending at `prefix + width`; return the next-token logits, `(B, V)`.

    The prefix runs once. Tails run some rows at a time, each such batch only as wide as its own longest, because one
    long prompt would otherwise make padding of all the others.
    """
    device = model.device
    shared = Cache(layers=[SlabLayer(len(prefix)) for _ in cache.layers])
    if prefix:
        model.base_model(input_ids=torch.tensor([prefix], device=device), past_key_values=shared)
    logits = []
    for start in range(0, len(tails), PREFILL_ROWS):
        batch = tails[start : start + PREFILL_ROWS]
        local = max(len(t) for t in batch)
        ids_BW = torch.zeros(len(batch), local, dtype=torch.long)
        padding_B = torch.tensor([local - len(t) for t in batch], device=device)
        for row, tail in enumerate(batch):
            ids_BW[row, local - len(tail) :] = torch.tensor(tail)
        column_W = torch.arange(local, device=device)
        tail_BW = column_W >= padding_B[:, None]
        causal_WW = column_W[:, None] >= column_W
        # A padding query sees only itself: softmax over nothing is NaN.
        tail_BWW = (causal_WW & tail_BW[:, None]) | torch.eye(local, dtype=torch.bool, device=device)
        prefix_BWP = torch.ones(len(batch), local, len(prefix), dtype=torch.bool, device=device)
        part = Cache(layers=[SlabLayer(len(prefix) + local) for _ in cache.layers])
        for layer, source in zip(part.layers, shared.layers, strict=True):
            if prefix:
                layer.start_from(source, len(batch))
        logits.append(
            model(
                input_ids=ids_BW.to(device),
                attention_mask=torch.cat([prefix_BWP, tail_BWW], -1)[:, None],
                position_ids=(len(prefix) + column_W - padding_B[:, None]).clamp(min=0),
                past_key_values=part,
                # An index, not a number: the copy that it makes spares one of the output head for every row.
                logits_to_keep=torch.tensor([local - 1], device=device),
            ).logits[:, -1]
        )
        for layer, source in zip(cache.layers, part.layers, strict=True):
            layer.take(source, slice(start, start + len(batch)), len(tails), len(prefix), len(prefix) + width)
    return torch.cat(logits)


def _draw(logits_BV: torch.Tensor, temperature: float, uniform_B: torch.Tensor | None):
    """Draw a token per row by inverting the cumulative distribution; return ids and log-probabilities, both `(B,)`.

    Without uniform numbers the likeliest token is taken, and its log-probability is not computed.
    """
    if uniform_B is None:
        return logits_BV.argmax(-1), None
    rows, vocabulary = logits_BV.shape
    # Only the block that a draw falls into is summed up token by token.
    scaled_BV = logits_BV.new_full(
        (rows, math.ceil(vocabulary / DRAW_BLOCK) * DRAW_BLOCK), -torch.inf, dtype=torch.float32
    )
    scaled_BV[:, :vocabulary] = logits_BV
    if temperature != 1:
        scaled_BV /= temperature
    scaled_BV -= scaled_BV.amax(-1, keepdim=True)
    # Probabilities, but for a factor that the draw is scaled by.
    weight_BNW = scaled_BV.exp().view(rows, -1, DRAW_BLOCK)
    block_BN = weight_BNW.sum(-1)
    upto_BN = block_BN.cumsum(-1)
    total_B1 = upto_BN[:, -1:]
    # Rounding must carry no draw out of the blocks, or out of a block's tokens, that have a probability.
    draw_B1 = torch.minimum(uniform_B[:, None], total_B1.new_tensor(1 - 1e-6)) * total_B1
    # A broken model's NaN lies in no block and draws the last token: its log-probability tells.
    block_B1 = torch.searchsorted(upto_BN, draw_B1, right=True).clamp_(max=upto_BN.shape[-1] - 1)
    inside_BW = weight_BNW[torch.arange(rows, device=logits_BV.device), block_B1[:, 0]].cumsum(-1)
    left_B1 = draw_B1 - (upto_BN - block_BN).gather(-1, block_B1)
    left_B1 = torch.minimum(left_B1.clamp_(min=0), inside_BW[:, -1:] * (1 - 1e-6))
    token_B1 = (block_B1 * DRAW_BLOCK + torch.searchsorted(inside_BW, left_B1, right=True)).clamp_(
        max=vocabulary - 1
    )
    return token_B1[:, 0], (scaled_BV.gather(-1, token_B1) - total_B1.log())[:, 0]
