"""The command that deletes what only resuming needs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from opdcl.cli import options as opt
from opdcl.cli import screen
from opdcl.cli.screen import start
from opdcl.errors import UsageError, typed
from opdcl.rundir.files import RESTORE
from opdcl.rundir.layout import StageDir, open_run


def clean(
    run_dir: opt.RunDir,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
) -> None:
    """Delete the checkpoints of a finished run. Says how large they are, and asks first.

    Adapters, scores and reports stay, so all commands still work. Lost are the adapters of earlier steps.
    """
    from opdcl.rundir.lock import locked
    from opdcl.rundir.seals import refuse_damaged

    start(json)
    run = open_run(run_dir)
    with locked(run):
        for stage in run.stages():
            if not stage.is_done():
                again = f"finish it first: {typed('opdcl', 'run', run.workflow, '-o', run.path)}"
                raise UsageError(f"{stage.path} is not done, and resumes from its checkpoints", again)
            _refuse_only_copy(stage)
        refuse_damaged(run)
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


def _refuse_only_copy(stage: StageDir) -> None:
    """Refuse a stage whose adapter is damaged or missing, and name the checkpoint that holds it whole."""
    from opdcl.rundir.hashes import ADAPTER, check

    adapter, recorded = stage.adapter / ADAPTER, stage.state().get("adapter_sha256")
    if recorded and (problem := check(adapter, recorded)):
        same = (file for file in sorted(stage.trainer.rglob(ADAPTER)) if not check(file, recorded))
        copy = next(same, None)
        hint = typed("cp", copy, adapter) if copy else RESTORE
        raise UsageError(f"{adapter} {problem}, and a checkpoint may be its only copy", hint)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
