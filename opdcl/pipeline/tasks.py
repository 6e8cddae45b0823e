"""Do the tasks of a plan: copy what another run has finished, take an adapter from elsewhere, train, measure.

Fingerprints cover settings, data and parents, but of base no more than its name: what it held may have been
replaced since. So a result is copied only from a run whose base had the same weights.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.model import LoraSection
from opdcl.console import Output, StageLine
from opdcl.errors import UsageError, typed
from opdcl.model.adapters import start_files
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import (
    Measure,
    Task,
    Train,
    command_line,
    finish_stage,
    read_record,
    stage_folder,
    write_learned,
    write_record,
)
from opdcl.pipeline.trackers import Tracking
from opdcl.results.origins import SET_ASIDE
from opdcl.rundir import seals
from opdcl.rundir.files import folder_appears_whole, now, write_atomic
from opdcl.rundir.hashes import adapter_hash
from opdcl.rundir.layout import RunDir, read_result, weights_of_base
from opdcl.rundir.stage import StageDir, StageRecord, read_metrics

if TYPE_CHECKING:
    from opdcl.model.backbone import Backbone
    from opdcl.pipeline.forecast import Timetable

# Nats a token above which rows are hardly learned: of a model that knows nothing of them they cost several.
HIGH_LOSS = 1.0


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
            seals.forget(run, run.eval_result(*what), run.eval_samples(*what))
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


@dataclass
class Session:
    """What one worker does its tasks with: the run directory or the worker's copy of it, and the model."""

    job: Job
    tasks: list[Task]
    run: RunDir
    backbone: Backbone
    output: Output
    tracking: Tracking
    measured_state: str = "base"
    """The last state with an adapter that was measured, which the backbone still holds."""

    @cached_property
    def times(self) -> Timetable:
        """How long all tasks take."""
        from opdcl.pipeline.forecast import Timetable, work_of

        return Timetable(work_of(self.job, self.tasks), self.output.note)


def do(task: Task, session: Session) -> None:
    """Do a task that the plan does not skip."""
    match task:
        case Measure():
            measure(task, session)
        case Train(name="finetune") if session.job.workflow.finetune is None:
            take_start(task, session)
        case Train():
            train(task, session)


def take_start(task: Train, session: Session) -> None:
    """Store what a run starts from as the outcome of a fine-tune done elsewhere.

    An adapter is copied. On a model that was tuned as a whole there is none yet: a new one changes nothing.
    """
    job, place = session.job, str(session.job.workflow.start)
    session.output.note(f"{'model' if job.tuned else 'adapter'} given: {short_name(place)}")
    record = StageRecord(
        stage=task.name,
        status="running",
        fingerprint=task.fingerprint,
        inputs=task.inputs,
        taken_from=place,
        tuned_model=job.tuned.model_dump() if job.tuned else None,
    )
    with folder_appears_whole(stage_folder(session.run, task.name).path) as temporary:
        stage = StageDir(temporary)
        if job.tuned:
            from opdcl.train.checkpoints import save_adapter

            session.backbone.new_adapter(LoraSection(), seed=0)
            save_adapter(session.backbone, stage.adapter)
        else:
            stage.adapter.mkdir()
            # A trainer's folder may hold much else: checkpoints, optimizer states, logs.
            for file in start_files(place):
                shutil.copyfile(file, stage.adapter / file.name)
        finish_stage(stage, record)


def train(task: Train, session: Session) -> None:
    """Train one stage, showing its progress on the console and in the trackers."""
    from opdcl.measure.ask import peak_memory, reset_peak_memory
    from opdcl.train.finetune import Losses

    job, run, output = session.job, session.run, session.output
    stage = stage_folder(run, task.name)
    earlier = read_record(stage) if task.action == "resume" else None
    cost = earlier.cost if earlier else {}
    record = StageRecord(
        stage=task.name,
        status="running",
        fingerprint=task.fingerprint,
        config=getattr(job.workflow, task.name).model_dump(),
        inputs=task.inputs,
        started=earlier.started if earlier else now(),
        cost=cost,
        rows=job.training_rows.count if task.name == "finetune" else None,
    )
    write_record(stage, record)
    if task.name == "finetune" and not earlier:
        test = str((run.data / f"{SET_ASIDE}.jsonl").resolve())
        set_aside = job.inputs.hash(test) if test in job.inputs.given else None
        write_learned(stage, job.examples.rows, set_aside)
    offset = steps_done(run, before=stage)
    reset_peak_memory()
    started = time.perf_counter()

    def on_progress(done: int, total: int) -> None:
        session.tracking.follow(stage, offset)
        session.times.progress(done, total)

    try:
        with session.times.timed(task.label), output.stage(task.label, on_progress) as line:
            _learn(task.name, stage, session, line)
        session.tracking.follow(stage, offset)
    finally:
        metrics = read_metrics(stage.metrics)
        steps = [row for row in metrics if "tokens" in row]
        spent = {
            "seconds": round(cost.get("seconds", 0) + time.perf_counter() - started, 1),
            "tokens": sum(row["tokens"] for row in steps),
            "steps": max((row["step"] for row in steps), default=0),
            "peak_memory_bytes": max(cost.get("peak_memory_bytes", 0), peak_memory()),
        }
        record = record.model_copy(update={"cost": spent | dose(metrics)})
        write_record(stage, record)
    finish_stage(stage, record)
    loss = Losses(metrics).recent("domain")
    if task.name == "finetune" and loss > HIGH_LOSS:
        output.note(f"Warning: your rows are hardly learned, at a loss of {loss:.2f} nats a token")
        option = "--epochs " if sys.argv[1:2] == ["finetune"] else "--set finetune.epochs="
        more = f"{option}{3 * job.workflow.finetune.epochs:g} --force"
        output.note(f"hint: {command_line(run)} {more}")


def dose(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the steps in a stage's metrics learned from, and how long their parts took.

    `graded` holds answers and tokens by stream and author; `parts` holds seconds.
    """
    graded: dict[str, dict[str, dict[str, int]]] = {}
    parts: dict[str, float] = {}
    for row in rows:
        for name, seconds in row.get("parts", {}).items():
            parts[name] = round(parts.get(name, 0.0) + seconds, 3)
        if "graded" in row:
            of_author = graded.setdefault(row["stream"], {}).setdefault(
                row["author"], {"answers": 0, "tokens": 0}
            )
            of_author["answers"] += row["answers"]
            of_author["tokens"] += row["graded"]
    return {"graded": graded, "parts": parts}


def _learn(name: str, stage: StageDir, session: Session, line: StageLine) -> None:
    """Recover or fine-tune, and write the adapter into the stage's folder."""
    from opdcl.train.answer_cache import CompletionCache
    from opdcl.train.external_teachers import provided
    from opdcl.train.finetune import finetune
    from opdcl.train.recover import recover

    job, workflow, backbone = session.job, session.job.workflow, session.backbone
    if name == "recover":
        config, prompts, tuned = workflow.recover, job.prompts, session.run.adapters()["tuned"]
        with provided(config, job.recovery, prompts, backbone, stage, line.note) as more:
            recover(config, prompts, backbone, tuned, stage, line, more)
        return
    start = job.adapter if isinstance(job.adapter, Path) else None
    rows, general, cache = job.examples.encoded, job.examples.replay, CompletionCache(backbone)
    finetune(workflow.finetune, rows, general, backbone, start, stage, line, cache)


def measure(task: Measure, session: Session) -> None:
    """Measure one state on one suite, or its closeness to base."""
    from opdcl.measure.ask import Asking
    from opdcl.measure.distance import measure_closeness
    from opdcl.measure.evaluate import evaluate

    job, config, run, backbone = session.job, session.job.workflow.eval, session.run, session.backbone
    state, adapter = task.state, run.adapters()[task.state] if task.state != "base" else None
    if adapter and session.measured_state != state:
        backbone.drop_adapters()
        backbone.load_adapter(adapter, "student")
        session.measured_state = state
    seals.forget(run, run.eval_result(state, task.suite), run.eval_samples(state, task.suite))
    digest = adapter_hash(adapter) if adapter else None
    model = {"id": job.workflow.model.id, "adapter_sha256": digest}
    record = {"role": task.role, "model": model, "fingerprint": task.fingerprint}
    with session.times.timed(task.label), session.output.stage(task.label, session.times.progress) as line:
        asking = Asking(config, backbone, run, state, task.suite, line, adapter, record)
        if task.suite == CLOSENESS:
            result = measure_closeness(asking, job.closeness)
        else:
            suite = job.suite(task.suite)
            if config.server and suite.generative:
                model["decoded"] = "on a server"
            result = evaluate(asking, suite)
        metric = result["metric"]
        line.note(f"{metric} {result['metrics'][metric]:.3f} (n = {result['n']})")


def steps_done(run: RunDir, before: StageDir | None = None) -> int:
    """Return the optimizer steps of all stages, or of those before one."""
    stages = [stage for stage in run.stages() if before is None or stage.path < before.path]
    return sum(stage.state().get("cost", {}).get("steps", 0) for stage in stages)


def short_name(place: str) -> str:
    """Return the name of a model or adapter: a folder, whose path is left out, or an id."""
    return Path(place).name if os.path.exists(place) else place
