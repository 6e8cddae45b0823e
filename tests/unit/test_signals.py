"""SIGTERM and SIGHUP end a command as Ctrl-C does; under nohup, SIGHUP does not."""

import os
import signal
import subprocess
import sys
import time

import pytest

from opdcl import parallel

WAITS = """
import sys, tempfile, time
from opdcl.cli import app, main

@app.command()
def wait():
    with tempfile.TemporaryDirectory(dir=sys.argv[2], prefix="half-written-"):
        print("ready", flush=True)
        time.sleep(60)

app.registered_commands[-1].name = "wait"
app.registered_commands[-1].context_settings = {"allow_extra_args": True}
main()
"""


@pytest.fixture
def waiting(tmp_path):
    """Return a function that starts a command which holds a temporary folder, and returns its process."""
    started = []

    def start(*before):
        words = [*before, sys.executable, "-c", WAITS, "wait", str(tmp_path)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        while "ready" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_any_command_that_is_asked_to_end_removes_what_is_half_written(waiting, tmp_path, number):
    process = waiting()
    assert list(tmp_path.glob("half-written-*"))
    process.send_signal(number)
    process.send_signal(number)  # as terminals and schedulers do
    said = process.communicate(timeout=30)[1]
    assert (process.returncode, said.splitlines()[0]) == (130, "note: interrupted")
    assert not list(tmp_path.glob("half-written-*"))


def test_under_nohup_a_lost_terminal_ends_nothing(waiting):
    process = waiting("nohup")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None


def test_the_handlers_are_put_back(monkeypatch):
    monkeypatch.setattr(parallel, "_heard", -1e9)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    def asked_to_end():
        with parallel.as_interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        asked_to_end()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
