"""What only resuming needs, of stages that are done: their checkpoints."""

from __future__ import annotations

import shlex
from pathlib import Path

from opdcl.errors import UsageError
from opdcl.rundir.layout import RunDir


def checkpoints_of(run: RunDir) -> dict[Path, int]:
    """Return the folders of checkpoints in a run whose stages are done, with their bytes.

    Raises:
        UsageError: A stage is not done: it resumes from them.
    """
    for stage in run.stages():
        if not stage.is_done():
            hint = (
                f"finish it first: opdcl run {shlex.quote(str(run.workflow))} -o {shlex.quote(str(run.path))}"
            )
            raise UsageError(f"{stage.path} is not done, and resumes from its checkpoints", hint)
    return {stage.trainer: bytes_in(stage.trainer) for stage in run.stages() if stage.trainer.exists()}


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
