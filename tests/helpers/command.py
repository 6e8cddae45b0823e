"""The command line, run in a process of its own."""

import os
import subprocess
import sys

OPDCL = [sys.executable, "-c", "import sys; sys.argv[0] = 'opdcl'; from opdcl.cli import main; main()"]
ENV = {**os.environ, "TERM": "dumb", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def opdcl(*arguments, timeout=300, env=None, **options):
    return subprocess.run(
        [*OPDCL, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENV | (env or {}),
        timeout=timeout,
        **options,
    )
