"""Attention of the training pass against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from opdcl.model import short_attention as module
from opdcl.model.forward import answer_states
from opdcl.model.short_attention import ShortAttention, short_attention


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


def gradients(out: torch.Tensor, *wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((out * weight).sum(), wanted)


@pytest.mark.parametrize("at_once", [1, 10**9])
@pytest.mark.parametrize(("heads", "groups", "width", "prefix"), [(6, 2, 5, 3), (3, 3, 4, 0), (4, 1, 1, 7)])
def test_equals_torchs_own_forward_and_backward(heads, groups, width, prefix, at_once, monkeypatch):
    monkeypatch.setattr(module, "SCORES", at_once)
    query, key, value, visible = operands(heads, groups, width, prefix)
    bias = torch.zeros(visible.shape, dtype=query.dtype).masked_fill(~visible, -torch.inf)
    repeated = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
    theirs = scaled_dot_product_attention(query, *repeated, attn_mask=visible, scale=0.3)
    ours = ShortAttention.apply(query, key, value, bias, 0.3)
    # A share is rounded to fp32, whatever it is kept in.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for mine, expected in zip(
        gradients(ours, query, key, value), gradients(theirs, query, key, value), strict=True
    ):
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


ROWS = [([1, 520, 9690, 198, 60 + i, *range(300, 306 + i)], [False] * 5 + [True] * (6 + i)) for i in range(3)]


def nodes(out: torch.Tensor) -> set[str]:
    """Return the names of all that a gradient of `out` passes through."""
    found, left = {}, [out.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found[node] = type(node).__name__
            left += [earlier for earlier, _ in node.next_functions]
    return set(found.values())


def test_a_model_learns_the_same_through_it_and_leaves_long_rows_to_torch(backbone, tuned, monkeypatch):
    model = backbone.causal_lm
    weights = [p for p in model.parameters() if p.requires_grad]
    ours = answer_states(model, ROWS)
    assert "ShortAttentionBackward" in nodes(ours)
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.setattr(module, "LONG", 10)
    theirs = answer_states(model, ROWS)
    assert "ShortAttentionBackward" not in nodes(theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for mine, expected in zip(gradients(ours, *weights), gradients(theirs, *weights), strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_without_a_gradient_the_model_attends_as_it_did(backbone):
    with torch.no_grad(), short_attention(backbone.causal_lm):
        assert backbone.causal_lm.config._attn_implementation == "sdpa"
