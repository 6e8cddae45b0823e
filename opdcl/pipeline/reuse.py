"""Copy what other runs have finished.

Fingerprints cover settings, data and parents, but of base no more than its name: what it held may have been
replaced since. So a result is copied only from a run whose base had the same weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opdcl.config.model import LoraSection
from opdcl.errors import UsageError, typed
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Measure, Task, Train
from opdcl.pipeline.stage_record import finish_stage, stage_folder
from opdcl.rundir.files import folder_appears_whole, write_atomic
from opdcl.rundir.identity import weights_of_base
from opdcl.rundir.layout import RunDir, StageDir
from opdcl.rundir.records import StageRecord, read_result
from opdcl.rundir.seals import forget

if TYPE_CHECKING:
    from opdcl.model.backbone import Backbone


def copy_finished(tasks: Sequence[Task], run: RunDir, donors: Sequence[RunDir], weights: str) -> list[str]:
    """Copy the outcome of each task that has not begun from the first donor that has it; return notes.

    `weights` is the hash of base's weights, which a donor must share.
    """
    finished = [(donor, outcomes(donor)) for donor in donors]
    notes: list[str] = []
    for task in tasks:
        lacks_result = isinstance(task, Measure) and not run.eval_result(task.state, task.suite).exists()
        if task.action not in ("run", "stale") and not lacks_result:
            continue
        alike = [donor for donor, fingerprints in finished if task.fingerprint in fingerprints]
        donor = next((donor for donor in alike if weights_of_base(donor.read_manifest()) == weights), None)
        if donor is None:
            notes += [not_taken(other) for other in alike]
            continue
        notes.append(f"{task.label}: taken from {donor.path.name}")
        if isinstance(task, Measure):
            what = task.state, task.suite
            forget(run, run.eval_result(*what), run.eval_samples(*what))
            write_atomic(run.eval_samples(*what), donor.eval_samples(*what).read_bytes())
            write_atomic(run.eval_result(*what), donor.eval_result(*what).read_bytes())
        elif stage := donor.find_stage(task.name):
            # A finished stage is not resumed, so its checkpoints stay behind.
            without = shutil.ignore_patterns(stage.trainer.name)
            with folder_appears_whole(stage_folder(run, task.name).path) as temporary:
                shutil.copytree(stage.path, temporary, dirs_exist_ok=True, ignore=without)
    return [*dict.fromkeys(notes)]


def refuse_other_base(name: str, weights: str, donor: RunDir) -> None:
    """Refuse to continue a run on weights of base that are not those that it was made with.

    Raises:
        UsageError: They are others, or the run has not recorded them.
    """
    recorded = weights_of_base(donor.read_manifest())
    if recorded == weights:
        return
    again = typed("opdcl", "recover", donor.adapters()["tuned"], "--domain", "PROMPTS", "-o", "RUN")
    hint = f"begin from its adapter: {again}"
    if not recorded:
        raise UsageError(f"{donor.path} has not recorded the weights of its base {name}", hint)
    message = f"the weights of {name} are not those that {donor.path} was made with"
    raise UsageError(message, f"restore the model, or {hint}")


def not_taken(donor: RunDir) -> str:
    """Say why nothing is taken from a run with the same settings and data."""
    if weights_of_base(donor.read_manifest()):
        return f"nothing is taken from {donor.path.name}: its base, of the same name, had other weights"
    return f"nothing is taken from {donor.path.name}: it has not recorded the weights of its base"


def outcomes(donor: RunDir) -> set[str]:
    """Return the fingerprints of everything that a run has finished."""
    records = [stage.state() for stage in donor.stages() if stage.is_done()]
    for file in donor.evals.glob("*/*.json"):
        if donor.eval_samples(file.parent.name, file.stem).exists():
            records.append(read_result(file))
    return {record["fingerprint"] for record in records if record.get("fingerprint")}


def offered(donors: Sequence[RunDir]) -> dict[str, str]:
    """Return, by fingerprint, which run a result would be copied from, as a dry run says it.

    A dry run loads no weights, so it cannot tell whether they are still those that the run was made with.
    """
    made_by: dict[str, str] = {}
    for donor in donors:
        if weights_of_base(donor.read_manifest()):
            made_by |= dict.fromkeys(outcomes(donor), f"{donor.path.name}, if base has the same weights")
    return made_by


def take_start(job: Job, run: RunDir, task: Train, backbone: Backbone) -> None:
    """Store what a run starts from as the outcome of a fine-tune done elsewhere.

    An adapter is copied. On a model that was tuned as a whole there is none yet: a new one changes nothing.
    """
    from opdcl.model.adapters import start_files

    place = str(job.workflow.start)
    record = StageRecord(
        stage=task.name,
        status="running",
        fingerprint=task.fingerprint,
        inputs=task.inputs,
        taken_from=place,
        tuned_model=job.tuned.model_dump() if job.tuned else None,
    )
    with folder_appears_whole(stage_folder(run, task.name).path) as temporary:
        stage = StageDir(temporary)
        if job.tuned:
            from opdcl.train.stage import save_adapter

            backbone.new_adapter(LoraSection(), seed=0)
            save_adapter(backbone, stage.adapter)
        else:
            stage.adapter.mkdir()
            # A trainer's folder may hold much else: checkpoints, optimizer states, logs.
            for file in start_files(place):
                shutil.copyfile(file, stage.adapter / file.name)
        finish_stage(stage, record)
