"""One decoding step of the Llama family: the same numbers as transformers' forward pass at less cost.

With one token per sequence, the weights are the large operand of every product and the sequences the small
one. Products are fastest with the large operand first, so activations stay transposed, `(features, rows)`,
from the embedding to the logits. In fp32 a few rows are the exception: there the features of a row lie side
by side. The rest of a step is a few operations per layer on existing buffers.

Source: Touvron et al., arXiv 2302.13971, section 2.2 (RMSNorm, SwiGLU, rotary positions); Qwen2 adds biases
to queries, keys and values, Qwen3 an RMSNorm to each head of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn.functional import scaled_dot_product_attention, silu

from opdcl.model.architecture import architecture
from opdcl.model.llama_pass import FAMILY
from opdcl.model.quantized import is_quantized
from opdcl.sampling.layout import attention_mask

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

# Below this many rows, a CPU's fp32 products are faster if the features of a row lie side by side: with 8
# rows they take half the time, with 24 nine tenths.
FEW_ROWS = 32

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Cache"], torch.Tensor]


def decoding_step(model) -> Step:
    """Return the function that runs one token per row through `model`.

    It takes token ids `(B,)`, their positions `(B,)`, the position of each column's token in the cache, the
    new one included, `(B, S)`, and the cache, which it extends; it returns next-token logits `(B, V)`.
    """
    return LlamaStep(model) if is_llama(model) else lambda *inputs: plain_step(model, *inputs)


def is_llama(model) -> bool:
    """Return whether `LlamaStep` computes what a model does: a known class, not quantized, no adapters."""
    return (
        type(model).__name__ in FAMILY
        and not is_quantized(model)
        and model.config.hidden_act == "silu"
        and architecture(model.config).full_attention
        and not getattr(model.config, "pretraining_tp", 1) > 1
        and all(m.disable_adapters or m.merged for m in model.modules() if isinstance(m, BaseTunerLayer))
    )


def plain_step(model, token_B, position_B, key_BS, cache) -> torch.Tensor:
    """Run one token per row through the model's own forward pass; arguments as for `decoding_step`."""
    return model(
        input_ids=token_B[:, None],
        attention_mask=attention_mask(model, position_B[:, None], key_BS),
        position_ids=position_B[:, None],
        past_key_values=cache,
    ).logits[:, -1]


class LlamaStep:
    """The decoding step of one model; it refers to the model's weights without copying them."""

    def __init__(self, model):
        self.model, self.shape = model, architecture(model.config)

    def __call__(self, token_B, position_B, key_BS, cache) -> torch.Tensor:
        body = self.model.model
        h_HB = body.embed_tokens(token_B).T
        if not _rows_first(h_HB):
            h_HB = h_HB.contiguous()
        # Both halves of a head rotate by the same angles.
        angles, half = body.rotary_emb(h_HB, position_B[:, None]), self.shape.head_dim // 2
        rotation = tuple(x[:, 0, :half].T.contiguous() for x in angles)
        bias_BS = torch.zeros_like(key_BS, dtype=h_HB.dtype)
        bias_BS.masked_fill_(key_BS > position_B[:, None], -torch.inf)
        bias_B11S = bias_BS[:, None, None]
        for layer, slots in zip(body.layers, cache.layers, strict=True):
            x_HB = _normed(h_HB, layer.input_layernorm)
            self._attend(layer.self_attn, x_HB, h_HB, rotation, bias_B11S, slots)
            mlp, x_HB = layer.mlp, _normed(h_HB, layer.post_attention_layernorm)
            gate_IB = silu(_times(mlp.gate_proj, x_HB), inplace=True).mul_(_times(mlp.up_proj, x_HB))
            _add_times(mlp.down_proj, gate_IB, h_HB)
        return _times(self.model.lm_head, _normed(h_HB, body.norm)).T

    def _attend(self, attention, x_HB, h_HB, rotation, bias_B11S, slots) -> None:
        rows, shape = x_HB.shape[1], self.shape
        query = _times(attention.q_proj, x_HB).view(shape.heads, shape.head_dim, rows)
        query = _rotated(query, getattr(attention, "q_norm", None), *rotation)
        key = _times(attention.k_proj, x_HB).view(shape.kv_heads, shape.head_dim, rows)
        key = _rotated(key, getattr(attention, "k_norm", None), *rotation)
        value = _times(attention.v_proj, x_HB).view(shape.kv_heads, shape.head_dim, rows)
        keys, values = slots.update(key.permute(2, 0, 1)[:, :, None], value.permute(2, 0, 1)[:, :, None])
        # Query heads that share a key head become its queries, so keys are read once and never repeated.
        query_BKGD = query.permute(2, 0, 1).contiguous().view(rows, shape.kv_heads, -1, shape.head_dim)
        out = scaled_dot_product_attention(query_BKGD, keys, values, bias_B11S, scale=attention.scaling)
        _add_times(attention.o_proj, out.reshape(rows, -1).T, h_HB)


def _rotated(x_NDB, norm, cos_DB, sin_DB) -> torch.Tensor:
    """Return heads rotated by their rows' angles; a head's halves are its coordinates (as in GPT-NeoX)."""
    if norm is not None:
        x_NDB = _normed(x_NDB, norm)
    first, second = x_NDB.chunk(2, 1)
    rotated_NDB = torch.empty_like(x_NDB)
    low, high = rotated_NDB.chunk(2, 1)
    torch.mul(first, cos_DB, out=low).addcmul_(second, sin_DB, value=-1)
    torch.mul(second, cos_DB, out=high).addcmul_(first, sin_DB)
    return rotated_NDB


def _weights(linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    linear = getattr(linear, "base_layer", linear)
    return linear.weight, linear.bias


def _rows_first(x_KB: torch.Tensor) -> bool:
    return x_KB.device.type == "cpu" and x_KB.dtype.itemsize > 2 and x_KB.shape[1] < FEW_ROWS


def _times(linear, x_KB) -> torch.Tensor:
    weight_NK, bias_N = _weights(linear)
    if _rows_first(x_KB):
        return torch.nn.functional.linear(x_KB.T, weight_NK, bias_N).T
    return weight_NK @ x_KB if bias_N is None else torch.addmm(bias_N[:, None], weight_NK, x_KB)


def _add_times(linear, x_KB, h_HB) -> None:
    weight_HK, bias_H = _weights(linear)
    h_HB.addmm_(weight_HK, x_KB)
    if bias_H is not None:
        h_HB.add_(bias_H[:, None])


def _normed(x: torch.Tensor, norm) -> torch.Tensor:
    """Return RMSNorm over the features, the last dimension but one, in fp32 as transformers does."""
    wide = x.float()
    scale = wide.square().mean(-2, keepdim=True).add_(norm.variance_epsilon).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(norm.weight[:, None])
