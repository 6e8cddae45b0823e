"""The training forward pass: hidden states of answers only, with the common prefix computed once.

Chat prompts share a beginning (the template's system turn), often half of their length. The prefix runs
through the model as one row, and every row attends to its keys and values. The gradient flows back through
them, so the result is that of the plain pass up to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from transformers import DynamicCache

from opdcl import parallel
from opdcl.model.architecture import architecture
from opdcl.model.short_attention import short_attention

# Per row: its token ids, and for each id whether it belongs to an answer.
Sequences = Sequence[tuple[list[int], list[bool]]]


def answer_states(causal_lm, sequences: Sequences, share_prefix: bool = True) -> torch.Tensor:
    """Return the last hidden state of each position that predicts an answer token, `(N, H)`, row after row.

    Args:
        causal_lm: The model whose `base_model` gives hidden states.
        sequences: The rows.
        share_prefix: Compute the common prefix once. Ignored for models that are sharded over processes or
            have a layer without full attention.
    """
    device = causal_lm.device
    plain = architecture(causal_lm.config).full_attention
    prefix = _shared_length(sequences) if share_prefix and plain and not parallel.sharded() else 0
    cache = _prefix_cache(causal_lm, sequences[0][0][:prefix], len(sequences)) if prefix else None
    width = max(len(ids) for ids, _ in sequences) - prefix
    ids_BT = torch.zeros(len(sequences), width, dtype=torch.long)
    predicts_BT = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, (ids, answer) in enumerate(sequences):
        ids_BT[row, : len(ids) - prefix] = torch.tensor(ids[prefix:])
        predicts_BT[row, : len(ids) - prefix - 1] = torch.tensor(answer[prefix + 1 :], dtype=torch.bool)
    # Padding is on the right, where causality hides it from every graded position.
    attention: contextlib.AbstractContextManager = contextlib.nullcontext()
    if plain:
        attention = short_attention(causal_lm)
        mask = torch.ones(width, prefix + width, dtype=torch.bool, device=device).tril(prefix)[None, None]
        mask = for_attention(causal_lm, mask.expand(len(sequences), -1, -1, -1))
    else:
        mask = torch.tensor([[i < len(ids) for i in range(width)] for ids, _ in sequences], device=device)
    with attention:
        hidden_BTH = causal_lm.base_model(
            input_ids=ids_BT.to(device),
            attention_mask=mask,
            position_ids=torch.arange(prefix, prefix + width, device=device)[None],
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
    return hidden_BTH[predicts_BT.to(device)]


def _prefix_cache(causal_lm, prefix_ids: list[int], rows: int) -> DynamicCache:
    cache = DynamicCache()
    ids_1T = torch.tensor([prefix_ids], device=causal_lm.device)
    causal_lm.base_model(input_ids=ids_1T, past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys = layer.keys.expand(rows, -1, -1, -1)
        layer.values = layer.values.expand(rows, -1, -1, -1)
    return cache


def for_attention(model, visible: torch.Tensor) -> torch.Tensor:
    """Return the mask in the form that the model takes: eager attention adds it to the scores."""
    if model.config._attn_implementation != "eager":
        return visible
    return torch.zeros_like(visible, dtype=model.dtype).masked_fill_(~visible, torch.finfo(model.dtype).min)


def answer_ids(sequences: Sequences, device: torch.device) -> torch.Tensor:
    """Return the answer tokens, `(N,)`, in the order of `answer_states`."""
    tokens = [
        token
        for ids, answer in sequences
        for token, is_answer in zip(ids[1:], answer[1:], strict=True)
        if is_answer
    ]
    # With a type: PyTorch would take no tokens at all for floats.
    return torch.tensor(tokens, dtype=torch.long, device=device)


def _shared_length(sequences: Sequences) -> int:
    """Return how many leading ids all rows share, up to the first position that predicts an answer."""
    if len(sequences) < 2:
        return 0
    shared = len(common_prefix([ids for ids, _ in sequences]))
    first_answer = min(next((i for i, a in enumerate(answer) if a), len(answer)) for _, answer in sequences)
    return max(0, min(shared, first_answer - 1))


def common_prefix(rows: Sequence[list[int]]) -> list[int]:
    """Return the longest prefix that all rows share."""
    # A prefix common to the lexically first and last row is common to all.
    first, last = min(rows), max(rows)
    shortest = min(len(first), len(last))
    return first[: next((i for i in range(shortest) if first[i] != last[i]), shortest)]
