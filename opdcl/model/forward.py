"""The training forward pass: hidden states of answer positions only, and the prompts' common prefix computed once.

Chat prompts begin alike (the template's system turn), often for half of their length. The prefix runs through the
model as one row whose keys and values every row then attends to; the gradient flows back through them, so the
result is that of the plain pass up to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from transformers import DynamicCache

from opdcl import parallel
from opdcl.model.short_attention import short_attention

Sequences = Sequence[tuple[list[int], list[bool]]]


def answer_states(causal_lm, sequences: Sequences, share_prefix: bool = True) -> torch.Tensor:
    """Return the last hidden state of each position that predicts an answer token, `(N, H)`, row after row.

    Args:
        causal_lm: The model whose `base_model` gives hidden states.
        sequences: Per row its token ids, and for each id whether it belongs to an answer.
        share_prefix: Compute the common prefix once; off, every row is computed whole. Models whose layers are not all
            full attention, or are spread over processes, always do the latter.
    """
    device = causal_lm.device
    plain = has_plain_attention(causal_lm.config)
    prefix = _shared_length(sequences) if share_prefix and plain and not parallel.sharded() else 0
    cache = None
    if prefix:
        cache = DynamicCache()
        shared = torch.tensor([sequences[0][0][:prefix]], device=device)
        causal_lm.base_model(input_ids=shared, past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            layer.keys = layer.keys.expand(len(sequences), -1, -1, -1)
            layer.values = layer.values.expand(len(sequences), -1, -1, -1)
    width = max(len(ids) for ids, _ in sequences) - prefix
    ids_BT = torch.zeros(len(sequences), width, dtype=torch.long)
    predicts_BT = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, (ids, answer) in enumerate(sequences):
        ids_BT[row, : len(ids) - prefix] = torch.tensor(ids[prefix:])
        predicts_BT[row, : len(ids) - prefix - 1] = torch.tensor(answer[prefix + 1 :], dtype=torch.bool)
    # Padding is on the right, where causality hides it from every position that counts.
    attention: contextlib.AbstractContextManager = contextlib.nullcontext()
    if plain:
        attention = short_attention(causal_lm)
        mask = torch.ones(width, prefix + width, dtype=torch.bool, device=device).tril(prefix)[None, None]
        mask = mask.expand(len(sequences), -1, -1, -1)
    else:
        mask = torch.tensor([[i < len(ids) for i in range(width)] for ids, _ in sequences], device=device)
    positions = torch.arange(prefix, prefix + width, device=device)[None]
    with attention:
        hidden_BTH = causal_lm.base_model(
            input_ids=ids_BT.to(device),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
    return hidden_BTH[predicts_BT.to(device)]


def answer_ids(sequences: Sequences, device: torch.device) -> torch.Tensor:
    """Return the answer tokens themselves, `(N,)`, in the order of `answer_states`."""
    return torch.tensor(
        [
            i
            for ids, answer in sequences
            for i, is_answer in zip(ids[1:], answer[1:], strict=True)
            if is_answer
        ],
        device=device,
    )


def key_width(config) -> int:
    """Return how many numbers a token's keys are in one layer, which its values are too; 0 without attention."""
    heads = getattr(config, "num_attention_heads", 0)
    dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return (getattr(config, "num_key_value_heads", None) or heads) * dim


def has_plain_attention(config) -> bool:
    """Say whether every layer is full attention, so that a mask of our own is the whole mask."""
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding" if getattr(config, "sliding_window", None) else "full_attention"]
    return set(kinds) == {"full_attention"} and not getattr(config, "is_encoder_decoder", False)


def _shared_length(sequences: Sequences) -> int:
    """Return how many leading ids all rows share, stopping short of the first position that predicts an answer."""
    if len(sequences) < 2:
        return 0
    shared = len(common_prefix([ids for ids, _ in sequences]))
    first_answer = min(next((i for i, a in enumerate(answer) if a), len(answer)) for _, answer in sequences)
    return max(0, min(shared, first_answer - 1))


def common_prefix(rows: Sequence[list[int]]) -> list[int]:
    """Return the ids with which every row begins."""
    first, last = min(rows), max(rows)  # in lexical order, so what these two share, all share
    length = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )
    return first[:length]
