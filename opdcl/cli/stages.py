"""The commands that run stages: run, finetune, recover and eval.

Each takes the arguments of the verb of its name. What is said here is how some of them are typed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from opdcl import api
from opdcl.arguments import Data, Options, PathLike
from opdcl.cli import options as opt
from opdcl.cli.screen import show, start, suggest
from opdcl.outcomes import Comparison

# Arguments of verbs that may be paths or rows: a command gets them as text.
TEXTS = (PathLike, PathLike | None, Data, Data | None)
SOURCE = Annotated[str, Argument(metavar="SOURCE")]


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


def _command(
    verb: Callable[..., Any], help: str, read: Mapping[str, Callable[[Any], Any]] | None = None, **typed: Any
) -> Callable[..., None]:
    """Return the command of a verb, which takes its arguments, then those of `_started`.

    `typed` says of some arguments how they are typed; others are numbers, or texts in place of paths and
    rows. `read` has functions that read the texts of some.
    """
    common = inspect.signature(_started, eval_str=True).parameters
    readers, parameters = read or {}, []
    for given in inspect.signature(verb).parameters.values():
        if given.name != "options":
            kind = str | None if given.annotation in TEXTS else given.annotation
            # The help shows defaults, and an empty one says nothing.
            default = given.default or None
            parameters.append(given.replace(annotation=typed.get(given.name, kind), default=default))
    parameters += common.values()

    def command(**given: Any) -> None:
        how = _started(**{name: given.pop(name) for name in common})
        # What is not given has the verb's own default.
        chosen = {name: value for name, value in given.items() if value is not None}
        chosen |= {name: readers[name](chosen[name]) for name in readers.keys() & chosen}
        outcome = verb(**chosen, **how)
        show(outcome)
        if isinstance(outcome, Comparison) and (runs := outcome.runs()):
            suggest("chat", runs[0])

    command.__name__, command.__doc__ = verb.__name__, help
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


run = _command(
    api.run,
    "Run a workflow: fine-tune, recover, evaluate, report. Run it again to resume where it stopped.\n\n"
    "With `--set track=[wandb]`, or trackio, tensorboard or mlflow, a tracker follows it.",
    workflow=opt.Workflow,
    out=opt.Out,
    deterministic=Annotated[bool, Option("--deterministic")],
)
finetune = _command(
    api.finetune,
    "Fine-tune a LoRA adapter on your rows, mixed with replayed general prompts.",
    data=Annotated[str, Argument(metavar="ROWS")],
    out=Annotated[Path, Option("-o", "--out", metavar="RUN")],
    columns=opt.Columns,
)
recover = _command(
    api.recover,
    "Recover what the fine-tune forgot, by distillation. The teacher is the original model.",
    path=SOURCE,
    out=opt.Out,
    system=opt.System,
    columns=opt.Columns,
)
evaluate = _command(
    api.evaluate,
    "Score base, tuned and recovered on the same prompts, or one model alone. Writes the report.\n\n"
    "With --max-drop, exit code 3 if a larger drop is shown, 5 if the scores do not decide it.",
    read={"data": opt.suite_files, "max_drop": opt.drops},
    path=SOURCE,
    retention=Annotated[list[str] | None, Option(metavar="SUITE,...")],
    domain=Annotated[list[str] | None, Option(metavar="SUITE")],
    data=Annotated[list[str] | None, Option(metavar="SUITE=PATH")],
    out=opt.Out,
    system=opt.System,
    columns=opt.Columns,
    max_drop=Annotated[list[str] | None, Option(metavar="POINTS")],
)
