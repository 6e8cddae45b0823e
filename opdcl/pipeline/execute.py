"""Carry out a run: check, lock, do every unfinished task in the order of the plan, write the report."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl import parallel
from opdcl.config.load import dump, with_setting
from opdcl.config.section import FINGERPRINT
from opdcl.config.workflow import Workflow
from opdcl.console import Output, quiet_libraries
from opdcl.data.rows import recognised
from opdcl.errors import GateError, InconclusiveError, Interrupted, OpdclError, UsageError, typed
from opdcl.model.consent import trackers_of
from opdcl.parallel import as_interrupts
from opdcl.pipeline.checks import checked_plan
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Measure, Task, Train, command_line, read_records, stage_folder, write_manifest
from opdcl.pipeline.tasks import Session, copy_finished, do, refuse_other_base, short_name, steps_done
from opdcl.pipeline.trackers import Tracking, scores
from opdcl.rundir import seals
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.layout import STATE_OF, RunDir, locked, machine_of, weights_of_base

if TYPE_CHECKING:
    from opdcl.model.backbone import Backbone
    from opdcl.results.estimates import Summary


def execute(job: Job, output: Output, donors: Sequence[RunDir] = ()) -> Summary:
    """Carry out the plan, write the report and return its summary.

    Results that a donor has finished with the same settings, data and base are copied.

    Raises:
        UsageError: The directory holds something else, or a run with other settings or another base.
        Interrupted: The user stopped it.
        GateError: Everything ran, but a required score was missed.
    """
    run, is_first = job.run, parallel.rank() == 0
    # Nothing that another command does can change what is checked under the lock.
    with interruptible(run), _locked_for_all(run, output):
        with output.busy("checking model and data"), quiet_libraries():
            tasks, notes, manifest = parallel.on_first_worker(lambda: _check(job, output))
        with quiet_libraries(run.new_log() if is_first else None):
            # Before anything is written: a run whose base is another one now stays as it was.
            is_unfinished = any(task.unfinished for task in tasks)
            backbone = _load(job, manifest, output) if is_unfinished else None
            base = weights_of_base(manifest)
            todo = parallel.on_first_worker(lambda: _settle(job, tasks, donors, base, output))
            trackers = trackers_of(job.workflow, job.origins)[0] if backbone and is_first else []
            with (
                _copy_of_worker(run) as place,
                contextlib.closing(Tracking(trackers, run, output.note)) as tracking,
            ):
                if backbone is None:
                    output.note("nothing to do: all stages are finished")
                else:
                    if is_first:
                        _announce(job, todo, notes, output)
                    _do_all(Session(job, todo, place, backbone, output, tracking), manifest)
                return parallel.on_first_worker(lambda: finish(job.workflow, run, output, tracking))


@contextlib.contextmanager
def _locked_for_all(run: RunDir, output: Output) -> Iterator[None]:
    """Lock a run directory: the first worker holds the lock for all, and all raise its error."""
    with contextlib.ExitStack() as held:
        if dead := parallel.on_first_worker(lambda: held.enter_context(locked(run))):
            output.note(f"took over the lock of process {dead.get('pid')}, which has ended")
        yield


def _check(job: Job, output: Output) -> tuple[list[Task], list[str], dict[str, Any]]:
    """Check everything; return the tasks, notes, and the manifest of what the directory holds."""
    run = job.run
    for name in seals.discard_damaged(run) if job.order.force else ():
        output.note(f"{name} has changed since it was made: what it belongs to is repeated")
    seals.refuse_damaged(run)
    records = read_records(run)
    tasks, notes = checked_plan(job, records)
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
    """Clear what the tasks replace, write the settings, copy what donors have; return what is left to do.

    `base` is the hash of base's weights. The run that this one continues is a donor too, and must share it.
    """
    run, continued = job.run, job.order.continued
    if continued:
        refuse_other_base(job.workflow.model.id, base, continued)
        donors = [continued, *donors]
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


def _do_all(session: Session, manifest: dict[str, Any]) -> None:
    """Do all tasks that the plan does not skip, and keep the manifest.

    Raises:
        OpdclError: A task failed, or the base weights changed on the way.
    """
    run, output, base = session.run, session.output, manifest["base"]
    started = time.perf_counter()
    write_manifest(run, manifest)
    try:
        for task in session.tasks:
            if task.action == "skip":
                output.note(f"{task.label}: skipped, {task.why}")
            else:
                do(task, session)
            if isinstance(task, Train):
                write_manifest(run, manifest)  # it names the new adapter
            seals.seal_new(run)
    finally:
        # The fingerprint of a sharded base needs all workers; after an error some may have exited.
        if not (parallel.sharded() and sys.exc_info()[0]):
            with output.busy("checking that the weights of the base are unchanged"):
                base["fingerprint_after"] = session.backbone.fingerprint()
        manifest["seconds"] = round(manifest["seconds"] + time.perf_counter() - started, 1)
        write_manifest(run, manifest)
    if base["fingerprint_after"] != base["fingerprint_before"]:
        raise OpdclError(
            "the base weights changed during the run", "this is a defect of opdcl: please report it"
        )


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
