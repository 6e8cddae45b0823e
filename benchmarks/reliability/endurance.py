"""Network contacts of a run, memory and handles over thousands of steps, and thousands of random inputs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from attempts import ROOT, attempt, command, row, status, wait_until

HUB = "http://127.0.0.1:9"  # a port where nothing listens


def network(place: Path, options) -> list[dict]:
    """Run the whole job under strace, offline and online; list the addresses its threads contacted."""
    if not shutil.which("strace"):
        return [row("network calls", "strace is not installed", "not measured here", "-")]
    online = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | {"HF_ENDPOINT": HUB}
    code, addresses = _contacted(place, command("traced"), dict(os.environ))
    rows = [
        row(
            "network calls with HF_HUB_OFFLINE=1",
            "strace of the whole job, all threads and children: connect, sendto",
            f"{'FAILED: ' if code or addresses else ''}exit {code}, {len(addresses)} internet addresses",
            "-",
        )
    ]
    code, addresses = _contacted(place, command("online"), online)
    rows.append(
        row(
            "network calls without it, with local model and data",
            "the same; HF_ENDPOINT points to 127.0.0.1:9",
            f"{'FAILED: ' if code or addresses - {'127.0.0.1:9'} else ''}exit {code}, "
            f"contacted: {', '.join(addresses) or 'none'}",
            "-",
        )
    )
    code, addresses = _contacted(place, [*command("remote"), "--set", "model.id=nobody/nothing"], online)
    rows.append(
        row(
            "network calls for a model on the Hub",
            "the same",
            f"{'FAILED: ' if code != 2 or addresses != {'127.0.0.1:9'} else ''}exit {code}, "
            f"contacted: {', '.join(addresses) or 'none'}",
            "-",
        )
    )
    return rows


def _contacted(place: Path, words: list[str], environment: dict[str, str]) -> tuple[int, set[str]]:
    trace = place / "trace"
    code = "import sys; sys.argv[0] = 'opdcl'; from opdcl.cli import main; main()"
    done = subprocess.run(
        [
            "strace",
            "-f",
            "-qq",
            "-e",
            "trace=connect,sendto",
            "-o",
            str(trace),
            sys.executable,
            "-c",
            code,
            *words,
        ],
        cwd=place,
        capture_output=True,
        text=True,
        env=environment,
    )
    found = re.findall(r'sin6?_port=htons\((\d+)\).*?"([0-9a-f.:]+)"', trace.read_text())
    return done.returncode, {f"{address}:{port}" for port, address in found}


def soak(place: Path, options) -> list[dict]:
    """Recover for a long time and check whether memory, file handles or threads grow."""
    steps = options.soak_steps
    settings = [
        f"recover.steps={steps}",
        "recover.save_steps=200",
        "recover.validate_every=200",
        "recover.learning_rate=1e-5",
        "eval=null",
    ]
    pid = attempt(place, *command("soak", settings))
    seen: list[tuple[int, int, int, int]] = []
    metrics = place / "soak" / "stages" / "02-recover" / "metrics.jsonl"
    while (ended := wait_until(pid, time.monotonic() + 1)) is None:
        with contextlib.suppress(OSError, IndexError, ValueError):
            step = json.loads(metrics.read_text().splitlines()[-1])["step"]
            seen.append(
                (step, status(pid, "VmRSS"), len(os.listdir(f"/proc/{pid}/fd")), status(pid, "Threads"))
            )
    steady = [s for s in seen if s[0] >= steps // 4]
    early, late = steady[: len(steady) // 4], steady[-len(steady) // 4 :]
    # Handles come and go while a file is written, so compare medians; for memory, compare maxima.
    growth = [
        pick(s[i] for s in late) - pick(s[i] for s in early)
        for i, pick in ((1, max), (2, statistics.median), (3, statistics.median))
    ]
    megabytes = growth[0] / 1e6
    # Freed memory is not always returned to the system, so a few megabytes are no leak. A leak of 10 kB per
    # step would show as 11 MB.
    ok = ended == 0 and megabytes < 8 and growth[1] <= 0 and growth[2] <= 0
    return [
        row(
            f"{steps} steps of recovery in one process",
            "memory, handles and threads, sampled every second",
            f"{'' if ok else 'FAILED: '}exit {ended}; from the second to the last quarter: "
            f"{megabytes:+.1f} MB, {growth[1]:+.0f} handles, "
            f"{growth[2]:+.0f} threads",
            "-",
        )
    ]


def fuzz(place: Path, options) -> list[dict]:
    """Run the property tests of configuration and data with many more examples than the test suite does."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-o",
            "addopts=",
            "-q",
            str(ROOT / "tests" / "unit" / "test_fuzz.py"),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OPDCL_FUZZ_EXAMPLES": str(options.examples)},
    )
    last = done.stdout.strip().splitlines()[-1]
    return [
        row(
            f"{options.examples:,} random configurations, as many random data files, and every prefix of a "
            "valid one of each",
            "hypothesis, test_fuzz.py",
            f"{'FAILED: ' if done.returncode else ''}{last}",
            "-",
        )
    ]
