"""One decoding step of the Llama family: the same numbers as transformers' forward pass at less cost.

With one token per sequence, the weights are the large operand of every product and the sequences the small
one. On a CPU, products are fastest with the large operand first, so activations stay transposed, `(features,
rows)`, from the embedding to the logits. In fp32 a few rows are the exception, and so is a GPU: there the
features of a row lie side by side. The rest of a step is a few operations per layer on existing buffers; on a
GPU, where each costs a launch, weights that lie one behind the other are one matrix.

Source: Touvron et al., arXiv 2302.13971, section 2.2 (RMSNorm, SwiGLU, rotary positions); Qwen2 adds biases
to queries, keys and values, Qwen3 an RMSNorm to each head of queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from opdcl.model.architecture import architecture
from opdcl.model.llama_pass import FAMILY
from opdcl.model.quantized import is_quantized
from opdcl.sampling.layout import attention_mask

# Below this many rows, a CPU's fp32 products are faster if the features of a row lie side by side: with 8
# rows they take half the time, with 24 nine tenths.
FEW_ROWS = 32


def is_llama(model) -> bool:
    """Return whether `LlamaStep` computes what a model does: a known class, not quantized, no adapters."""
    return (
        FAMILY.get(model.config.model_type) == type(model).__name__
        and not is_quantized(model)
        and model.config.hidden_act == "silu"
        and architecture(model.config).full_attention
        and not getattr(model.config, "pretraining_tp", 1) > 1
        and all(m.disable_adapters or m.merged for m in model.modules() if isinstance(m, BaseTunerLayer))
    )


def plain_step(model, token_B, position_B, key_BS, cache) -> torch.Tensor:
    """Run one token per row through the model's own forward pass; arguments as for `LlamaStep`."""
    return model(
        input_ids=token_B[:, None],
        attention_mask=attention_mask(model, position_B[:, None], key_BS),
        position_ids=position_B[:, None],
        past_key_values=cache,
    ).logits[:, -1]


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
        body = self.body
        h_HB = body.embed_tokens(token_B).T
        if not _rows_first(h_HB):
            h_HB = h_HB.contiguous()
        # Both halves of a head rotate by the same angles.
        angles, half = body.rotary_emb(h_HB, position_B[:, None]), self.shape.head_dim // 2
        rotation = tuple(x[:, 0, :half].T.contiguous() for x in angles)
        bias_BS = torch.zeros_like(key_BS, dtype=h_HB.dtype)
        bias_BS.masked_fill_(key_BS > position_B[:, None], -torch.inf)
        bias_B11S = bias_BS[:, None, None]
        for layer, weight_ND, slots in zip(body.layers, self.head_weights, cache.layers, strict=True):
            x_HB = _normed(h_HB, layer.input_layernorm)
            self._attend(layer.self_attn, weight_ND, x_HB, h_HB, rotation, bias_B11S, slots)
            mlp, x_HB = layer.mlp, _normed(h_HB, layer.post_attention_layernorm)
            parts = _products(x_HB, mlp.gate_proj, mlp.up_proj)
            gate_IB, up_IB = parts if len(parts) > 1 else parts[0].chunk(2)
            _add_times(mlp.down_proj, silu(gate_IB, inplace=True).mul_(up_IB), h_HB)
        return _products(_normed(h_HB, body.norm), self.head)[0].T

    def _attend(self, attention, weight_ND, x_HB, h_HB, rotation, bias_B11S, slots) -> None:
        rows, shape = x_HB.shape[1], self.shape
        heads = _products(x_HB, attention.q_proj, attention.k_proj, attention.v_proj)
        heads_NDB = (heads[0] if len(heads) == 1 else torch.cat(heads)).unflatten(0, (-1, shape.head_dim))
        turning_NDB, value = heads_NDB[: -shape.kv_heads], heads_NDB[-shape.kv_heads :]
        if weight_ND is not None:
            turning_NDB = _normed(turning_NDB, attention.q_norm, weight_ND)
        query, key = _rotated(turning_NDB, *rotation).split([shape.heads, shape.kv_heads])
        key, value = (x.permute(2, 0, 1)[:, :, None] for x in (key, value))
        keys, values = slots.update(key, value)
        # Query heads that share a key head become its queries, so keys are read once and never repeated.
        query_BHD = query.permute(2, 0, 1)
        query_BHD = query_BHD if _rows_first(x_HB) else query_BHD.contiguous()
        query_BKGD = query_BHD.unflatten(1, (shape.kv_heads, -1))
        out = scaled_dot_product_attention(query_BKGD, keys, values, bias_B11S, scale=attention.scaling)
        _add_times(attention.o_proj, out.reshape(rows, -1).T, h_HB)


def _rotated(x_NDB, cos_DB, sin_DB) -> torch.Tensor:
    """Return heads rotated by their rows' angles; a head's halves are its coordinates (as in GPT-NeoX)."""
    first, second = x_NDB.chunk(2, 1)
    heads, dim, rows = x_NDB.shape
    if _rows_first(x_NDB):
        rotated_NDB = x_NDB.new_empty(rows, heads, dim).permute(1, 2, 0)
    else:
        rotated_NDB = x_NDB.new_empty(heads, dim, rows)
    low, high = rotated_NDB.chunk(2, 1)
    torch.mul(first, cos_DB, out=low).addcmul_(second, sin_DB, value=-1)
    torch.mul(second, cos_DB, out=high).addcmul_(first, sin_DB)
    return rotated_NDB


def _rows_first(x: torch.Tensor) -> bool:
    """Return whether the features of a row lie side by side; rows are the last dimension."""
    if x.device.type != "cpu":
        return True
    return x.dtype.itemsize > 2 and x.shape[-1] < FEW_ROWS


def _products(x_KB, *layers) -> list[torch.Tensor]:
    """Return the layers' outputs, `(N, B)` each; one tensor of all if their weights are one matrix."""
    pairs = [_weight_and_bias(layer) for layer in layers]
    if len(pairs) > 1 and not any(bias is not None for _, bias in pairs):
        whole_NK = _one_matrix([weight for weight, _ in pairs])
        pairs = pairs if whole_NK is None else [(whole_NK, None)]
    if _rows_first(x_KB):
        return [linear(x_KB.T, weight_NK, bias_N).T for weight_NK, bias_N in pairs]
    return [w @ x_KB if bias_N is None else torch.addmm(bias_N[:, None], w, x_KB) for w, bias_N in pairs]


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


def _add_times(layer, x_KB, h_HB) -> None:
    weight_HK, bias_H = _weight_and_bias(layer)
    h_HB.addmm_(weight_HK, x_KB)
    if bias_H is not None:
        h_HB.add_(bias_H[:, None])


def _normed(x: torch.Tensor, norm, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Return RMSNorm over the features, the last dimension but one, in fp32 as transformers does."""
    weight = norm.weight if weight is None else weight
    if x.device.type != "cpu":
        inside = weight if weight.dim() == 1 else None
        normed = rms_norm(x.movedim(-1, 0), x.shape[-2:-1], inside, norm.variance_epsilon).movedim(0, -1)
        return normed if inside is not None else normed.mul_(weight[..., None])
    wide = x.float()
    scale = wide.square().mean(-2, keepdim=True).add_(norm.variance_epsilon).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight[..., None])
