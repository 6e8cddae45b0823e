"""Take from other runs what a run would make just so, or starts from: fingerprints cover settings, data and parents."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opdcl.plan import Task
from opdcl.rundir import RunDir, StageDir, folder_appears_whole, now, read_json, write_atomic, write_json


def adopt(tasks: Sequence[Task], stages: dict[str, StageDir], run: RunDir, donors: Sequence[RunDir]) -> list[tuple[Task, RunDir]]:
    """Copy each task's outcome from the first donor that has it; return what was copied, and from where.

    Args:
        tasks: What the plan says; only tasks that have not begun are looked for.
        stages: The run's training stages, by name.
        run: Where the copies go.
        donors: Runs to take from.
    """
    taken = []
    for task in tasks:
        if task.action == "run":
            target = None if task.name == "eval" else stages[task.name].path
            donor = next((d for d in donors if _copied(task, d, run, target)), None)
            taken += [(task, donor)] if donor else []
    return taken


def outcomes(donor: RunDir) -> set[str]:
    """Return the fingerprints of all that a run has finished."""
    states = [stage.state() for name in ("finetune", "recover") if (stage := donor.find_stage(name))]
    results = [read_json(file) for file in donor.evals.glob("*/*.json")]
    return {f for found in ([s for s in states if s.get("status") == "done"], results) for s in found if (f := s.get("fingerprint"))}


def take_start(place: str, stage: StageDir, record: dict[str, Any]) -> None:
    """Copy the adapter that a run starts from into it, as the outcome of a fine-tune that was done elsewhere."""
    from opdcl.models import adapter_hash, find_adapter

    with folder_appears_whole(stage.path) as temporary:
        shutil.copytree(find_adapter(place), temporary / "adapter")
        done = {"status": "done", "taken_from": place, "finished": now(), "cost": {}, "adapter_sha256": adapter_hash(temporary / "adapter")}
        write_json(temporary / "stage.json", record | done)


def _copied(task: Task, donor: RunDir, run: RunDir, target: Path | None) -> bool:
    return _copy_stage(donor, task, target) if target else _copy_result(donor, run, task)


def _copy_stage(donor: RunDir, task: Task, target: Path) -> bool:
    stage = donor.find_stage(task.name)
    state = stage.state() if stage else {}
    if stage is None or state.get("status") != "done" or state.get("fingerprint") != task.fingerprint:
        return False
    with folder_appears_whole(target) as temporary:
        # Checkpoints are for going on with, which a finished stage has no need of.
        shutil.copytree(stage.path, temporary, dirs_exist_ok=True, ignore=shutil.ignore_patterns(stage.trainer.name))
    return True


def _copy_result(donor: RunDir, run: RunDir, task: Task) -> bool:
    result, samples = (f(task.state, task.suite) for f in (donor.eval_result, donor.eval_samples))
    if not (result.exists() and samples.exists()) or read_json(result).get("fingerprint") != task.fingerprint:
        return False
    write_atomic(run.eval_samples(task.state, task.suite), samples.read_bytes())
    write_json(run.eval_result(task.state, task.suite), read_json(result))
    return True
