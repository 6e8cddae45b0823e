"""Execute a plan. The only place that knows the order of the stages."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from opdcl import parallel
from opdcl.config.load import dump
from opdcl.config.workflow import Workflow
from opdcl.console import Output, quiet_libraries
from opdcl.errors import GateError, Interrupted, UsageError
from opdcl.pipeline.defaults import describe_automatic, resolve_for_machine
from opdcl.pipeline.plan import Task, stage_folder
from opdcl.pipeline.reuse import copy_finished
from opdcl.pipeline.session import Session, command_line, steps_done
from opdcl.pipeline.sources import Sources, checked_plan
from opdcl.pipeline.trackers import Tracking, scores
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.layout import STATE_OF, RunDir
from opdcl.rundir.verify import seal_run


def execute(
    workflow: Workflow,
    origins: dict[str, str],
    run: RunDir,
    output: Output,
    force: bool = False,
    donors: Sequence[RunDir] = (),
    sources: Sources | None = None,
) -> dict[str, Any]:
    """Carry out the plan, write the report and return its summary.

    Results that a donor has finished with the same settings and data are copied. `force` redoes stages whose
    settings or data have changed. The arms of a sweep share `sources`.

    Raises:
        UsageError: The directory holds something else, or a run with other settings.
        Interrupted: The user stopped it.
        GateError: Everything ran, but a required score was missed.
    """
    sources = sources or Sources()
    workflow, automatic = resolve_for_machine(sources.inherit(workflow))
    origins = origins | automatic
    with interruptible(), contextlib.ExitStack() as stack:
        with output.busy("checking model and data"):
            tasks = parallel.on_first_worker(
                lambda: _prepare(workflow, origins, run, output, force, donors, sources, stack)
            )
        local = stack.enter_context(own(run))
        stack.enter_context(quiet_libraries(local.new_log()))
        unfinished = any(t.action != "skip" for t in tasks)
        trackers = workflow.track if unfinished and parallel.rank() == 0 else []
        tracked = stack.enter_context(contextlib.closing(Tracking(trackers, local, output.note)))
        if unfinished and automatic:
            output.note(describe_automatic(workflow, automatic))
        if unfinished:
            Session(workflow, local, sources, output, tracked).do(tasks)
        else:
            output.note("everything is done already")
        return parallel.on_first_worker(lambda: finish(workflow, run, output, tracked))


def _prepare(
    workflow: Workflow,
    origins: dict[str, str],
    run: RunDir,
    output: Output,
    force: bool,
    donors: Sequence[RunDir],
    sources: Sources,
    stack: contextlib.ExitStack,
) -> list[Task]:
    """Check everything, lock the run directory until the stack closes, and return the tasks."""
    stale = [t for t in checked_plan(workflow, run, sources) if t.action == "stale"]
    if stale and not force:
        reasons = "; ".join(f"{t.name} {t.why}" for t in stale)
        ways = ["the old settings and files", "--force to redo these stages"]
        if earlier := [option for task in stale for option in _earlier_values(task, run, origins)]:
            ways = [f"what it was made with: {' '.join(dict.fromkeys(earlier))}"]
        if stale[0].name == "finetune":  # a later stage is added to its run and has no other directory
            ways.insert(0, f"a new directory (-o {run.path}-2)")
        hint = ", or ".join(ways)
        raise UsageError(f"{run.path} does not hold what this command would make; {reasons}", hint)
    if dead := stack.enter_context(run.lock()):
        output.note(f"took over the lock of process {dead.get('pid')}, which has ended")
    for task in stale:
        shutil.rmtree(stage_folder(run, task.name).path, ignore_errors=True)
        shutil.rmtree(run.evals / STATE_OF[task.name], ignore_errors=True)
    # First the file by which a run is recognized: after a crash here, the same command goes on.
    write_json(run.config, {"workflow": workflow.model_dump(), "origins": origins})
    write_atomic(run.workflow, dump(workflow))
    sources.save()
    for task, donor in copy_finished(sources.plan(workflow, run), run, donors):
        output.note(f"{task.label}: taken from {donor.path.name}")
    return sources.plan(workflow, run)


def _earlier_values(task: Task, run: RunDir, origins: dict[str, str]) -> list[str]:
    """Return the options that give automatic settings the values with which a stage was made."""
    before = stage_folder(run, task.name).state().get("inputs", {})
    changed = {
        "model.dtype" if key == "dtype" else f"{task.name}.{key}": value
        for key, value in before.items()
        if task.inputs.get(key) != value
    }
    return [f"--set {k}={v}" for k, v in changed.items() if origins.get(k, "").startswith("auto: ")]


def finish(workflow: Workflow, run: RunDir, output: Output, tracked: Tracking) -> dict[str, Any]:
    """Write the report, send its scores to the trackers, and check them against the gates.

    Raises:
        GateError: A required score was missed.
    """
    from opdcl.results.report import write
    from opdcl.results.summary import summarise

    summary = summarise(run)
    seal_run(run)
    for file in write(run, summary=summary):
        output.note(f"wrote {file}")
    report = run.reports[0].read_text(encoding="utf-8")
    tracked.finish(steps_done(run), scores(summary), {"verdict": summary["verdict"], "report": report})
    for gate, required in workflow.gates.model_dump().items():
        value = (summary[gate] or {}).get("value")
        if required is not None and (value is None or value < required):
            message = f"gate missed: {gate} is {value}, required {required}"
            raise GateError(message, f"opdcl report {run.path}")
    return summary


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into an error whose hint is the command that resumes the run."""
    hint = f"{command_line()}  # resumes where it stopped"

    def stop(number, frame):
        raise KeyboardInterrupt

    # Schedulers send SIGTERM. Training stages have their own handler, which saves first.
    in_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, stop) if in_main else None
    try:
        yield
    except KeyboardInterrupt as fault:
        raise Interrupted("interrupted; what was finished is saved", hint) from fault
    except Interrupted as fault:
        fault.hint = hint
        raise
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def own(run: RunDir) -> Iterator[RunDir]:
    """Yield the run directory to the first worker, and a temporary copy of it to each other worker."""
    if parallel.rank() == 0:
        parallel.all_values(None)  # wait until the copies are made
        yield run
        return
    with tempfile.TemporaryDirectory(prefix="opdcl-") as scratch:
        copy = Path(scratch) / run.path.name
        shutil.copytree(run.path, copy)
        parallel.all_values(None)
        yield RunDir(copy)
