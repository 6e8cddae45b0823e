"""Sample completions from the resident model, for recovery and for evaluation alike.

One decoding loop over transformers' own forward pass. It is faster than `generate` where a batch is large and the
model small, for three reasons: keys and values go into preallocated slabs (no concatenation per token), finished
sequences leave the batch, and the prefix that all prompts share (a system prompt, say) is computed once.

Randomness is one uniform number per sequence and token, drawn beforehand, so what a sequence samples depends neither
on its neighbours in the batch nor on when they finish.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from opdcl.distill.forward import common_prefix

# Rows are dropped from the slabs once a fifth of them is finished: copying the survivors then costs less than
# decoding the finished ones.
COMPACT_BELOW = 0.8


@dataclass
class Rollout:
    """One sampled completion.

    `completion_ids` ends with an end-of-sequence id if and only if `finished`; `logprobs` holds the sampler's own
    log-probability (nats, at the sampling temperature) of each of its tokens.
    """

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


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

    def expand(self, rows: int) -> None:
        """Repeat the single row held so far (the shared prefix) to `rows` rows."""
        key, value = self.keys[:, :, : self.length], self.values[:, :, : self.length]
        self._allocate(key, value, rows)
        self.keys[:, :, : self.length] = key
        self.values[:, :, : self.length] = value

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


def supports_slabs(config) -> bool:
    """Say whether every layer is plain full attention, which the slab cache can serve."""
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return set(kinds) == {"full_attention"} and not getattr(config, "is_encoder_decoder", False)


def sample(
    model,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 96,
    on_progress: Callable[[int], None] | None = None,
) -> list[Rollout]:
    """Sample one completion per prompt, in the order of `prompts`.

    Args:
        model: A causal language model whose layers are all full attention (see `supports_slabs`).
        prompts: Token ids of each prompt, at least one id each.
        max_new_tokens: Longest completion, in tokens.
        eos_ids: Every id that ends a completion.
        temperature: Softmax temperature; 0 is greedy decoding.
        seed: Fixes the uniform numbers; the same seed and prompts give the same completions.
        batch_size: Sequences decoded together. Results do not depend on it beyond rounding.
        on_progress: Called with the number of completions finished since the last call.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform_NT = torch.rand(len(prompts), max_new_tokens, generator=generator) if temperature else None
    prefix = _shared_prefix(prompts)
    rollouts = [Rollout(list(p)) for p in prompts]
    # Neighbours in length share a batch, so that little of the prefill is padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        _decode(model, [rollouts[i] for i in rows], prefix, max_new_tokens, set(eos_ids), temperature,
                None if uniform_NT is None else uniform_NT[rows], on_progress)  # fmt: skip
    return rollouts


def _shared_prefix(prompts: Sequence[list[int]]) -> list[int]:
    """Return the ids with which every prompt begins; at least one id of each prompt stays outside."""
    return common_prefix([p[:-1] for p in prompts]) if len(prompts) > 1 else []


@torch.no_grad()
def _decode(model, rollouts, prefix, max_new_tokens, eos_ids, temperature, uniform_BT, on_progress) -> None:
    device = model.device
    tails = [r.prompt_ids[len(prefix) :] for r in rollouts]
    width = max(len(t) for t in tails)
    capacity = len(prefix) + width + max_new_tokens
    cache = Cache(layers=[SlabLayer(capacity) for _ in range(model.config.get_text_config().num_hidden_layers)])

    if prefix:
        model(input_ids=torch.tensor([prefix], device=device), past_key_values=cache, logits_to_keep=1)
        for layer in cache.layers:
            layer.expand(len(tails))

    # Layout of a row: shared prefix, left padding, its own tail, completion. Padding is masked everywhere.
    ids_BW = torch.zeros(len(tails), width, dtype=torch.long)
    visible_BC = torch.ones(len(tails), capacity, dtype=torch.bool)
    for i, tail in enumerate(tails):
        ids_BW[i, width - len(tail) :] = torch.tensor(tail)
        visible_BC[i, len(prefix) : len(prefix) + width - len(tail)] = False
    visible_BC = visible_BC.to(device)
    position_BW = (visible_BC.cumsum(1) - 1).clamp(min=0)[:, len(prefix) : len(prefix) + width]
    causal_WC = torch.ones(width, len(prefix) + width, dtype=torch.bool, device=device).tril(len(prefix))
    mask = (causal_WC & visible_BC[:, None, : len(prefix) + width])[:, None]
    # A padding query sees nothing, and softmax over nothing is NaN: let it see itself.
    mask |= torch.eye(width, len(prefix) + width, dtype=torch.bool, device=device).roll(len(prefix), 1)

    logits_BV = model(input_ids=ids_BW.to(device), attention_mask=mask, position_ids=position_BW,
                      past_key_values=cache, logits_to_keep=1).logits[:, -1]  # fmt: skip
    position_B = position_BW[:, -1]
    live = list(range(len(rollouts)))  # row of the batch -> index of its rollout
    done = [False] * len(rollouts)
    for step in range(max_new_tokens):
        uniform_B = None if uniform_BT is None else uniform_BT[live, step].to(device)
        token_B, logprob_B = _draw(logits_BV, temperature, uniform_B)
        ended = 0
        for row, (token, logprob) in enumerate(zip(token_B.tolist(), logprob_B.tolist(), strict=True)):
            if done[row]:
                continue
            rollout = rollouts[live[row]]
            rollout.completion_ids.append(token)
            rollout.logprobs.append(logprob)
            rollout.finished = token in eos_ids
            done[row] = rollout.finished or step == max_new_tokens - 1
            ended += done[row]
        if on_progress and ended:
            on_progress(ended)
        if all(done):
            return
        if done.count(False) < COMPACT_BELOW * len(done):
            keep = torch.tensor([row for row, finished in enumerate(done) if not finished], device=device)
            for layer in cache.layers:
                layer.keep(keep)
            live = [live[row] for row in keep.tolist()]
            done = [False] * len(live)
            token_B, position_B, visible_BC = token_B[keep], position_B[keep], visible_BC[keep]
        position_B = position_B + 1
        filled = cache.get_seq_length() + 1
        logits_BV = model(input_ids=token_B[:, None], attention_mask=visible_BC[:, None, None, :filled],
                          position_ids=position_B[:, None], past_key_values=cache).logits[:, -1]  # fmt: skip


def _draw(logits_BV: torch.Tensor, temperature: float, uniform_B: torch.Tensor | None):
    """Draw a token per row by inverting the cumulative distribution; return ids and log-probabilities, both `(B,)`."""
    if uniform_B is None:
        logprobs_BV = logits_BV.float().log_softmax(-1)
        token_B = logits_BV.argmax(-1)
    else:
        logprobs_BV = (logits_BV.float() / temperature).log_softmax(-1)
        cumulative_BV = logprobs_BV.exp().cumsum(-1)
        # Rounding leaves the total near, not at, one; scaling the draw keeps it inside the vocabulary.
        target_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
        token_B = torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)
    return token_B, logprobs_BV.gather(-1, token_B[:, None])[:, 0]
