"""Plant one fault at a time in a copy of the code and see whether the named unit tests find it.

    make planted                              all faults of planted.toml; minutes
    .venv/bin/python tests/planted.py N4 D1   some of them

The command fails if any fault lives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FAULTS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

# What a copy leaves out: it takes seconds to write, and nothing of it is tested.
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "site", "*.egg-info")

# A fault that makes a test run longer than this is found.
SECONDS = 900


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--jobs", type=int, default=2, help="faults at once (2)")
    options = parser.parse_args(arguments)
    names = options.names or list(FAULTS)
    with ThreadPoolExecutor(options.jobs) as pool:
        found = dict(zip(names, pool.map(is_found, names), strict=True))
    alive = [name for name in names if not found[name]]
    print(f"{len(names) - len(alive)} of {len(names)} faults found")
    return bool(alive)


def is_found(name: str) -> bool:
    """Return whether a test fails on the code with this fault."""
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        module = copy / "opdcl" / f"{fault['module']}.py"
        module.write_text(faulty(module.read_text("utf-8"), fault), "utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not nightly"]
        command += files_of(fault)
        env = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        try:
            run = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=SECONDS)
            code, lines = run.returncode, run.stdout.splitlines()
        except subprocess.TimeoutExpired:
            code, lines = 1, ["FAILED: out of time"]
    by = next((line.partition(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    print(f"{'found' if code else 'LIVES'} {name}: {fault['what']}  {by}", flush=True)
    return bool(code)


def faulty(text: str, fault: dict[str, Any]) -> str:
    """Return a module's text with the fault in it.

    Raises:
        ValueError: The sound line is not there, or more than once.
    """
    if text.count(fault["old"]) != 1:
        raise ValueError(f"{fault['module']} has {text.count(fault['old'])} times: {fault['old']}")
    return text.replace(fault["old"], fault["new"])


def files_of(fault: dict[str, Any]) -> list[str]:
    """Return the test files that must find the fault, from the project's root."""
    unit = ROOT / "tests" / "unit"
    files = {file for pattern in fault["tests"] for file in unit.glob(f"{pattern}.py")}
    return sorted(str(file.relative_to(ROOT)) for file in files)


if __name__ == "__main__":
    sys.exit(main())
