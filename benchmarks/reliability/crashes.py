"""Kill runs at random instants, over and over, until each one finishes."""

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

# Train longer than the tests do, so that kills hit the training.
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
    """Kill runs at random instants until each finishes; every result must equal the uninterrupted run's."""
    started = time.perf_counter()
    code, said = run(place, *command("whole", LONGER))
    whole_seconds = time.perf_counter() - started
    assert code == 0, said
    expected = outcome_of(place / "whole")
    chance = random.Random(options.seed)
    where: Counter[str] = Counter()
    kills = runs = wrong = redone = 0
    # Go on until every part has been hit at least once.
    while kills < options.kills or (EVERYWHERE - set(where) and runs < options.kills):
        runs += 1
        folder = place / f"crash-{runs}"
        while True:
            done_before = _finished(folder)
            born = time.time_ns()
            pid = attempt(place, *command(folder.name, LONGER))
            # Half of the kills fall anywhere in the duration of a run; half come early, so little is done
            # between two kills.
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
    outcome = f"{runs} runs killed {kills} times ({places}): {runs - wrong} end bit-identical to the"
    outcome += " uninterrupted run"
    return [
        row(
            "kill -9 at a random instant",
            "SIGKILL, repeated until the run ends",
            ("FAILED: " if wrong or redone else "") + outcome,
            f"steps since the last checkpoint; {redone} finished stages or results redone",
        )
    ]


def _finished(folder: Path) -> dict[str, int]:
    """Return modification times of finished parts: adapters of finished stages, and evaluation results."""
    found = {}
    for record in folder.glob("stages/*/stage.json"):
        with contextlib.suppress(ValueError):
            if json.loads(record.read_text()).get("status") == "done":
                found[record.parent.name] = (
                    (record.parent / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns
                )
    return found | {str(p): p.stat().st_mtime_ns for p in folder.glob("evals/*/*.json")}


def _active(folder: Path, born: int) -> str:
    """Return which part a run was in when the attempt that started at `born` was killed."""
    for name in ("01-finetune", "02-recover"):
        stage = folder / "stages" / name
        if not (stage / "stage.json").exists():
            return "start" if name == "01-finetune" else "finetune"
        if json.loads((stage / "stage.json").read_text()).get("status") != "done":
            # Written by this attempt and not sealed yet.
            unsealed = [
                p
                for p in (stage / "trainer").glob("checkpoint-*")
                if p.stat().st_mtime_ns > born and not (p / "seal.json").exists()
            ]
            return name[3:] + (", inside a checkpoint" if unsealed else "")
    results = len(list(folder.glob("evals/*/*.json")))
    return "eval" if results < 6 else "report"
