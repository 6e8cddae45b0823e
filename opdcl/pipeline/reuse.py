"""Take from other runs what a run would make just so, or starts from: fingerprints cover settings, data and parents."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opdcl.pipeline.plan import Task
from opdcl.rundir.files import folder_appears_whole, now, read_json, write_atomic, write_json
from opdcl.rundir.layout import STAGE_OF, RunDir, StageDir


def copy_finished(
    tasks: Sequence[Task], stages: dict[str, StageDir], run: RunDir, donors: Sequence[RunDir]
) -> list[tuple[Task, RunDir]]:
    """Copy each task's outcome from the first donor that has it; return what was copied, and from where.

    Args:
        tasks: What the plan says; only tasks that have not begun are looked for.
        stages: The run's training stages, by name.
        run: Where the copies go.
        donors: Runs to take from.
    """
    known = [(donor, outcomes(donor)) for donor in donors]
    taken = []
    for task in tasks:
        donor = next((d for d, made in known if task.fingerprint in made), None)
        if task.action != "run" or donor is None:
            continue
        if task.name == "eval":
            _copy_result(donor, run, task)
        else:
            _copy_stage(donor, task.name, stages[task.name].path)
        taken.append((task, donor))
    return taken


def outcomes(donor: RunDir) -> set[str]:
    """Return the fingerprints of all that a run has finished."""
    stages = [stage.state() for name in STAGE_OF.values() if (stage := donor.find_stage(name))]
    done = [state for state in stages if state.get("status") == "done"]
    results = [
        read_json(file)
        for file in donor.evals.glob("*/*.json")
        if donor.eval_samples(file.parent.name, file.stem).exists()
    ]
    return {fingerprint for record in done + results if (fingerprint := record.get("fingerprint"))}


def take_start(place: str, stage: StageDir, record: dict[str, Any]) -> None:
    """Copy the adapter that a run starts from into it, as the outcome of a fine-tune that was done elsewhere."""
    from opdcl.model.adapters import find_adapter
    from opdcl.rundir.hashes import adapter_hash

    with folder_appears_whole(stage.path) as temporary:
        shutil.copytree(find_adapter(place), temporary / "adapter")
        done = {
            "status": "done",
            "taken_from": place,
            "finished": now(),
            "cost": {},
            "adapter_sha256": adapter_hash(temporary / "adapter"),
        }
        write_json(temporary / "stage.json", record | done)


def _copy_stage(donor: RunDir, name: str, target: Path) -> None:
    stage = donor.find_stage(name)
    assert stage
    with folder_appears_whole(target) as temporary:
        # Checkpoints are for going on with, which a finished stage has no need of.
        shutil.copytree(
            stage.path, temporary, dirs_exist_ok=True, ignore=shutil.ignore_patterns(stage.trainer.name)
        )


def _copy_result(donor: RunDir, run: RunDir, task: Task) -> None:
    result, samples = (f(task.state, task.suite) for f in (donor.eval_result, donor.eval_samples))
    write_atomic(run.eval_samples(task.state, task.suite), samples.read_bytes())
    write_json(run.eval_result(task.state, task.suite), read_json(result))
