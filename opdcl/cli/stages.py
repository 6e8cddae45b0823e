"""The commands that run stages: run, finetune, recover and eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from opdcl import api
from opdcl.cli import options as opt
from opdcl.cli.screen import lead, show, start


def run(
    workflow: opt.Workflow,
    out: opt.Out = None,
    base: opt.Base = None,
    deterministic: Annotated[
        bool, Option("--deterministic", help="Use only kernels that repeat bit for bit.")
    ] = False,
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
    start(json, quiet, workers)
    outcome = api.run(
        workflow,
        out=out,
        base=base,
        deterministic=deterministic,
        settings=settings,
        dry_run=dry_run,
        force=force,
        quiet=quiet or json,
    )
    show(outcome)
    from opdcl.outcomes import Comparison

    runs = outcome.runs() if isinstance(outcome, Comparison) else []
    if runs:
        lead("chat", runs[0])


def finetune(
    rows: Annotated[
        str,
        Argument(metavar="ROWS", help="Rows to learn: handbook (shipped), a file, a folder, or a Hub id."),
    ],
    out: Annotated[Path, Option("-o", "--out", metavar="RUN", help="Run directory.")] = Path("runs/finetune"),
    base: opt.Base = None,
    epochs: Annotated[float | None, Option(help="Passes over the rows.")] = None,
    learning_rate: opt.LearningRate = None,
    seed: opt.Seed = None,
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
    start(json, quiet, workers)
    outcome = api.finetune(
        rows,
        out=out,
        base=base,
        epochs=epochs,
        learning_rate=learning_rate,
        seed=seed,
        columns=columns,
        settings=settings,
        dry_run=dry_run,
        force=force,
        quiet=quiet or json,
    )
    show(outcome)


def recover(
    source: opt.Source,
    prompts: Annotated[
        str | None, Option(help="General prompts: everyday (shipped), a file, or a Hub id.")
    ] = None,
    domain: Annotated[
        str | None, Option(help="Domain prompts. Default: the questions of the fine-tune's rows.")
    ] = None,
    steps: Annotated[int | None, Option(help="Optimizer steps.")] = None,
    learning_rate: opt.LearningRate = None,
    seed: opt.Seed = None,
    out: opt.OutBeside = None,
    base: opt.BaseOfAdapter = None,
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
    start(json, quiet, workers)
    outcome = api.recover(
        source,
        prompts=prompts,
        domain=domain,
        steps=steps,
        learning_rate=learning_rate,
        seed=seed,
        out=out,
        base=base,
        system=system,
        columns=columns,
        settings=settings,
        dry_run=dry_run,
        force=force,
        quiet=quiet or json,
    )
    show(outcome)


def evaluate(
    source: opt.Measured,
    retention: Annotated[
        list[str] | None,
        Option(
            metavar="SUITE,...",
            help="Suites that measure forgetting. Default: instructions. `opdcl suites ls` lists the shipped "
            "ones; of lm-eval: ifeval,arc_easy. Repeatable.",
        ),
    ] = None,
    domain: Annotated[
        list[str] | None,
        Option(metavar="SUITE", help="Domain suite, or a file of questions and answers. Repeatable."),
    ] = None,
    data: Annotated[
        list[str] | None, Option(metavar="SUITE=PATH", help="Local file with a suite's data. Repeatable.")
    ] = None,
    limit: Annotated[int | None, Option(help="Evaluate only the first N documents of each suite.")] = None,
    out: opt.Out = None,
    base: opt.BaseOfAdapter = None,
    system: opt.System = None,
    columns: opt.Columns = None,
    max_drop: Annotated[
        list[str] | None,
        Option(
            metavar="POINTS",
            help="Points that retention suites may fall below base: 5, SUITE=3, closeness=0.8. Repeatable.",
        ),
    ] = None,
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
    start(json, quiet, workers)
    outcome = api.evaluate(
        source,
        retention=retention or (),
        domain=domain or (),
        data=opt.suite_files(data),
        limit=limit,
        out=out,
        base=base,
        system=system,
        columns=columns,
        max_drop=opt.drops(max_drop),
        settings=settings,
        dry_run=dry_run,
        force=force,
        quiet=quiet or json,
    )
    show(outcome)
