"""Faults that a smaller batch could have avoided."""

from __future__ import annotations

import torch


def is_out_of_memory(fault: BaseException) -> bool:
    """Return whether a smaller batch could have avoided a fault: on CUDA, on the CPU, or in Python itself."""
    on_cpu = any(text in str(fault) for text in ("can't allocate memory", "std::bad_alloc"))
    return on_cpu or isinstance(fault, torch.OutOfMemoryError | MemoryError)


def release() -> None:
    """Give memory that nothing uses any more back to the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
