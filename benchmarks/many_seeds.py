"""Run the comparison of decided.yaml and frontier.yaml: many seeds side by side on one GPU, kept as they end.

    python benchmarks/many_seeds.py OUT                       # eight processes, until all is done
    python benchmarks/many_seeds.py OUT --minutes 7

OUT/kept.tar.gz holds what `pieces.py` reads of each finished run: everything but weights, which are removed.
A run that was cut off is resumed by the same command.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from opdcl.results.summary import summarise
from opdcl.rundir.layout import RunDir

HERE = Path(__file__).parent
SEEDS, FRONTIER_SEED = range(8), 9
# Arms of one process: those that share a fine-tune, so that it is made once.
TOGETHER = [["half", "start-alone"], ["mix-kl", "mix-kl-then"]]
FRONTIER_ARMS = 5
RETENTION, DOMAIN = "instructions_quick", "handbook_quick"
ENOUGH = 0.95  # of the best domain score


@dataclass
class Job:
    """One `opdcl run` of some arms of one seed, in a folder of its own."""

    folder: Path
    settings: dict[str, Any]

    def start(self, threads: int) -> subprocess.Popen:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder.with_suffix(".yaml")
        YAML().dump(self.settings, file)
        command = [sys.executable, "-m", "opdcl", "run", "quickstart", file, "-o", self.folder]
        path = f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        own = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
        with self.folder.with_suffix(".log").open("a") as log:
            # Elsewhere than in a checkout, whose package would come before that of PYTHONPATH.
            return subprocess.Popen(
                [*map(str, command)], stdout=log, stderr=log, env=own, cwd=self.folder.parent
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop then")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    out = options.out.resolve()
    frontier = frontier_jobs(out)
    waiting = [*decided_jobs(out), *frontier]
    running: dict[subprocess.Popen, Job] = {}
    chosen = False
    while (waiting or running) and time.monotonic() < end:
        finished = [process for process in running if process.poll() is not None]
        for process in finished:
            job = running.pop(process)
            drop_weights(job.folder)
            print(f"{job.folder.name}: exit {process.returncode}", flush=True)
        if finished:
            archive(out)
        if not chosen and not any(job in frontier for job in [*waiting, *running.values()]):
            chosen = True
            waiting[:0] = chosen_jobs(out)
        while waiting and len(running) < options.processes:
            job = waiting.pop(0)
            running[job.start(max(1, (os.cpu_count() or 1) // options.processes))] = job
        time.sleep(0.5)
    for process in running:
        process.kill()
    archive(out)


def decided_jobs(out: Path) -> list[Job]:
    """Return the jobs of the arms that are known beforehand, those of the recovery first."""
    settings = YAML(typ="safe").load(HERE / "decided.yaml")
    return [Job(out / f"{arms[0]}-{seed}", only(settings, arms, seed)) for arms in TOGETHER for seed in SEEDS]


def frontier_jobs(out: Path) -> list[Job]:
    settings = YAML(typ="safe").load(HERE / "frontier.yaml")
    names = [*settings["arms"]]
    parts = [names[start : start + FRONTIER_ARMS] for start in range(0, len(names), FRONTIER_ARMS)]
    return [Job(out / f"frontier-{part[0]}", only(settings, part, FRONTIER_SEED)) for part in parts]


def chosen_jobs(out: Path) -> list[Job]:
    """Return the jobs of the best plain fine-tune and the best mixing of the frontier."""
    arms = YAML(typ="safe").load(HERE / "frontier.yaml")["arms"]
    settings = YAML(typ="safe").load(HERE / "decided.yaml")
    settings["arms"] = {}
    for kind in ("plain", "mix"):
        name = best(out, [arm for arm in arms if arm.startswith(kind)])
        print(f"{kind}: {name}", flush=True)
        if name:
            settings["arms"][kind] = arms[name]
    return [Job(out / f"chosen-{seed}", only(settings, [*settings["arms"]], seed)) for seed in SEEDS]


def best(out: Path, arms: list[str]) -> str | None:
    """Return the arm that passes most instructions of those that know enough of the domain."""
    scores = {}
    for arm in arms:
        for run in out.glob(f"frontier-*/{arm}-{FRONTIER_SEED}"):
            if (run / "report.html").exists():
                suites = summarise(RunDir(run))["suites"]
                scores[arm] = [suites[suite]["tuned"]["value"] for suite in (RETENTION, DOMAIN)]
    enough = ENOUGH * max((domain for _, domain in scores.values()), default=0)
    able = [arm for arm, (_, domain) in scores.items() if domain >= enough]
    return max(able, key=lambda arm: scores[arm][0], default=None)


def only(settings: dict[str, Any], arms: list[str], seed: int) -> dict[str, Any]:
    """Return a comparison with some of its arms and one seed."""
    return {**settings, "seeds": [seed], "arms": {arm: settings["arms"][arm] for arm in arms}}


def drop_weights(folder: Path) -> None:
    for trainer in folder.glob("*/stages/*/trainer"):
        shutil.rmtree(trainer)
    for weights in folder.glob("*/stages/*/adapter/*.safetensors"):
        weights.unlink()


def archive(out: Path) -> None:
    """Write the finished runs and all logs to kept.tar.gz, without weights."""
    part = out / "kept.tar.gz.part"
    with tarfile.open(part, "w:gz", compresslevel=3) as tar:
        for file in sorted([*out.glob("*/*/report.html"), *out.glob("*.log"), *out.glob("*.yaml")]):
            path = file.parent if file.name == "report.html" else file
            tar.add(path, path.relative_to(out), filter=without_weights)
    part.rename(out / "kept.tar.gz")


def without_weights(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = Path(member.name)
    return None if name.suffix == ".safetensors" or name.name == "trainer" else member


if __name__ == "__main__":
    main()
