"""Run a recipe, and record how long it took beside what was announced before it and after three steps.

    python benchmarks/times.py quickstart --threads 2                     # appends a row to times.json
    python benchmarks/times.py quickstart --threads 1 --isa avx2 --set finetune.epochs=1
    python benchmarks/times.py workflows/repair.yaml --set start=runs/mine/stages/01-finetune/adapter

The recipe runs twice through the command line, in processes of their own: dry, then in earnest. A stage's
record holds the first time left that the log shows. A second call under the same conditions shows what a dry
run knows from the first. With `OPDCL_CACHE`, a folder that links the models, a machine has no history.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from opdcl.results.format import duration
from opdcl.rundir.environment import machine
from opdcl.rundir.files import read_json, write_json
from opdcl.rundir.layout import RunDir

RECORD = Path(__file__).with_suffix(".json")
OPDCL = [sys.executable, "-m", "opdcl"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--isa", help="ATEN_CPU_CAPABILITY: default, avx2 or avx512; the processor's own if left out"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in opdcl run")
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "TERM": "dumb"}
    if options.isa:
        environment["ATEN_CPU_CAPABILITY"] = options.isa
    settings = [word for pair in options.set for word in ("--set", pair)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        command = ["run", options.recipe, "-o", str(path), *settings]
        dry = subprocess.run([*OPDCL, *command, "--dry-run", "--json"], env=environment, capture_output=True)
        if dry.returncode:
            sys.exit(dry.stderr.decode())
        if subprocess.run([*OPDCL, *command], env=environment).returncode:
            sys.exit("the run failed")
        row = {
            "recipe": options.recipe,
            "settings": options.set,
            **conditions(RunDir(path), options.threads, options.isa),
            **times(RunDir(path)),
            "dry_run": json.loads(dry.stdout)["seconds"],
            "command": shlex.join(["python", "benchmarks/times.py", *sys.argv[1:]]),
            "date": date.today().isoformat(),
        }
    print("\n".join(compared(row)))
    rows = read_json(options.out)["rows"] if options.out.exists() else []
    write_json(options.out, {"rows": [*rows, row]})


def conditions(run: RunDir, threads: int, isa: str | None) -> dict[str, Any]:
    """Return what a run's speed depends on."""
    device = run.read_manifest().get("device", {})
    place = {"machine": machine()["name"], "cores": machine()["cores"], "threads": threads, "isa": isa}
    return place | {key: device.get(key) for key in ("kind", "dtype")}


def times(run: RunDir) -> dict[str, Any]:
    """Return a run's seconds, whole and by stage, and what the stages announced."""
    costs = {stage.path.name.split("-", 1)[1]: stage.state()["cost"] for stage in run.stages()}
    # A stage that was taken from elsewhere has taken no time here.
    seconds = {name: cost["seconds"] for name, cost in costs.items() if "seconds" in cost}
    seconds["eval"] = round(sum(read_json(f)["cost"]["seconds"] for f in run.evals.glob("*/*.json")), 1)
    whole, announced = run.read_manifest()["seconds"], {}
    for stage in run.stages():
        found = stage.state().get("announced")
        if found:
            took = {"stage": found["took"], "all": round(whole - found["at"], 1)}
            announced[stage.path.name.split("-", 1)[1]] = {
                part: {"announced": found[part], "took": took[part]} for part in took
            }
    return {"seconds": whole, "stages": seconds, "after_three_steps": announced}


def compared(row: dict[str, Any]) -> list[str]:
    """Return what was announced beside what it took, in lines."""
    lines = [f"{name}: {duration(seconds)}" for name, seconds in row["stages"].items()]
    pairs = [("dry run", {"announced": row["dry_run"], "took": row["seconds"]})]
    for stage, parts in row["after_three_steps"].items():
        pairs += [(f"{stage}, time left of {part}", pair) for part, pair in parts.items()]
    for what, pair in pairs:
        if pair["announced"] is None:
            lines.append(f"{what}: silent; it took {duration(pair['took'])}")
        else:
            ratio = pair["announced"] / max(pair["took"], 0.1)
            lines.append(
                f"{what}: {pair['announced']:.0f} s announced, {pair['took']:.0f} s taken, {ratio:.2f} times"
            )
    return lines


if __name__ == "__main__":
    main()
