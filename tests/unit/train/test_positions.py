"""Cross-entropy in parts against torch's."""

from __future__ import annotations

import pytest
import torch

from opdcl.model.distributions import HiddenStates
from opdcl.train.losses import CHUNK, THREAD_POSITIONS, chunks, for_each_part, imitation_losses


@pytest.mark.parametrize("count", [1, 40, CHUNK + 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_equals_torchs_cross_entropy(count, threads):
    torch.manual_seed(0)
    states, head = torch.randn(count, 8, requires_grad=True), torch.randn(50, 8)
    tokens, weight = torch.randint(50, (count,)), torch.rand(count)
    reference = torch.nn.functional.cross_entropy(states @ head.T, tokens, reduction="none")
    (expected,) = torch.autograd.grad((reference * weight).sum(), states)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours = imitation_losses(HiddenStates(states, head), tokens).loss
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(ours, reference)
    torch.testing.assert_close(torch.autograd.grad((ours * weight).sum(), states)[0], expected)


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
