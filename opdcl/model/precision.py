"""Which precision a processor trains faster in: measured, because its flags do not say."""

from __future__ import annotations

import functools
import time

import torch

# A layer of a small model and a few answers: large enough that the multiplications decide.
TRIED_ROWS, INPUTS, OUTPUTS = 256, 576, 1536
REPETITIONS = 5

# bfloat16 rounds more, so it has to be this much faster.
WORTH_IT = 0.9


@functools.cache
def trains_faster_in_bfloat16() -> bool:
    """Return whether this processor trains clearly faster in bfloat16; the first call measures for .1 s.

    Some processors with AVX-512 BF16 and without AMX are slower in bfloat16, others twice as fast.
    """
    seconds = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    for _ in range(REPETITIONS):
        for dtype in seconds:  # in turn, so that a busy moment hits both
            seconds[dtype] = min(seconds[dtype], _seconds_of_a_pass(dtype))
    return seconds[torch.bfloat16] < WORTH_IT * seconds[torch.float32]


def _seconds_of_a_pass(dtype: torch.dtype) -> float:
    """Return the time of one forward and backward pass through a linear layer."""
    inputs = torch.ones(TRIED_ROWS, INPUTS, dtype=dtype, requires_grad=True)
    weight = torch.ones(OUTPUTS, INPUTS, dtype=dtype)
    started = time.perf_counter()
    torch.nn.functional.linear(inputs, weight).sum().backward()
    return time.perf_counter() - started
