"""Cross-entropy in parts against torch's."""

from __future__ import annotations

import pytest
import torch

from opdcl.model.positions import CHUNK, cross_entropy, cut


@pytest.mark.parametrize("count", [1, 40, CHUNK + 3])
def test_equals_torchs_cross_entropy(count):
    torch.manual_seed(0)
    states, head = torch.randn(count, 8, requires_grad=True), torch.randn(50, 8)
    tokens, weight = torch.randint(50, (count,)), torch.rand(count)
    reference = torch.nn.functional.cross_entropy(states @ head.T, tokens, reduction="none")
    (expected,) = torch.autograd.grad((reference * weight).sum(), states)
    ours = cross_entropy(states, head, tokens)
    torch.testing.assert_close(ours, reference)
    torch.testing.assert_close(torch.autograd.grad((ours * weight).sum(), states)[0], expected)


def test_no_answer_has_no_loss():
    states = torch.zeros(0, 8, requires_grad=True)
    assert cross_entropy(states, torch.randn(50, 8), torch.zeros(0, dtype=torch.long)).sum() == 0


@pytest.mark.parametrize("count", [0, 1, CHUNK, 3 * CHUNK + 1])
def test_each_position_is_in_one_part(count):
    seen = torch.zeros(count)
    for part in cut(seen):
        seen[part] += 1
        assert part.stop - part.start <= CHUNK
    assert bool((seen == 1).all())
