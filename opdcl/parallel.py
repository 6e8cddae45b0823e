"""Several processes on one run: each does its share of every step, and all of them hold the same adapter.

    opdcl run quickstart --num-processes 2
    accelerate launch --config_file workflows/accelerate/data-parallel.yaml -m opdcl run quickstart

Rollouts, grades, gradients and answers are shared out and put together here, not by a wrapper round the model. What a step
learns is then the mean over all of its tokens, whoever had them, and a run may go on with more processes or fewer: the time
changes, and the order in which long completions are learned from (docs/processes.md). The trainers know of one process only.

Process 0 owns the run directory, the console and the trackers; each of the others works in a copy of the run, which goes
when it ends. With `model.shard` the frozen layers of the base are spread over the processes (FSDP2, arXiv 2304.11277);
the adapter is small, and stays whole everywhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from opdcl.errors import EnvironmentFault, Interrupted, OpdclError, UsageError

if TYPE_CHECKING:
    import torch


T = TypeVar("T")

# What launchers tell the processes that they start; the trainers' own libraries would act on it.
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "ACCELERATE_",
    "FSDP_",
)

# Seconds for the others to end by themselves once one of them has failed, or was interrupted and is saving.
GRACE, GRACE_TO_SAVE = 10, 120

_rank, _count = 0, 1

_to_shard = _sharded = False


def rank() -> int:
    """Return this process's number; 0 owns the run."""
    return _rank


def worker_count() -> int:
    """Return how many processes work on the run."""
    return _count


def sharded() -> bool:
    """Say whether the base's layers are spread over the processes, so that all must run them equally often."""
    return _sharded


def launched() -> bool:
    """Say whether a launcher started this process together with others."""
    return _count > 1 or int(os.environ.get("WORLD_SIZE") or 1) > 1


def launch(number: int) -> int:
    """Start this command as so many processes on this machine; return the exit code of the one that owns the run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Their copies of the run lie in a folder of ours, which goes whatever becomes of them.
    with tempfile.TemporaryDirectory(prefix="opdcl-") as scratch:
        common = {
            "WORLD_SIZE": str(number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TMPDIR": scratch,
            "OMP_NUM_THREADS": os.environ.get(
                "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number))
            ),
        }
        # In sessions of their own, so that a Ctrl-C reaches each of them once, through us; -P, so that no folder here is taken
        # for a package.
        command = [sys.executable, "-P", "-m", "opdcl", *sys.argv[1:]]
        return _see_through(
            [
                subprocess.Popen(
                    command,
                    env=os.environ | common | {"RANK": str(i), "LOCAL_RANK": str(i)},
                    start_new_session=True,
                )
                for i in range(number)
            ]
        )


def _see_through(started: list[subprocess.Popen]) -> int:
    """Hand signals on to processes until all have ended; where one fails the others must soon follow."""

    def hand_on(which, frame):
        for process in started:
            if process.poll() is None:
                process.send_signal(which)

    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, hand_on)
    deadline: float | None = None
    while running := [process for process in started if process.poll() is None]:
        if deadline is None and (bad := [p.returncode for p in started if p.returncode]):
            deadline = time.monotonic() + (GRACE_TO_SAVE if Interrupted.exit_code in bad else GRACE)
        if deadline and time.monotonic() > deadline:
            for process in running:
                process.kill()
        time.sleep(0.1)
    codes = [process.returncode for process in started]
    code = codes[0] if codes[0] > 0 else next((c for c in codes if c > 0), codes[0])
    return code if code >= 0 else 128 - code


def join() -> None:
    """Meet the other processes, if a launcher started this one with others.

    Raises:
        UsageError: The launcher's configuration asks for what opdcl does in another way.
        EnvironmentFault: There are fewer GPUs than processes.
    """
    global _rank, _count, _to_shard
    if _count > 1 or not launched():
        return
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise UsageError(
            "DeepSpeed has nothing to do here: of an adapter there is too little to be partitioned",
            "model.shard spreads the base's layers, as ZeRO-3 would: --set model.shard=true",
        )
    local = int(os.environ.get("LOCAL_RANK") or 0)
    cards = [card for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if card]
    if cards and local >= len(cards):
        raise EnvironmentFault(
            f"process {local} of this machine has no GPU: CUDA_VISIBLE_DEVICES names {len(cards)}",
            "start fewer processes",
        )
    # Before CUDA is touched: each process sees one GPU only, as the trainers know of one only.
    os.environ["CUDA_VISIBLE_DEVICES"] = cards[local] if cards else str(local)

    import torch

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # Long: the others wait while process 0 writes reports.
    torch.distributed.init_process_group(backend, timeout=timedelta(days=1))
    _rank, _count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    _to_shard = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        del os.environ[name]


def my_share(items: Sequence[T], of: int | None = None) -> Sequence[T]:
    """Return the items that are this process's to work on, or those of another one."""
    return items[_rank if of is None else of :: _count]


def gather_shares(mine: Sequence[T]) -> list[T]:
    """Return what all processes made of their shares, in the order of the whole."""
    if _count == 1:
        return list(mine)
    shares = all_values(mine)
    return [shares[i % _count][i // _count] for i in range(sum(map(len, shares)))]


def sum_over_workers(mine: Mapping[str, float]) -> dict[str, float]:
    """Return the sums over all processes, by name; one that has no such figure adds nothing."""
    found: dict[str, float] = {}
    for figures in all_values(mine):
        for name, value in figures.items():
            found[name] = found.get(name, 0.0) + value
    return found


def any_worker(flag: bool) -> bool:
    """Say whether the flag is up in any process."""
    return any(all_values(flag))


def check_same(what: str, value: Any) -> None:
    """Refuse to go on when the processes no longer hold the same thing."""
    if len(found := set(all_values(value))) > 1:
        raise OpdclError(
            f"the processes hold different {what}: {sorted(found)}",
            "this is a defect of opdcl, or of a machine: please report it",
        )


def add_gradients(model: torch.nn.Module) -> None:
    """Give every trained weight the sum of its gradients in all processes."""
    if _count == 1:
        return
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in trained])
    torch.distributed.all_reduce(flat)
    for parameter, gradient in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        parameter.grad = gradient.view_as(parameter).clone()


def on_first_worker(work: Callable[[], T]) -> T:
    """Let process 0 do something for all; everybody gets its result, or its error."""
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
    """Let process 0 go through the block before the others do, which then find what it has left in the caches."""
    if _rank:
        all_values(None)
    yield
    if not _rank:
        all_values(None)


def shard(model: torch.nn.Module, device: str, wanted: bool) -> None:
    """Spread the weights of the decoder layers over the processes, if that or the launcher's FSDP is wanted.

    Each layer is then whole only while it runs. Left out are the adapter, which is put on afterwards, and embeddings and
    head, which loss and sampling read.
    """
    global _sharded
    if _count == 1 or not (wanted or _to_shard):
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.split(":")[0], (_count,))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    _sharded = True


@contextlib.contextmanager
def unsharded(model: torch.nn.Module) -> Iterator[None]:
    """Hold all layers whole inside the block, where processes run them as often as each needs: sampling."""
    from torch.distributed.fsdp import FSDPModule

    spread = [m for m in model.modules() if isinstance(m, FSDPModule)] if _sharded else []
    for layer in spread:
        layer.set_reshard_after_forward(False)
        layer.unshard()
    try:
        yield
    finally:
        for layer in spread:
            layer.set_reshard_after_forward(True)
            layer.reshard()


def _layers(model: torch.nn.Module) -> Iterable[torch.nn.Module]:
    decoder = getattr(model, "model", None)
    if not (layers := getattr(decoder, "layers", None)):
        raise UsageError(
            f"{type(model).__name__} has no decoder layers that opdcl knows how to spread",
            "leave model.shard off",
        )
    return layers


def all_values(value: T) -> list[T]:
    """Return every process's value, in order of their numbers."""
    if _count == 1:
        return [value]
    import torch

    found: list[Any] = [None] * _count
    torch.distributed.all_gather_object(found, value)
    return found
