"""Carry out a run: check, lock, do every unfinished task in the order of the plan, write the report."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl import parallel
from opdcl.config.evaluate import CLOSENESS
from opdcl.config.load import dump, with_setting
from opdcl.config.section import FINGERPRINT
from opdcl.config.workflow import Workflow
from opdcl.console import Output, StageLine, quiet_libraries
from opdcl.data.rows import recognised
from opdcl.errors import GateError, InconclusiveError, Interrupted, OpdclError, UsageError, typed
from opdcl.model.consent import trackers_of
from opdcl.pipeline.checks import checked_plan
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Measure, Task, Train
from opdcl.pipeline.reuse import copy_finished, refuse_other_base, take_start
from opdcl.pipeline.stage_record import (
    finish_stage,
    read_record,
    read_records,
    stage_folder,
    write_learned,
    write_record,
)
from opdcl.pipeline.trackers import Tracking, scores
from opdcl.results.origins import SET_ASIDE
from opdcl.rundir import seals
from opdcl.rundir.files import now, write_atomic, write_json
from opdcl.rundir.hashes import adapter_hash
from opdcl.rundir.layout import STATE_OF, RunDir, machine_of, versions, weights_of_base
from opdcl.rundir.lock import locked
from opdcl.rundir.stage import StageDir, StageRecord, read_metrics
from opdcl.sanitize import redact
from opdcl.signals import as_interrupts
from opdcl.version import __version__

if TYPE_CHECKING:
    from opdcl.model.backbone import Backbone
    from opdcl.results.estimates import Summary

# Nats a token above which rows are hardly learned: of a model that knows nothing of them they cost several.
HIGH_LOSS = 1.0


def execute(
    job: Job,
    output: Output,
    force: bool = False,
    donors: Sequence[RunDir] = (),
    continued: RunDir | None = None,
) -> Summary:
    """Carry out the plan, write the report and return its summary.

    Results that a donor has finished with the same settings, data and base are copied. `continued` is a donor
    whose base this run must have. `force` redoes stages whose settings or data have changed.

    Raises:
        UsageError: The directory holds something else, or a run with other settings or another base.
        Interrupted: The user stopped it.
        GateError: Everything ran, but a required score was missed.
    """
    run, is_first = job.run, parallel.rank() == 0
    # Nothing that another command does can change what is checked under the lock.
    with interruptible(run), _locked_for_all(run, output):
        with output.busy("checking model and data"), quiet_libraries():
            planned, notes, manifest = parallel.on_first_worker(lambda: _check(job, output, force, continued))
        with quiet_libraries(run.new_log() if is_first else None):
            # Before anything is written: a run whose base is another one now stays as it was.
            is_unfinished = any(task.unfinished for task in planned)
            backbone = _load(job, manifest, output) if is_unfinished else None
            base = weights_of_base(manifest)
            if continued:
                refuse_other_base(job.workflow.model.id, base, continued)
            givers = [continued, *donors] if continued else donors
            tasks = parallel.on_first_worker(lambda: _settle(job, planned, givers, base, output))
            trackers = trackers_of(job.workflow, job.origins)[0] if backbone and is_first else []
            with (
                _copy_of_worker(run) as place,
                contextlib.closing(Tracking(trackers, run, output.note)) as tracking,
            ):
                if backbone is None:
                    output.note("nothing to do: all stages are finished")
                else:
                    if is_first:
                        _announce(job, tasks, notes, output)
                    Session(job, place, backbone, manifest, output, tracking).do(tasks)
                return parallel.on_first_worker(lambda: finish(job.workflow, run, output, tracking))


@contextlib.contextmanager
def _locked_for_all(run: RunDir, output: Output) -> Iterator[None]:
    """Lock a run directory: the first worker holds the lock for all, and all raise its error."""
    with contextlib.ExitStack() as held:
        if dead := parallel.on_first_worker(lambda: held.enter_context(locked(run))):
            output.note(f"took over the lock of process {dead.get('pid')}, which has ended")
        yield


def _check(
    job: Job, output: Output, force: bool, continued: RunDir | None
) -> tuple[list[Task], list[str], dict[str, Any]]:
    """Check everything; return the tasks, notes, and the manifest of what the directory holds."""
    run = job.run
    for name in seals.discard_damaged(run) if force else ():
        output.note(f"{name} has changed since it was made: what it belongs to is repeated")
    seals.refuse_damaged(run)
    records = read_records(run)
    tasks, notes = checked_plan(job, records, force, continued)
    seals.remove_unfinished(run)
    seals.forget_removed(run)
    # The manifest of an attempt that has made nothing is ignored: this one may have another base.
    return tasks, notes, {} if records.empty else run.read_manifest()


def _load(job: Job, manifest: dict[str, Any], output: Output) -> Backbone:
    """Return the model, check that it is the one that the run began with, and add it to the manifest."""
    from opdcl.model.hardware import pick_device, pick_dtype
    from opdcl.model.load_backbone import load_backbone, refuse_changed_copies

    started, config, tuned = time.perf_counter(), job.workflow.model, job.tuned
    models = f"{short_name(tuned.id)} beside {short_name(config.id)}" if tuned else short_name(config.id)
    output.note(f"load: {models} on {pick_device()} in {pick_dtype(config.dtype)}")
    with output.busy("loading the model"):
        backbone = load_backbone(config, tuned, job.tokenizer)
        for folder in job.foreign_adapters:
            refuse_changed_copies(folder, backbone.causal_lm)
    if parallel.worker_count() > 1:
        part = "a part of the" if parallel.sharded() else "the whole"
        output.note(f"{parallel.worker_count()} processes, each with {part} base")
    base = manifest.setdefault("base", {"id": config.id, "revision": config.revision})
    base.setdefault("parameters", backbone.causal_lm.num_parameters())
    with output.busy("hashing the weights of the base"):
        fingerprint = backbone.fingerprint()
    if base.setdefault("fingerprint_before", fingerprint) != fingerprint:
        names = f"{config.id} or {tuned.id}" if tuned else config.id
        message = f"the weights of {names} are not those that this run began with"
        raise UsageError(message, "restore the model, or start a new run directory")
    if tuned:
        base["weights"] = backbone.base_fingerprint()
    manifest["device"] = machine_of(backbone.device) | {
        "kind": str(backbone.causal_lm.device),
        "dtype": str(backbone.causal_lm.dtype).removeprefix("torch."),
        "processes": parallel.worker_count(),
    }
    manifest["seconds"] = manifest.get("seconds", 0) + time.perf_counter() - started
    return backbone


def _settle(job: Job, tasks: list[Task], donors: Sequence[RunDir], base: str, output: Output) -> list[Task]:
    """Clear what the tasks replace, write the settings, copy what donors have; return what is left to do."""
    run = job.run
    replaced = []
    for task in tasks:
        if isinstance(task, Train) and task.action in ("run", "stale"):
            replaced.append(stage_folder(run, task.name).path)
        if task.action == "stale":
            replaced.append(run.evals / STATE_OF[task.name])
    seals.forget(run, *replaced, run.config, run.workflow, run.data)
    for folder in replaced:
        shutil.rmtree(folder, ignore_errors=True)
    # First the file by which a run is recognized: after a crash here, the same command continues.
    # With former settings: runs of an earlier version have them, and equal arms are pooled.
    settings = job.workflow.model_dump(context=FINGERPRINT)
    write_json(run.config, {"workflow": settings, "origins": job.origins})
    workflow = job.workflow
    for key, place in job.sources.items():  # its own files are found from the file that names them
        if Path(place).parent == run.data.resolve():
            workflow = with_setting(workflow, key, f"{run.data.name}/{Path(place).name}")
    write_atomic(run.workflow, dump(workflow))
    job.inputs.save()
    for note in copy_finished(tasks, run, donors, base):
        output.note(note)
    seals.seal_new(run)
    return job.plan()


def _announce(job: Job, tasks: list[Task], notes: list[str], output: Output) -> None:
    """Say what the run works with, and what a user should know before it trains."""
    from opdcl.pipeline.forecast import TOO_LARGE, forecast, memory_words

    if TOO_LARGE in (words := memory_words(forecast(job, tasks))):
        output.note(words)
    done = [task for task in tasks if task.action in ("skip", "resume")]
    known = {str(value) for task in done if isinstance(task, Train) for value in task.inputs.values()}
    asked = {job.workflow.eval.data.get(task.suite) for task in done if isinstance(task, Measure)}
    for source, rows in job.inputs.files.items():
        if source not in asked and job.inputs.hash(source) not in known:  # an earlier command has not said it
            output.note(recognised(source, rows))
    for note in notes:
        output.note(note)


@dataclass
class Session:
    """One worker's part of a run, in the run directory or the worker's copy of it.

    It does the tasks, and keeps the manifest and the stage records.
    """

    job: Job
    run: RunDir
    backbone: Backbone
    manifest: dict[str, Any]
    output: Output
    tracking: Tracking
    measured_state: str = "base"
    """The last state that was measured: the one whose adapter the backbone holds."""

    def do(self, tasks: list[Task]) -> None:
        """Do all tasks that the plan does not skip.

        Raises:
            OpdclError: A task failed, or the base weights changed on the way.
        """
        from opdcl.pipeline.forecast import Timetable, work_of

        started = time.perf_counter()
        base, workflow = self.manifest["base"], self.job.workflow
        self._save_manifest()
        self.times = Timetable(work_of(self.job, tasks), self.output.note)
        try:
            for task in tasks:
                match task:
                    case _ if task.action == "skip":
                        self.output.note(f"{task.label}: skipped, {task.why}")
                    case Measure():
                        self._measure(task)
                    case Train(name="finetune") if workflow.finetune is None:
                        given = "model" if self.job.tuned else "adapter"
                        self.output.note(f"{given} given: {short_name(workflow.start)}")
                        take_start(self.job, self.run, task, self.backbone)
                    case Train():
                        self._train(task)
                if isinstance(task, Train):
                    self._save_manifest()  # it names the new adapter
                seals.seal_new(self.run)
        finally:
            # The fingerprint of a sharded base needs all workers; after an error some may have exited.
            if not (parallel.sharded() and sys.exc_info()[0]):
                with self.output.busy("checking that the weights of the base are unchanged"):
                    base["fingerprint_after"] = self.backbone.fingerprint()
            seconds = self.manifest["seconds"] + time.perf_counter() - started
            self.manifest["seconds"] = round(seconds, 1)
            self._save_manifest()
        if base["fingerprint_after"] != base["fingerprint_before"]:
            hint = "this is a defect of opdcl: please report it"
            raise OpdclError("the base weights changed during the run", hint)

    def _train(self, task: Train) -> None:
        """Train one stage, showing its progress on the console and in the trackers."""
        from opdcl.train.cost import dose, peak_memory, reset_peak_memory
        from opdcl.train.finetune import Losses

        stage = stage_folder(self.run, task.name)
        earlier = read_record(stage) if task.action == "resume" else None
        cost = earlier.cost if earlier else {}
        record = StageRecord(
            stage=task.name,
            status="running",
            fingerprint=task.fingerprint,
            config=getattr(self.job.workflow, task.name).model_dump(),
            inputs=task.inputs,
            started=earlier.started if earlier else now(),
            cost=cost,
            rows=self.job.training_rows.count if task.name == "finetune" else None,
        )
        write_record(stage, record)
        if task.name == "finetune" and not earlier:
            inputs, test = self.job.inputs, str((self.run.data / f"{SET_ASIDE}.jsonl").resolve())
            set_aside = inputs.hash(test) if test in inputs.given else None
            write_learned(stage, self.job.examples.rows, set_aside)
        offset = steps_done(self.run, before=stage)
        reset_peak_memory()
        started = time.perf_counter()

        def on_progress(done: int, total: int) -> None:
            self.tracking.follow(stage, offset)
            self.times.progress(done, total)

        try:
            with self.times.timed(task.label), self.output.stage(task.label, on_progress) as line:
                self._learn(task.name, stage, line)
            self.tracking.follow(stage, offset)
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
        config, loss = self.job.workflow.finetune, Losses(metrics).recent("domain")
        if task.name == "finetune" and loss > HIGH_LOSS:
            self.output.note(f"Warning: your rows are hardly learned, at a loss of {loss:.2f} nats a token")
            self.output.note(f"hint: {longer(self.run, 3 * config.epochs)}")

    def _learn(self, name: str, stage: StageDir, line: StageLine) -> None:
        """Recover or fine-tune, and write the adapter into the stage's folder."""
        from opdcl.train.answer_cache import CompletionCache
        from opdcl.train.external_teachers import provided
        from opdcl.train.finetune import finetune
        from opdcl.train.recover import recover

        job, workflow, backbone = self.job, self.job.workflow, self.backbone
        if name == "recover":
            config, prompts, tuned = workflow.recover, job.prompts, self.run.adapters()["tuned"]
            with provided(config, job.recovery, prompts, backbone, stage, line.note) as more:
                recover(config, prompts, backbone, tuned, stage, line, more)
            return
        start = job.adapter if isinstance(job.adapter, Path) else None
        rows, general, cache = job.examples.encoded, job.examples.replay, CompletionCache(backbone)
        finetune(workflow.finetune, rows, general, backbone, start, stage, line, cache)

    def _measure(self, task: Measure) -> None:
        """Measure one state on one suite, or its closeness to base."""
        from opdcl.measure.ask import Asking
        from opdcl.measure.distance import measure_closeness
        from opdcl.measure.evaluate import evaluate

        job, config, run, backbone = self.job, self.job.workflow.eval, self.run, self.backbone
        state, adapter = task.state, run.adapters()[task.state] if task.state != "base" else None
        if adapter and self.measured_state != state:
            backbone.drop_adapters()
            backbone.load_adapter(adapter, "student")
            self.measured_state = state
        seals.forget(run, run.eval_result(state, task.suite), run.eval_samples(state, task.suite))
        digest = adapter_hash(adapter) if adapter else None
        model = {"id": job.workflow.model.id, "adapter_sha256": digest}
        record = {"role": task.role, "model": model, "fingerprint": task.fingerprint}
        with self.times.timed(task.label), self.output.stage(task.label, self.times.progress) as line:
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

    def _save_manifest(self) -> None:
        """Write what the run was made with: base, device, versions, commands, adapters."""
        run = self.run
        commands = [*self.manifest.get("commands", []), command_line(run)]
        made_with = {"commands": [*dict.fromkeys(commands)], "opdcl": __version__, "versions": versions()}
        self.manifest = {"created": now()} | self.manifest | made_with
        adapters = {}
        for state, folder in run.adapters().items():
            digest = StageDir(folder.parent).state()["adapter_sha256"]
            adapters[state] = {"path": str(folder.relative_to(run.path)), "sha256": digest}
        self.manifest["adapters"] = adapters
        seals.forget(run, run.manifest)
        write_json(run.manifest, self.manifest)


def finish(workflow: Workflow, run: RunDir, output: Output, tracking: Tracking) -> Summary:
    """Write the report, send its scores to the trackers, and check them against the gates.

    Raises:
        GateError: A gate is shown to be missed.
        InconclusiveError: The scores do not decide a gate.
    """
    from opdcl.results import gates
    from opdcl.results.render import run_document, write
    from opdcl.results.summary import Results

    results = Results(run)
    summary = results.summary
    verdicts = gates.judge_gates(workflow.gates.model_dump(), results)
    seals.seal_new(run)
    written = write(results)
    for file in written if summary.suites else ():  # before a measurement they say what the result says
        output.note(f"wrote {file}")
    report = run.reports[0].read_text(encoding="utf-8")
    told = {**scores(run_document(summary)), "verdict": summary.verdict.text, "report": report}
    tracking.send({f"eval/{key}": value for key, value in told.items()}, steps_done(run))
    tracking.close()
    for verdict in verdicts:
        output.note(f"gate {verdict['outcome']}: {verdict['sentence']}")
    try:
        gates.refuse(verdicts, typed("opdcl", "report", run.path))
    except (GateError, InconclusiveError):
        # The command ends without showing the result; its faults and notes must be seen all the same.
        output.remarks(summary.faults, [note for note in summary.notes if note not in summary.faults])
        output.note(summary.verdict.text)
        raise
    return summary


@contextlib.contextmanager
def interruptible(run: RunDir) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into an error whose hint is the command that resumes the run."""
    hint = f"{command_line(run)}  # resumes where it stopped"
    try:
        # Training stages have their own handler, which saves first.
        with as_interrupts():
            yield
    except KeyboardInterrupt as fault:
        raise Interrupted("interrupted; what was finished is saved", hint) from fault
    except Interrupted as fault:
        fault.hint = hint
        raise


@contextlib.contextmanager
def _copy_of_worker(run: RunDir) -> Iterator[RunDir]:
    """Yield the run to the first worker, and to each other one a temporary copy of its directory."""
    if parallel.rank() == 0:
        parallel.all_values(None)  # wait until the copies are made
        yield run
        return
    with tempfile.TemporaryDirectory(prefix="opdcl-") as scratch:
        folder = Path(scratch) / run.path.name
        shutil.copytree(run.path, folder)
        parallel.all_values(None)
        yield RunDir(folder)


def steps_done(run: RunDir, before: StageDir | None = None) -> int:
    """Return the optimizer steps of all stages, or of those before one."""
    stages = [stage for stage in run.stages() if before is None or stage.path < before.path]
    return sum(stage.state().get("cost", {}).get("steps", 0) for stage in stages)


def short_name(place: str) -> str:
    """Return the name of a model or adapter: a folder, whose path is left out, or an id."""
    return Path(place).name if os.path.exists(place) else place


def longer(run: RunDir, epochs: float) -> str:
    """Return the present command with more epochs."""
    option = "--epochs " if sys.argv[1:2] == ["finetune"] else "--set finetune.epochs="
    return f"{command_line(run)} {option}{epochs:g} --force"


def command_line(run: RunDir) -> str:
    """Return the command that started this process; from Python, one that continues the run."""
    program = Path(sys.argv[0])
    words = sys.argv[1:]
    if program.stem != "opdcl" and program.parent.name != "opdcl":  # neither the script nor `python -m opdcl`
        words = ["run", str(run.workflow), "-o", str(run.path)]
    return redact(typed("opdcl", *words))
