"""The commands that run stages: run, finetune, recover and eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from opdcl import api
from opdcl.arguments import Options
from opdcl.cli import options as opt
from opdcl.cli.screen import show, start, suggest


def _started(
    json: bool, quiet: bool, workers: int, settings: list[str] | None, dry_run: bool, force: bool
) -> Options:
    """Start a command; return what it hands to its verb as all verbs take it."""
    start(json, quiet, workers)
    return {"settings": settings, "dry_run": dry_run, "force": force, "quiet": quiet or json}


def run(
    workflow: opt.Workflow,
    out: opt.Out = None,
    base: str | None = None,
    deterministic: Annotated[bool, Option("--deterministic")] = False,
    settings: opt.Settings = None,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    offline: opt.Offline = False,
    workers: opt.Workers = 1,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Run a workflow: fine-tune, recover, evaluate, report. Run it again to resume where it stopped.

    With `--set track=[wandb]`, or trackio, tensorboard or mlflow, a tracker follows it.
    """
    how = _started(json, quiet, workers, settings, dry_run, force)
    outcome = api.run(workflow, out=out, base=base, deterministic=deterministic, **how)
    show(outcome)
    from opdcl.outcomes import Comparison

    runs = outcome.runs() if isinstance(outcome, Comparison) else []
    if runs:
        suggest("chat", runs[0])


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
    settings: opt.Settings = None,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    offline: opt.Offline = False,
    workers: opt.Workers = 1,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Fine-tune a LoRA adapter on your rows, mixed with replayed general prompts."""
    how = _started(json, quiet, workers, settings, dry_run, force)
    outcome = api.finetune(
        data,
        out=out,
        base=base,
        epochs=epochs,
        learning_rate=learning_rate,
        seed=seed,
        columns=columns,
        replay=replay,
        test_share=test_share,
        **how,
    )
    show(outcome)


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
    settings: opt.Settings = None,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    offline: opt.Offline = False,
    workers: opt.Workers = 1,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Recover what the fine-tune forgot, by distillation. The teacher is the original model."""
    how = _started(json, quiet, workers, settings, dry_run, force)
    outcome = api.recover(
        path,
        prompts=prompts,
        domain=domain,
        steps=steps,
        learning_rate=learning_rate,
        seed=seed,
        out=out,
        base=base,
        system=system,
        columns=columns,
        **how,
    )
    show(outcome)


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
    settings: opt.Settings = None,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    offline: opt.Offline = False,
    workers: opt.Workers = 1,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Score base, tuned and recovered on the same prompts, or one model alone. Writes the report.

    With --max-drop, exit code 3 if a larger drop is shown, 5 if the scores do not decide it.
    """
    how = _started(json, quiet, workers, settings, dry_run, force)
    outcome = api.evaluate(
        path,
        retention=retention or (),
        domain=domain or (),
        data=opt.suite_files(data),
        limit=limit,
        out=out,
        base=base,
        system=system,
        columns=columns,
        max_drop=opt.drops(max_drop),
        **how,
    )
    show(outcome)
