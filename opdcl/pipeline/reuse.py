"""Copy what other runs have finished.

Fingerprints cover settings, data and parents, so equal fingerprints mean equal results.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from opdcl.pipeline.plan import Task, stage_folder
from opdcl.rundir.files import folder_appears_whole, now, read_json, write_atomic, write_json
from opdcl.rundir.layout import STAGE_OF, RunDir


def copy_finished(tasks: Sequence[Task], run: RunDir, donors: Sequence[RunDir]) -> list[tuple[Task, RunDir]]:
    """Copy the outcome of each task not yet started from the first donor that has it; return both of each."""
    finished = [(donor, outcomes(donor)) for donor in donors]
    copied = []
    for task in tasks:
        donor = next((d for d, fingerprints in finished if task.fingerprint in fingerprints), None)
        if task.action != "run" or donor is None:
            continue
        if task.name == "eval":
            result, samples = (f(task.state, task.suite) for f in (donor.eval_result, donor.eval_samples))
            write_atomic(run.eval_samples(task.state, task.suite), samples.read_bytes())
            write_json(run.eval_result(task.state, task.suite), read_json(result))
        elif stage := donor.find_stage(task.name):
            # A finished stage is not resumed, so its checkpoints stay behind.
            without = shutil.ignore_patterns(stage.trainer.name)
            with folder_appears_whole(stage_folder(run, task.name).path) as temporary:
                shutil.copytree(stage.path, temporary, dirs_exist_ok=True, ignore=without)
        copied.append((task, donor))
    return copied


def outcomes(donor: RunDir) -> set[str]:
    """Return the fingerprints of everything that a run has finished."""
    stages = [stage.state() for name in STAGE_OF.values() if (stage := donor.find_stage(name))]
    results = [
        read_json(file)
        for file in donor.evals.glob("*/*.json")
        if donor.eval_samples(file.parent.name, file.stem).exists()
    ]
    records = [state for state in stages if state.get("status") == "done"] + results
    return {fingerprint for record in records if (fingerprint := record.get("fingerprint"))}


def take_start(place: str, run: RunDir, task: Task) -> None:
    """Copy the adapter that a run starts from into the run, as the outcome of a fine-tune done elsewhere."""
    from opdcl.model.adapters import find_adapter
    from opdcl.rundir.hashes import ADAPTER, adapter_hash

    adapter = find_adapter(place)
    with folder_appears_whole(stage_folder(run, task.name).path) as temporary:
        (temporary / "adapter").mkdir()
        # A trainer's folder may hold much else: checkpoints, optimizer states, logs.
        for name in (ADAPTER, "adapter_config.json"):
            shutil.copyfile(adapter / name, temporary / "adapter" / name)
        record = {"stage": task.name, "status": "done", "fingerprint": task.fingerprint, "config": {}}
        record |= {"inputs": task.inputs, "taken_from": place, "finished": now(), "cost": {}}
        record["adapter_sha256"] = adapter_hash(temporary / "adapter")
        write_json(temporary / "stage.json", record)
