"""The helper that runs commands in process: it reports what a process would, and leaves nothing behind."""

import os
import random
import signal
import sys

import pytest
import torch
from helpers.command import opdcl, opdcl_process

from opdcl import parallel


def state() -> dict:
    return {
        "folder": os.getcwd(),
        "variables": dict(os.environ),
        "words": sys.argv,
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "generators": (random.getstate(), torch.get_rng_state().tolist()),
        "workers": parallel.worker_count(),
    }


@pytest.mark.parametrize("words", ["nosuchcommand", "config validate quickstart --json"])
def test_it_reports_what_a_process_reports(words, tmp_path):
    here, there = opdcl(*words.split(), cwd=tmp_path), opdcl_process(*words.split(), cwd=tmp_path)
    assert (here.returncode, here.stdout, here.stderr) == (there.returncode, there.stdout, there.stderr)


def test_it_leaves_this_process_as_it_was(tmp_path):
    before = state()
    opdcl("workflows", "cp", "quickstart", cwd=tmp_path, env={"OPDCL_CACHE": str(tmp_path), "A": "b"}, code=0)
    assert (tmp_path / "quickstart.yaml").exists()
    assert state() == before
