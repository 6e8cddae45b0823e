"""What the machine decides: device, precision, memory that runs out, and cores that wait for each other.

torch splits every operation over all cores of a CPU, and after each they wait for the slowest. With small
operations they wait as long as they compute. Parts that never wait for each other keep the cores busy.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")

# A layer of a small model and a few answers: large enough that the multiplications decide.
TRIED_ROWS, INPUTS, OUTPUTS = 256, 576, 1536
REPETITIONS = 5

# bfloat16 rounds more, so it has to be this much faster.
WORTH_IT = 0.9


def pick_device() -> str:
    """Return the device of all models: a GPU if there is one; `CUDA_VISIBLE_DEVICES` chooses it."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(name: str) -> str:
    """Return the named dtype; for `auto`, `bfloat16` where the hardware is faster in it, else `float32`.

    A CPU without AVX-512 BF16 or AMX emulates bfloat16 about eight times slower than it computes in float32;
    one that has them is measured. torch itself can be held to fewer instructions (`ATEN_CPU_CAPABILITY`).
    """
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    multiplies = torch.cpu._is_avx512_bf16_supported() and "512" in torch.backends.cpu.get_cpu_capability()
    return "bfloat16" if multiplies and trains_faster_in_bfloat16() else "float32"


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


def is_out_of_memory(fault: BaseException) -> bool:
    """Return whether a smaller batch could have avoided a fault: on CUDA, on the CPU, or in Python itself."""
    on_cpu = any(text in str(fault) for text in ("can't allocate memory", "std::bad_alloc"))
    return on_cpu or isinstance(fault, torch.OutOfMemoryError | MemoryError)


def release() -> None:
    """Give memory that nothing uses any more back to the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_in_threads(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of independent tasks in order, each run on a thread with its share of the cores.

    A task's exception is raised.
    """
    if len(tasks) == 1:
        return [tasks[0]()]
    # Both are settings of a thread.
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    def run(task: Callable[[], T]) -> T:
        dtype = torch.get_autocast_dtype("cpu")
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=dtype, enabled=autocast):
            return task()

    futures = [_pool(len(tasks), torch.get_num_threads()).submit(run, task) for task in tasks]
    wait(futures)  # also if one fails: the caller may then change what the others use
    return [future.result() for future in futures]


@functools.cache
def _pool(parts: int, cores: int) -> ThreadPoolExecutor:
    pool, started = ThreadPoolExecutor(parts), threading.Barrier(parts)

    def start() -> None:
        torch.get_num_threads()  # the first call in a thread, which takes over the number of the process
        torch.set_num_threads(max(1, cores // parts))
        started.wait()  # so that each of the pool's threads runs this once

    wait([pool.submit(start) for _ in range(parts)])
    torch.set_num_threads(cores)  # of this thread, and of threads to come
    return pool
