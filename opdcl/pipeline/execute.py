"""Execute a plan. The only place that knows the order of the stages."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl import parallel
from opdcl.config.load import dump
from opdcl.config.workflow import Workflow
from opdcl.console import Output, quiet_libraries
from opdcl.errors import GateError, Interrupted, UsageError
from opdcl.pipeline.defaults import describe_automatic, resolve_for_machine
from opdcl.pipeline.plan import Task, make_plan, training_stages
from opdcl.pipeline.preflight import check_servers, check_tasks, refuse_foreign
from opdcl.pipeline.reuse import copy_finished
from opdcl.pipeline.session import Session, command_line, label, steps_done
from opdcl.pipeline.sources import data_hashes, inherit
from opdcl.pipeline.trackers import Tracking, scores, tracking
from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.layout import STATE_OF, RunDir
from opdcl.rundir.verify import seal_run

if TYPE_CHECKING:
    pass


def plan_run(workflow: Workflow, run: RunDir) -> list[Task]:
    """Check all inputs, and return what would be done. Writes nothing."""
    return make_plan(workflow, run, data_hashes(workflow))


def execute(
    workflow: Workflow,
    origins: dict[str, str],
    run: RunDir,
    output: Output,
    force: bool = False,
    donors: Sequence[RunDir] = (),
) -> dict[str, Any]:
    """Run what the plan says and write the report; return the report's summary.

    What a donor, a finished run, has made with the same settings and data is copied instead of being made again.

    Raises:
        UsageError: The run directory holds other things, or was made with another configuration.
        Interrupted: The user stopped it.
        GateError: Everything ran, and a required score was missed.
    """
    workflow, automatic = resolve_for_machine(inherit(workflow))
    origins = origins | automatic
    with interruptible(), contextlib.ExitStack() as held:
        tasks = parallel.by_first(lambda: _open(workflow, origins, run, output, force, donors, held))
        mine = held.enter_context(parallel.own(run))
        held.enter_context(quiet_libraries(mine.new_log()))
        left = any(t.action != "skip" for t in tasks)
        tracked = held.enter_context(
            tracking(workflow.track if left and not parallel.rank() else [], mine, output.note)
        )
        if left and automatic:
            output.note(describe_automatic(workflow, automatic))
        if left:
            Session(workflow, mine, output, tracked).do(tasks)
        else:
            output.note("everything is done already")
        return parallel.by_first(lambda: finish(workflow, run, output, tracked))


def _open(
    workflow: Workflow,
    origins: dict[str, str],
    run: RunDir,
    output: Output,
    force: bool,
    donors: Sequence[RunDir],
    held: contextlib.ExitStack,
) -> list[Task]:
    """Check a run, hold its lock, make it ready, and return what there is to do."""
    refuse_foreign(run)
    tasks = plan_run(workflow, run)
    check_tasks(workflow)
    check_servers(workflow, tasks)
    stale = [t for t in tasks if t.action == "stale"]
    if stale and not force:
        raise UsageError(
            f"{run.path} does not hold what this command would make; {'; '.join(f'{t.name} {t.why}' for t in stale)}",
            f"a new directory (-o {run.path}-2), the old settings and files, or --force to do these stages again",
        )
    if dead := held.enter_context(run.lock()):
        output.note(f"the lock of process {dead.get('pid')}, which is gone, is taken over")
    if force:
        _remove_stale(run, workflow, tasks)
        tasks = plan_run(workflow, run)
    _write_head(workflow, origins, run)
    if taken := copy_finished(tasks, training_stages(run, workflow), run, donors):
        for task, donor in taken:
            output.note(f"{label(task)}: taken from {donor.path.name}")
        tasks = plan_run(workflow, run)
    return tasks


def finish(workflow: Workflow, run: RunDir, output: Output, tracked: Tracking) -> dict[str, Any]:
    """Write the report, show its scores in the trackers, and compare them with the gates."""
    from opdcl.results.report import summarise, write

    summary = summarise(run)
    seal_run(run)
    for file in write(run):
        output.note(f"wrote {file}")
    tracked.finish(
        steps_done(run),
        scores(summary),
        {"verdict": summary["verdict"], "report": run.reports[0].read_text(encoding="utf-8")},
    )
    for gate, smallest in workflow.gates.model_dump().items():
        value = (summary[gate] or {}).get("value")
        if smallest is not None and (value is None or value < smallest):
            raise GateError(
                f"gate missed: {gate} is {value}, required {smallest}", f"opdcl report {run.path}"
            )
    return summary


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C into an error that says how to go on."""
    hint = f"{command_line()}  # goes on where it stopped"

    def stop(number, frame):
        raise KeyboardInterrupt

    # A scheduler's way of asking; training stages listen for themselves, and save first.
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


def _write_head(workflow: Workflow, origins: dict[str, str], run: RunDir) -> None:
    write_atomic(run.workflow, dump(workflow))
    write_json(run.config, {"workflow": workflow.model_dump(), "origins": origins})


def _remove_stale(run: RunDir, workflow: Workflow, tasks: list[Task]) -> None:
    """Delete stages that are to be done again, and what was measured on them."""
    stages = training_stages(run, workflow)
    for task in tasks:
        if task.action == "stale":
            shutil.rmtree(stages[task.name].path, ignore_errors=True)
            shutil.rmtree(run.evals / STATE_OF[task.name], ignore_errors=True)


@contextlib.contextmanager
def own(run: RunDir) -> Iterator[RunDir]:
    """Yield the run to process 0, and to each of the others a copy that goes when it is done."""
    if parallel.rank() == 0:
        parallel.all_values(None)  # the copies are made
        yield run
        return
    with tempfile.TemporaryDirectory(prefix="opdcl-") as scratch:
        copy = Path(scratch) / run.path.name
        shutil.copytree(run.path, copy)
        parallel.all_values(None)
        yield RunDir(copy)
