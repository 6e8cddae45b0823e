"""The training pass of the Llama family: only real tokens, in few operations.

Rows lie one behind the other, so no product sees padding. On a CPU, rows of one length attend together; on a
GPU, one kernel attends within all rows. Layers with the same input are one node, and so are a norm and a
rotation: those of transformers are a dozen passes each.

Source: Touvron et al., arXiv 2302.13971, section 2.2 (RMSNorm, SwiGLU, rotary positions); Qwen2 adds biases
to queries, keys and values, Qwen3 an RMSNorm to each head of queries and keys.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

try:
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn
except ImportError:  # PyTorch before 2.10
    varlen_attn = None

from opdcl import parallel
from opdcl.model.architecture import architecture
from opdcl.model.lora import linears

# Type of a config -> the class that computes what this module does.
FAMILY = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Width from which a GPU computes a layer again for the gradient instead of keeping what is inside. A
# micro-batch of 8,192 tokens of an 8B model then keeps 4 GB, not 45. Small micro-batches would fit too, but
# take longer to launch than to compute.
WIDE = 2048

# Scores computed at once: 4 MB in fp32.
SCORES = 2**20

# Scores per row above which torch's kernel is used, because it never holds them all.
LONG = 4 * SCORES

# Queries, keys and values of all tokens `(M, N, D)`, and the scale -> what they attend to, `(M, N * D)`.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


@dataclass(frozen=True)
class Run:
    """Rows of one length that lie behind each other; they see `prefix` tokens at the start of the pack."""

    start: int
    rows: int
    width: int
    prefix: int

    def rows_of(self, x_MND: torch.Tensor) -> torch.Tensor:
        """Return the rows' part of the pack, `(rows, N, width, D)`."""
        part = x_MND[self.start : self.start + self.rows * self.width]
        return part.unflatten(0, (self.rows, self.width)).transpose(1, 2)

    def seen_by_rows(self, x_MND: torch.Tensor) -> torch.Tensor:
        """Return the prefix and the rows' part of the pack, `(rows, N, prefix + width, D)`."""
        own = self.rows_of(x_MND)
        if not self.prefix:
            return own
        before = x_MND[: self.prefix].transpose(0, 1).expand(self.rows, -1, -1, -1)
        return torch.cat([before, own], 2)

    def bias(self, like: torch.Tensor) -> torch.Tensor:
        """Return what is added to the scores, `(width, prefix + width)`: -inf for later tokens."""
        visible = torch.ones(self.width, self.prefix + self.width, dtype=torch.bool).tril(self.prefix)
        return torch.zeros(visible.shape, dtype=like.dtype).masked_fill_(~visible, -torch.inf)


def packs(causal_lm, width: int) -> bool:
    """Return whether `packed_states` computes what a model does, and rows of this width fit the attention."""
    config, shape = causal_lm.config, architecture(causal_lm.config)
    short = causal_lm.device.type == "cpu" and shape.heads * width**2 <= LONG
    return (
        (short or attends_within_rows(config, causal_lm.device, causal_lm.dtype))
        and FAMILY.get(config.model_type) == type(causal_lm).__name__
        and shape.full_attention
        and not parallel.sharded()  # a shard's layers must be called as a whole
        and config._attn_implementation == "sdpa"
        and config.hidden_act == "silu"
        and not causal_lm.base_model.embed_tokens._forward_hooks  # NEFTune expects rows
        and not getattr(config, "pretraining_tp", 1) > 1
        and not (causal_lm.training and config.attention_dropout)
    )


def attends_within_rows(config, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a kernel attends within packed rows: from Ampere on, in 16 bits, for usual heads."""
    if device.type != "cuda" or dtype.itemsize != 2 or varlen_attn is None:
        return False
    width = architecture(config).head_dim
    # Before PyTorch 2.11 it could not look at earlier tokens only.
    known = "window_size" in inspect.signature(varlen_attn).parameters
    return known and width % 8 == 0 and width <= 256 and torch.cuda.get_device_capability(device) >= (8, 0)


def packed_states(causal_lm, prefix: list[int], tails: Sequence[list[int]]) -> tuple[torch.Tensor, list[int]]:
    """Return the last hidden states of a prefix and of the tails that follow it, `(M, H)`.

    They lie one behind the other; the second result is where each tail begins. A GPU takes no prefix.
    """
    body, shape, device = causal_lm.base_model, architecture(causal_lm.config), causal_lm.device
    order = sorted(range(len(tails)), key=lambda row: len(tails[row]))
    ids, position, starts = list(prefix), list(range(len(prefix))), [0] * len(tails)
    for row in order:
        starts[row] = len(ids)
        ids += tails[row]
        position += range(len(prefix), len(prefix) + len(tails[row]))
    h_MH = body.embed_tokens(torch.tensor(ids, device=device))
    # Both halves of a head rotate by the same angles.
    angles = body.rotary_emb(h_MH, torch.tensor([position], device=device))
    cos_M1D, sin_M1D = (x[0, :, None, : shape.head_dim // 2] for x in angles)
    lengths = [len(tails[row]) for row in order]
    within_rows = attends_within_rows(causal_lm.config, device, causal_lm.dtype)
    attend = _of_rows(lengths, device) if within_rows else _of_runs(prefix, lengths, h_MH)
    run = partial(_layer, shape.head_dim, cos_M1D, sin_M1D, attend)
    recompute = within_rows and torch.is_grad_enabled() and h_MH.shape[1] >= WIDE
    for layer in body.layers:
        h_MH = checkpoint(run, layer, h_MH, use_reentrant=False) if recompute else run(layer, h_MH)
    return rms_norm(h_MH, body.norm), starts


def _layer(head_dim: int, cos_M1D, sin_M1D, attend: Attend, layer, h_MH: torch.Tensor) -> torch.Tensor:
    attention, mlp = layer.self_attn, layer.mlp
    x_MH = rms_norm(h_MH, layer.input_layernorm)
    heads = linears(x_MH, attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (x.unflatten(-1, (-1, head_dim)) for x in heads)
    if hasattr(attention, "q_norm"):
        query, key = rms_norm(query, attention.q_norm), rms_norm(key, attention.k_norm)
    query, key = (_Rotation.apply(x, cos_M1D, sin_M1D) for x in (query, key))
    h_MH = h_MH + linears(attend(query, key, value, attention.scaling), attention.o_proj)[0]
    gate, up = linears(rms_norm(h_MH, layer.post_attention_layernorm), mlp.gate_proj, mlp.up_proj)
    return h_MH + linears(silu(gate) * up, mlp.down_proj)[0]


def _of_rows(lengths: list[int], device: torch.device) -> Attend:
    """Return attention to the earlier tokens of a row, in one kernel for all rows."""
    start_B = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    rows = start_B, start_B, max(lengths), max(lengths)
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    earlier = partial(varlen_attn, window_size=(-1, 0), **grouped)

    def attend(query, key, value, scale: float) -> torch.Tensor:
        out_MND: torch.Tensor = earlier(query, key, value, *rows, scale=scale)
        return out_MND.flatten(1)

    return attend


def _of_runs(prefix: list[int], lengths: list[int], like: torch.Tensor) -> Attend:
    """Return attention to the prefix and the earlier tokens of a row; rows of one length attend together."""
    runs, start = [Run(0, 1, len(prefix), 0)] if prefix else [], len(prefix)
    for width, group in itertools.groupby(lengths):
        rows = len(list(group))
        runs.append(Run(start, rows, width, len(prefix)))
        start += rows * width
    biases = [run.bias(like) for run in runs]

    def attend(query, key, value, scale: float) -> torch.Tensor:
        parts = []
        for run, bias_TS in zip(runs, biases, strict=True):
            query_BHTD = run.rows_of(query)
            key_BKSD, value_BKSD = run.seen_by_rows(key), run.seen_by_rows(value)
            out_BHTD = ShortAttention.apply(query_BHTD, key_BKSD, value_BKSD, bias_TS, scale)
            parts.append(out_BHTD.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(parts)

    return attend


class ShortAttention(torch.autograd.Function):
    """softmax(scale q k^T + bias) v on a CPU: a few matrix products, computed again for the gradient.

    torch's own CPU kernel works in blocks made for long sequences. Completions are short, so the scores of a
    few rows fit into the cache whole. Query heads that share a key head become its queries (arXiv
    2305.13245), so keys and values are never repeated.
    """

    @staticmethod
    def forward(ctx, query_BHTD, key_BKSD, value_BKSD, bias_TS, scale):
        query_BKQD = _grouped(query_BHTD, key_BKSD.shape[1])
        bias_QS = bias_TS.repeat(query_BKQD.shape[2] // len(bias_TS), 1)
        out_BKQD = torch.empty_like(query_BKQD)
        for rows in _parts(query_BKQD, key_BKSD):
            weights = _attention_weights(query_BKQD[rows], key_BKSD[rows], bias_QS, scale)
            out_BKQD[rows] = (weights @ value_BKSD[rows].flatten(0, 1)).view_as(out_BKQD[rows])
        ctx.save_for_backward(query_BKQD, key_BKSD, value_BKSD, bias_QS)
        ctx.scale = scale
        return out_BKQD.view(query_BHTD.shape)

    @staticmethod
    def backward(ctx, grad_BHTD):
        query_BKQD, key_BKSD, value_BKSD, bias_QS = ctx.saved_tensors
        grad_BKQD = _grouped(grad_BHTD, key_BKSD.shape[1])
        grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query_BKQD, key_BKSD, value_BKSD))
        for rows in _parts(query_BKQD, key_BKSD):
            query, key, value, grad = (
                x[rows].flatten(0, 1) for x in (query_BKQD, key_BKSD, value_BKSD, grad_BKQD)
            )
            weights = _attention_weights(query_BKQD[rows], key_BKSD[rows], bias_QS, ctx.scale)
            grad_value[rows] = (weights.mT @ grad).view_as(grad_value[rows])
            grad_scores = torch.ops.aten._softmax_backward_data(grad @ value.mT, weights, -1, weights.dtype)
            grad_scores = grad_scores.mul_(ctx.scale)
            grad_query[rows] = (grad_scores @ key).view_as(grad_query[rows])
            grad_key[rows] = (grad_scores.mT @ query).view_as(grad_key[rows])
        return grad_query.view(grad_BHTD.shape), grad_key, grad_value, None, None


def _grouped(x_BHTD: torch.Tensor, groups: int) -> torch.Tensor:
    """Return heads as queries of the key head that they share, `(B, K, H / K * T, D)`."""
    rows, heads, width, dim = x_BHTD.shape
    return x_BHTD.reshape(rows, groups, heads // groups * width, dim)


def _parts(query_BKQD: torch.Tensor, key_BKSD: torch.Tensor) -> list[slice]:
    rows, groups, queries, _ = query_BKQD.shape
    size = max(1, SCORES // (groups * queries * key_BKSD.shape[2]))
    return [slice(start, start + size) for start in range(0, rows, size)]


def _attention_weights(
    query: torch.Tensor, key: torch.Tensor, bias_QS: torch.Tensor, scale: float
) -> torch.Tensor:
    scores = torch.baddbmm(bias_QS, query.flatten(0, 1), key.flatten(0, 1).mT, alpha=scale)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype)


def rms_norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """Return RMSNorm over the last dimension, in fp32 as transformers does; the weight is frozen."""
    if x.device.type != "cpu":  # one kernel; autocast would make its result fp32
        with torch.autocast(x.device.type, enabled=False):
            return functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
    out: torch.Tensor = _RmsNorm.apply(x, norm.weight, norm.variance_epsilon)
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_H, epsilon):
        wide = x.float()
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = square.div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight_H, scale)
        return (wide * scale).to(x.dtype).mul_(weight_H)

    @staticmethod
    def backward(ctx, grad):
        x, weight_H, scale = ctx.saved_tensors
        wide, slope = x.float(), (grad * weight_H).float()
        # The scale falls as x grows in its own direction.
        along = torch.linalg.vecdot(slope, wide)[..., None].mul_(scale.pow(3)).div_(-x.shape[-1])
        return slope.mul_(scale).addcmul_(wide, along).to(x.dtype), None, None


class _Rotation(torch.autograd.Function):
    """Rotate heads by their positions' angles; a head's halves are its coordinates (as in GPT-NeoX)."""

    @staticmethod
    def forward(ctx, x_MND, cos_M1D, sin_M1D):
        ctx.save_for_backward(cos_M1D, sin_M1D)
        return _rotated(x_MND, cos_M1D, sin_M1D)

    @staticmethod
    def backward(ctx, grad_MND):
        cos_M1D, sin_M1D = ctx.saved_tensors
        return _rotated(grad_MND, cos_M1D, -sin_M1D), None, None


def _rotated(x_MND: torch.Tensor, cos_M1D: torch.Tensor, sin_M1D: torch.Tensor) -> torch.Tensor:
    first, second = x_MND.chunk(2, -1)
    rotated_MND = torch.empty_like(x_MND)
    low, high = rotated_MND.chunk(2, -1)
    torch.mul(first, cos_M1D, out=low).addcmul_(second, sin_M1D, value=-1)
    torch.mul(second, cos_M1D, out=high).addcmul_(first, sin_M1D)
    return rotated_MND
