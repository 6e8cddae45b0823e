"""How work is split between workers and merged again; two real workers run in tests/e2e/test_processes.py."""

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


TWO = """
import sys
from opdcl import parallel

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
"""


def test_two_workers_agree(tmp_path, monkeypatch):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    workers = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        workers.append(subprocess.Popen([sys.executable, "-c", TWO], stdout=subprocess.PIPE, text=True))
    said = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert said == ["the workers hold different answers: [0, 1]\n"] * 2
