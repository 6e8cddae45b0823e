"""Token losses: divergences of the student p from the teacher q over the vocabulary, computed in chunks.

| loss | per token | source |
| --- | --- | --- |
| `reverse_kl` | KL(p, q): penalizes text that the teacher would not write | arXiv 2306.08543, 2306.13649 |
| `forward_kl` | KL(q, p): asks the student to cover everything the teacher might say | arXiv 2306.13649 |
| `jsd` | generalised Jensen-Shannon divergence: of both from their mixture | arXiv 2306.13649, eq. 1 |
| `top_k` | reverse KL over the teacher's top k tokens and one bucket for the rest | arXiv 2601.20802 |
| `policy_gradient` | -(p / p_sampler) (log q - log p) of the sampled token | REINFORCE, importance-sampled |
| `clipped_gradient` | -min(r A, clip(r) A), r = p / p_sampler, A: advantage | arXiv 1707.06347, 2402.03300 |
| `cross_entropy` | -log p of the token itself: imitation of text that a teacher wrote | arXiv 1606.07947 |

Near equality every divergence is half a squared distance, so one learning rate suits all of them. That of
`jsd` is beta (1 - beta) times as large, which Adam's steps do not depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from opdcl.model.distributions import HiddenStates, TeacherDistribution, rows_at_once, shared_rows
from opdcl.model.hardware import run_in_threads
from opdcl.words import Loss

# How far a token's probability ratio may move before the reward stops pushing it (PPO, arXiv 1707.06347).
CLIP = 0.2

# Positions projected onto the vocabulary at once: 256 x 49,152 fp32 logits are 50 MB. A GPU needs more of
# them to be busy: 512 positions of 152,000 words are 0.3 GB, five times while a loss is computed.
CHUNK, CUDA_CHUNK = 256, 512

# Fewest positions for which a thread of their own pays.
THREAD_POSITIONS = 32


class TokenLosses(NamedTuple):
    """Statistics of each scored token, all `(N,)` in nats; only `loss` has a gradient."""

    loss: torch.Tensor
    kl: torch.Tensor
    """Reverse KL for every loss: the measure of progress. In `TopTokens`, unnamed tokens count as one."""
    student_entropy: torch.Tensor
    teacher_entropy: torch.Tensor
    logprob: torch.Tensor
    """The student's log-probability of the token itself."""


class ScoredTokens(NamedTuple):
    """The tokens at the scored positions, and what is known of each, all `(N,)`."""

    ids_N: torch.Tensor
    sampler_N: torch.Tensor
    """Their log-probabilities at sampling time; only `policy_gradient` and a reward read them."""
    advantage_N: torch.Tensor
    """The reward's advantage; only a loss with a `reward_weight` reads it."""


# Positions, the student's log-distributions there, and where to note the losses -> the gradient of the losses
# by the student's logits, which may take the memory of the log-distributions.
GradeRows = Callable[[slice, torch.Tensor, TokenLosses], torch.Tensor]


def forward_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return KL(q, p) per row of `(N, V)`."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return KL(p, q) per row of `(N, V)`."""
    return forward_kl(log_q, log_p)


def top_k(log_p: torch.Tensor, log_q: torch.Tensor, k: int) -> torch.Tensor:
    """Return reverse KL over the teacher's k most likely tokens and the rest as one outcome, per row.

    Without the bucket, mass pushed out of the top k would cost nothing. Never exceeds the full reverse KL.
    """
    if k >= log_q.shape[-1]:
        return reverse_kl(log_p, log_q)
    ids = log_q.topk(k, -1).indices
    return reverse_kl(_with_rest(log_p, ids), _with_rest(log_q, ids))


def _with_rest(log_x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of these tokens, and of all others together."""
    # 1 minus the sum of the others would be pure rounding error where the teacher is confident.
    rest = log_x.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_x.gather(-1, ids), rest], -1)


def policy_gradient(
    log_p: torch.Tensor, log_q: torch.Tensor, token_N: torch.Tensor, sampler_N: torch.Tensor
) -> torch.Tensor:
    """Return -ratio * advantage of the sampled tokens, `(N,)`; its expected gradient is that of reverse KL.

    The importance ratio is taken against `sampler_N`, their log-probabilities at sampling time.
    """
    student_N, teacher_N = gather_logprobs(log_p, token_N), gather_logprobs(log_q, token_N)
    return -(student_N - sampler_N).exp() * (teacher_N - student_N).detach()


def clipped_gradient(
    log_p: torch.Tensor, token_N: torch.Tensor, sampler_N: torch.Tensor, advantage_N: torch.Tensor
) -> torch.Tensor:
    """Return the surrogate loss of rewarded tokens, `(N,)`.

    It is flat once the ratio to the sampler has moved from 1 by `CLIP` in the direction of the advantage.
    """
    ratio_N = (gather_logprobs(log_p, token_N) - sampler_N).exp()
    return -torch.minimum(ratio_N * advantage_N, ratio_N.clamp(1 - CLIP, 1 + CLIP) * advantage_N)


@torch.no_grad()
def token_logprobs(distribution: TeacherDistribution, token_N: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the log-probability of each token under the distribution at its position, `(N,)`."""
    logprob_N = torch.empty(len(token_N), device=token_N.device)
    for part in chunks(token_N):
        logprob_N[part] = gather_logprobs(distribution.log_probs(part, rows), token_N[part])
    return logprob_N


@torch.no_grad()
def missed_ends(
    student: HiddenStates, teacher: TeacherDistribution, eos_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the teacher's probability of ending here, and how much of it the student lacks, both `(N,)`.

    Summed over a teacher's own texts, their ratio is the share of its endings that the student would miss:
    a student that does not know when to stop shows it here without sampling a single answer.
    """
    rows, ids = shared_rows(student.head_VH, teacher), list(eos_ids)
    ends, missed = [], []
    for part in chunks(student.states_NH):
        p_N = student.log_probs(part, rows)[:, ids].exp().sum(-1)
        q_N = teacher.log_probs(part, rows)[:, ids].exp().sum(-1)
        ends.append(q_N)
        missed.append((q_N - p_N).clamp(min=0))
    return torch.cat(ends), torch.cat(missed)


def _divergence(
    p: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor, reverse: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (1 - reverse) KL(q, p) + reverse KL(p, q), KL(p, q), and the loss's gradient by the logits of p.

    The gradient of KL(q, p) is p - q, that of KL(p, q) is p (log p - log q - KL). It may be written over `p`.
    """
    ratio = log_p - log_q
    kl = (p * ratio).sum(-1)
    if reverse == 1:
        return kl, kl, ratio.sub_(kl[:, None]).mul_(p)
    q = log_q.exp()
    loss = reverse * kl - (1 - reverse) * (q * ratio).sum(-1)
    if reverse == 0:
        return loss, kl, p.sub_(q)
    slope = ratio.sub_(kl[:, None]).mul_(p).mul_(reverse)
    return loss, kl, slope.add_(p.sub_(q), alpha=1 - reverse)


def jsd(
    p: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return beta KL(q, m) + (1 - beta) KL(p, m), KL(p, q), and the loss's gradient by the logits of p.

    m is the mixture (1 - beta) p + beta q. The gradient is 1 - beta times that of KL(p, m) with m held fixed.
    As in TRL's GKD, beta 0 is KL(q, p) and 1 is KL(p, q), the limits of this over beta and over 1 - beta.
    """
    if beta in (0, 1):
        return _divergence(p, log_p, log_q, reverse=beta)
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    _, kl_to_m, slope = _divergence(p, log_p, log_m, reverse=1)
    loss = beta * reverse_kl(log_q, log_m) + (1 - beta) * kl_to_m
    return loss, reverse_kl(log_p, log_q), slope.mul_(1 - beta)


def _differentiated(
    cost: Callable[[torch.Tensor], torch.Tensor], log_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cost and its gradient by the logits of p: g - p sum(g), where g is that by log p."""
    with torch.enable_grad():
        leaf = log_p.detach().requires_grad_()
        loss = cost(leaf)
        (slope,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), slope.sub_(log_p.exp().mul_(slope.sum(-1, keepdim=True)))


def chunks(x_N: torch.Tensor, threads: int = 1) -> list[slice]:
    """Cut N positions into parts whose logits are computed at once."""
    size = CUDA_CHUNK if x_N.is_cuda else max(THREAD_POSITIONS, CHUNK // threads)
    size = max(1, min(size, math.ceil(len(x_N) / threads)))
    return [slice(start, start + size) for start in range(0, len(x_N), size)]


def for_each_part(x_N: torch.Tensor, compute: Callable[[slice], None]) -> None:
    """Compute all parts; on a CPU, each thread takes every n-th."""
    threads = 1 if x_N.is_cuda else max(1, min(torch.get_num_threads(), len(x_N) // THREAD_POSITIONS))
    parts = chunks(x_N, threads)

    def run(share: list[slice]) -> None:
        for part in share:
            compute(part)

    run_in_threads([partial(run, parts[i::threads]) for i in range(threads)])


class _TokenLoss(torch.autograd.Function):
    """Per-token losses from hidden states, saving hidden-sized gradients instead of vocabulary-sized logits.

    The head is frozen, so only the hidden state needs a gradient: that of the logits times the head.
    """

    @staticmethod
    def forward(ctx, student_NH, weight_VH, grade: GradeRows):
        student = HiddenStates(student_NH, weight_VH)
        grad_NH = torch.empty_like(student_NH)
        count = len(student_NH)
        found = TokenLosses(*(student_NH.new_zeros(count, dtype=torch.float32) for _ in TokenLosses._fields))

        def compute(part: slice) -> None:
            slope = grade(part, student.log_probs(part, len(weight_VH)), found)
            grad_NH[part] = slope.to(weight_VH.dtype) @ weight_VH

        for_each_part(student_NH, compute)
        ctx.save_for_backward(grad_NH)
        ctx.mark_non_differentiable(*found[1:])
        return tuple(found)

    @staticmethod
    def backward(ctx, grad_loss_N, *_):
        (grad_NH,) = ctx.saved_tensors
        return grad_NH * grad_loss_N[:, None].to(grad_NH.dtype), None, None


def imitation_losses(student: HiddenStates, token_N: torch.Tensor) -> TokenLosses:
    """Return the cross-entropy of each token, and zeros for what only a teacher shows."""

    def imitate(part: slice, log_p: torch.Tensor, found: TokenLosses) -> torch.Tensor:
        found.loss[part] = -log_p.gather(1, token_N[part, None])[:, 0]
        return log_p.exp_().scatter_add_(1, token_N[part, None], -torch.ones_like(log_p[:, :1]))

    return _per_token(student, len(student.head_VH), imitate)


def token_losses(
    student: HiddenStates, teacher: TeacherDistribution, tokens: ScoredTokens, loss: Loss
) -> TokenLosses:
    """Return the loss and statistics of each token.

    Args:
        student: The student's last hidden states, into which the gradient flows, and its frozen output
            embedding; rows beyond the teacher's vocabulary are padding.
        teacher: The teacher's distributions at the same N positions.
        tokens: The tokens that the states predict.
        loss: The divergence and its parameters.
    """
    ids_N, sampler_N, advantage_N = tokens

    def by_token(log_p: torch.Tensor, log_q: torch.Tensor, at: slice) -> torch.Tensor:
        match loss.kind:
            case "top_k":
                return top_k(log_p, log_q, loss.k)
            case "cross_entropy":
                return -gather_logprobs(log_p, ids_N[at])
        return policy_gradient(log_p, log_q, ids_N[at], sampler_N[at])

    def grade(at: slice, p: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor):
        """Return the losses, KL(p, q), and the losses' gradient by the student's logits."""
        match loss.kind:
            case "jsd":
                loss_N, kl_N, slope = jsd(p, log_p, log_q, loss.beta)
            case "forward_kl":
                loss_N, kl_N, slope = _divergence(p, log_p, log_q, loss.reverse)
            case "reverse_kl":
                loss_N, kl_N, slope = _divergence(p, log_p, log_q, reverse=1.0)
            case _:  # the others need autograd
                loss_N, slope = _differentiated(partial(by_token, log_q=log_q, at=at), log_p)
                kl_N = teacher.kl(at, log_p, log_q)
        if loss.reward_weight is not None:
            sampled = ids_N[at], sampler_N[at], advantage_N[at]
            rewarded_N, rewarded_slope = _differentiated(lambda x: clipped_gradient(x, *sampled), log_p)
            loss_N = loss.reward_weight * rewarded_N + loss.teacher_weight * loss_N
            slope = loss.reward_weight * rewarded_slope + loss.teacher_weight * slope
        return loss_N, kl_N, slope

    def compare(part: slice, log_p_NV: torch.Tensor, found: TokenLosses) -> torch.Tensor:
        log_q_NV = teacher.log_probs(part, log_p_NV.shape[1])
        slope_NV = log_p_NV  # the same memory: each block of rows is overwritten once it is compared
        size = rows_at_once(log_p_NV)
        for start in range(0, len(log_p_NV), size):
            rows = slice(start, min(start + size, len(log_p_NV)))
            at = slice(part.start + rows.start, part.start + rows.stop)
            log_p, log_q = log_p_NV[rows], log_q_NV[rows]
            p = log_p.exp()
            found.logprob[at] = gather_logprobs(log_p, ids_N[at])
            found.student_entropy[at] = -(p * log_p).sum(-1)
            found.teacher_entropy[at] = teacher.entropy(at, log_q)
            found.loss[at], found.kl[at], slope_NV[rows] = grade(at, p, log_p, log_q)
        return slope_NV

    return _per_token(student, shared_rows(student.head_VH, teacher), compare)


def _per_token(student: HiddenStates, rows: int, grade: GradeRows) -> TokenLosses:
    """Return the losses over the vocabulary's first `rows` tokens, in the head's precision."""
    with torch.autocast(student.states_NH.device.type, enabled=False):
        weight_VH = student.head_VH.detach()[:rows]
        return TokenLosses(*_TokenLoss.apply(student.states_NH.to(weight_VH.dtype), weight_VH, grade))


def gather_logprobs(log_NV: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of tokens, `(N,)`; of one that the vocabulary lacks, minus infinity.

    A student with such tokens is thus not scored where it wrote one: sampler and trainer differ there.
    """
    known_N = token_N < log_NV.shape[-1]
    found_N = log_NV.gather(-1, (token_N * known_N)[:, None])[:, 0]
    return found_N.masked_fill(~known_N, -torch.inf)
