"""Checks before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from opdcl.config.workflow import Workflow
from opdcl.errors import UsageError
from opdcl.pipeline.plan import Task
from opdcl.pipeline.trackers import check_trackers
from opdcl.rundir.layout import RunDir


def refuse_foreign(run: RunDir) -> None:
    """Refuse a directory with content that is not a run's, or that leads elsewhere: nothing may be mistaken or overwritten."""
    if run.path.exists() and not run.path.is_dir():
        raise UsageError(f"{run.path} is a file", "choose another directory with -o")
    if (
        run.path.is_dir()
        and not run.is_run()
        and any(p.name not in (".lock", "logs") for p in run.path.iterdir())
    ):
        raise UsageError(f"{run.path} exists and is not a run directory", "choose another directory with -o")
    for folder, folders, files in os.walk(run.path):
        if link := next((p for name in (*folders, *files) if (p := Path(folder, name)).is_symlink()), None):
            raise UsageError(
                f"{link} is a symbolic link: what a run writes stays inside its directory",
                "replace it by what it points to; the run directory itself may be a link",
            )


def check_tasks(workflow: Workflow) -> None:
    """Check what needs the libraries but no weights: trainer fields, the model's place, the suites."""
    from opdcl.model.load import check_exists

    check_exists(workflow.model)
    check_trackers(workflow.track)
    if workflow.finetune and workflow.finetune.method == "self-distill":
        from opdcl.distill.prompts import read_recovery_source
        from opdcl.stages.finetune import as_distillation

        read_recovery_source(as_distillation(workflow.finetune))
    if workflow.recover:
        for teacher in workflow.recover.all_teachers().values():
            if teacher.model:
                check_exists(teacher.model)
    if workflow.eval:
        from opdcl.data.suites import load_task

        for suite in workflow.eval.suites():
            load_task(suite, workflow.eval)


def check_servers(workflow: Workflow, tasks: list[Task]) -> None:
    """Ask the servers that open tasks will need whether they let us in."""
    from opdcl.sampling.server import check_access

    needed = {task.name for task in tasks if task.action != "skip"}
    servers = [workflow.eval.server] if workflow.eval and "eval" in needed else []
    if workflow.recover and "recover" in needed:
        servers += [
            workflow.recover.server,
            *(teacher.server for teacher in workflow.recover.all_teachers().values()),
        ]
    for server in filter(None, servers):
        check_access(server)
