"""The student's optimizer against AdamW on the sum of a period's bounded gradients."""

import pytest
import torch

from opdcl.config.model import LoraSection
from opdcl.train.checkpoints import StudentOptimizer
from opdcl.train.loop import LONGEST_GRADIENT


def give_gradients(weights, seed, size):
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.grad = size * torch.randn(weight.shape, generator=generator)


def bounded(weights):
    torch.nn.utils.clip_grad_norm_(weights, LONGEST_GRADIENT)
    return [weight.grad.clone() for weight in weights]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_period_changes_the_weights_once_by_its_steps_bounded_gradients(backbone, tmp_path, interrupted):
    backbone.new_adapter(LoraSection(r=4, alpha=8), 0)
    ours = StudentOptimizer(backbone, 6, 1e-2)
    weights = [*ours.weights.values()]
    theirs = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    adamw = torch.optim.AdamW(theirs, lr=1.0, weight_decay=0.0)
    for period in range(3):
        expected = None
        for step in (2 * period, 2 * period + 1):
            size = 10.0 ** (-2 * (step % 2))  # one above the bound, one that is small
            give_gradients(weights, step, size)
            ours.add()
            if interrupted and not step % 2:  # a checkpoint in the middle of a period
                folder = tmp_path / str(step)
                folder.mkdir()
                ours.save(folder)
                ours = StudentOptimizer(backbone, 6, 1e-2)
                ours.restore(folder)
            rate = ours.rate
            ours.end_step(ends_period=step % 2 == 1)
            give_gradients(theirs, step, size)
            own = bounded(theirs)
            expected = own if expected is None else [a + b for a, b in zip(expected, own, strict=True)]
        for weight, gradient in zip(theirs, expected, strict=True):
            weight.grad = gradient
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
        for own_weight, weight in zip(weights, theirs, strict=True):
            torch.testing.assert_close(own_weight, weight, rtol=1e-5, atol=1e-7)
