"""The loss against a deliberately naive reference, and the identities that pin it."""

import math

import pytest
import torch

from opdcl.config.loss import LossSection
from opdcl.distill import losses
from opdcl.distill.losses import CHUNK, token_losses, top_k_overlap
from opdcl.model.distributions import HiddenStates

V, H = 37, 8
KINDS = ["reverse_kl", "forward_kl", "jsd", "entropy_switched", "top_k"]


def reverse_kl(student, teacher, weight, temperature=1.0):
    return graded(student, teacher, weight, temperature).loss


def graded(student, teacher, weight, temperature=1.0, tokens=None, sampler=None, **loss):
    n = len(student)
    tokens = torch.zeros(n, dtype=torch.long) if tokens is None else tokens
    sampler = torch.zeros(n) if sampler is None else sampler
    return token_losses(
        student, weight, HiddenStates(teacher, weight), tokens, sampler, temperature, LossSection(**loss)
    )


def naive(student, teacher, weight, temperature=1.0):
    """Sum p (log p - log q) token by token and word by word, in Python floats."""
    out = []
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        logits = [
            [sum(a * b for a, b in zip(h, w, strict=True)) / temperature for w in weight.tolist()]
            for h in (s, t)
        ]
        p, q = ([math.exp(x - max(row)) for x in row] for row in logits)
        p, q = ([x / sum(row) for x in row] for row in (p, q))
        out.append(sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True)))
    return torch.tensor(out)


def tensors(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, H, generator=g), torch.randn(n, H, generator=g), torch.randn(V, H, generator=g))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_equals_the_naive_reference(temperature):
    student, teacher, weight = tensors(9)
    kl = reverse_kl(student, teacher, weight, temperature)
    torch.testing.assert_close(kl, naive(student, teacher, weight, temperature), atol=2e-5, rtol=1e-5)


def test_gradient_equals_autograd_through_plain_torch():
    student, teacher, weight = tensors(7)
    student.requires_grad_()
    reverse_kl(student, teacher, weight, 1.3).sum().backward()
    ours, student.grad = student.grad, None
    log_p = torch.log_softmax(student @ weight.T / 1.3, -1)
    log_q = torch.log_softmax(teacher @ weight.T / 1.3, -1)
    (log_p.exp() * (log_p - log_q)).sum().backward()
    torch.testing.assert_close(ours, student.grad, atol=1e-5, rtol=1e-4)


def test_gradient_passes_finite_differences():
    student, teacher, weight = (t.double() for t in tensors(2))
    student.requires_grad_()
    reverse_kl(student, teacher, weight).sum().backward()
    step = 1e-3
    for i in (0, 5):
        up, down = student.detach().clone(), student.detach().clone()
        up[0, i] += step
        down[0, i] -= step
        slope = (reverse_kl(up, teacher, weight).sum() - reverse_kl(down, teacher, weight).sum()) / (2 * step)
        assert float(student.grad[0, i]) == pytest.approx(float(slope), rel=2e-2, abs=1e-3)


def test_zero_loss_and_zero_gradient_where_student_equals_teacher():
    student, _, weight = tensors(5)
    student.requires_grad_()
    kl = reverse_kl(student, student.detach().clone(), weight)
    kl.sum().backward()
    assert float(kl.detach().abs().max()) < 1e-6
    assert float(student.grad.abs().max()) < 1e-6


def test_never_negative_and_not_symmetric():
    student, teacher, weight = tensors(64)
    there, back = reverse_kl(student, teacher, weight), reverse_kl(teacher, student, weight)
    assert float(there.min()) >= 0
    assert float((there - back).abs().max()) > 0.1


def test_a_teacher_without_mass_where_the_student_has_it_costs_more():
    weight = torch.eye(4)
    student = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    mild, harsh = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([[-9.0, 0.0, 0.0, 0.0]])
    assert reverse_kl(student, harsh, weight) > 5 * reverse_kl(student, mild, weight)


def test_entropies_are_those_of_both_models():
    student, teacher, weight = tensors(3)
    _, _, of_student, of_teacher, _ = graded(student, teacher, weight)
    for got, hidden in ((of_student, student), (of_teacher, teacher)):
        expected = torch.distributions.Categorical(logits=hidden @ weight.T).entropy()
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_chunks_do_not_show():
    student, teacher, weight = tensors(2 * CHUNK + 3)
    whole = reverse_kl(student, teacher, weight)
    parts = torch.cat(
        [reverse_kl(s, t, weight) for s, t in zip(student.split(100), teacher.split(100), strict=True)]
    )
    torch.testing.assert_close(whole, parts)


def test_logprob_is_that_of_the_token():
    student, teacher, weight = tensors(CHUNK + 5)
    tokens = torch.arange(len(student)) % V
    expected = torch.log_softmax(student @ weight.T / 1.3, -1)[torch.arange(len(student)), tokens]
    torch.testing.assert_close(
        graded(student, teacher, weight, 1.3, tokens).logprob, expected, atol=1e-5, rtol=1e-5
    )


def distributions(n=40, seed=3):
    student, teacher, weight = (t.double() for t in tensors(n, seed))
    return torch.log_softmax(0.4 * student @ weight.T, -1), torch.log_softmax(0.4 * teacher @ weight.T, -1)


def naive_loss(kind, p, q, beta=0.5, k=5, unsure_above=2.0):
    """One position, in Python floats, from the definitions."""

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    if kind == "reverse_kl":
        return kl(p, q)
    if kind == "forward_kl":
        return kl(q, p)
    if kind == "jsd":
        m = [beta * y + (1 - beta) * x for x, y in zip(p, q, strict=True)]
        return (beta * kl(q, m) + (1 - beta) * kl(p, m)) / (beta * (1 - beta))
    if kind == "entropy_switched":
        return kl(q, p) if -sum(y * math.log(y) for y in q) > unsure_above else kl(p, q)
    top = sorted(range(len(q)), key=lambda i: -q[i])[:k]
    return kl(
        [*(p[i] for i in top), 1 - sum(p[i] for i in top)], [*(q[i] for i in top), 1 - sum(q[i] for i in top)]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_equals_its_definition_and_its_gradient_autograd(kind):
    options = {"beta": 0.3, "k": 5, "unsure_above": 2.0}
    student, teacher, weight = (t.double() for t in tensors(CHUNK + 3))
    student.requires_grad_()
    found = graded(student, teacher, weight, kind=kind, **options)
    found.loss.sum().backward()
    p, q = (torch.softmax(x.detach() @ weight.T, -1) for x in (student, teacher))
    rows = range(0, len(student), 20)
    expected = torch.tensor([naive_loss(kind, p[i].tolist(), q[i].tolist(), **options) for i in rows])
    torch.testing.assert_close(found.loss[::20].detach(), expected, atol=1e-4, rtol=1e-4)
    plain = student.detach().clone().requires_grad_()
    log_p, log_q = torch.log_softmax(plain @ weight.T, -1), torch.log_softmax(teacher @ weight.T, -1)
    cost = {
        "reverse_kl": losses.reverse_kl,
        "forward_kl": losses.forward_kl,
        "jsd": lambda a, b: losses.jsd(a, b, 0.3),
        "top_k": lambda a, b: losses.top_k(a, b, 5),
        "entropy_switched": lambda a, b: losses.entropy_switched(a, b, 2.0),
    }[kind]
    cost(log_p, log_q).sum().backward()
    torch.testing.assert_close(student.grad, plain.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_is_zero_with_zero_gradient_at_equality_and_positive_elsewhere(kind):
    student, teacher, weight = tensors(50)
    assert (graded(student, teacher, weight, kind=kind).loss > 0).all()
    student.requires_grad_()
    loss = graded(student, student.detach().clone(), weight, kind=kind).loss
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.zeros(50), atol=1e-5, rtol=0)
    assert student.grad.abs().max() < 1e-4


def test_jsd_recovers_both_endpoints():
    log_p, log_q = distributions()
    for beta, kl in ((0.0, losses.forward_kl), (1.0, losses.reverse_kl)):
        expected = kl(log_p, log_q)
        torch.testing.assert_close(losses.jsd(log_p, log_q, beta), expected)
        near = beta + (1e-6 if beta == 0 else -1e-6)
        torch.testing.assert_close(losses.jsd(log_p, log_q, near), expected, rtol=1e-3, atol=1e-4)


def test_jsd_midpoint_is_symmetric_and_bounded_by_ln_2():
    log_p, log_q = distributions()
    torch.testing.assert_close(losses.jsd(log_p, log_q, 0.5), losses.jsd(log_q, log_p, 0.5))
    disjoint = torch.tensor([[1.0, 1e-30]]).log().double(), torch.tensor([[1e-30, 1.0]]).log().double()
    assert (losses.jsd(log_p, log_q, 0.5) / 4 < math.log(2)).all()
    assert float(losses.jsd(*disjoint, 0.5)) / 4 == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_near_equality_every_beta_has_the_same_size(beta):
    log_p, _ = distributions()
    near = torch.log_softmax(
        log_p + 1e-3 * torch.randn(log_p.shape, generator=torch.Generator().manual_seed(0)), -1
    )
    torch.testing.assert_close(
        losses.jsd(log_p, near, beta), losses.reverse_kl(log_p, near), rtol=0.02, atol=1e-9
    )


def test_top_k_is_at_most_the_whole_and_reaches_it():
    log_p, log_q = distributions()
    whole = losses.reverse_kl(log_p, log_q)
    for k in (1, 5, 20):
        assert (losses.top_k(log_p, log_q, k) <= whole + 1e-9).all()
    torch.testing.assert_close(losses.top_k(log_p, log_q, V), whole)


def test_top_k_charges_for_mass_pushed_out_of_the_top_k():
    log_q = torch.tensor([[0.6, 0.3, 0.05, 0.05]]).double().log()
    inside, outside = (
        torch.tensor([row]).double().log() for row in ([0.6, 0.3, 0.05, 0.05], [0.06, 0.03, 0.46, 0.45])
    )
    assert float(losses.top_k(outside, log_q, 2)) > 1 > float(losses.top_k(inside, log_q, 2)) + 0.9


def test_entropy_switch_goes_from_one_kl_to_the_other():
    log_p, log_q = distributions()
    torch.testing.assert_close(losses.entropy_switched(log_p, log_q, 100.0), losses.reverse_kl(log_p, log_q))
    torch.testing.assert_close(losses.entropy_switched(log_p, log_q, 0.0), losses.forward_kl(log_p, log_q))


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


def test_policy_gradient_weighs_by_how_much_likelier_the_token_has_become():
    student, teacher, weight = tensors(4)
    tokens = torch.arange(4)
    now = graded(student, teacher, weight, tokens=tokens).logprob
    same, half = (
        graded(student, teacher, weight, tokens=tokens, sampler=now - shift, kind="policy_gradient").loss
        for shift in (0.0, math.log(2))
    )
    torch.testing.assert_close(half, 2 * same)


def test_one_signal_per_token():
    student, teacher, weight = tensors(11)
    for kind in [*KINDS, "policy_gradient"]:
        assert graded(student, teacher, weight, kind=kind).loss.shape == (11,)


def test_cap_bounds_the_loss_and_stops_its_gradient():
    student, teacher, weight = tensors(50)
    student.requires_grad_()
    free = graded(student, teacher, weight)
    cap = float(free.loss.detach().median())
    capped = graded(student, teacher, weight, cap=cap)
    torch.testing.assert_close(capped.loss.detach(), free.loss.detach().clamp(max=cap))
    torch.testing.assert_close(capped.kl, free.kl)
    capped.loss.sum().backward()
    over = free.loss > cap
    assert over.any()
    assert (student.grad[over] == 0).all()
    assert (student.grad[~over].abs().sum(-1) > 0).all()


def test_later_advantages_equal_a_double_loop():
    torch.manual_seed(3)
    lengths, discount = [4, 1, 7], 0.8
    advantage = torch.randn(sum(lengths))
    expected, start = [], 0
    for length in lengths:
        for t in range(length):
            expected.append(
                sum(discount ** (s - t) * float(advantage[start + s]) for s in range(t + 1, length))
            )
        start += length
    torch.testing.assert_close(losses.later_advantages(advantage, lengths, discount), torch.tensor(expected))
    assert not losses.later_advantages(advantage, lengths, 0.0).any()


def test_a_discount_credits_tokens_for_what_follows_within_their_own_sequence():
    torch.manual_seed(4)
    student, teacher, weight = torch.randn(5, 6), torch.randn(5, 6), torch.randn(9, 6)
    tokens, sampler = torch.randint(9, (5,)), torch.zeros(5)
    loss = {"kind": "policy_gradient", "discount": 0.5}
    one, two = (
        token_losses(
            student, weight, HiddenStates(teacher, weight), tokens, sampler, 1.0, LossSection(**loss), lengths
        ).loss
        for lengths in ([5], [2, 3])
    )
    alone = graded(student, teacher, weight, tokens=tokens, sampler=sampler, kind="policy_gradient").loss
    log_p, log_q = (
        (x @ weight.T).log_softmax(-1).gather(-1, tokens[:, None])[:, 0] for x in (student, teacher)
    )
    gap = log_q - log_p
    assert float(two[0] - alone[0]) == pytest.approx(float(-log_p[0].exp() * 0.5 * gap[1]), rel=1e-4)
    assert float(one[1]) != pytest.approx(float(two[1]))
    torch.testing.assert_close(two[[1, 4]], alone[[1, 4]])  # the last of each sequence


def test_plain_jsd_is_smaller_by_beta_times_its_complement():
    torch.manual_seed(5)
    student, teacher, weight = torch.randn(5, 6), torch.randn(5, 6), torch.randn(9, 6)
    for beta, factor in ((0.5, 0.25), (0.1, 0.09), (0.0, 1.0), (1.0, 1.0)):
        ours, plain = (
            graded(student, teacher, weight, kind="jsd", beta=beta, rescaled=r).loss for r in (True, False)
        )
        torch.testing.assert_close(plain, factor * ours)


def test_top_k_overlap_is_the_share_by_hand_and_one_for_oneself():
    torch.manual_seed(0)
    student, teacher, weight = torch.randn(300, 8), torch.randn(300, 8), torch.randn(50, 8)
    found = top_k_overlap(HiddenStates(student, weight), HiddenStates(teacher, weight), k=5)
    expected = [
        len(set((s @ weight.T).topk(5).indices.tolist()) & set((t @ weight.T).topk(5).indices.tolist())) / 5
        for s, t in zip(student, teacher, strict=True)
    ]
    torch.testing.assert_close(found, torch.tensor(expected))
    assert 0 < float(found.mean()) < 0.5
    assert top_k_overlap(HiddenStates(student, weight), HiddenStates(student, weight)).eq(1).all()
