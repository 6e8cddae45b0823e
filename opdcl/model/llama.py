"""The Llama family written out: the training pass over packed rows, and the decoding step.

Both compute what transformers' classes compute, in fewer operations; `opdcl.model.forward` and
`opdcl.sampling.decoder` say when. The norm and the rotation at the end of this file are those of both.

Training: rows lie one behind the other, so no product sees padding. On a CPU, rows of one length attend
together; on a GPU, one kernel attends within all rows.

Decoding: a step is a few operations per layer on existing buffers. On a GPU, where each costs a launch,
weights that lie one behind the other are one matrix.

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
from peft.tuners.tuners_utils import BaseTunerLayer
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
from opdcl.model.quantized import is_quantized

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

# Queries, keys and values of all tokens `(M, N, D)`, and the scale -> what they attend to, `(M, N * D)`.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


@dataclass(frozen=True)
class SameLengthRows:
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

    def visible(self) -> torch.Tensor:
        """Return which tokens each token of a row sees, `(width, prefix + width)`."""
        return torch.ones(self.width, self.prefix + self.width, dtype=torch.bool).tril(self.prefix)


def is_llama(causal_lm) -> bool:
    """Return whether this file computes what a model does, apart from adapters and how it attends."""
    config = causal_lm.config
    return (
        FAMILY.get(config.model_type) == type(causal_lm).__name__
        and architecture(config).full_attention
        and config.hidden_act == "silu"
        and not getattr(config, "pretraining_tp", 1) > 1
    )


def trains_as_llama(causal_lm) -> bool:
    """Return whether `packed_states` computes a model's training pass."""
    return (
        is_llama(causal_lm)
        and not parallel.sharded()  # a shard's layers must be called as a whole
        and causal_lm.config._attn_implementation == "sdpa"
        and not causal_lm.base_model.embed_tokens._forward_hooks  # NEFTune expects rows
        and not (causal_lm.training and causal_lm.config.attention_dropout)
    )


def attends_within_rows(config, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a kernel attends within packed rows: from Ampere on, in 16 bits, for usual heads."""
    if device.type != "cuda" or dtype.itemsize != 2 or varlen_attn is None:
        return False
    width = architecture(config).head_dim
    # Before PyTorch 2.11 it could not look at earlier tokens only.
    known = "window_size" in inspect.signature(varlen_attn).parameters
    return known and width % 8 == 0 and width <= 256 and torch.cuda.get_device_capability(device) >= (8, 0)


def packed_states(
    causal_lm, prefix: list[int], tails: Sequence[list[int]], in_one_kernel: bool
) -> tuple[torch.Tensor, list[int]]:
    """Return the last hidden states of a prefix and of the tails that follow it, `(M, H)`.

    They lie one behind the other; the second result is where each tail begins. Tails that attend in one
    kernel have no prefix.
    """
    body, shape, device = causal_lm.base_model, architecture(causal_lm.config), causal_lm.device
    order = sorted(range(len(tails)), key=lambda row: len(tails[row]))
    ids, position, starts = list(prefix), list(range(len(prefix))), [0] * len(tails)
    for row in order:
        starts[row] = len(ids)
        ids += tails[row]
        position += range(len(prefix), len(prefix) + len(tails[row]))
    h_MH = body.embed_tokens(torch.tensor(ids, device=device))
    angles = body.rotary_emb(h_MH, torch.tensor([position], device=device))
    rotation = tuple(x[0, :, None] for x in angles)
    lengths = [len(tails[row]) for row in order]
    attend = _in_one_kernel(lengths, device) if in_one_kernel else _by_length(len(prefix), lengths)
    run = partial(_layer, shape.head_dim, rotation, attend)
    recompute = in_one_kernel and torch.is_grad_enabled() and h_MH.shape[1] >= WIDE
    for layer in body.layers:
        h_MH = checkpoint(run, layer, h_MH, use_reentrant=False) if recompute else run(layer, h_MH)
    return rms_norm(h_MH, body.norm), starts


def _layer(head_dim: int, rotation, attend: Attend, layer, h_MH: torch.Tensor) -> torch.Tensor:
    attention, mlp = layer.self_attn, layer.mlp
    x_MH = rms_norm(h_MH, layer.input_layernorm)
    heads = attention.q_proj(x_MH), attention.k_proj(x_MH), attention.v_proj(x_MH)
    query, key, value = (x.unflatten(-1, (-1, head_dim)) for x in heads)
    if hasattr(attention, "q_norm"):
        query, key = rms_norm(query, attention.q_norm), rms_norm(key, attention.k_norm)
    query, key = rotated(query, *rotation), rotated(key, *rotation)
    h_MH = h_MH + attention.o_proj(attend(query, key, value, attention.scaling))
    x_MH = rms_norm(h_MH, layer.post_attention_layernorm)
    return h_MH + mlp.down_proj(silu(mlp.gate_proj(x_MH)) * mlp.up_proj(x_MH))


def _in_one_kernel(lengths: list[int], device: torch.device) -> Attend:
    """Return attention to the earlier tokens of a row, in one kernel for all rows."""
    start_B = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    rows = start_B, start_B, max(lengths), max(lengths)
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    earlier = partial(varlen_attn, window_size=(-1, 0), **grouped)

    def attend(query, key, value, scale: float) -> torch.Tensor:
        out_MND: torch.Tensor = earlier(query, key, value, *rows, scale=scale)
        return out_MND.flatten(1)

    return attend


def _by_length(prefix: int, lengths: list[int]) -> Attend:
    """Return attention to the prefix and the earlier tokens of a row; rows of one length attend together."""
    groups, start = [SameLengthRows(0, 1, prefix, 0)] if prefix else [], prefix
    for width, same in itertools.groupby(lengths):
        rows = len(list(same))
        groups.append(SameLengthRows(start, rows, width, prefix))
        start += rows * width
    masks = [group.visible() for group in groups]

    def attend(query, key, value, scale: float) -> torch.Tensor:
        parts = []
        for group, visible_TS in zip(groups, masks, strict=True):
            seen = group.seen_by_rows(key), group.seen_by_rows(value)
            out_BHTD = functional.scaled_dot_product_attention(
                group.rows_of(query), *seen, visible_TS, scale=scale, enable_gqa=True
            )
            parts.append(out_BHTD.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(parts)

    return attend


# -- Decoding


def decodes_as_llama(causal_lm) -> bool:
    """Return whether `LlamaStep` computes a model's decoding step: not quantized, no adapter at work."""
    tuners = [m for m in causal_lm.modules() if isinstance(m, BaseTunerLayer)]
    merged = all(m.disable_adapters or m.merged for m in tuners)
    return is_llama(causal_lm) and merged and not is_quantized(causal_lm)


class LlamaStep:
    """The decoding step of one model; it refers to the model's parts, and copies only the norms of heads.

    It takes token ids `(B,)`, their positions `(B,)`, the position of each column's token in the cache, the
    new one included, `(B, S)`, and the cache, which it extends; it returns next-token logits `(B, V)`.
    """

    def __init__(self, model):
        self.body, self.head, self.shape = model.model, model.lm_head, architecture(model.config)
        # Queries and keys are normed together.
        self.head_weights = [self._head_weight(layer.self_attn) for layer in model.model.layers]

    def _head_weight(self, attention) -> torch.Tensor | None:
        """Return the norms' weights of each query and key head, `(N, D)`; None without such norms."""
        if not hasattr(attention, "q_norm"):
            return None
        norms = (attention.q_norm, self.shape.heads), (attention.k_norm, self.shape.kv_heads)
        return torch.cat([norm.weight.detach().expand(heads, -1) for norm, heads in norms])

    def __call__(self, token_B, position_B, key_BS, cache) -> torch.Tensor:
        body, shape = self.body, self.shape
        h_BH = body.embed_tokens(token_B)
        rotation = body.rotary_emb(h_BH, position_B[:, None])
        bias_BS = torch.zeros_like(key_BS, dtype=h_BH.dtype)
        bias_BS.masked_fill_(key_BS > position_B[:, None], -torch.inf)
        bias_B11S = bias_BS[:, None, None]
        for layer, weight_ND, slots in zip(body.layers, self.head_weights, cache.layers, strict=True):
            attention, x_BH = layer.self_attn, rms_norm(h_BH, layer.input_layernorm)
            heads = _products(x_BH, attention.q_proj, attention.k_proj, attention.v_proj)
            joined = heads[0] if len(heads) == 1 else torch.cat(heads, -1)
            heads_BND = joined.unflatten(-1, (-1, shape.head_dim))
            turning_BND, value_BKD = heads_BND.split([shape.heads + shape.kv_heads, shape.kv_heads], 1)
            if weight_ND is not None:
                turning_BND = rms_norm(turning_BND, attention.q_norm, weighted=False).mul_(weight_ND)
            query_BHD, key_BKD = rotated(turning_BND, *rotation).split([shape.heads, shape.kv_heads], 1)
            keys, values = slots.update(key_BKD[:, :, None], value_BKD[:, :, None])
            # Query heads that share a key head become its queries, so keys are read once and never repeated.
            query_BKGD = query_BHD.unflatten(1, (shape.kv_heads, -1))
            out_BKGD = functional.scaled_dot_product_attention(
                query_BKGD, keys, values, bias_B11S, scale=attention.scaling
            )
            _add_product(h_BH, out_BKGD.flatten(1), attention.o_proj)
            mlp, x_BH = layer.mlp, rms_norm(h_BH, layer.post_attention_layernorm)
            parts = _products(x_BH, mlp.gate_proj, mlp.up_proj)
            gate_BI, up_BI = parts if len(parts) > 1 else parts[0].chunk(2, -1)
            _add_product(h_BH, silu(gate_BI, inplace=True).mul_(up_BI), mlp.down_proj)
        return _products(rms_norm(h_BH, body.norm), self.head)[0]


def _products(x_BK, *layers) -> list[torch.Tensor]:
    """Return the layers' outputs, `(B, N)` each; one tensor of all if their weights are one matrix."""
    pairs = [_weight_and_bias(layer) for layer in layers]
    if len(pairs) > 1 and not any(bias is not None for _, bias in pairs):
        whole_NK = _one_matrix([weight for weight, _ in pairs])
        pairs = pairs if whole_NK is None else [(whole_NK, None)]
    return [_product(x_BK, weight_NK, bias_N) for weight_NK, bias_N in pairs]


def _product(x_BK, weight_NK, bias_N) -> torch.Tensor:
    if x_BK.device.type == "cpu" and x_BK.dtype.itemsize == 2:
        # Kernels for 16 bits repack their second operand at each call, and the rows are the small one.
        out_NB = weight_NK @ x_BK.T if bias_N is None else torch.addmm(bias_N[:, None], weight_NK, x_BK.T)
        return out_NB.T
    return functional.linear(x_BK, weight_NK, bias_N)


def _weight_and_bias(layer) -> tuple[torch.Tensor, torch.Tensor | None]:
    layer = getattr(layer, "base_layer", layer)
    return layer.weight, layer.bias


def _one_matrix(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return matrices that lie one behind the other, as `Backbone.merged` can put them, as one."""
    first, end = weights[0], weights[0].storage_offset()
    for weight in weights:
        here = weight.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not here or weight.storage_offset() != end or not weight.is_contiguous():
            return None
        end += weight.numel()
    return first.as_strided((sum(map(len, weights)), first.shape[1]), (first.shape[1], 1))


def _add_product(h_BH, x_BK, layer) -> None:
    weight_HK, bias_H = _weight_and_bias(layer)
    if x_BK.device.type == "cpu" and x_BK.dtype.itemsize == 2:
        h_BH.add_(_product(x_BK, weight_HK, bias_H))
        return
    h_BH.addmm_(x_BK, weight_HK.T)
    if bias_H is not None:
        h_BH.add_(bias_H)


# -- The mathematics of both


def rms_norm(x: torch.Tensor, norm: Any, weighted: bool = True) -> torch.Tensor:
    """Return RMSNorm over the last dimension, without its weight if not `weighted`."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):  # which would make the result fp32
            return rms_norm(x, norm, weighted)
    weight = norm.weight if weighted else None
    return functional.rms_norm(x, x.shape[-1:], weight, norm.variance_epsilon)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return heads rotated by their positions' angles; their halves are the coordinates, as in GPT-NeoX."""
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat([-second, first], -1), sin)
