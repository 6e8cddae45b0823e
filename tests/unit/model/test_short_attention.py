"""Attention of the training pass against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from opdcl.model import llama_pass as module
from opdcl.model.llama_pass import ShortAttention


def operands(heads: int, groups: int, width: int, prefix: int, dtype=torch.double):
    torch.manual_seed(0)
    query = (
        torch.randn(4, width, heads, 8, dtype=dtype).transpose(1, 2).requires_grad_()
    )  # strided, as a model's are
    key, value = (
        torch.randn(4, groups, prefix + width, 8, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    visible = torch.ones(width, prefix + width, dtype=torch.bool).tril(prefix)
    return query, key, value, visible


def gradients(out: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((out * weight).sum(), inputs)


@pytest.mark.parametrize("scores", [1, 10**9])
@pytest.mark.parametrize(("heads", "groups", "width", "prefix"), [(6, 2, 5, 3), (3, 3, 4, 0), (4, 1, 1, 7)])
def test_equals_torchs_own_forward_and_backward(heads, groups, width, prefix, scores, monkeypatch):
    monkeypatch.setattr(module, "SCORES", scores)
    query, key, value, visible = operands(heads, groups, width, prefix)
    bias = torch.zeros(visible.shape, dtype=query.dtype).masked_fill(~visible, -torch.inf)
    repeated = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
    reference = scaled_dot_product_attention(query, *repeated, attn_mask=visible, scale=0.3)
    ours = ShortAttention.apply(query, key, value, bias, 0.3)
    # Attention weights are rounded to fp32 in every dtype.
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)
    for grad, expected in zip(
        gradients(ours, query, key, value), gradients(reference, query, key, value), strict=True
    ):
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
