"""The training pass of the Llama family on a CPU: only real tokens, in few operations.

Rows lie one behind the other, so no product sees padding; those of one length attend together. Layers with
the same input are one node, and so are a norm and a rotation: those of transformers are a dozen passes each.

Source: Touvron et al., arXiv 2302.13971, section 2.2 (RMSNorm, SwiGLU, rotary positions); Qwen2 adds biases
to queries, keys and values, Qwen3 an RMSNorm to each head of queries and keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from opdcl.model.architecture import architecture
from opdcl.model.fused_lora import linears
from opdcl.model.short_attention import LONG, NAME, ShortAttention

FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class Run:
    """Rows of one length that lie behind each other; they see `prefix` tokens at the start of the pack."""

    start: int
    rows: int
    width: int
    prefix: int

    def bias(self, like: torch.Tensor) -> torch.Tensor:
        """Return what is added to the scores, `(width, prefix + width)`: -inf for later tokens."""
        visible = torch.ones(self.width, self.prefix + self.width, dtype=torch.bool).tril(self.prefix)
        return torch.zeros(visible.shape, dtype=like.dtype).masked_fill_(~visible, -torch.inf)


def packs(causal_lm, width: int) -> bool:
    """Return whether `packed_states` computes what a model does, and rows of this width fit the attention."""
    config = causal_lm.config
    return (
        type(causal_lm).__name__ in FAMILY
        and causal_lm.device.type == "cpu"
        and config._attn_implementation in ("sdpa", NAME)
        and config.hidden_act == "silu"
        and not causal_lm.base_model.embed_tokens._forward_hooks  # NEFTune expects rows
        and not getattr(config, "pretraining_tp", 1) > 1
        and not (causal_lm.training and config.attention_dropout)
        and architecture(config).heads * width**2 <= LONG
    )


def packed_states(causal_lm, prefix: list[int], tails: Sequence[list[int]]) -> list[torch.Tensor]:
    """Return each tail's last hidden states, `(T, H)`, given the prefix that all of them follow."""
    body, shape = causal_lm.base_model, architecture(causal_lm.config)
    order = sorted(range(len(tails)), key=lambda row: len(tails[row]))
    ids, runs = list(prefix), [Run(0, 1, len(prefix), 0)] if prefix else []
    for width, rows in itertools.groupby(order, key=lambda row: len(tails[row])):
        group = [tails[row] for row in rows]
        runs.append(Run(len(ids), len(group), width, len(prefix)))
        ids += itertools.chain.from_iterable(group)
    position = [i + run.prefix for run in runs for _ in range(run.rows) for i in range(run.width)]
    h_MH = body.embed_tokens(torch.tensor(ids))
    # Both halves of a head rotate by the same angles.
    angles = body.rotary_emb(h_MH, torch.tensor([position]))
    cos_M1D, sin_M1D = (x[0, :, None, : shape.head_dim // 2] for x in angles)
    biases = [run.bias(h_MH) for run in runs]
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        x_MH = rms_norm(h_MH, layer.input_layernorm)
        heads = linears(x_MH, attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (x.unflatten(-1, (-1, shape.head_dim)) for x in heads)
        if hasattr(attention, "q_norm"):
            query, key = rms_norm(query, attention.q_norm), rms_norm(key, attention.k_norm)
        query, key = (_Rotation.apply(x, cos_M1D, sin_M1D) for x in (query, key))
        parts = [
            _attend(query, key, value, run, bias, attention.scaling)
            for run, bias in zip(runs, biases, strict=True)
        ]
        h_MH = h_MH + linears(torch.cat(parts), attention.o_proj)[0]
        gate, up = linears(rms_norm(h_MH, layer.post_attention_layernorm), mlp.gate_proj, mlp.up_proj)
        h_MH = h_MH + linears(silu(gate) * up, mlp.down_proj)[0]
    packed = rms_norm(h_MH, body.norm)[len(prefix) :].split([len(tails[row]) for row in order])
    states = dict(zip(order, packed, strict=True))
    return [states[row] for row in range(len(tails))]


def _attend(query, key, value, run: Run, bias_TS: torch.Tensor, scale: float) -> torch.Tensor:
    part = slice(run.start, run.start + run.rows * run.width)
    query_BHTD, key_BKSD, value_BKSD = (
        x[part].unflatten(0, (run.rows, run.width)).transpose(1, 2) for x in (query, key, value)
    )
    if run.prefix:
        before = (x[: run.prefix].transpose(0, 1).expand(run.rows, -1, -1, -1) for x in (key, value))
        key_BKSD, value_BKSD = (
            torch.cat(pair, 2) for pair in zip(before, (key_BKSD, value_BKSD), strict=True)
        )
    out_BHTD = ShortAttention.apply(query_BHTD, key_BKSD, value_BKSD, bias_TS, scale)
    return out_BHTD.transpose(1, 2).flatten(2).flatten(0, 1)


def rms_norm(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
    """Return RMSNorm over the last dimension, in fp32 as transformers does; the weight is frozen."""
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
