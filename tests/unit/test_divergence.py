"""The loss against a deliberately naive reference, and the identities that pin it."""

import math

import pytest
import torch

from opdcl.distill.divergence import CHUNK, reverse_kl

V, H = 37, 8


def naive(student, teacher, weight, temperature=1.0):
    """Sum p (log p - log q) token by token and word by word, in Python floats."""
    out = []
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        logits = [[sum(a * b for a, b in zip(h, w, strict=True)) / temperature for w in weight.tolist()] for h in (s, t)]
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
    kl, *_ = reverse_kl(student, teacher, weight, temperature)
    torch.testing.assert_close(kl, naive(student, teacher, weight, temperature), atol=2e-5, rtol=1e-5)


def test_gradient_equals_autograd_through_plain_torch():
    student, teacher, weight = tensors(7)
    student.requires_grad_()
    reverse_kl(student, teacher, weight, 1.3)[0].sum().backward()
    ours, student.grad = student.grad, None
    log_p = torch.log_softmax(student @ weight.T / 1.3, -1)
    log_q = torch.log_softmax(teacher @ weight.T / 1.3, -1)
    (log_p.exp() * (log_p - log_q)).sum().backward()
    torch.testing.assert_close(ours, student.grad, atol=1e-5, rtol=1e-4)


def test_gradient_passes_finite_differences():
    student, teacher, weight = (t.double() for t in tensors(2))
    student.requires_grad_()
    reverse_kl(student, teacher, weight)[0].sum().backward()
    step = 1e-3
    for i in (0, 5):
        up, down = student.detach().clone(), student.detach().clone()
        up[0, i] += step
        down[0, i] -= step
        slope = (reverse_kl(up, teacher, weight)[0].sum() - reverse_kl(down, teacher, weight)[0].sum()) / (2 * step)
        assert float(student.grad[0, i]) == pytest.approx(float(slope), rel=2e-2, abs=1e-3)


def test_zero_loss_and_zero_gradient_where_student_equals_teacher():
    student, _, weight = tensors(5)
    student.requires_grad_()
    kl, *_ = reverse_kl(student, student.detach().clone(), weight)
    kl.sum().backward()
    assert float(kl.detach().abs().max()) < 1e-6
    assert float(student.grad.abs().max()) < 1e-6


def test_never_negative_and_not_symmetric():
    student, teacher, weight = tensors(64)
    there, back = reverse_kl(student, teacher, weight)[0], reverse_kl(teacher, student, weight)[0]
    assert float(there.min()) >= 0
    assert float((there - back).abs().max()) > 0.1


def test_a_teacher_without_mass_where_the_student_has_it_costs_more():
    weight = torch.eye(4)
    student = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    mild, harsh = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([[-9.0, 0.0, 0.0, 0.0]])
    assert reverse_kl(student, harsh, weight)[0] > 5 * reverse_kl(student, mild, weight)[0]


def test_entropies_are_those_of_both_models():
    student, teacher, weight = tensors(3)
    _, of_student, of_teacher = reverse_kl(student, teacher, weight)
    for got, hidden in ((of_student, student), (of_teacher, teacher)):
        expected = torch.distributions.Categorical(logits=hidden @ weight.T).entropy()
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_chunks_do_not_show():
    student, teacher, weight = tensors(2 * CHUNK + 3)
    whole = reverse_kl(student, teacher, weight)[0]
    parts = torch.cat([reverse_kl(s, t, weight)[0] for s, t in zip(student.split(100), teacher.split(100), strict=True)])
    torch.testing.assert_close(whole, parts)
