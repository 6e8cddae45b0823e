"""The command that deletes what only resuming needs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from opdcl.cli import options as opt
from opdcl.cli import screen
from opdcl.cli.screen import start
from opdcl.errors import UsageError


def clean(
    run_dir: opt.RunDir,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
) -> None:
    """Delete the checkpoints of a finished run. Says how large they are, and asks first.

    Adapters, scores and reports stay, so all commands still work. Lost are the adapters of earlier steps.
    """
    from opdcl.pipeline.checks import refuse_foreign
    from opdcl.rundir.layout import open_run
    from opdcl.rundir.lock import locked

    start(json)
    run = open_run(run_dir)
    refuse_foreign(run)
    with locked(run):
        for stage in run.stages():
            if not stage.is_done():
                again = f"finish it first: opdcl run {run.workflow} -o {run.path}"
                raise UsageError(f"{stage.path} is not done, and resumes from its checkpoints", again)
        folders = [stage.trainer for stage in run.stages() if stage.trainer.exists()]
        freed, whole = sum(map(_bytes_in, folders)), _bytes_in(run.path)
        found = f"{freed / 2**20:,.1f} of {whole / 2**20:,.1f} MiB"
        if folders and not (yes or dry_run):
            if not screen.output.can_ask():
                raise UsageError(f"{found} would be deleted, and nobody can be asked", "--yes deletes them")
            yes = typer.confirm(f"Delete {found}, which only an unfinished stage needs?", err=True)
        for folder in folders if yes and not dry_run else ():
            shutil.rmtree(folder)
    did = "were" if yes and not dry_run else "can be"
    screen.output.result(f"{found} {did} deleted", {"bytes": freed, "deleted": did == "were"})


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
