"""Work through graded positions in parts whose logits fit into memory; on a CPU, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from opdcl.model.distributions import HiddenStates
from opdcl.model.side_by_side import side_by_side

# Positions projected onto the vocabulary at once: 256 x 49,152 fp32 logits are 50 MB. A GPU needs more of
# them to be busy: 512 positions of 152,000 words are 0.3 GB, five times while a loss is computed.
CHUNK, CUDA_CHUNK = 256, 512

# Fewest positions for which a thread of their own pays.
THREAD_POSITIONS = 32


def cut(x_N: torch.Tensor, threads: int = 1) -> list[slice]:
    """Cut N positions into parts whose logits are computed at once."""
    size = CUDA_CHUNK if x_N.is_cuda else max(THREAD_POSITIONS, CHUNK // threads)
    size = max(1, min(size, math.ceil(len(x_N) / threads)))
    return [slice(start, start + size) for start in range(0, len(x_N), size)]


def for_each_part(x_N: torch.Tensor, compute: Callable[[slice], None]) -> None:
    """Compute all parts; on a CPU, each thread takes every n-th."""
    threads = 1 if x_N.is_cuda else max(1, min(torch.get_num_threads(), len(x_N) // THREAD_POSITIONS))
    parts = cut(x_N, threads)

    def run(share: list[slice]) -> None:
        for part in share:
            compute(part)

    side_by_side([partial(run, parts[i::threads]) for i in range(threads)])


class _CrossEntropy(torch.autograd.Function):
    """-log p of each token, `(N,)`, saving hidden-sized gradients."""

    @staticmethod
    def forward(ctx, states_NH, weight_VH, token_N):
        grad_NH = torch.empty_like(states_NH)
        loss_N = states_NH.new_empty(len(states_NH), dtype=torch.float32)

        def compute(part: slice) -> None:
            log_p = HiddenStates(states_NH, weight_VH).log_probs(part, len(weight_VH))
            loss_N[part] = -log_p.gather(1, token_N[part, None])[:, 0]
            slope = log_p.exp_().scatter_add_(1, token_N[part, None], -torch.ones_like(log_p[:, :1]))
            grad_NH[part] = slope.to(weight_VH.dtype) @ weight_VH

        for_each_part(states_NH, compute)
        ctx.save_for_backward(grad_NH)
        return loss_N

    @staticmethod
    def backward(ctx, grad_loss_N):
        (grad_NH,) = ctx.saved_tensors
        return grad_NH * grad_loss_N[:, None].to(grad_NH.dtype), None, None


def cross_entropy(states_NH: torch.Tensor, weight_VH: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
    """Return -log p of each token in fp32, `(N,)`; the gradient flows into the states, the head is frozen."""
    with torch.autocast(states_NH.device.type, enabled=False):
        losses_N: torch.Tensor = _CrossEntropy.apply(
            states_NH.to(weight_VH.dtype), weight_VH.detach(), token_N
        )
        return losses_N
