"""Run opdcl in separate processes, each forked from this one so that the imports are paid for once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # for helpers

ADAPTER = "adapter_model.safetensors"
OPDCL = [sys.executable, "-c", "import sys; sys.argv[0] = 'opdcl'; from opdcl.cli import main; main()"]


def import_everything() -> None:
    import lm_eval.evaluator  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import torch
    import trl  # noqa: F401

    import opdcl.api  # noqa: F401

    torch.set_num_threads(1)


def row(fault: str, how: str, outcome: str, lost: str = "-", ok: bool = True) -> dict[str, str]:
    outcome = outcome if ok else f"FAILED: {outcome}"
    print(f"{fault}: {outcome} (lost: {lost})", flush=True)
    return {"fault": fault, "how": how, "outcome": outcome, "lost": lost}


def error_of(said: str, otherwise: str = "no error line") -> str:
    return next((line for line in said.splitlines() if line.startswith("error:")), otherwise)


def attempt(place: Path, *arguments: str, prepare: Callable[[], None] | None = None) -> int:
    """Start `opdcl` with these arguments in a forked process and return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.chdir(place)
        log = os.open(place / "attempt.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["opdcl", *arguments]
        if prepare:
            prepare()
        from opdcl import cli

        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70  # a traceback, which must never happen
    sys.stdout.flush()
    os._exit(code)


def said_by(place: Path) -> str:
    """Return what the last attempt printed."""
    return (place / "attempt.log").read_text(errors="replace")


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_until(pid: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(code)
        time.sleep(0.003)
    return None


def run(place: Path, *arguments: str, prepare: Callable[[], None] | None = None) -> tuple[int, str]:
    """Run `opdcl` to its end; return its exit code and everything it printed."""
    return wait(attempt(place, *arguments, prepare=prepare)), said_by(place)


def start_anew(
    place: Path, words: list[str], before: list[str] | None = None, unset: str = "", **variables: str
) -> tuple[int, str]:
    """Run `opdcl` in a process of its own, behind the words of a wrapper; return its exit code and stderr."""
    environment = {name: value for name, value in os.environ.items() if name != unset} | variables
    command = [*(before or []), *OPDCL, *words]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


def command(out: str, settings: list[str] | None = None) -> list[str]:
    return ["run", "tiny.yaml", "-o", out, *(word for pair in settings or [] for word in ("--set", pair))]


def outcome_of(folder: Path) -> dict[str, bytes]:
    """Return the results of a run: adapters, answers, and metrics without their times."""
    found = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if (file.suffix == ".safetensors" and "trainer" not in file.parts) or name.endswith("samples.jsonl"):
            found[name] = file.read_bytes()
        elif file.name == "metrics.jsonl":
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            found[name] = json.dumps([{k: v for k, v in r.items() if k != "seconds"} for r in rows]).encode()
    return found


def status(pid: int, key: str) -> int:
    """Return a field of a process's status, in bytes or as a count; 0 if the process no longer exists."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                _, number, *unit = line.split()
                return int(number) * (1024 if unit == ["kB"] else 1)
    return 0
