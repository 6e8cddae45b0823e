"""The fine-tune's loss against a naive reference, and what each of its rules leaves alone."""

import math

import pytest
import torch
from helpers.near import relative_error

from opdcl.config.finetune import AnswerLossSection
from opdcl.distill.losses import answer_losses
from opdcl.model.positions import CHUNK

V, H = 37, 8
RULES = [
    {},
    {"weight": "probability"},
    {"weight": "probability", "weight_power": 0.4},
    {"weight": "entropy"},
    {"weight": "entropy", "weight_power": 2.0},
    {"weight": "base_probability", "weight_power": 0.5},
    {"anchor": "kl"},
    {"anchor": "non_target_kl", "anchor_coefficient": 2.0},
    {"weight": "probability", "anchor": "kl", "anchor_coefficient": 0.3},
    {"weight": "base_probability", "anchor": "non_target_kl"},
]


def states(n=9, seed=0):
    """Return the states of student and base, the head and the tokens, in fp64."""
    torch.manual_seed(seed)
    tensors = torch.randn(n, H), torch.randn(n, H), torch.randn(V, H)
    return [*(x.double() for x in tensors), torch.randint(0, V, (n,))]


def losses(student, base, head, tokens, **rules):
    """Return our losses, in fp32, and the gradient of their sum."""
    leaf = student.float().requires_grad_()
    loss_N = answer_losses(leaf, head.float(), base.float(), tokens, AnswerLossSection(**rules))
    return loss_N.detach(), torch.autograd.grad(loss_N.sum(), leaf)[0]


def naive_weight(rule, p, q, token):
    """Return a weight from two lists of probabilities."""
    if rule == "entropy":
        top = sorted(p, reverse=True)[:20]
        return sum(-x / sum(top) * math.log(x / sum(top)) for x in top) / math.log(20)
    return {"none": 1.0, "probability": p[token], "base_probability": q[token]}[rule]


def naive_loss(student_H, base_H, head, token, weight="none", power=1.0, anchor="none", coefficient=0.1):
    """Return the loss of one token, summed up word by word; the weight is a plain number."""
    scores = [torch.stack([(word * state).sum() for word in head]) for state in (student_H, base_H)]
    p, q = ([x.exp() / sum(x.exp() for x in row) for x in row] for row in scores)
    weighted = naive_weight(weight, [x.item() for x in p], [x.item() for x in q], token) ** power
    loss = -weighted * p[token].log()
    if anchor == "kl":
        loss = loss + coefficient * sum(b * (b / a).log() for a, b in zip(p, q, strict=True))
    if anchor == "non_target_kl":
        others = [i for i in range(len(p)) if i != token]
        rest_p, rest_q = (sum(x[i] for i in others) for x in (p, q))
        terms = [q[i] / rest_q * ((q[i] / rest_q) / (p[i] / rest_p)).log() for i in others]
        loss = loss + coefficient * sum(terms)
    return loss


@pytest.mark.parametrize("rules", RULES)
def test_loss_and_gradient_equal_a_sum_word_by_word(rules):
    student, base, head, tokens = states()
    leaf = student.clone().requires_grad_()
    names = {"weight_power": "power", "anchor_coefficient": "coefficient"}
    options = {names.get(k, k): v for k, v in rules.items()}
    expected = torch.stack(
        [naive_loss(leaf[n], base[n], head, int(tokens[n]), **options) for n in range(len(tokens))]
    )
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    loss_N, gradient_NH = losses(student, base, head, tokens, **rules)
    assert relative_error(loss_N, expected.detach()) < 1e-5
    assert relative_error(gradient_NH, gradient) < 1e-5


def test_without_rules_it_is_cross_entropy():
    student, base, head, tokens = states(50)
    leaf = student.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf @ head.T, tokens, reduction="none")
    loss_N, gradient_NH = losses(student, base, head, tokens)
    assert relative_error(loss_N, expected.detach()) < 1e-6
    assert relative_error(gradient_NH, torch.autograd.grad(expected.sum(), leaf)[0]) < 1e-6


@pytest.mark.parametrize("anchor", ["kl", "non_target_kl"])
@pytest.mark.parametrize("weight", ["none", "probability"])
def test_an_anchor_does_nothing_at_coefficient_zero_or_while_the_student_equals_base(anchor, weight):
    student, base, head, tokens = states()
    without = losses(student, base, head, tokens, weight=weight)
    anchored = {"weight": weight, "anchor": anchor}
    at_zero = losses(student, base, head, tokens, **anchored, anchor_coefficient=0.0)
    assert all(torch.equal(one, other) for one, other in zip(at_zero, without, strict=True))
    at_base = losses(student, student, head, tokens, **anchored, anchor_coefficient=5.0)
    for one, other in zip(at_base, without, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_non_target_anchor_does_not_oppose_the_answer():
    """It sees no difference if only the logit of the token itself changes, and the plain anchor does."""
    base = states(1)[1]
    head, tokens = torch.eye(V, H, dtype=torch.float64), torch.tensor([3])
    raised = base.clone()
    raised[0, 3] += 4  # the head is diagonal, so this is a logit
    plain, _ = losses(raised, base, head, tokens)
    kl, non_target = (
        float((losses(raised, base, head, tokens, anchor=a)[0] - plain).abs())
        for a in ("kl", "non_target_kl")
    )
    assert non_target < 1e-3 * kl


def test_a_certain_student_keeps_its_loss_finite():
    _, base, head, tokens = states(4)
    for sign in (1, -1):  # all but certain of the answer, or of something else
        sure = sign * 60 * head[tokens]
        for rules in RULES:
            assert all(x.isfinite().all() for x in losses(sure, base, head, tokens, **rules))


@pytest.mark.parametrize("rules", RULES[1:])
def test_tokens_do_not_depend_on_one_another(rules):
    """So the losses of micro-batches add up, and chunks change nothing."""
    student, base, head, tokens = states(CHUNK + 40)
    whole = losses(student, base, head, tokens, **rules)
    halves = [
        losses(student[i], base[i], head, tokens[i], **rules) for i in (slice(0, 100), slice(100, None))
    ]
    for one, parts in zip(whole, zip(*halves, strict=True), strict=True):
        torch.testing.assert_close(one, torch.cat(parts), atol=1e-6, rtol=1e-5)
