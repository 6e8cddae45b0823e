"""Network contacts of a run, memory and handles over thousands of steps, and thousands of random inputs."""

from __future__ import annotations

import argparse
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

from attempts import ROOT, attempt, command, row, start_anew, status, wait_until

HUB = "127.0.0.1:9"  # a port where nothing listens
TRACE = ["strace", "-f", "-qq", "-e", "trace=connect,sendto", "-o", "trace"]


def network(place: Path, options: argparse.Namespace) -> list[dict]:
    """Run the whole job under strace, offline and online; list the addresses its threads contacted."""
    if not shutil.which("strace"):
        return [row("network calls", "strace is not installed", "not measured here")]

    def contacted(words: list[str], **how: str) -> tuple[int, set[str]]:
        code, _ = start_anew(place, words, TRACE, **how)
        found = re.findall(r'sin6?_port=htons\((\d+)\).*?"([0-9a-f.:]+)"', (place / "trace").read_text())
        return code, {f"{address}:{port}" for port, address in found}

    how = "strace of the whole job, all threads and children: connect, sendto"
    code, seen = contacted(command("traced"))
    outcome = f"exit {code}, {len(seen)} internet addresses"
    rows = [row("network calls with HF_HUB_OFFLINE=1", how, outcome, ok=not (code or seen))]
    online = {"unset": "HF_HUB_OFFLINE", "HF_ENDPOINT": f"http://{HUB}"}
    code, seen = contacted(command("online"), **online)
    outcome = f"exit {code}, contacted: {', '.join(seen) or 'none'}"
    how, fault = f"the same; HF_ENDPOINT points to {HUB}", "without it, with local model and data"
    rows.append(row(f"network calls {fault}", how, outcome, ok=not (code or seen - {HUB})))
    code, seen = contacted(command("remote", ["model.id=nobody/nothing"]), **online)
    outcome = f"exit {code}, contacted: {', '.join(seen) or 'none'}"
    fault = "network calls for a model on the Hub"
    return [*rows, row(fault, "the same", outcome, ok=code == 2 and seen == {HUB})]


def soak(place: Path, options: argparse.Namespace) -> list[dict]:
    """Recover for a long time and check whether memory, file handles or threads grow."""
    steps = options.soak_steps
    settings = ["recover.validate_every=200", "recover.learning_rate=1e-5"]
    pid = attempt(place, *command("soak", [f"recover.steps={steps}", "eval=null", *settings]))
    seen: list[tuple[int, int, int, int]] = []
    metrics = place / "soak" / "stages" / "02-recover" / "metrics.jsonl"
    while (ended := wait_until(pid, time.monotonic() + 1)) is None:
        with contextlib.suppress(OSError, IndexError, ValueError):
            step = json.loads(metrics.read_text().splitlines()[-1])["step"]
            handles = len(os.listdir(f"/proc/{pid}/fd"))
            seen.append((step, status(pid, "VmRSS"), handles, status(pid, "Threads")))
    steady = [s for s in seen if s[0] >= steps // 4]
    quarter = len(steady) // 4
    # Handles come and go while a file is written, so compare medians; for memory, compare maxima.
    memory, handles, threads = (
        pick(s[i] for s in steady[-quarter:]) - pick(s[i] for s in steady[:quarter])
        for i, pick in ((1, max), (2, statistics.median), (3, statistics.median))
    )
    # Freed memory is not always returned to the system, so a few megabytes are no leak. A leak of 10 kB per
    # step would show as 11 MB.
    ok = ended == 0 and memory < 8e6 and handles <= 0 and threads <= 0
    growth = f"{memory / 1e6:+.1f} MB, {handles:+.0f} handles, {threads:+.0f} threads"
    outcome = f"exit {ended}; from the second to the last quarter: {growth}"
    how = "memory, handles and threads, sampled every second"
    return [row(f"{steps} steps of recovery in one process", how, outcome, ok=ok)]


def fuzz(place: Path, options: argparse.Namespace) -> list[dict]:
    """Run the property tests of configuration and data with many more examples than the test suite does."""
    test = str(ROOT / "tests" / "unit" / "test_fuzz.py")
    words = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", test]
    environment = os.environ | {"OPDCL_FUZZ_EXAMPLES": str(options.examples)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    fault = f"{options.examples:,} random configurations, as many random data files, and every prefix of a "
    last, ok = done.stdout.strip().splitlines()[-1], not done.returncode
    return [row(f"{fault}valid one of each", "hypothesis, test_fuzz.py", last, ok=ok)]
