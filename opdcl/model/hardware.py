"""What the machine sets limits to: memory that runs out, and cores that wait for each other.

torch splits every operation over all cores of a CPU, and after each they wait for the slowest. With small
operations they wait as long as they compute. Parts that never wait for each other keep the cores busy.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")


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
