"""Copy what other runs have finished.

Fingerprints cover settings, data and parents, so equal fingerprints mean equal results.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opdcl.config.finetune import LoraSection
from opdcl.config.workflow import Workflow
from opdcl.pipeline.plan import Task, stage_folder
from opdcl.rundir.files import folder_appears_whole, now, write_atomic, write_json
from opdcl.rundir.layout import RunDir
from opdcl.rundir.records import read_result
from opdcl.rundir.seals import forget

if TYPE_CHECKING:
    from opdcl.model.backbone import Backbone


def copy_finished(tasks: Sequence[Task], run: RunDir, donors: Sequence[RunDir]) -> list[tuple[Task, RunDir]]:
    """Copy the outcome of each task not yet started from the first donor that has it; return both of each."""
    finished = [(donor, outcomes(donor)) for donor in donors]
    copied = []
    for task in tasks:
        donor = next((d for d, fingerprints in finished if task.fingerprint in fingerprints), None)
        if task.action != "run" or donor is None:
            continue
        copied.append((task, donor))
        if task.name == "eval":
            result, samples = (
                run.eval_result(task.state, task.suite),
                run.eval_samples(task.state, task.suite),
            )
            forget(run, result, samples)
            write_atomic(samples, donor.eval_samples(task.state, task.suite).read_bytes())
            write_atomic(result, donor.eval_result(task.state, task.suite).read_bytes())
        elif stage := donor.find_stage(task.name):
            # A finished stage is not resumed, so its checkpoints stay behind.
            without = shutil.ignore_patterns(stage.trainer.name)
            with folder_appears_whole(stage_folder(run, task.name).path) as temporary:
                shutil.copytree(stage.path, temporary, dirs_exist_ok=True, ignore=without)
    return copied


def outcomes(donor: RunDir) -> set[str]:
    """Return the fingerprints of everything that a run has finished."""
    records = [stage.state() for stage in donor.stages() if stage.is_done()]
    for file in donor.evals.glob("*/*.json"):
        if donor.eval_samples(file.parent.name, file.stem).exists():
            records.append(read_result(file))
    return {record["fingerprint"] for record in records if record.get("fingerprint")}


def take_start(workflow: Workflow, run: RunDir, task: Task, backbone: Backbone) -> None:
    """Store what a run starts from as the outcome of a fine-tune done elsewhere.

    An adapter is copied. On a model that was tuned as a whole there is none yet: a new one changes nothing.
    """
    from opdcl.model.adapters import start_files, tuned_model
    from opdcl.rundir.hashes import adapter_hash

    place = str(workflow.start)
    tuned = tuned_model(place, workflow.model)
    record = {
        "stage": task.name,
        "status": "done",
        "fingerprint": task.fingerprint,
        "config": {},
        "inputs": task.inputs,
        "taken_from": place,
        "finished": now(),
        "cost": {},
    }
    with folder_appears_whole(stage_folder(run, task.name).path) as temporary:
        adapter = temporary / "adapter"
        if tuned:
            from opdcl.training import save_adapter

            record["tuned_model"] = tuned.model_dump()
            backbone.new_adapter(LoraSection(), seed=0)
            save_adapter(backbone, adapter)
        else:
            adapter.mkdir()
            # A trainer's folder may hold much else: checkpoints, optimizer states, logs.
            for file in start_files(place):
                shutil.copyfile(file, adapter / file.name)
        record["adapter_sha256"] = adapter_hash(adapter)
        write_json(temporary / "stage.json", record)
