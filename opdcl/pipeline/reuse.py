"""Copy what other runs have finished.

Fingerprints cover settings, data and parents, so equal fingerprints mean equal results.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from opdcl.config.finetune import LoraSection
from opdcl.config.workflow import Workflow
from opdcl.pipeline.plan import Task, stage_folder
from opdcl.rundir.files import folder_appears_whole, now, write_atomic, write_json
from opdcl.rundir.layout import STAGE_OF, RunDir, StageDir
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
        if task.name == "eval":
            result, samples = (f(task.state, task.suite) for f in (donor.eval_result, donor.eval_samples))
            forget(run, run.eval_result(task.state, task.suite), run.eval_samples(task.state, task.suite))
            write_atomic(run.eval_samples(task.state, task.suite), samples.read_bytes())
            write_json(run.eval_result(task.state, task.suite), read_result(result))
        elif stage := donor.find_stage(task.name):
            # A finished stage is not resumed, so its checkpoints stay behind.
            without = shutil.ignore_patterns(stage.trainer.name)
            with folder_appears_whole(stage_folder(run, task.name).path) as temporary:
                shutil.copytree(stage.path, temporary, dirs_exist_ok=True, ignore=without)
        copied.append((task, donor))
    return copied


def copy_manifest(run: RunDir, donors: Sequence[RunDir], command: str) -> None:
    """Give a run of which everything was copied the manifest of the donor that has its adapters too."""
    folders = run.adapters()
    hashes = {state: StageDir(folder.parent).state()["adapter_sha256"] for state, folder in folders.items()}
    for manifest in (donor.read_manifest() for donor in donors):
        adapters = manifest.get("adapters", {})
        if hashes == {state: adapters[state]["sha256"] for state in hashes if state in adapters}:
            manifest["adapters"] = {state: adapters[state] for state in hashes}
            manifest.pop("seconds", None)
            write_json(run.manifest, manifest | {"created": now(), "commands": [command]})
            return


def outcomes(donor: RunDir) -> set[str]:
    """Return the fingerprints of everything that a run has finished."""
    stages = [stage.state() for name in STAGE_OF.values() if (stage := donor.find_stage(name))]
    results = [
        read_result(file)
        for file in donor.evals.glob("*/*.json")
        if donor.eval_samples(file.parent.name, file.stem).exists()
    ]
    records = [state for state in stages if state.get("status") == "done"] + results
    return {fingerprint for record in records if (fingerprint := record.get("fingerprint"))}


def take_start(workflow: Workflow, run: RunDir, task: Task, load: Callable[[], Backbone]) -> None:
    """Store what a run starts from as the outcome of a fine-tune done elsewhere.

    An adapter is copied. On a model that was tuned as a whole there is none yet: a new one changes nothing.
    """
    from opdcl.model.adapters import start_files, tuned_model
    from opdcl.rundir.hashes import adapter_hash

    place = str(workflow.start)
    with folder_appears_whole(stage_folder(run, task.name).path) as temporary:
        tuned = tuned_model(place, workflow.model)
        if tuned:
            from opdcl.training import save_adapter

            load().new_adapter(LoraSection(), seed=0)
            save_adapter(load(), temporary / "adapter")
        else:
            (temporary / "adapter").mkdir()
            # A trainer's folder may hold much else: checkpoints, optimizer states, logs.
            for file in start_files(place):
                shutil.copyfile(file, temporary / "adapter" / file.name)
        record = {"stage": task.name, "status": "done", "fingerprint": task.fingerprint, "config": {}}
        record |= {"inputs": task.inputs, "taken_from": place, "finished": now(), "cost": {}}
        record |= {"tuned_model": tuned.model_dump()} if tuned else {}
        record["adapter_sha256"] = adapter_hash(temporary / "adapter")
        write_json(temporary / "stage.json", record)
