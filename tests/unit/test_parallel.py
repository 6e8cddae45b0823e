"""How work is split between workers and merged again; two real workers run in tests/e2e/test_processes.py."""

import os
import socket
import subprocess
import sys

import pytest

from opdcl import parallel


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("size", [0, 1, 5, 6])
def test_the_shares_of_all_workers_are_all_items_once(monkeypatch, count, size):
    monkeypatch.setattr(parallel, "_count", count)
    items = list(range(size))
    shares = [parallel.my_share(items, worker) for worker in range(count)]
    assert sorted(item for share in shares for item in share) == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


# On the first worker's machine bfloat16 is fast, on the other's it is emulated.
TWO = """
import os
import torch
from opdcl import parallel
from opdcl.config.workflow import Workflow
from opdcl.model.hardware import pick_dtype
from opdcl.pipeline.defaults import resolve_for_machine

is_first = os.environ["RANK"] == "0"
parallel.join()
items = list(range(5))
assert parallel.worker_count() == 2
assert parallel.gather_shares([i * i for i in parallel.my_share(items)]) == [i * i for i in items]
assert parallel.sum_over_workers({"a": 1.0} | ({"b": 2.0} if parallel.rank() else {})) == {"a": 2.0, "b": 2.0}
assert parallel.any_worker(parallel.rank() == 1)
assert not parallel.any_worker(False)
assert parallel.on_first_worker(lambda: parallel.rank()) == 0
parallel.check_same("answers", 1)
try:
    parallel.check_same("answers", parallel.rank())
except parallel.OpdclError as fault:
    print(fault.message)
torch.cuda.is_bf16_supported = lambda including_emulation: True
torch.cpu._is_avx512_bf16_supported = lambda: False
torch.cuda.is_available = lambda: is_first
flow = Workflow.model_validate({"recover": {"teachers": {"a": {"kind": "model", "model": {"id": "other"}}}}})
resolved, _ = resolve_for_machine(flow)
again, _ = resolve_for_machine(flow)
assert again == resolved
print(pick_dtype("auto"), *(model.dtype for model in resolved.models()))
"""


def test_two_workers_agree_and_compute_in_the_precision_that_the_first_one_chose():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = []
    for rank in "01":
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": rank}
        words = [sys.executable, "-c", TWO]
        workers.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | shared))
    said = [worker.communicate(timeout=120)[0].splitlines() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert [lines[0] for lines in said] == ["the workers hold different answers: [0, 1]"] * 2
    assert [lines[1] for lines in said] == ["bfloat16 bfloat16 bfloat16", "float32 bfloat16 bfloat16"]
