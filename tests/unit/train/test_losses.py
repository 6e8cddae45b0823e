"""The losses against a deliberately naive reference, and the identities that define them."""

import pytest
import torch
from trl.experimental.gkd import GKDTrainer

from opdcl.model.distributions import HiddenStates
from opdcl.train import losses
from opdcl.train.losses import (
    CHUNK,
    THREAD_POSITIONS,
    ScoredTokens,
    chunks,
    for_each_part,
    imitation_losses,
    missed_ends,
    token_losses,
)
from opdcl.words import Loss

V, H = 37, 8
DIVERGENCES = ["reverse_kl", "forward_kl", "jsd", "top_k"]
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def reverse_kl(student, teacher, weight):
    return graded(student, teacher, weight, kind="reverse_kl").loss


def of_kind(kind):
    return {"kind": kind, "k": 5} if kind == "top_k" else {"kind": kind}


def graded(student, teacher, weight, tokens=None, sampler=None, **loss):
    n = len(student)
    tokens = torch.zeros(n, dtype=torch.long) if tokens is None else tokens
    sampler = torch.zeros(n) if sampler is None else sampler
    of_tokens = ScoredTokens(tokens, sampler, torch.zeros(n))
    return token_losses(HiddenStates(student, weight), HiddenStates(teacher, weight), of_tokens, Loss(**loss))


def reference(kind, *inputs):
    """Return a loss of plain float64 torch whose gradient autograd computes through the softmax itself."""
    student, teacher, weight, tokens, sampler, advantage = inputs
    log_p, log_q = ((x @ weight.T).log_softmax(-1) for x in (student, teacher))
    p, q, rows = log_p.exp(), log_q.exp(), torch.arange(len(student))
    token_p, token_q = log_p[rows, tokens], log_q[rows, tokens]
    match kind:
        case "reverse_kl":
            return (p * (log_p - log_q)).sum(-1)
        case "forward_kl":
            return (q * (log_q - log_p)).sum(-1)
        case "mixed":
            return (0.7 * q * (log_q - log_p) + 0.3 * p * (log_p - log_q)).sum(-1)
        case "jsd":
            mixed = (0.7 * p + 0.3 * q).log()
            return (0.3 * q * (log_q - mixed) + 0.7 * p * (log_p - mixed)).sum(-1)
        case "top_k":
            named = torch.zeros_like(q).scatter(1, q.topk(5, -1).indices, 1.0)
            rest_p, rest_q = ((x * (1 - named)).sum(-1) for x in (p, q))
            return (named * p * (log_p - log_q)).sum(-1) + rest_p * (rest_p / rest_q).log()
        case "policy_gradient":
            return -(token_p - sampler).exp() * (token_q - token_p).detach()
        case "cross_entropy":
            return -token_p
        case "reward" | "reward and jsd":
            beside = "jsd" if "jsd" in kind else "reverse_kl"
            ratio = (token_p - sampler).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            return -0.5 * surrogate + 0.3 * reference(beside, *inputs)


def tensors(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, H, generator=g), torch.randn(n, H, generator=g), torch.randn(V, H, generator=g))


@pytest.mark.parametrize(
    "kind", [*DIVERGENCES, "mixed", "policy_gradient", "cross_entropy", "reward", "reward and jsd"]
)
def test_loss_gradient_and_kl_equal_an_independent_reference(kind):
    student, teacher, weight = (x.double() for x in tensors(CHUNK + 9))
    tokens = torch.arange(len(student)) % V
    # Shifts keep the ratio away from the clip bounds, where the reward's gradient jumps.
    shift = torch.tensor([-0.5, -0.1, 0.1, 0.5]).double().repeat(len(student))[: len(student)]
    sampler = (student @ weight.T).log_softmax(-1)[torch.arange(len(student)), tokens] + shift
    advantage = torch.tensor([1.0, -1.0, 0.4]).double().repeat(len(student))[: len(student)]
    chosen = {
        "mixed": {"reverse": 0.3},
        "jsd": {"kind": "jsd", "beta": 0.3},
        "reward": {"kind": "reverse_kl", "reward_weight": 0.5, "teacher_weight": 0.3},
        "reward and jsd": {"kind": "jsd", "beta": 0.3, "reward_weight": 0.5, "teacher_weight": 0.3},
    }
    loss = Loss(**chosen.get(kind) or of_kind(kind))
    ours, plain = (student.clone().requires_grad_() for _ in range(2))
    p, q = HiddenStates(ours, weight), HiddenStates(teacher, weight)
    result = token_losses(p, q, ScoredTokens(tokens, sampler, advantage), loss)
    expected = reference(kind, plain, teacher, weight, tokens, sampler, advantage)
    torch.testing.assert_close(result.loss.detach().double(), expected.detach(), atol=1e-5, rtol=1e-4)
    for found, name in ((result.kl, "reverse_kl"), (-result.logprob, "cross_entropy")):
        known = reference(name, student, teacher, weight, tokens, sampler, advantage)
        torch.testing.assert_close(found.double(), known, atol=1e-5, rtol=1e-4)
    # Unequal weights, as truncated completions have.
    scale = torch.linspace(0.5, 1.5, len(student)).double()
    (result.loss * scale).sum().backward()
    (expected * scale).sum().backward()
    assert plain.grad.abs().max() > 0.1
    torch.testing.assert_close(ours.grad, plain.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("count", [9, CHUNK + 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_jsd_has_loss_and_gradient_of_trls_gkd(beta, count, dtype):
    """In chunks and whole: beta 0 is KL(teacher, student) there, 1 is KL(student, teacher)."""
    student, teacher, weight = (x.to(dtype) for x in tensors(count))
    ours, trls = student.clone().requires_grad_(), (student @ weight.T).requires_grad_()
    in_chunks = graded(ours, teacher, weight, kind="jsd", beta=beta).loss
    log_p, log_q = (trls.detach().log_softmax(-1), (teacher @ weight.T).log_softmax(-1))
    at_once, _, slope = losses.jsd(log_p.exp(), log_p, log_q, beta)
    expected = GKDTrainer.generalized_jsd_loss(trls, teacher @ weight.T, beta=beta, reduction="none").sum(-1)
    in_chunks.sum().backward()
    expected.sum().backward()
    assert trls.grad.abs().max() > 0.01
    # The chunks are in float32 whatever the model is in.
    exact = 1e-12 if dtype == torch.float64 else 2e-5
    for loss, gradient, atol in ((in_chunks, ours.grad, 2e-5), (at_once, slope @ weight, exact)):
        torch.testing.assert_close(loss.to(dtype), expected, atol=atol, rtol=atol)
        torch.testing.assert_close(gradient, trls.grad @ weight, atol=atol, rtol=atol)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_every_divergence_is_zero_with_zero_gradient_at_equality_and_positive_elsewhere(kind):
    student, teacher, weight = tensors(50)
    assert (graded(student, teacher, weight, **of_kind(kind)).loss > 0).all()
    student.requires_grad_()
    loss = graded(student, student.detach().clone(), weight, **of_kind(kind)).loss
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.zeros(50), atol=1e-5, rtol=0)
    assert student.grad.abs().max() < 1e-4


def test_entropies_are_those_of_both_models():
    student, teacher, weight = tensors(3)
    result = graded(student, teacher, weight)
    for entropy, hidden in ((result.student_entropy, student), (result.teacher_entropy, teacher)):
        expected = torch.distributions.Categorical(logits=hidden @ weight.T).entropy()
        torch.testing.assert_close(entropy, expected, atol=1e-5, rtol=1e-5)


def test_policy_gradient_has_in_expectation_the_gradient_of_reverse_kl():
    student, teacher, weight = (t.double() for t in tensors(3, seed=5))
    expected = torch.zeros_like(student)
    p = torch.softmax(student @ weight.T, -1)
    for token in range(V):
        x = student.clone().requires_grad_()
        tokens = torch.full((3,), token)
        loss = graded(
            x, teacher, weight, tokens=tokens, sampler=p[:, token].log(), kind="policy_gradient"
        ).loss
        loss.sum().backward()
        expected += p[:, token, None] * x.grad
    x = student.clone().requires_grad_()
    reverse_kl(x, teacher, weight).sum().backward()
    torch.testing.assert_close(expected, x.grad, atol=1e-5, rtol=1e-4)


def test_missed_ends_are_counted_where_the_student_is_less_likely_to_end():
    weight = torch.eye(4)
    teacher = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.1, 0.1, 0.4, 0.4], [0.2, 0.2, 0.3, 0.3]]).log()
    student = torch.tensor([[0.1, 0.1, 0.4, 0.4], [0.5, 0.3, 0.1, 0.1], [0.2, 0.2, 0.3, 0.3]]).log()
    ends, missed = missed_ends(HiddenStates(student, weight), HiddenStates(teacher, weight), [0, 1])
    torch.testing.assert_close(ends, torch.tensor([0.8, 0.2, 0.4]))
    torch.testing.assert_close(missed, torch.tensor([0.6, 0.0, 0.0]))


def test_no_answer_has_no_loss():
    states = HiddenStates(torch.zeros(0, 8, requires_grad=True), torch.randn(50, 8))
    assert imitation_losses(states, torch.zeros(0, dtype=torch.long)).loss.sum() == 0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_position_is_in_one_part(threads):
    for count in (0, 1, THREAD_POSITIONS, 3 * THREAD_POSITIONS + 1, CHUNK + 1):
        seen = torch.zeros(count)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for_each_part(seen, lambda part, seen=seen: seen[part].add_(1))
        finally:
            torch.set_num_threads(before)
        assert bool((seen == 1).all())
    assert max(p.stop - p.start for p in chunks(torch.zeros(10 * CHUNK), threads)) <= CHUNK
