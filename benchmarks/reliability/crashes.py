"""Kill runs at random instants, over and over, until each one finishes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

from attempts import ADAPTER, attempt, command, outcome_of, row, run, said_by, wait, wait_until

# Train longer than the tests do, so that kills hit the training.
LONGER = ["finetune.epochs=20", "finetune.save_steps=4", "recover.steps=24", "recover.validate_every=4"]
CHECKPOINT = ", inside a checkpoint"
EVERYWHERE = {"finetune", f"finetune{CHECKPOINT}", "recover", f"recover{CHECKPOINT}", "eval", "report"}


def crash(place: Path, options: argparse.Namespace) -> list[dict]:
    """Kill runs at random instants until each finishes; every result must equal the uninterrupted run's."""
    started = time.perf_counter()
    code, said = run(place, *command("whole", LONGER))
    whole_seconds = time.perf_counter() - started
    assert code == 0, said
    expected = outcome_of(place / "whole")
    chance = random.Random(options.seed)
    where: Counter[str] = Counter()
    runs = wrong = redone = 0
    # Go on until every part has been hit at least once.
    while where.total() < options.kills or (EVERYWHERE - set(where) and runs < options.kills):
        runs += 1
        folder, ended = place / f"crash-{runs}", None
        while ended is None:
            done_before, born = _finished(folder), time.time_ns()
            pid = attempt(place, *command(folder.name, LONGER))
            # Half of the kills fall anywhere in a run; half come early, so little is done between two.
            longest = whole_seconds if chance.random() < 0.5 else 3
            ended = wait_until(pid, time.monotonic() + chance.uniform(0.05, longest))
            if ended is None:
                os.kill(pid, signal.SIGKILL)
                wait(pid)
                where[_active(folder, born)] += 1
            redone += any(_finished(folder).get(name) != made for name, made in done_before.items())
        assert ended == 0, said_by(place)
        if outcome_of(folder).items() >= expected.items():
            shutil.rmtree(folder)
        else:
            wrong += 1
            print(f"{folder.name} differs", flush=True)
    places = ", ".join(f"{name} {count}" for name, count in sorted(where.items()))
    outcome = f"{runs} runs killed {where.total()} times ({places}): {runs - wrong} end bit-identical to the"
    lost = f"steps since the last checkpoint; {redone} finished stages or results redone"
    how, ok = "SIGKILL, repeated until the run ends", not (wrong or redone)
    return [row("kill -9 at a random instant", how, f"{outcome} uninterrupted run", lost, ok)]


def _status(stage: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((stage / "stage.json").read_text()).get("status", "")
    return ""


def _finished(folder: Path) -> dict[str, int]:
    """Return modification times of finished parts: adapters of finished stages, and evaluation results."""
    adapters = [stage / "adapter" / ADAPTER for stage in folder.glob("stages/*") if _status(stage) == "done"]
    return {str(file): file.stat().st_mtime_ns for file in (*adapters, *folder.glob("evals/*/*.json"))}


def _active(folder: Path, born: int) -> str:
    """Return which part a run was in when the attempt that started at `born` was killed."""
    for name in ("01-finetune", "02-recover"):
        stage = folder / "stages" / name
        if not (stage / "stage.json").exists():
            return "start" if name == "01-finetune" else "finetune"
        if _status(stage) != "done":
            mine = [p for p in stage.glob("trainer/checkpoint-*") if p.stat().st_mtime_ns > born]
            return name[3:] + CHECKPOINT * any(not (p / "seal.json").exists() for p in mine)
    return "eval" if len(list(folder.glob("evals/*/*.json"))) < 6 else "report"
