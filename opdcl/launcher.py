"""Start the workers of one run on this machine, pass signals on to them, and end with them.

    opdcl run quickstart --num-processes 2

Unlike torchrun, it gives an interrupted worker the time to save a checkpoint.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from opdcl.errors import Interrupted
from opdcl.parallel import ending, launched

# Seconds that the other workers get to exit after one has failed, or was interrupted and saves a checkpoint.
GRACE, GRACE_TO_SAVE = 10, 120

# Environment variable by which a worker of `launch` knows the process that started it.
LAUNCHER = "OPDCL_LAUNCHER"

_requested = 1


def request_workers(number: int) -> None:
    """Let `start_workers` run this command line again as several workers."""
    global _requested
    _requested = number


def start_workers() -> None:
    """If several workers were requested, run them, then exit as they do; a worker follows its launcher.

    Raises:
        SystemExit: The requested workers have exited.
    """
    if _requested > 1 and not launched():
        sys.exit(launch(_requested))
    if launcher := os.environ.pop(LAUNCHER, ""):
        _exit_with_launcher(int(launcher))


def launch(number: int) -> int:
    """Run this command line as several workers; return the exit code of worker 0, or of one that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The workers' copies of the run lie in this folder, which is deleted even if they crash.
    with tempfile.TemporaryDirectory(prefix="opdcl-") as scratch:
        threads = str(max(1, (os.cpu_count() or 1) // number))
        common = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        common |= {
            LAUNCHER: str(os.getpid()),
            "TMPDIR": scratch,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        }
        # -P: a folder in the current directory is not a package.
        command = [sys.executable, "-P", "-m", "opdcl", *sys.argv[1:]]
        workers = []
        for i in range(number):
            env = os.environ | common | {"RANK": str(i), "LOCAL_RANK": str(i)}
            # In a session of its own, a worker gets Ctrl-C once: from this process.
            workers.append(subprocess.Popen(command, env=env, start_new_session=True))
        return _wait_for(workers)


def _wait_for(workers: list[subprocess.Popen]) -> int:
    """Wait until all workers exit, and pass signals on. After a failure, kill those that take too long."""

    def pass_on(number, frame):
        for worker in workers:
            worker.send_signal(number)

    for number in ending():
        signal.signal(number, pass_on)
    deadline: float | None = None
    while running := [worker for worker in workers if worker.poll() is None]:
        if deadline is None and (failed := [w.returncode for w in workers if w.returncode]):
            deadline = time.monotonic() + (GRACE_TO_SAVE if Interrupted.exit_code in failed else GRACE)
        if deadline and time.monotonic() > deadline:
            for worker in running:
                worker.kill()
        time.sleep(0.1)
    first, *others = [worker.returncode for worker in workers]
    code = first if first > 0 else next((c for c in others if c > 0), first)
    return code if code >= 0 else 128 - code


def _exit_with_launcher(launcher: int) -> None:
    """End this worker when its launcher has been killed: it would continue unseen, and keep the run locked.

    It gets SIGTERM, so it saves a checkpoint. The launcher's temporary folder is deleted.
    """
    scratch = os.environ["TMPDIR"]

    def is_orphan() -> bool:
        return os.getppid() != launcher

    def clean_up() -> None:
        if is_orphan():
            shutil.rmtree(scratch, ignore_errors=True)

    def watch() -> None:
        while not is_orphan():
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_TO_SAVE)
        clean_up()
        os._exit(Interrupted.exit_code)  # it may wait forever for a worker that has ended

    atexit.register(clean_up)
    threading.Thread(target=watch, daemon=True).start()
