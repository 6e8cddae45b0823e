"""The commands that run stages: run, finetune, recover and eval.

Each is declared by its arguments, and hands them to the verb of its name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from opdcl import api
from opdcl.arguments import Options
from opdcl.cli import options as opt
from opdcl.cli.screen import show, start, suggest


def _started(
    settings: opt.Settings = None,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    offline: opt.Offline = False,
    workers: opt.Workers = 1,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> Options:
    """Start a command by the options that all of these have; return what it hands to its verb of them."""
    start(json, quiet, workers)
    return {"settings": settings, "dry_run": dry_run, "force": force, "quiet": quiet or json}


def _command(declared: Callable[..., None], **read: Callable[[Any], Any]) -> Callable[..., None]:
    """Return the command that takes the declared arguments, then those of `_started`, and calls the verb.

    `read` has the functions by which the texts of some arguments become what the verb takes.
    """
    own, common = (inspect.signature(f, eval_str=True).parameters for f in (declared, _started))

    @functools.wraps(declared)
    def command(**given: Any) -> None:
        how = _started(**{name: given.pop(name) for name in common})
        # What is not given has the verb's own default.
        chosen = {name: value for name, value in given.items() if value is not None}
        chosen |= {name: read[name](value) for name, value in chosen.items() if name in read}
        outcome = getattr(api, declared.__name__)(**chosen, **how)
        show(outcome)
        from opdcl.outcomes import Comparison

        if isinstance(outcome, Comparison) and (runs := outcome.runs()):
            suggest("chat", runs[0])

    parameters = [*own.values(), *common.values()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


@_command
def run(
    workflow: opt.Workflow,
    out: opt.Out = None,
    base: str | None = None,
    deterministic: Annotated[bool, Option("--deterministic")] = False,
) -> None:
    """Run a workflow: fine-tune, recover, evaluate, report. Run it again to resume where it stopped.

    With `--set track=[wandb]`, or trackio, tensorboard or mlflow, a tracker follows it.
    """


@_command
def finetune(
    data: Annotated[str, Argument(metavar="ROWS")],
    out: Annotated[Path, Option("-o", "--out", metavar="RUN")] = Path("runs/finetune"),
    base: str | None = None,
    epochs: float | None = None,
    replay: float | None = None,
    test_share: float | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    columns: opt.Columns = None,
) -> None:
    """Fine-tune a LoRA adapter on your rows, mixed with replayed general prompts."""


@_command
def recover(
    path: Annotated[str, Argument(metavar="SOURCE")],
    prompts: str | None = None,
    domain: str | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    out: opt.Out = None,
    base: str | None = None,
    system: opt.System = None,
    columns: opt.Columns = None,
) -> None:
    """Recover what the fine-tune forgot, by distillation. The teacher is the original model."""


@functools.partial(_command, data=opt.suite_files, max_drop=opt.drops)
def evaluate(
    path: Annotated[str, Argument(metavar="SOURCE")],
    retention: Annotated[list[str] | None, Option(metavar="SUITE,...")] = None,
    domain: Annotated[list[str] | None, Option(metavar="SUITE")] = None,
    data: Annotated[list[str] | None, Option(metavar="SUITE=PATH")] = None,
    limit: int | None = None,
    out: opt.Out = None,
    base: str | None = None,
    system: opt.System = None,
    columns: opt.Columns = None,
    max_drop: Annotated[list[str] | None, Option(metavar="POINTS")] = None,
) -> None:
    """Score base, tuned and recovered on the same prompts, or one model alone. Writes the report.

    With --max-drop, exit code 3 if a larger drop is shown, 5 if the scores do not decide it.
    """
