"""Checks before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from opdcl.config.workflow import Workflow
from opdcl.errors import UsageError
from opdcl.pipeline.plan import Task
from opdcl.pipeline.sources import Sources
from opdcl.pipeline.trackers import check_trackers
from opdcl.rundir.layout import RunDir


def checked_plan(workflow: Workflow, run: RunDir, sources: Sources) -> list[Task]:
    """Check the run directory, the data and what the tasks need; return the tasks. Writes nothing."""
    refuse_foreign(run)
    sources.check(workflow)
    tasks = sources.plan(workflow, run)
    check_tasks(workflow, sources)
    check_servers(workflow, {task.name for task in tasks if task.action != "skip"})
    return tasks


def refuse_foreign(run: RunDir) -> None:
    """Refuse a directory that is not a run's, or that links out of itself, so that nothing is overwritten."""
    hint = "choose another directory with -o"
    if run.path.exists() and not run.path.is_dir():
        raise UsageError(f"{run.path} is a file", hint)
    names = {p.name for p in run.path.iterdir()} if run.path.is_dir() else set()
    if names - {".lock", "logs"} and not run.is_run():
        raise UsageError(f"{run.path} exists and is not a run directory", hint)
    for folder, folders, files in os.walk(run.path):
        if link := next((p for name in (*folders, *files) if (p := Path(folder, name)).is_symlink()), None):
            hint = "replace it by what it points to; the run directory itself may be a link"
            raise UsageError(f"{link} is a symbolic link: what a run writes stays inside its directory", hint)


def check_tasks(workflow: Workflow, sources: Sources) -> None:
    """Check what needs libraries but no weights: the models' locations, trackers, prompts, suites."""
    from opdcl.model.load import check_exists

    finetune, recover = workflow.finetune, workflow.recover
    check_exists(workflow.model)
    check_trackers(workflow.track)
    if finetune and finetune.method == "self-distill":
        from opdcl.stages.finetune import as_distillation

        sources.recovery(as_distillation(finetune, len(sources.rows(finetune.data))))
    for teacher in recover.all_teachers().values() if recover else ():
        if teacher.model:
            check_exists(teacher.model)
    if workflow.eval:
        for suite in workflow.eval.suites():
            sources.suite(suite, workflow.eval)


def check_servers(workflow: Workflow, unfinished: set[str]) -> None:
    """Check that every server that the unfinished stages need grants access."""
    from opdcl.sampling.server import check_access

    servers = [workflow.eval.server] if workflow.eval and "eval" in unfinished else []
    if workflow.recover and "recover" in unfinished:
        teachers = workflow.recover.all_teachers().values()
        servers += [workflow.recover.server, *(teacher.server for teacher in teachers)]
    for server in filter(None, servers):
        check_access(server)
