"""What a graded token costs: divergences between student p and teacher q over the whole vocabulary, in chunks.

| loss | per token | source |
| --- | --- | --- |
| `reverse_kl` | KL(p, q): punishes the student for what the teacher would not say | arXiv 2306.08543, 2306.13649 |
| `forward_kl` | KL(q, p): asks for all that the teacher might say | arXiv 2306.13649 |
| `jsd` | beta KL(q, m) + (1 - beta) KL(p, m), m = beta q + (1 - beta) p, over beta (1 - beta) | arXiv 2306.13649, eq. 1 |
| `entropy_switched` | forward KL where the teacher is unsure, reverse KL elsewhere | arXiv 2603.07079 |
| `top_k` | reverse KL over the teacher's k likeliest tokens and one bucket for the rest | arXiv 2601.20802 |
| `policy_gradient` | -(p / p_sampler) (log q - log p) of the sampled token alone | REINFORCE, importance-sampled |
| `clipped_gradient` | -min(r A, clip(r) A), r = p / p_sampler, A the completion's reward against its group's | arXiv 1707.06347, 2402.03300 |
| `cross_entropy` | -log p of the token itself: imitation, for text that a teacher wrote | arXiv 1606.07947 |

Near equality every divergence is half a squared distance, so that one learning rate serves all: JSD itself would be
beta (1 - beta) times smaller, and its limits at beta 0 and 1, forward and reverse KL, would vanish.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from opdcl.config.loss import LossSection
from opdcl.config.recover import RewardSection
from opdcl.model.distributions import HiddenStates, TeacherDistribution, rows_at_once, shared_rows

# Positions projected onto the vocabulary at once: 256 x 49,152 fp32 logits are 50 MB.
CHUNK = 256

# Both log-distributions, and which positions they are of -> their losses.
Cost = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]


class TokenLosses(NamedTuple):
    """What is known of each graded token, all `(N,)` in nats; only `loss` has a gradient."""

    loss: torch.Tensor
    kl: torch.Tensor
    """Reverse KL, whatever the loss: the yardstick of progress. Of what a server tells, with all other tokens as one."""
    student_entropy: torch.Tensor
    teacher_entropy: torch.Tensor
    logprob: torch.Tensor
    """The student's log-probability of the token itself."""


def forward_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return KL(q, p) per row of `(N, V)`."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return KL(p, q) per row of `(N, V)`."""
    return forward_kl(log_q, log_p)


def jsd(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the generalized Jensen-Shannon divergence over beta (1 - beta), per row; forward KL at 0, reverse at 1."""
    if beta in (0.0, 1.0):
        return (reverse_kl if beta else forward_kl)(log_p, log_q)
    scale = torch.tensor([beta, 1 - beta], dtype=log_p.dtype, device=log_p.device).log()
    log_m = torch.logaddexp(log_q + scale[0], log_p + scale[1])
    return (beta * forward_kl(log_m, log_q) + (1 - beta) * forward_kl(log_m, log_p)) / (beta * (1 - beta))


def entropy_switched(log_p: torch.Tensor, log_q: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return forward KL where the teacher's entropy exceeds `threshold` nats, reverse KL elsewhere, per row."""
    unsure = -(log_q.exp() * log_q).sum(-1) > threshold
    return torch.where(unsure, forward_kl(log_p, log_q), reverse_kl(log_p, log_q))


def top_k(log_p: torch.Tensor, log_q: torch.Tensor, k: int) -> torch.Tensor:
    """Return reverse KL over the teacher's k likeliest tokens and the rest as one outcome, per row.

    Without the bucket, mass pushed out of the top k would cost nothing. Never more than the full reverse KL.
    """
    if k >= log_q.shape[-1]:
        return reverse_kl(log_p, log_q)
    ids = log_q.topk(k, -1).indices
    # Not 1 minus the sum of the others, which is rounding alone where the teacher is sure.
    buckets = [
        torch.cat([x.gather(-1, ids), x.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)], -1)
        for x in (log_p, log_q)
    ]
    return reverse_kl(*buckets)


def policy_gradient(
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    token_N: torch.Tensor,
    sampler_N: torch.Tensor,
    later_N: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Return -ratio * advantage of the sampled tokens, whose gradient in expectation is that of reverse KL.

    Args:
        log_p: The student, `(N, V)`.
        log_q: The teacher, `(N, V)`.
        token_N: The sampled tokens.
        sampler_N: Their log-probabilities when they were sampled; the ratio to now is importance sampling's.
        later_N: What `later_advantages` credits each token with for those that came after it.
    """
    mine, theirs = (x.gather(-1, token_N[:, None])[:, 0] for x in (log_p, log_q))
    advantage = (theirs - mine).detach() + later_N
    return -(mine - sampler_N).exp() * advantage


def clipped_gradient(
    log_p: torch.Tensor,
    token_N: torch.Tensor,
    sampler_N: torch.Tensor,
    advantage_N: torch.Tensor,
    clip: float,
) -> torch.Tensor:
    """Return the surrogate loss of rewarded tokens: their gradient ends where the ratio to the sampler has moved by `clip`.

    Args:
        log_p: The student, `(N, V)`.
        token_N: The sampled tokens.
        sampler_N: Their log-probabilities when they were sampled.
        advantage_N: `group_advantages` of the completion that each belongs to.
        clip: How far from 1 the ratio may go in the direction that the reward asks for.
    """
    ratio_N = (log_p.gather(-1, token_N[:, None])[:, 0] - sampler_N).exp()
    return -torch.minimum(ratio_N * advantage_N, ratio_N.clamp(1 - clip, 1 + clip) * advantage_N)


def group_advantages(rewards: list[float], group: int) -> list[float]:
    """Return each reward's distance from the mean of its group, in standard deviations; 0 where all of a group are alike.

    Args:
        rewards: Group after group, all of the size `group`.
        group: Completions per prompt.
    """
    reward_PG = torch.tensor(rewards, dtype=torch.float64).view(-1, group)
    found = (reward_PG - reward_PG.mean(1, keepdim=True)) / (reward_PG.std(1, keepdim=True) + 1e-4)
    alike = reward_PG.amax(1, keepdim=True) == reward_PG.amin(1, keepdim=True)
    return found.masked_fill(alike, 0.0).flatten().tolist()


def later_advantages(advantage_N: torch.Tensor, lengths: list[int], discount: float) -> torch.Tensor:
    """Return, per token, discount * (the next token's advantage + what that one is credited with), within its sequence.

    Args:
        advantage_N: log q - log p of the sampled tokens, sequence after sequence.
        lengths: How many of them belong to each sequence.
        discount: 0 leaves every token to itself; 1 is the sequence's whole reverse KL from here on.
    """
    later_N = torch.zeros_like(advantage_N)
    ends = set(itertools.accumulate(lengths))
    for i in range(len(advantage_N) - 2, -1, -1):
        if i + 1 not in ends:
            later_N[i] = discount * (advantage_N[i + 1] + later_N[i + 1])
    return later_N


@torch.no_grad()
def token_logprobs(
    opinion: TeacherDistribution, token_N: torch.Tensor, rows: int, temperature: float
) -> torch.Tensor:
    """Return the log-probability of each token in somebody's opinion of its position, `(N,)`."""
    parts = [slice(start, start + CHUNK) for start in range(0, len(token_N), CHUNK)]
    found = [
        opinion.log_probs(part, rows, temperature).gather(-1, token_N[part, None])[:, 0] for part in parts
    ]
    return torch.cat(found) if found else torch.empty(0, device=token_N.device)


@torch.no_grad()
def top_k_overlap(student: HiddenStates, teacher: TeacherDistribution, k: int = 16) -> torch.Tensor:
    """Return which share of the teacher's k likeliest tokens is among the student's k likeliest, per position, `(N,)`.

    Distillation on the student's own text works through the tokens that both consider (arXiv 2604.13016).
    """
    shares = []
    rows = shared_rows(student.head_VH, teacher)
    for start in range(0, len(student.states_NH), CHUNK):
        mine, theirs = (
            x.log_probs(slice(start, start + CHUNK), rows, 1.0).topk(min(k, rows), -1).indices
            for x in (student, teacher)
        )
        shares.append((mine[:, :, None] == theirs[:, None]).any(1).float().mean(-1))
    return torch.cat(shares)


class _TokenLoss(torch.autograd.Function):
    """Per-token losses from hidden states, keeping hidden-sized gradients instead of vocabulary-sized logits.

    The head is frozen, so the only gradient needed is that of the student's hidden state h. With g = dL/dlog p it is
    (g - p sum(g)) / temperature @ W; for reverse KL, g - p sum(g) = p (log p - log q - KL), computed in place.
    """

    @staticmethod
    def forward(ctx, student_NH, weight_VH, teacher, token_N, temperature, cost, cap):
        grad_NH = torch.empty_like(student_NH)
        loss_N, kl_N, student_entropy_N, teacher_entropy_N, logprob_N = (
            student_NH.new_empty(len(student_NH), dtype=torch.float32) for _ in range(5)
        )
        for start in range(0, len(student_NH), CHUNK):
            part = slice(start, start + CHUNK)
            student = HiddenStates(student_NH, weight_VH).log_probs(part, len(weight_VH), temperature)
            theirs = teacher.log_probs(part, len(weight_VH), temperature)
            block = rows_at_once(student)
            # Each block of `student` ends as the gradient of its logits.
            for first, log_p, log_q in zip(
                itertools.count(start, block), student.split(block), theirs.split(block), strict=False
            ):
                at = slice(first, first + len(log_p))
                p = log_p.exp()
                logprob_N[at] = log_p.gather(-1, token_N[at, None])[:, 0]
                teacher_entropy_N[at] = teacher.entropy(at, log_q)
                student_entropy_N[at] = -(p * log_p).sum(-1)
                if cost:
                    with torch.enable_grad():
                        leaf = log_p.detach().requires_grad_()
                        loss = cost(leaf, log_q, at)
                        (slope,) = torch.autograd.grad(loss.sum(), leaf)
                    loss_N[at] = loss.detach()
                    kl_N[at] = teacher.kl(at, log_p, log_q)
                    torch.sub(slope, p.mul_(slope.sum(-1, keepdim=True)), out=log_p).div_(temperature)
                else:
                    ratio = log_p.sub_(log_q)
                    loss_N[at] = kl_N[at] = kl = (p * ratio).sum(-1)
                    ratio.sub_(kl[:, None]).mul_(p).div_(temperature)
            grad_NH[part] = student.to(weight_VH.dtype) @ weight_VH
        if cap is not None:
            grad_NH[loss_N > cap] = 0
            loss_N.clamp_(max=cap)
        ctx.save_for_backward(grad_NH)
        found = loss_N, kl_N, student_entropy_N, teacher_entropy_N, logprob_N
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    def backward(ctx, grad_loss_N, *_):
        (grad_NH,) = ctx.saved_tensors
        return grad_NH * grad_loss_N[:, None].to(grad_NH.dtype), *[None] * 6


def token_losses(
    student_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    teacher: TeacherDistribution,
    token_N: torch.Tensor,
    sampler_N: torch.Tensor,
    temperature: float = 1.0,
    loss: LossSection | None = None,
    lengths: list[int] | None = None,
    reward: RewardSection | None = None,
    advantage_N: torch.Tensor | None = None,
) -> TokenLosses:
    """Return the loss of each token, and what else is known of it.

    Args:
        student_NH: The student's last hidden states, `(N, H)`; the gradient flows into these.
        weight_VH: The frozen output embedding, `(V, H)`; rows beyond those that the teacher has stand for nothing.
        teacher: What the teacher thinks of the same N positions.
        token_N: The tokens that the states predict.
        sampler_N: Log-probabilities of these tokens when they were sampled; only `policy_gradient` and a reward read them.
        temperature: Softmax temperature of both distributions.
        loss: Which divergence, with its parameters; reverse KL by default.
        lengths: How many tokens belong to each sequence; only a discounted `policy_gradient` reads them.
        reward: How rewarded tokens are weighed against the teacher; without it there is none.
        advantage_N: Each token's advantage by that reward.
    """
    loss = loss or LossSection()
    with torch.autocast(student_NH.device.type, enabled=False):
        weight_VH = weight_VH.detach()[: shared_rows(weight_VH, teacher)]
        student_NH = student_NH.to(weight_VH.dtype)
        later_N = torch.zeros_like(sampler_N)
        if loss.kind == "policy_gradient" and loss.discount:
            both = HiddenStates(student_NH.detach(), weight_VH), teacher
            mine_N, theirs_N = (token_logprobs(x, token_N, len(weight_VH), temperature) for x in both)
            later_N = later_advantages(theirs_N - mine_N, lengths or [len(token_N)], loss.discount)
        cost = _cost(loss, token_N, sampler_N, later_N)
        if reward and advantage_N is not None:
            cost = _rewarded(cost, reward, token_N, sampler_N, advantage_N)
        return TokenLosses(
            *_TokenLoss.apply(student_NH, weight_VH, teacher, token_N, temperature, cost, loss.cap)
        )


def _rewarded(dense: Cost | None, reward: RewardSection, token_N, sampler_N, advantage_N) -> Cost:
    """Return the surrogate loss of the reward, with the teacher's loss beside it at its weight."""
    teach = dense or (lambda log_p, log_q, part: reverse_kl(log_p, log_q))
    return lambda log_p, log_q, part: (
        reward.weight
        * clipped_gradient(log_p, token_N[part], sampler_N[part], advantage_N[part], reward.clip)
        + reward.teacher * teach(log_p, log_q, part)
    )


def _cost(loss: LossSection, token_N, sampler_N, later_N) -> Cost | None:
    """Return the loss as a function of both log-distributions and the positions at hand; None for reverse KL."""
    match loss.kind:
        case "reverse_kl":
            return None
        case "forward_kl":
            return lambda log_p, log_q, part: forward_kl(log_p, log_q)
        case "jsd":
            plain = 1.0 if loss.rescaled or loss.beta in (0.0, 1.0) else loss.beta * (1 - loss.beta)
            return lambda log_p, log_q, part: plain * jsd(log_p, log_q, loss.beta)
        case "entropy_switched":
            return lambda log_p, log_q, part: entropy_switched(log_p, log_q, loss.unsure_above)
        case "top_k":
            return lambda log_p, log_q, part: top_k(log_p, log_q, loss.k)
        case "cross_entropy":
            return lambda log_p, log_q, part: -log_p.gather(-1, token_N[part, None])[:, 0]
        case "policy_gradient":
            return lambda log_p, log_q, part: policy_gradient(
                log_p, log_q, token_N[part], sampler_N[part], later_N[part]
            )
