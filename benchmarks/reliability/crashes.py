"""Runs killed at random instants, again and again, until each has ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

from attempts import attempt, command, outcome_of, row, run, wait, wait_until

# Longer training than the tests', so that crashes fall into it.
LONGER = ["finetune.epochs=20", "finetune.save_steps=4", "recover.steps=24", "recover.save_steps=4"]

EVERYWHERE = {
    "finetune",
    "finetune, inside a checkpoint",
    "recover",
    "recover, inside a checkpoint",
    "eval",
    "report",
}


def crash(place: Path, options) -> list[dict]:
    """Kill runs at random instants, again and again, until each ends; every end must equal the uninterrupted one."""
    started = time.perf_counter()
    code, said = run(place, *command("whole", LONGER))
    whole_seconds = time.perf_counter() - started
    assert code == 0, said
    expected = outcome_of(place / "whole")
    chance = random.Random(options.seed)
    where: Counter[str] = Counter()
    kills = runs = wrong = redone = 0
    # Until every part has been hit at least once, whatever chance has to say.
    while kills < options.kills or (EVERYWHERE - set(where) and runs < options.kills):
        runs += 1
        folder = place / f"crash-{runs}"
        while True:
            done_before = _finished(folder)
            born = time.time_ns()
            pid = attempt(place, *command(folder.name, LONGER))
            # Half of the instants anywhere in what a whole run takes, half soon: between two of them little is done.
            seconds = (
                chance.uniform(0.05, whole_seconds) if chance.random() < 0.5 else chance.uniform(0.05, 3)
            )
            ended = wait_until(pid, time.monotonic() + seconds)
            if ended is None:
                os.kill(pid, signal.SIGKILL)
                wait(pid)
                kills += 1
                where[_active(folder, born)] += 1
            redone += any(_finished(folder).get(name) != made for name, made in done_before.items())
            if ended is not None:
                assert ended == 0, (place / "attempt.log").read_text()
                break
        differing = [k for k, v in expected.items() if outcome_of(folder).get(k) != v]
        wrong += bool(differing)
        if differing:
            print(f"{folder.name} differs in {differing}", flush=True)
        else:
            shutil.rmtree(folder)
    places = ", ".join(f"{name} {count}" for name, count in sorted(where.items()))
    outcome = f"{runs} runs killed {kills} times ({places}): {runs - wrong} end bit-identical to the uninterrupted run"
    return [
        row(
            "kill -9 at a random instant",
            "SIGKILL, again and again until the run ends",
            ("FAILED: " if wrong or redone else "") + outcome,
            f"steps since the last checkpoint; {redone} finished stages or results made again",
        )
    ]


def _finished(folder: Path) -> dict[str, int]:
    """Return when each finished part was made: adapters of finished stages, and results."""
    found = {}
    for record in folder.glob("stages/*/stage.json"):
        with contextlib.suppress(ValueError):
            if json.loads(record.read_text()).get("status") == "done":
                found[record.parent.name] = (
                    (record.parent / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns
                )
    return found | {str(p): p.stat().st_mtime_ns for p in folder.glob("evals/*/*.json")}


def _active(folder: Path, born: int) -> str:
    """Say in which part a run was when an attempt, begun at `born`, was killed."""
    for name in ("01-finetune", "02-recover"):
        stage = folder / "stages" / name
        if not (stage / "stage.json").exists():
            return "start" if name == "01-finetune" else "finetune"
        if json.loads((stage / "stage.json").read_text()).get("status") != "done":
            # Written by this attempt, and not sealed yet.
            unsealed = [
                p
                for p in (stage / "trainer").glob("checkpoint-*")
                if p.stat().st_mtime_ns > born and not (p / "seal.json").exists()
            ]
            return name[3:] + (", inside a checkpoint" if unsealed else "")
    results = len(list(folder.glob("evals/*/*.json")))
    return "eval" if results < 6 else "report"
