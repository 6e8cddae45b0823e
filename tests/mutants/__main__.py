"""Change the code by one fault at a time and see whether the unit tests find it.

    make mutants                                                    all modules, and the planted faults
    .venv/bin/python tests/mutants --module distill/losses          one module
    .venv/bin/python tests/mutants --seed 7 --count 40              other faults, and more of them
    .venv/bin/python tests/mutants --planted N4 D1                  some planted faults only

Generic faults are made by rule (faults.py): a seeded sample for each module in targets.py. Planted faults
stand in planted.toml, each with the test files that must find it. A fault that hangs is found too. For each
fault only those tests run that reach the changed lines, in a fork of a process that has the libraries loaded;
tests that start processes of their own test sound code there. survivors.toml names the faults that may live,
each with a reason. The command fails if any other fault survives, or if fewer than 85 % of the generic or
planted ones are found.

Why not mutmut or cosmic-ray: mutmut changes function bodies only, so neither the verdict's margins nor a
setting's default; cosmic-ray starts a process for each fault, which imports torch for five seconds.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from mutants.faults import Fault, generic, planted, sample  # noqa: E402
from mutants.outcomes import Outcome, summarise  # noqa: E402
from mutants.runner import ENVIRONMENT, Job, Test, in_fork, measure, preload, run  # noqa: E402
from mutants.targets import TARGETS  # noqa: E402

PACKAGE, UNIT = ROOT / "opdcl", ROOT / "tests" / "unit"

# Generic faults for each module.
COUNT = 10


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    os.environ.update(ENVIRONMENT)
    faults = _chosen(options)
    files = sorted({file for _, _, named in faults for file in named})
    preload([*PACKAGE.rglob("*.py"), *(ROOT / file for file in files)], "opdcl")
    print(f"{len(faults)} faults; first the sound code in {len(files)} test files", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        os.environ["OPDCL_TINY_MODEL"] = folder
        in_fork(lambda: importlib.import_module("helpers.tiny").make_model(Path(folder)))
        sources = {str(file) for file in PACKAGE.rglob("*.py")}
        tests = measure(files, sources, options.jobs, ROOT, ROOT / ".mutants")
        outcomes = _run(faults, tests, options.jobs)
    excused = tomllib.loads((HERE / "survivors.toml").read_text(encoding="utf-8"))
    report, problems = summarise(outcomes, excused)
    print(report)
    if options.json:
        rows = [
            {"name": o.fault.name, "place": o.place, "change": o.fault.change, "found": o.found, "by": o.by}
            for o in outcomes
        ]
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return bool(problems)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--module", action="append", choices=TARGETS, help="generic faults of this module only")
    add("--planted", nargs="*", metavar="NAME", help="these planted faults only; without names, all")
    add("--seed", type=int, default=0)
    add("--count", type=int, default=COUNT, help=f"generic faults for each module ({COUNT})")
    add("--jobs", type=int, default=2, help="tests at once (2)")
    add("--json", type=Path, metavar="FILE", help="write every outcome to a file")
    return parser.parse_args(arguments)


def _chosen(options: argparse.Namespace) -> list[tuple[Fault, bool, list[str]]]:
    """Return the faults to try, whether each is planted, and its test files."""
    faults: list[tuple[Fault, bool, list[str]]] = []
    if options.planted is None:
        for module in options.module or TARGETS:
            tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
            chosen = sample(generic(module, tree), options.count, options.seed)
            faults += [(fault, False, test_files(TARGETS[module])) for fault in chosen]
    if options.module is None:
        for fault, patterns in planted(HERE / "planted.toml", PACKAGE):
            if not options.planted or fault.name in options.planted:
                faults.append((fault, True, test_files(patterns)))
    return faults


def test_files(patterns: Iterable[str]) -> list[str]:
    files = {file for pattern in patterns for file in UNIT.glob(f"{pattern}.py")}
    return sorted(str(file.relative_to(ROOT)) for file in files)


def reaching(fault: Fault, tests: list[Test]) -> list[Test]:
    """Return the tests that run a fault's lines, the shortest first; all, if it acts on import."""
    file = str(PACKAGE / f"{fault.module}.py")
    lines = set(fault.lines)
    reached = [t for t in tests if not fault.in_function or lines & t.lines.get(file, set())]
    return sorted(reached, key=lambda t: t.seconds)


def _run(
    faults: list[tuple[Fault, bool, list[str]]], tests: dict[str, list[Test]], parallel: int
) -> list[Outcome]:
    outcomes: list[Outcome | None] = [None] * len(faults)
    jobs, positions = [], []
    for i, (fault, is_planted, files) in enumerate(faults):
        chosen = reaching(fault, [test for file in files for test in tests[file]])
        if not chosen:
            outcomes[i] = Outcome(fault, is_planted, False, "no test runs this line")
            continue
        names, seconds = [t.name for t in chosen], sum(t.seconds for t in chosen)
        module, file = f"opdcl.{fault.module.replace('/', '.')}", str(PACKAGE / f"{fault.module}.py")
        jobs.append(Job(names, seconds, module, partial(fault.code, file)))
        positions.append(i)
    for done, (index, code, output) in enumerate(run(jobs, parallel, ROOT), 1):
        fault, is_planted, _ = faults[positions[index]]
        found = code != 0
        failed = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        by = failed.partition(" - ")[0] or f"ended with {code}"
        if code == pytest.ExitCode.USAGE_ERROR and "not found:" in output:
            found, by = False, "its tests have other names with the fault"
        outcomes[positions[index]] = Outcome(fault, is_planted, found, by if code else "")
        words = f"{done}/{len(jobs)} {'found' if found else 'LIVES'} {fault.name}  {by if code else ''}"
        print(words, file=sys.stderr, flush=True)
    return [outcome for outcome in outcomes if outcome]


if __name__ == "__main__":
    sys.exit(main())
