"""Several worker processes share one run: each does its share of every step, and all hold the same adapter.

    accelerate launch --config_file workflows/accelerate/data-parallel.yaml -m opdcl run quickstart

Rollouts, grades, gradients and answers are split and merged here, not by a wrapper around the model. A step
learns from the mean over all of its tokens, no matter which worker held them. A run can therefore resume with
another number of workers: only the time changes (docs/larger-machines.md). The trainers see one process only.

Worker 0 owns the run directory, the console and the trackers. Every other worker uses a copy of the run, and
deletes it when it ends. With `model.shard` the frozen layers of the base are spread over the workers (FSDP2,
arXiv 2304.11277); the adapter is small and stays whole on every worker.

A signal that asks a worker to end raises KeyboardInterrupt, as Ctrl-C does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from opdcl.errors import EnvironmentFault, OpdclError, UsageError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Environment variables that launchers set; the trainers' libraries would act on them.
LAUNCHERS = re.compile("RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|ACCELERATE_|FSDP_")

# Seconds in which a repeated SIGTERM or SIGHUP is ignored. Schedulers and terminals send several, and those
# after the first would interrupt the removal of temporary files.
PAUSE = 5
_heard = -float(PAUSE)

_rank, _count = 0, 1
_to_shard = _sharded = False


def rank() -> int:
    """Return the number of this worker. Worker 0 owns the run."""
    return _rank


def worker_count() -> int:
    """Return the number of workers that share the run."""
    return _count


def sharded() -> bool:
    """Return whether the base is spread over the workers, which must then run each layer equally often."""
    return _sharded


def launched() -> bool:
    """Return whether this process was started as one of several workers."""
    return _count > 1 or int(os.environ.get("WORLD_SIZE") or 1) > 1


def join() -> None:
    """Connect to the other workers, if any.

    Raises:
        UsageError: The launcher is configured for DeepSpeed.
        EnvironmentFault: There are fewer GPUs than workers.
    """
    global _rank, _count, _to_shard
    if _count > 1 or not launched():
        return
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise UsageError(
            "DeepSpeed is not supported: an adapter is too small to be partitioned",
            "to spread the base's layers over the GPUs as ZeRO-3 does: --set model.shard=true",
        )
    local = int(os.environ.get("LOCAL_RANK") or 0)
    cards = [card for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if card]
    if cards and local >= len(cards):
        message = f"worker {local} of this machine has no GPU: CUDA_VISIBLE_DEVICES names {len(cards)}"
        raise EnvironmentFault(message, "start fewer workers")
    # The trainers expect a single GPU, so each worker sees one only. This must come before CUDA starts.
    os.environ["CUDA_VISIBLE_DEVICES"] = cards[local] if cards else str(local)

    import torch

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # A long timeout, because the others wait while worker 0 writes reports.
    torch.distributed.init_process_group(backend, timeout=timedelta(days=1))
    # Left to the end of the interpreter, gloo's threads may release a tensor without one: the process aborts.
    atexit.register(torch.distributed.destroy_process_group)
    _rank, _count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    _to_shard = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    for name in filter(LAUNCHERS.match, list(os.environ)):
        del os.environ[name]


def my_share(items: Sequence[T], worker: int | None = None) -> Sequence[T]:
    """Return the items that this worker handles, or those of another worker: every n-th one."""
    return items[_rank if worker is None else worker :: _count]


def gather_shares(share: Sequence[T]) -> list[T]:
    """Return the results of all workers in the order of the items that `my_share` split."""
    if _count == 1:
        return list(share)
    shares = all_values(share)
    return [shares[i % _count][i // _count] for i in range(sum(map(len, shares)))]


def sum_over_workers(values: Mapping[str, float]) -> dict[str, float]:
    """Return the sum over all workers for each name. A missing name counts as zero."""
    sums: dict[str, float] = {}
    for part in all_values(values):
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def any_worker(flag: bool) -> bool:
    """Return whether the flag is true on any worker."""
    return any(all_values(flag))


def check_same(what: str, value: Any) -> None:
    """Raise an error if the workers hold different values."""
    if len(values := set(all_values(value))) > 1:
        raise OpdclError(
            f"the workers hold different {what}: {sorted(values)}",
            "this is a bug in opdcl, or a faulty machine: please report it",
        )


def add_gradients(model: torch.nn.Module) -> None:
    """Replace the gradient of every trained weight by its sum over all workers."""
    if _count == 1:
        return
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in trained])
    torch.distributed.all_reduce(flat)
    for parameter, gradient in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        parameter.grad = gradient.view_as(parameter).clone()


def on_first_worker(work: Callable[[], T]) -> T:
    """Let worker 0 do the work; every worker returns its result, or raises its error."""
    if _count == 1:
        return work()
    outcome: list[Any] = [None, None]
    if _rank == 0:
        try:
            outcome[0] = work()
        except OpdclError as fault:
            outcome[1] = fault
    import torch

    torch.distributed.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


@contextlib.contextmanager
def first_worker_first() -> Iterator[None]:
    """Let worker 0 run the block before the others, which then find its files in the caches."""
    if _rank:
        all_values(None)
    yield
    if not _rank:
        all_values(None)


def shard(model: torch.nn.Module, device: str, enabled: bool) -> None:
    """Spread the decoder layers over the workers, if `enabled` or if the launcher asks for FSDP.

    Each layer is whole only while it runs. The adapter, attached later, is not spread, nor are embeddings
    and head, which loss and sampling read.
    """
    global _sharded
    if _count == 1 or not (enabled or _to_shard):
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.split(":")[0], (_count,))
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not layers:
        name = type(model).__name__
        raise UsageError(f"{name} has no decoder layers that opdcl can spread", "leave model.shard off")
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    _sharded = True


@contextlib.contextmanager
def unsharded(model: torch.nn.Module) -> Iterator[None]:
    """Hold all layers whole in the block, so that each worker may run them as often as it needs to sample."""
    from torch.distributed.fsdp import FSDPModule

    layers = [m for m in model.modules() if isinstance(m, FSDPModule)] if _sharded else []
    for layer in layers:
        layer.set_reshard_after_forward(False)
        layer.unshard()
    try:
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(True)
            layer.reshard()


def all_values(value: T) -> list[T]:
    """Return the values of all workers, in the order of their ranks."""
    if _count == 1:
        return [value]
    import torch

    values: list[Any] = [None] * _count
    torch.distributed.all_gather_object(values, value)
    return values


def ending() -> list[signal.Signals]:
    """Return the signals that ask this process to end. `nohup` ignores SIGHUP, and so does opdcl then."""
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP too, so that they clean up as Ctrl-C does.

    Outside of the main thread, which alone may handle signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        global _heard
        now = time.monotonic()
        if now - _heard >= PAUSE:
            _heard = now
            raise KeyboardInterrupt

    others = [number for number in ending() if number != signal.SIGINT]
    previous = {number: signal.signal(number, stop) for number in others}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
