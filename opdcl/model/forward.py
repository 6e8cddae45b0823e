"""The training forward pass: hidden states of answers only, with the common prefix computed once.

Chat prompts share a beginning (the template's system turn), often half of their length. On a CPU, the prefix
runs through the model as one row, and every row attends to its keys and values. The gradient flows back
through them, so the result is that of the plain pass up to rounding. Parts of the rows run side by side. On a
GPU, launching the second pass costs more than the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from transformers import DynamicCache

from opdcl import parallel
from opdcl.model.architecture import architecture
from opdcl.model.llama_pass import packed_states, packs
from opdcl.model.quantized import is_quantized
from opdcl.model.side_by_side import side_by_side

# Per row: its token ids, and for each id whether it belongs to an answer.
Sequences = Sequence[tuple[list[int], list[bool]]]

# Fewest tokens of a part that runs on its own: with fewer, reading the weights takes longer than multiplying.
PART_TOKENS = 96


def answer_states(causal_lm, sequences: Sequences) -> torch.Tensor:
    """Return the last hidden state of each position that predicts an answer token, `(N, H)`, row after row.

    Args:
        causal_lm: The model whose `base_model` gives hidden states.
        sequences: The rows.
    """
    share_prefix = _shares_prefix(causal_lm)
    count = _part_count(causal_lm, sequences) if share_prefix else 1
    if count == 1:
        return _states(causal_lm, sequences, share_prefix)
    weights = [weight for weight in causal_lm.parameters() if weight.requires_grad]
    if not torch.is_grad_enabled():
        weights = []
    states = partial(_states, causal_lm, share_prefix=share_prefix)
    return _SideBySide.apply(states, sequences, _cut(sequences, count), *weights)


def _shares_prefix(causal_lm) -> bool:
    """Return whether the common prefix is computed once: on a CPU, if every layer attends fully."""
    plain = architecture(causal_lm.config).full_attention
    return plain and causal_lm.device.type == "cpu" and not parallel.sharded()


class _SideBySide(torch.autograd.Function):
    """The states of all rows, computed in parts; the weights' gradients are the sum over the parts."""

    @staticmethod
    def forward(ctx, states, sequences, parts, *weights):
        grad = any(ctx.needs_input_grad)

        def run(rows: list[int]) -> torch.Tensor:
            with torch.set_grad_enabled(grad):
                return states([sequences[row] for row in rows])

        ctx.parts, ctx.weights = parts, weights
        ctx.answers = [sum(answer[1:]) for _, answer in sequences]
        ctx.states = side_by_side([partial(run, rows) for rows in parts])
        by_row: dict[int, torch.Tensor] = {}
        for rows, part in zip(parts, ctx.states, strict=True):
            by_row |= zip(rows, part.detach().split([ctx.answers[row] for row in rows]), strict=True)
        return torch.cat([by_row[row] for row in range(len(sequences))])

    @staticmethod
    def backward(ctx, grad):
        grad_of = grad.split(ctx.answers)
        tasks = []
        for rows, states in zip(ctx.parts, ctx.states, strict=True):
            grad_of_part = torch.cat([grad_of[row] for row in rows])
            tasks.append(partial(torch.autograd.grad, states, ctx.weights, grad_of_part))
        first, *others = side_by_side(tasks)
        for grads in others:
            torch._foreach_add_(first, grads)
        return None, None, None, *first


def _part_count(causal_lm, sequences: Sequences) -> int:
    """Return into how many parts rows are cut: 1 where threads would draw random numbers in any order."""
    if causal_lm.device.type != "cpu" or is_quantized(causal_lm):
        return 1
    if causal_lm.training and any(isinstance(m, torch.nn.Dropout) for m in causal_lm.modules()):
        return 1
    prefix = _shared_length(sequences)
    # Each part computes the prefix itself.
    least = max(PART_TOKENS, 4 * prefix)
    tokens = sum(len(ids) - prefix for ids, _ in sequences)
    return max(1, min(torch.get_num_threads(), len(sequences), tokens // least))


def _cut(sequences: Sequences, count: int) -> list[list[int]]:
    """Cut the rows into parts that take about the same time; rows of similar length share a part."""
    prefix = _shared_length(sequences)

    def cost(rows: list[int]) -> int:
        return prefix + len(rows) * (len(sequences[rows[0]][0]) - prefix)

    def halves(rows: list[int], count: int) -> list[list[int]]:
        if count == 1:
            return [rows]
        left = count // 2
        best = min(
            range(left, len(rows) - count + left + 1),
            key=lambda cut: max(cost(rows[:cut]) / left, cost(rows[cut:]) / (count - left)),
        )
        return halves(rows[:best], left) + halves(rows[best:], count - left)

    return halves(sorted(range(len(sequences)), key=lambda row: -len(sequences[row][0])), count)


def _states(causal_lm, sequences: Sequences, share_prefix: bool) -> torch.Tensor:
    prefix = _shared_length(sequences) if share_prefix else 0
    longest = max(len(ids) for ids, _ in sequences)
    if packs(causal_lm, longest):
        return _packed(causal_lm, sequences, prefix)
    return _padded(causal_lm, sequences, prefix, longest - prefix)


def _packed(causal_lm, sequences: Sequences, prefix: int) -> torch.Tensor:
    """Compute the rows one behind the other."""
    tails = [ids[prefix:] for ids, _ in sequences]
    states_MH, starts = packed_states(causal_lm, sequences[0][0][:prefix], tails)
    predicts: list[int] = []
    for start, (_, answer) in zip(starts, sequences, strict=True):
        following = answer[prefix + 1 :]
        predicts += [start + i for i, is_answer in enumerate(following) if is_answer]
    return states_MH.index_select(0, torch.tensor(predicts, dtype=torch.long, device=causal_lm.device))


def _padded(causal_lm, sequences: Sequences, prefix: int, width: int) -> torch.Tensor:
    """Compute the rows as transformers does, padded on the right, where causality hides it."""
    device = causal_lm.device
    ids_BT = torch.zeros(len(sequences), width, dtype=torch.long)
    predicts_BT = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, (ids, answer) in enumerate(sequences):
        length = len(ids) - prefix
        ids_BT[row, :length] = torch.tensor(ids[prefix:])
        predicts_BT[row, : length - 1] = torch.tensor(answer[prefix + 1 :], dtype=torch.bool)
    mask = None  # then attention may use the kernel that never stores its scores
    if not architecture(causal_lm.config).full_attention:
        lengths_B = torch.tensor([len(ids) for ids, _ in sequences], device=device)
        mask = torch.arange(width, device=device)[None] < lengths_B[:, None]
    cache = _prefix_cache(causal_lm, sequences[0][0][:prefix], len(sequences)) if prefix else None
    hidden_BTH = causal_lm.base_model(
        input_ids=ids_BT.to(device),
        attention_mask=mask,
        position_ids=torch.arange(prefix, prefix + width, device=device)[None],
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state
    # By index, not by mask: a mask's size is known only when the device has finished.
    at_N = predicts_BT.flatten().nonzero()[:, 0].to(device)
    return hidden_BTH.flatten(0, 1)[at_N]


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
    tokens: list[int] = []
    for ids, answer in sequences:
        tokens += [token for token, is_answer in zip(ids[1:], answer[1:], strict=True) if is_answer]
    # With a type: PyTorch would take no tokens at all for floats.
    return torch.tensor(tokens, dtype=torch.long, device=device)


def _shared_length(sequences: Sequences) -> int:
    """Return how many leading ids all rows share, up to the first position that predicts an answer."""
    if len(sequences) < 2:
        return 0
    shared = len(common_prefix([ids for ids, _ in sequences]))
    for _, answer in sequences:
        first_answer = answer.index(True) if True in answer else len(answer)
        shared = min(shared, first_answer - 1)
    return max(0, shared)


def common_prefix(rows: Sequence[list[int]]) -> list[int]:
    """Return the longest prefix that all rows share."""
    # A prefix common to the lexically first and last row is common to all.
    first, last = min(rows), max(rows)
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]
