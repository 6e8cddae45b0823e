"""Attention for the training pass on a CPU: a few matrix products, recomputed for the gradient.

torch's own CPU kernel works in blocks made for long sequences. Completions are short, so the scores of a few
rows fit into the cache whole. Query heads that share a key head become its queries (arXiv 2305.13245), so
keys and values are never repeated.
"""

from __future__ import annotations

import torch

# Scores computed at once: 4 MB in fp32.
SCORES = 2**20

# Scores per row above which torch's kernel is used, because it never holds them all.
LONG = 4 * SCORES


class ShortAttention(torch.autograd.Function):
    """softmax(scale q k^T + bias) v; only the operands of the forward pass are saved."""

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
