"""Execute a plan. The only place that knows the order of the stages."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from opdcl import parallel
from opdcl.config.load import dump
from opdcl.config.workflow import Workflow
from opdcl.console import Output, quiet_libraries
from opdcl.errors import GateError, InconclusiveError, Interrupted
from opdcl.pipeline.defaults import describe_automatic
from opdcl.pipeline.job import Job, read_records
from opdcl.pipeline.plan import Task, stage_folder
from opdcl.pipeline.preflight import checked_plan, remarks
from opdcl.pipeline.reuse import copy_finished, copy_manifest
from opdcl.pipeline.session import OtherBase, Session, command_line, steps_done
from opdcl.pipeline.trackers import Tracking, scores
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.layout import STATE_OF, RunDir
from opdcl.rundir.verify import seal_run
from opdcl.signals import as_interrupts


def execute(job: Job, output: Output, force: bool = False, donors: Sequence[RunDir] = ()) -> dict[str, Any]:
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
            from opdcl.pipeline.timetable import Timetable

            times = Timetable(job, tasks)
            if parallel.rank() == 0:
                for line in (opening(job, times), *job.sources.recognised(), *remarks(job, tasks)):
                    output.note(line)
            if job.automatic:
                output.note(describe_automatic(job.workflow, job.automatic))
            Session(job, times, output, tracked).do(tasks)
        else:
            output.note("everything is done already")
        return parallel.on_first_worker(lambda: finish(job.workflow, run, output, tracked))


def _prepare(
    job: Job, output: Output, force: bool, donors: Sequence[RunDir], stack: contextlib.ExitStack
) -> list[Task]:
    """Check everything, lock the run directory until the stack closes, and return the tasks."""
    tasks, run = checked_plan(job, force), job.run
    if dead := stack.enter_context(run.lock()):
        output.note(f"took over the lock of process {dead.get('pid')}, which has ended")
    if read_records(run).empty:  # an attempt that produced nothing imposes no model
        run.manifest.unlink(missing_ok=True)
    for task in tasks:
        if task.name in STATE_OF and task.action in ("run", "stale"):
            shutil.rmtree(stage_folder(run, task.name).path, ignore_errors=True)
        if task.action == "stale":
            shutil.rmtree(run.evals / STATE_OF[task.name], ignore_errors=True)
    settings = {
        file: file.read_text(encoding="utf-8") for file in (run.config, run.workflow) if file.exists()
    }

    def restore(kind: Any, fault: BaseException | None, trace: Any) -> None:
        for file, text in settings.items() if isinstance(fault, OtherBase) else ():
            write_atomic(file, text)

    stack.push(restore)
    # First the file by which a run is recognized: after a crash here, the same command goes on.
    write_json(run.config, {"workflow": job.workflow.model_dump(), "origins": job.origins})
    write_atomic(run.workflow, dump(job.workflow))
    job.sources.save()
    for task, donor in copy_finished(job.plan(), run, donors):
        output.note(f"{task.label}: taken from {donor.path.name}")
    tasks = job.plan()
    if not run.manifest.exists() and not any(task.unfinished for task in tasks):
        copy_manifest(run, donors, command_line(run))
    return tasks


def finish(workflow: Workflow, run: RunDir, output: Output, tracked: Tracking) -> dict[str, Any]:
    """Write the report, send its scores to the trackers, and check them against the gates.

    Raises:
        GateError: A gate is shown to be missed.
        InconclusiveError: The scores do not decide a gate.
    """
    from opdcl.results import gates
    from opdcl.results.report import write
    from opdcl.results.summary import Results

    results = Results(run)
    summary = results.summary
    verdicts = gates.judge(workflow.gates.model_dump(), summary, results.suites)
    seal_run(run)
    for file in write(results):
        output.note(f"wrote {file}")
    report = run.reports[0].read_text(encoding="utf-8")
    tracked.finish(steps_done(run), scores(summary), {"verdict": summary["verdict"], "report": report})
    for verdict in verdicts:
        output.note(f"gate {verdict['outcome']}: {verdict['sentence']}")
    try:
        gates.refuse(verdicts, f"opdcl report {run.path}")
    except (GateError, InconclusiveError):
        # The result itself is not shown then, but what speaks against it must be.
        output.remarks(summary["faults"], [n for n in summary["notes"] if n not in summary["faults"]])
        output.note(summary["verdict"])
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
