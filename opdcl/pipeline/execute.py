"""Carry out a run: check, lock, do every unfinished task in the order of the plan, write the report."""

from __future__ import annotations

import contextlib
import copy
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl import parallel
from opdcl.config.evaluate import CLOSENESS
from opdcl.config.load import dump, with_setting
from opdcl.config.section import FINGERPRINT
from opdcl.config.workflow import Workflow
from opdcl.console import Output, StageLine, quiet_libraries
from opdcl.data.rows import recognised
from opdcl.errors import GateError, InconclusiveError, Interrupted, OpdclError, UsageError
from opdcl.model.consent import trackers_of
from opdcl.pipeline.checks import checked_plan, foreign_adapters, refuse_foreign
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Task
from opdcl.pipeline.records import StageRecord, read_record, read_records, stage_folder, write_learned
from opdcl.pipeline.reuse import copy_finished, refuse_other_base, take_start
from opdcl.pipeline.trackers import Tracking, scores
from opdcl.results.origins import SET_ASIDE
from opdcl.rundir import seals
from opdcl.rundir.environment import machine_of, versions
from opdcl.rundir.files import now, write_atomic, write_json
from opdcl.rundir.hashes import adapter_hash
from opdcl.rundir.identity import weights_of_base
from opdcl.rundir.layout import STATE_OF, RunDir, StageDir
from opdcl.rundir.lock import locked
from opdcl.rundir.records import read_metrics
from opdcl.sanitize import redact
from opdcl.signals import as_interrupts
from opdcl.version import __version__

if TYPE_CHECKING:
    from opdcl.model.backbone import Backbone
    from opdcl.results.result_types import Summary

COST_OF_DETERMINISM = {
    "cpu": "deterministic: costs nothing here; on a CPU, runs repeat bit for bit anyway",
    "cuda": "deterministic: slower; results repeat only on the same kind of GPU with the same versions",
}


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
    run, first = job.run, parallel.rank() == 0
    with interruptible(run), contextlib.ExitStack() as stack:
        # Nothing that another command does can change what is checked under the lock.
        parallel.on_first_worker(lambda: _lock(run, output, stack))
        with output.busy("checking model and data"), quiet_libraries():
            tasks, notes, manifest = parallel.on_first_worker(lambda: _check(job, output, force, continued))
        unfinished = any(task.unfinished for task in tasks)
        stack.enter_context(quiet_libraries(run.new_log() if first else None))
        # Before anything is written: a run whose base is another one now stays as it was.
        backbone = _load(job, manifest, output) if unfinished else None
        base = weights_of_base(manifest)
        if continued:
            refuse_other_base(job.workflow.model.id, base, continued)
            donors = [continued, *donors]
        tasks = parallel.on_first_worker(lambda: _settle(job, tasks, donors, base, output))
        mine = stack.enter_context(_own(job))
        trackers, _ = trackers_of(job.workflow, job.origins) if unfinished and first else ([], "")
        tracking = stack.enter_context(contextlib.closing(Tracking(trackers, run, output.note)))
        if backbone:
            if first:
                _announce(job, tasks, notes, output)
            Session(mine, backbone, manifest, output, tracking).do(tasks)
        else:
            output.note("nothing to do: all stages are finished")
        return parallel.on_first_worker(lambda: finish(job.workflow, run, output, tracking))


def _lock(run: RunDir, output: Output, stack: contextlib.ExitStack) -> None:
    """Lock the run directory until the stack closes, if it is one that this command may write to."""
    refuse_foreign(run)
    if dead := stack.enter_context(locked(run)):
        output.note(f"took over the lock of process {dead.get('pid')}, which has ended")


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
    from opdcl.model.accept import load_backbone, refuse_changed_copies
    from opdcl.model.adapters import tuned_model
    from opdcl.model.load import pick_device, pick_dtype

    started, config = time.perf_counter(), job.workflow.model
    tuned = tuned_model(job.workflow.start, config)
    with output.stage("load") as line:
        models = f"{tuned.id} beside {config.id}" if tuned else config.id
        line.note(f"{models} on {pick_device()} in {pick_dtype(config.dtype)}")
        backbone = load_backbone(config, tuned, job.tokenizer)
        for folder in foreign_adapters(job.workflow):
            refuse_changed_copies(folder, backbone.causal_lm)
        if parallel.worker_count() > 1:
            part = "a part of the" if parallel.sharded() else "the whole"
            line.note(f"{parallel.worker_count()} processes, each with {part} base")
        if config.deterministic:
            line.note(COST_OF_DETERMINISM[backbone.device.type])
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
        if task.name in STATE_OF and task.action in ("run", "stale"):
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
    for source, rows in job.inputs.files.items():
        output.note(recognised(source, rows))
    for note in notes:
        output.note(note)


class Session:
    """One worker's part of a run, in the run directory or the worker's copy of it.

    It does the tasks, and keeps the manifest and the stage records.
    """

    def __init__(
        self, job: Job, backbone: Backbone, manifest: dict[str, Any], output: Output, tracking: Tracking
    ):
        self.job, self.workflow, self.run = job, job.workflow, job.run
        self.backbone, self.manifest = backbone, manifest
        self.output, self.tracking = output, tracking
        self._measured_state = "base"

    def do(self, tasks: list[Task]) -> None:
        """Do all tasks that the plan does not skip.

        Raises:
            OpdclError: A task failed, or the base weights changed on the way.
        """
        from opdcl.pipeline.times import Timetable, work_of

        started = time.perf_counter()
        base = self.manifest["base"]
        self._save_manifest()
        self.times = Timetable(work_of(self.job, tasks), self.output.note)
        try:
            for task in tasks:
                if task.action == "skip":
                    self.output.note(f"{task.label}: skipped, {task.why}")
                elif task.name == "eval":
                    with self.times.timed(task.label):
                        self._measure(task)
                elif task.name == "finetune" and self.workflow.finetune is None:
                    self.output.note(f"{task.name}: taken from {self.workflow.start}")
                    take_start(self.workflow, self.run, task, self.backbone)
                else:
                    with self.times.timed(task.label):
                        self._train(task)
                if task.name != "eval":
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

    def _train(self, task: Task) -> None:
        """Train one stage, showing its progress on the console and in the trackers."""
        from opdcl.train.cost import dose, peak_memory, reset_peak_memory

        stage = stage_folder(self.run, task.name)
        earlier = read_record(stage) if task.action == "resume" else None
        cost = earlier.cost if earlier else {}
        record = StageRecord(
            stage=task.name,
            fingerprint=task.fingerprint,
            config=getattr(self.workflow, task.name).model_dump(),
            inputs=task.inputs,
            started=earlier.started if earlier else now(),
            cost=cost,
            rows=self.job.training_rows.count if task.name == "finetune" else None,
        )
        record.write(stage)
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
            with self.output.stage(task.label, on_progress) as line:
                self._learn(task, stage, line)
            self.tracking.follow(stage, offset)
        finally:
            metrics = read_metrics(stage.metrics)
            steps = [row for row in metrics if "tokens" in row]
            record = replace(
                record,
                cost={
                    "seconds": round(cost.get("seconds", 0) + time.perf_counter() - started, 1),
                    "tokens": sum(row["tokens"] for row in steps),
                    "steps": max((row["step"] for row in steps), default=0),
                    "peak_memory_bytes": max(cost.get("peak_memory_bytes", 0), peak_memory()),
                    **dose(metrics),
                },
            )
            record.write(stage)
        record.finish(stage)

    def _learn(self, task: Task, stage: StageDir, line: StageLine) -> None:
        """Recover or fine-tune, and write the adapter into the stage's folder."""
        from opdcl.model.adapters import find_adapter
        from opdcl.train.answer_cache import CompletionCache
        from opdcl.train.finetune import finetune
        from opdcl.train.provide import provided
        from opdcl.train.recover import recover
        from opdcl.train.self_distill import self_distill

        job, workflow, backbone = self.job, self.workflow, self.backbone
        if task.name == "recover":
            config, prompts, tuned = workflow.recover, job.prompts, self.run.adapters()["tuned"]
            with provided(config, job.recovery, prompts, backbone, stage, line.note) as more:
                recover(config, prompts, backbone, tuned, stage, line, more)
            return
        start = find_adapter(workflow.start) if workflow.start else None
        if workflow.finetune.method == "self-distill":
            self_distill(workflow.finetune, *job.self_distillation, backbone, start, stage, line)
        else:
            rows, general, cache = job.examples.encoded, job.examples.replay, CompletionCache(backbone)
            finetune(workflow.finetune, rows, general, backbone, start, stage, line, cache)

    def _measure(self, task: Task) -> None:
        """Measure one state on one suite, or its closeness to base."""
        from opdcl.stages.closeness import measure_closeness
        from opdcl.stages.evaluate import evaluate

        config, run, backbone = self.workflow.eval, self.run, self.backbone
        adapter = run.adapters()[task.state] if task.state != "base" else None
        if adapter and self._measured_state != task.state:
            backbone.drop_adapters()
            backbone.load_adapter(adapter, "student")
            self._measured_state = task.state
        seals.forget(run, run.eval_result(task.state, task.suite), run.eval_samples(task.state, task.suite))
        model = {"id": self.workflow.model.id, "adapter_sha256": adapter_hash(adapter) if adapter else None}
        record = {"role": task.role, "model": model, "fingerprint": task.fingerprint}
        with self.output.stage(task.label, self.times.progress) as line:
            place = backbone, task.state, run, record, line, adapter
            if task.suite == CLOSENESS:
                result = measure_closeness(config, self.job.closeness, *place)
            else:
                suite = self.job.suite(task.suite)
                if config.server and suite.generative:
                    model["decoded"] = "on a server"
                result = evaluate(config, suite, *place)
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
    from opdcl.results.document import run_document
    from opdcl.results.report import write
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
        gates.refuse(verdicts, f"opdcl report {run.path}")
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
def _own(job: Job) -> Iterator[Job]:
    """Yield the job to the first worker; to each other one, the same in a temporary copy of the directory."""
    if parallel.rank() == 0:
        parallel.all_values(None)  # wait until the copies are made
        yield job
        return
    with tempfile.TemporaryDirectory(prefix="opdcl-") as scratch:
        folder = Path(scratch) / job.run.path.name
        shutil.copytree(job.run.path, folder)
        parallel.all_values(None)
        mine = copy.copy(job)
        mine.run = RunDir(folder)
        yield mine


def steps_done(run: RunDir, before: StageDir | None = None) -> int:
    """Return the optimizer steps of all stages, or of those before one."""
    stages = [stage for stage in run.stages() if before is None or stage.path < before.path]
    return sum(stage.state().get("cost", {}).get("steps", 0) for stage in stages)


def command_line(run: RunDir) -> str:
    """Return the command that started this process; from Python, one that continues the run."""
    program = Path(sys.argv[0])
    words = sys.argv[1:]
    if program.stem != "opdcl" and program.parent.name != "opdcl":  # neither the script nor `python -m opdcl`
        words = ["run", str(run.workflow), "-o", str(run.path)]
    return redact(shlex.join(["opdcl", *words]))
