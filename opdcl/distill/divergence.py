"""The loss of recovery: full-vocabulary reverse KL per token, computed in chunks.

Reverse KL, KL(student || teacher) = sum_v p_v (log p_v - log q_v), is the mode-seeking direction of Gu et al.
(arXiv 2306.08543) and Agarwal et al. (arXiv 2306.13649): it punishes the student for what the teacher would not say.
"""

from __future__ import annotations

import torch

# Positions projected onto the vocabulary at once: 256 x 49,152 fp32 logits are 50 MB.
CHUNK = 256


class _ReverseKL(torch.autograd.Function):
    """Per-token reverse KL from hidden states, keeping hidden-sized gradients instead of vocabulary-sized logits.

    The head is frozen, so the only gradient needed is that of the student's hidden state h:
    dKL/dlogit_v = p_v (log p_v - log q_v - KL) / temperature, and dKL/dh = dKL/dlogit @ W.
    """

    @staticmethod
    def forward(ctx, student_NH, teacher_NH, weight_VH, temperature):
        grad_NH = torch.empty_like(student_NH)
        kl_N, student_entropy_N, teacher_entropy_N = (student_NH.new_empty(len(student_NH), dtype=torch.float32) for _ in range(3))  # fmt: skip
        for start in range(0, len(student_NH), CHUNK):
            part = slice(start, start + CHUNK)
            log_p = torch.log_softmax((student_NH[part] @ weight_VH.T).float() / temperature, -1)
            log_q = torch.log_softmax((teacher_NH[part] @ weight_VH.T).float() / temperature, -1)
            teacher_entropy_N[part] = -(log_q.exp() * log_q).sum(-1)
            p = log_p.exp()
            student_entropy_N[part] = -(p * log_p).sum(-1)
            ratio = log_p.sub_(log_q)
            kl = (p * ratio).sum(-1)
            kl_N[part] = kl
            grad_logits = ratio.sub_(kl[:, None]).mul_(p).div_(temperature)
            grad_NH[part] = grad_logits.to(weight_VH.dtype) @ weight_VH
        ctx.save_for_backward(grad_NH)
        ctx.mark_non_differentiable(student_entropy_N, teacher_entropy_N)
        return kl_N, student_entropy_N, teacher_entropy_N

    @staticmethod
    def backward(ctx, grad_kl_N, *_):
        (grad_NH,) = ctx.saved_tensors
        return grad_NH * grad_kl_N[:, None].to(grad_NH.dtype), None, None, None


def reverse_kl(
    student_NH: torch.Tensor, teacher_NH: torch.Tensor, weight_VH: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the reverse KL of each token, and both entropies, all `(N,)` in nats.

    Args:
        student_NH: The student's last hidden states, `(N, H)`; the gradient flows into these.
        teacher_NH: The teacher's last hidden states, `(N, H)`.
        weight_VH: The frozen output embedding that both share, `(V, H)`.
        temperature: Softmax temperature of both distributions.
    """
    with torch.autocast(student_NH.device.type, enabled=False):
        dtype = weight_VH.dtype
        return _ReverseKL.apply(student_NH.to(dtype), teacher_NH.detach().to(dtype), weight_VH.detach(), temperature)
