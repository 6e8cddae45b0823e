"""Compare tensors by the norm of their difference, whose rounding error can be bounded on every processor."""

import torch

# Processors sum in different orders. In fp32 (eps 6e-8) a gradient of the two-layer model passes through
# logits of up to 50 and sums over 49,152 tokens: 50 * sqrt(49152) * 6e-8 is below 1e-3 in the worst case. A
# token left out, a factor or another sign changes a norm by per cents.
ROUNDING = 1e-3


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`, which must not be zero."""
    size = float(expected.double().norm())
    assert size > 0
    return float((actual.double() - expected.double()).norm()) / size


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tensors])
