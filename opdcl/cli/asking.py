"""The commands that ask: init and clean. They ask on a terminal only, and each question is an option too."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from opdcl.cli import options as opt
from opdcl.cli import screen
from opdcl.cli.guidance import EXAMPLES
from opdcl.cli.screen import start, suggest
from opdcl.errors import UsageError

ROWS, BASE, SHARE = "ROWS", "--base", "--test-share"
QUESTIONS = {
    ROWS: "Rows to learn: a file, a folder, or a Hub id.",
    BASE: "Model to teach: smollm2-135m (embedded), a Hub id, or a folder.",
    SHARE: "Share of the rows to set aside as a test.",
}


def init(
    data: Annotated[str | None, Argument(metavar=ROWS, help=QUESTIONS[ROWS])] = None,
    base: Annotated[str | None, Option(help=QUESTIONS[BASE])] = None,
    test_share: Annotated[float | None, Option(help=QUESTIONS[SHARE])] = None,
    out: Annotated[Path, Option("-o", "--out", metavar="FILE", help="Workflow.")] = Path("my-run.yaml"),
    json: opt.Json = False,
) -> None:
    """Write a workflow for your rows and your model, with test rows set aside. Asks for what is missing."""
    from opdcl.pipeline.begin import write_workflow

    start(json)
    given = {ROWS: data, BASE: base, SHARE: test_share}
    _refuse_to_ask([name for name, value in given.items() if value is None], EXAMPLES["init"])
    data = data or _asked(QUESTIONS[ROWS])
    base = base or _asked(QUESTIONS[BASE], "smollm2-135m")
    share = _asked(QUESTIONS[SHARE], "0.1") if test_share is None else test_share
    files = [str(file) for file in write_workflow(out, data, base, _number(share), screen.output)]
    screen.output.result(f"wrote {', '.join(files)}", {"wrote": files})
    suggest("run", out, "--dry-run")


def clean(
    run_dir: opt.RunDir,
    yes: Annotated[bool, Option("--yes", help="Delete without asking.")] = False,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
) -> None:
    """Delete the checkpoints of a finished run. Says how large they are, and asks first.

    Adapters, scores and reports stay, so all commands still work. Lost are the adapters of earlier steps.
    """
    from opdcl.pipeline.checks import refuse_foreign
    from opdcl.rundir.clean import bytes_in, checkpoints_of
    from opdcl.rundir.layout import open_run
    from opdcl.rundir.lock import locked

    start(json)
    run = open_run(run_dir)
    refuse_foreign(run)
    with locked(run):
        folders, whole = checkpoints_of(run), bytes_in(run.path)
        size, of_all = (f"{count / 2**20:,.1f} MiB" for count in (sum(folders.values()), whole))
        if folders and not (yes or dry_run):
            _refuse_to_ask(["--yes"], f"opdcl clean {run_dir} --yes")
            screen.output.note(f"{size} of {of_all} are checkpoints, which only an unfinished stage needs.")
            yes = _asked("Delete them? y or n", "n").lower() in ("y", "yes")
        deletes = yes and not dry_run
        for folder in folders if deletes else ():
            shutil.rmtree(folder)
    data = {
        "folders": [str(folder) for folder in folders],
        "bytes": sum(folders.values()),
        "deleted": deletes,
    }
    screen.output.result(f"{size} of {of_all} {'were deleted' if deletes else 'can be deleted'}", data)


def _refuse_to_ask(missing: list[str], example: str) -> None:
    """Refuse a command that lacks options where nobody can be asked for them."""
    if missing and not (screen.output.mode == "human" and sys.stdin.isatty()):
        raise UsageError(f"not given: {', '.join(missing)}", f"{example}  # a terminal is asked for them")


def _asked(question: str, default: str = "") -> str:
    """Return what somebody types on the terminal, or the default; Ctrl-C and Ctrl-D interrupt."""
    line = screen.output.ask(f"{question} [{default}] " if default else f"{question} ")
    if not line:
        raise KeyboardInterrupt
    return line.strip() or default


def _number(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number", "0.1 sets a tenth of the rows aside") from None
