"""Execute a plan. The only place that knows the order of the stages."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl import parallel
from opdcl.config.load import dump
from opdcl.config.workflow import Workflow
from opdcl.console import Output, quiet_libraries
from opdcl.errors import GateError, InconclusiveError, Interrupted
from opdcl.pipeline.damage import discard_damaged, forget_removed, refuse_damaged
from opdcl.pipeline.defaults import describe_automatic
from opdcl.pipeline.job import Job, read_records
from opdcl.pipeline.plan import Task, stage_folder
from opdcl.pipeline.preflight import checked_plan, refuse_foreign, remarks
from opdcl.pipeline.reuse import copy_finished, copy_manifest
from opdcl.pipeline.session import OtherBase, Session, command_line, steps_done
from opdcl.pipeline.trackers import Tracking, scores
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.layout import STATE_OF, RunDir
from opdcl.rundir.lock import locked
from opdcl.rundir.seals import forget, remove_unfinished, seal_new
from opdcl.signals import as_interrupts

if TYPE_CHECKING:
    from opdcl.results.result_types import Summary


def execute(job: Job, output: Output, force: bool = False, donors: Sequence[RunDir] = ()) -> Summary:
    """Carry out the plan, write the report and return its summary.

    Results that a donor has finished with the same settings and data are copied. `force` redoes stages whose
    settings or data have changed.

    Raises:
        UsageError: The directory holds something else, or a run with other settings.
        Interrupted: The user stopped it.
        GateError: Everything ran, but a required score was missed.
    """
    run = job.run
    with interruptible(run), contextlib.ExitStack() as stack:
        with output.busy("checking model and data"), quiet_libraries():
            tasks = parallel.on_first_worker(lambda: _prepare(job, output, force, donors, stack))
        job = stack.enter_context(own(job))
        stack.enter_context(quiet_libraries(job.run.new_log()))
        unfinished = any(task.unfinished for task in tasks)
        trackers = job.workflow.track if unfinished and parallel.rank() == 0 else []
        tracked = stack.enter_context(contextlib.closing(Tracking(trackers, job.run, output.note)))
        if unfinished:
            from opdcl.pipeline.forecast import opening

            if parallel.rank() == 0:
                for line in (opening(job, tasks), *job.sources.recognised(), *remarks(job, tasks)):
                    output.note(line)
            if job.automatic:
                output.note(describe_automatic(job.workflow, job.automatic))
            Session(job, output, tracked).do(tasks)
        else:
            output.note("everything is done already")
        return parallel.on_first_worker(lambda: finish(job.workflow, run, output, tracked))


def _prepare(
    job: Job, output: Output, force: bool, donors: Sequence[RunDir], stack: contextlib.ExitStack
) -> list[Task]:
    """Check everything, lock the run directory until the stack closes, and return the tasks."""
    run = job.run
    refuse_foreign(run)
    # Before anything is written. What `force` is to repair may be unreadable, so there it comes later.
    before = None if force and run.is_run() else checked_plan(job, force)
    if dead := stack.enter_context(locked(run, output.note)):
        output.note(f"took over the lock of process {dead.get('pid')}, which has ended")
    # Another command may have used the directory while this one was checking: only what is there now counts.
    if force:
        for name in discard_damaged(run):
            output.note(f"{name} has changed since it was made: what it belongs to is repeated")
    refuse_damaged(run)
    if before is None or job.plan() != before:
        before = checked_plan(job, force)
    remove_unfinished(run)
    forget_removed(run)
    _clear_for(before, run)
    _write_settings(job, stack)
    for task, donor in copy_finished(job.plan(), run, donors):
        output.note(f"{task.label}: taken from {donor.path.name}")
    tasks = job.plan()
    if not run.manifest.exists() and not any(task.unfinished for task in tasks):
        copy_manifest(run, donors, command_line(run))
    seal_new(run)
    return tasks


def _clear_for(tasks: list[Task], run: RunDir) -> None:
    """Remove what the tasks replace."""
    if read_records(run).empty:  # an attempt that produced nothing imposes no model
        forget(run, run.manifest)
        run.manifest.unlink(missing_ok=True)
    for task in tasks:
        if task.name in STATE_OF and task.action in ("run", "stale"):
            folder = stage_folder(run, task.name).path
            forget(run, folder)
            shutil.rmtree(folder, ignore_errors=True)
        if task.action == "stale":
            results = run.evals / STATE_OF[task.name]
            forget(run, results)
            shutil.rmtree(results, ignore_errors=True)


def _write_settings(job: Job, stack: contextlib.ExitStack) -> None:
    """Write the settings and the rows that were given in memory; restore them if the base is another one."""
    run = job.run
    earlier = {file: file.read_text(encoding="utf-8") for file in (run.config, run.workflow) if file.exists()}

    def restore(kind: Any, fault: BaseException | None, trace: Any) -> None:
        if isinstance(fault, OtherBase) and earlier:
            forget(run, run.config, run.workflow)
            for file, text in earlier.items():
                write_atomic(file, text)
            seal_new(run)

    stack.push(restore)
    forget(run, run.config, run.workflow, run.data)
    # First the file by which a run is recognized: after a crash here, the same command goes on.
    write_json(run.config, {"workflow": job.workflow.model_dump(), "origins": job.origins})
    write_atomic(run.workflow, dump(job.workflow))
    job.sources.save()
    seal_new(run)


def finish(workflow: Workflow, run: RunDir, output: Output, tracked: Tracking) -> Summary:
    """Write the report, send its scores to the trackers, and check them against the gates.

    Raises:
        GateError: A gate is shown to be missed.
        InconclusiveError: The scores do not decide a gate.
    """
    from opdcl.results import gates
    from opdcl.results.plain import as_json
    from opdcl.results.report import write
    from opdcl.results.summary import Results

    results = Results(run)
    summary = results.summary
    verdicts = gates.judge(workflow.gates.model_dump(), results)
    seal_new(run)
    for file in write(results):
        output.note(f"wrote {file}")
    report = run.reports[0].read_text(encoding="utf-8")
    told = {**scores(as_json(summary)), "verdict": summary.verdict, "report": report}
    tracked.send({f"eval/{key}": value for key, value in told.items()}, steps_done(run))
    tracked.close()
    for verdict in verdicts:
        output.note(f"gate {verdict['outcome']}: {verdict['sentence']}")
    try:
        gates.refuse(verdicts, f"opdcl report {run.path}")
    except (GateError, InconclusiveError):
        # The result itself is not shown then, but what speaks against it must be.
        output.remarks(summary.faults, [note for note in summary.notes if note not in summary.faults])
        output.note(summary.verdict)
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
def own(job: Job) -> Iterator[Job]:
    """Yield the job to the first worker; to each other one, the same in a temporary copy of the directory."""
    if parallel.rank() == 0:
        parallel.all_values(None)  # wait until the copies are made
        yield job
        return
    with tempfile.TemporaryDirectory(prefix="opdcl-") as scratch:
        copy = Path(scratch) / job.run.path.name
        shutil.copytree(job.run.path, copy)
        parallel.all_values(None)
        yield replace(job, run=RunDir(copy))
