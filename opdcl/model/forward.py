"""The training forward pass: hidden states of answers only, by the cheapest of four ways through the model.

Chat prompts share a beginning (the template's system turn), often half of their length. On a CPU, the prefix
runs through the model as one row, and every row attends to its keys and values. The gradient flows back
through them, so the result is that of the plain pass up to rounding. Parts of the rows run side by side. On a
GPU, launching the second pass costs more than the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial

import torch
from transformers import DynamicCache

from opdcl import parallel
from opdcl.model.architecture import architecture
from opdcl.model.hardware import run_in_threads
from opdcl.model.llama import attends_within_rows, packed_states, trains_as_llama
from opdcl.model.quantized import is_quantized
from opdcl.words import Example

# Fewest tokens of a part that runs on its own: with fewer, reading the weights takes longer than multiplying.
PART_TOKENS = 96


class Pass(Enum):
    """How rows run through a model."""

    IN_ONE_KERNEL = "one behind the other; one kernel attends within all rows"
    BY_LENGTH = "one behind the other, after their common prefix; rows of one length attend together"
    BEHIND_PREFIX = "padded, after their common prefix, by transformers"
    PADDED = "padded, by transformers"


def pick_pass(causal_lm) -> Pass:
    """Return how rows run through a model."""
    config, device = causal_lm.config, causal_lm.device
    match device.type, trains_as_llama(causal_lm):
        case "cuda", True if attends_within_rows(config, device, causal_lm.dtype):
            return Pass.IN_ONE_KERNEL
        case "cpu", True:
            return Pass.BY_LENGTH
        case "cpu", _ if architecture(config).full_attention and not parallel.sharded():
            return Pass.BEHIND_PREFIX
    return Pass.PADDED


def answer_states(causal_lm, examples: Sequence[Example]) -> torch.Tensor:
    """Return the last hidden state of each position that predicts an answer token, `(N, H)`, row after row.

    Args:
        causal_lm: The model whose `base_model` gives hidden states.
        examples: The rows.
    """
    count = _part_count(causal_lm, examples)
    if count == 1:
        return _states(causal_lm, examples)
    weights = [weight for weight in causal_lm.parameters() if weight.requires_grad]
    if not torch.is_grad_enabled():
        weights = []
    return _SideBySide.apply(partial(_states, causal_lm), examples, _cut(examples, count), *weights)


class _SideBySide(torch.autograd.Function):
    """The states of all rows, computed in parts; the weights' gradients are the sum over the parts."""

    @staticmethod
    def forward(ctx, states, examples, parts, *weights):
        grad = any(ctx.needs_input_grad)

        def run(rows: list[int]) -> torch.Tensor:
            with torch.set_grad_enabled(grad):
                return states([examples[row] for row in rows])

        ctx.parts, ctx.weights = parts, weights
        ctx.answers = [len(example.predicting) for example in examples]
        ctx.states = run_in_threads([partial(run, rows) for rows in parts])
        by_row: dict[int, torch.Tensor] = {}
        for rows, part in zip(parts, ctx.states, strict=True):
            by_row |= zip(rows, part.detach().split([ctx.answers[row] for row in rows]), strict=True)
        return torch.cat([by_row[row] for row in range(len(examples))])

    @staticmethod
    def backward(ctx, grad):
        grad_of = grad.split(ctx.answers)
        tasks = []
        for rows, states in zip(ctx.parts, ctx.states, strict=True):
            grad_of_part = torch.cat([grad_of[row] for row in rows])
            tasks.append(partial(torch.autograd.grad, states, ctx.weights, grad_of_part))
        first, *others = run_in_threads(tasks)
        for grads in others:
            torch._foreach_add_(first, grads)
        return None, None, None, *first


def _part_count(causal_lm, examples: Sequence[Example]) -> int:
    """Return into how many parts rows are cut: 1 where threads would draw random numbers in any order."""
    if pick_pass(causal_lm) not in (Pass.BY_LENGTH, Pass.BEHIND_PREFIX) or is_quantized(causal_lm):
        return 1
    if causal_lm.training and any(isinstance(m, torch.nn.Dropout) for m in causal_lm.modules()):
        return 1
    prefix = _shared_length(examples)
    # Each part computes the prefix itself.
    least = max(PART_TOKENS, 4 * prefix)
    tokens = sum(len(example.ids) - prefix for example in examples)
    return max(1, min(torch.get_num_threads(), len(examples), tokens // least))


def _cut(examples: Sequence[Example], count: int) -> list[list[int]]:
    """Cut the rows into parts that take about the same time; rows of similar length share a part."""
    prefix = _shared_length(examples)

    def cost(rows: list[int]) -> int:
        return prefix + len(rows) * (len(examples[rows[0]].ids) - prefix)

    def halves(rows: list[int], count: int) -> list[list[int]]:
        if count == 1:
            return [rows]
        left = count // 2
        best = min(
            range(left, len(rows) - count + left + 1),
            key=lambda cut: max(cost(rows[:cut]) / left, cost(rows[cut:]) / (count - left)),
        )
        return halves(rows[:best], left) + halves(rows[best:], count - left)

    return halves(sorted(range(len(examples)), key=lambda row: -len(examples[row].ids)), count)


def _states(causal_lm, examples: Sequence[Example]) -> torch.Tensor:
    prefix, longest = _shared_length(examples), max(len(example.ids) for example in examples)
    match pick_pass(causal_lm):
        case Pass.IN_ONE_KERNEL:
            return _packed(causal_lm, examples, 0, in_one_kernel=True)
        case Pass.BY_LENGTH:
            return _packed(causal_lm, examples, prefix, in_one_kernel=False)
        case Pass.BEHIND_PREFIX:
            return _padded(causal_lm, examples, prefix, longest - prefix)
    return _padded(causal_lm, examples, 0, longest)


def _packed(causal_lm, examples: Sequence[Example], prefix: int, in_one_kernel: bool) -> torch.Tensor:
    """Compute the rows one behind the other."""
    tails = [example.ids[prefix:] for example in examples]
    states_MH, starts = packed_states(causal_lm, examples[0].ids[:prefix], tails, in_one_kernel)
    predicts: list[int] = []
    for start, example in zip(starts, examples, strict=True):
        predicts += [start + i - prefix for i in example.predicting]
    return states_MH.index_select(0, torch.tensor(predicts, dtype=torch.long, device=causal_lm.device))


def _padded(causal_lm, examples: Sequence[Example], prefix: int, width: int) -> torch.Tensor:
    """Compute the rows as transformers does, padded on the right, where causality hides it."""
    device = causal_lm.device
    ids_BT = torch.zeros(len(examples), width, dtype=torch.long)
    predicts: list[int] = []
    for row, example in enumerate(examples):
        ids_BT[row, : len(example.ids) - prefix] = torch.tensor(example.ids[prefix:])
        predicts += [row * width + i - prefix for i in example.predicting]
    mask = None  # then attention may use the kernel that never stores its scores
    if not architecture(causal_lm.config).full_attention:
        lengths_B = torch.tensor([len(example.ids) for example in examples], device=device)
        mask = torch.arange(width, device=device)[None] < lengths_B[:, None]
    cache = _prefix_cache(causal_lm, examples[0].ids[:prefix], len(examples)) if prefix else None
    hidden_BTH = causal_lm.base_model(
        input_ids=ids_BT.to(device),
        attention_mask=mask,
        position_ids=torch.arange(prefix, prefix + width, device=device)[None],
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state
    # By index, not by mask: a mask's size is known only when the device has finished.
    at_N = torch.tensor(predicts, dtype=torch.long, device=device)
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


def answer_ids(examples: Sequence[Example], device: torch.device) -> torch.Tensor:
    """Return the answer tokens, `(N,)`, in the order of `answer_states`."""
    tokens: list[int] = []
    for example in examples:
        tokens += [example.ids[i + 1] for i in example.predicting]
    # With a type: PyTorch would take no tokens at all for floats.
    return torch.tensor(tokens, dtype=torch.long, device=device)


def _shared_length(examples: Sequence[Example]) -> int:
    """Return how many leading ids all rows share, up to the first position that predicts an answer."""
    if len(examples) < 2:
        return 0
    shared = len(common_prefix([example.ids for example in examples]))
    for example in examples:
        first = next(iter(example.predicting), len(example.ids) - 1)
        shared = min(shared, first)
    return shared


def common_prefix(rows: Sequence[list[int]]) -> list[int]:
    """Return the longest prefix that all rows share."""
    # A prefix common to the lexically first and last row is common to all.
    first, last = min(rows), max(rows)
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]
