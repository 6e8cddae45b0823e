"""A process with its own environment that runs many commands, and imports torch and its like only once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from helpers.command import ENV, ROOT, opdcl


class WarmProcess:
    """Call it as `helpers.command.opdcl`; use it as a context manager.

    It is for variables that libraries read when they are imported, such as the address of the hub.
    """

    def __init__(self, env: Mapping[str, str]):
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "helpers.warm_process"],
            env=ENV | dict(env) | {"PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=30)

    def __call__(
        self, *arguments: object, cwd: Path | None = None, code: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        request = {"arguments": [str(a) for a in arguments], "cwd": cwd and str(cwd)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"opdcl {arguments} ended the process; its error is on stderr"
        done = subprocess.CompletedProcess(**json.loads(answer))
        assert code in (None, done.returncode), done.stderr
        return done


def main() -> None:
    """Run one command for each line on stdin, and answer with a line on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    for line in sys.stdin:
        request = json.loads(line)
        done = opdcl(*request["arguments"], cwd=request["cwd"])
        answers.write(json.dumps(vars(done)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
