"""The helper that runs commands in process: it reports what a process would, and leaves nothing behind."""

import os
import random
import signal
import sys

import pytest
import torch
from helpers.command import opdcl, opdcl_process

from opdcl import cli, parallel


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


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["nosuchcommand"],
        ["config", "validate", "quickstart", "--json"],
        ["config", "show", "quickstart", "--set", "recover.stepz=1"],
        ["workflows", "show", "quickstart"],
    ],
    ids=" ".join,
)
def test_it_reports_what_a_process_reports(words, tmp_path):
    here, there = opdcl(*words, cwd=tmp_path), opdcl_process(*words, cwd=tmp_path)
    assert (here.returncode, here.stdout, here.stderr) == (there.returncode, there.stdout, there.stderr)


def test_it_leaves_this_process_as_it_was(tmp_path):
    before = state()
    done = opdcl("workflows", "cp", "quickstart", cwd=tmp_path, env={"OPDCL_CACHE": str(tmp_path), "A": "b"})
    assert done.returncode == 0
    assert (tmp_path / "quickstart.yaml").exists()
    assert state() == before


def test_a_command_sees_its_environment(tmp_path):
    done = opdcl("doctor", "--json", cwd=tmp_path, env={"OPDCL_CACHE": "/proc/self/opdcl"})
    assert done.returncode == 4
    assert os.environ["OPDCL_CACHE"] != "/proc/self/opdcl"


def test_an_exception_that_escapes_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "main", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opdcl("--version", cwd=tmp_path)


def test_a_variable_that_is_read_at_import_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="opdcl_process"):
        opdcl("--version", cwd=tmp_path, env={"HF_HUB_OFFLINE": "0"})
