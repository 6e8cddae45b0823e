"""The commands that run stages: run, finetune, recover and eval; and fetch, which prepares a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import opdcl
from opdcl.cli import options as opt
from opdcl.cli.screen import lead, show, start
from opdcl.errors import UsageError

if TYPE_CHECKING:
    from opdcl.api import Options


def run(
    workflow: opt.Workflow,
    out: opt.Out = None,
    model: opt.Model = None,
    deterministic: opt.Deterministic = False,
    settings: opt.Settings = None,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    offline: opt.Offline = False,
    num_processes: opt.Workers = 1,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Run a workflow: fine-tune, recover, evaluate, report. Run it again to resume where it stopped."""
    start(json, quiet, num_processes)
    shared: Options = {"settings": settings, "dry_run": dry_run, "force": force, "quiet": quiet or json}
    from opdcl.outcomes import Comparison

    outcome = opdcl.run(workflow, out, model, deterministic, **shared)
    show(outcome)
    if runs := outcome.runs() if isinstance(outcome, Comparison) else []:
        lead("chat", runs[0])


def finetune(
    data: opt.Rows,
    out: opt.FinetuneOut = Path("runs/finetune"),
    model: opt.Model = None,
    epochs: opt.Epochs = None,
    learning_rate: opt.LearningRate = None,
    seed: opt.Seed = None,
    columns: opt.Columns = None,
    settings: opt.FinetuneSettings = None,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    offline: opt.Offline = False,
    num_processes: opt.Workers = 1,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Learn a domain: train a LoRA adapter on your rows."""
    start(json, quiet, num_processes)
    shared: Options = {"settings": settings, "dry_run": dry_run, "force": force, "quiet": quiet or json}
    show(opdcl.finetune(data, out, model, epochs, learning_rate, seed, columns, **shared))


def recover(
    source: opt.RunOrTuned,
    prompts: opt.Prompts = None,
    domain: opt.DomainPrompts = None,
    steps: opt.Steps = None,
    learning_rate: opt.LearningRate = None,
    seed: opt.Seed = None,
    out: opt.NewRun = None,
    base: opt.ItsBase = None,
    columns: opt.Columns = None,
    settings: opt.Settings = None,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    offline: opt.Offline = False,
    num_processes: opt.Workers = 1,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Recover what the fine-tune forgot, by distillation. The teacher is the original model."""
    start(json, quiet, num_processes)
    shared: Options = {"settings": settings, "dry_run": dry_run, "force": force, "quiet": quiet or json}
    show(opdcl.recover(source, prompts, domain, steps, learning_rate, seed, out, base, columns, **shared))


def evaluate(
    source: opt.RunOrTuned,
    retention: opt.Retention = None,
    domain: opt.DomainSuites = None,
    data: opt.SuiteFiles = None,
    limit: opt.Limit = None,
    out: opt.NewRun = None,
    base: opt.ItsBase = None,
    columns: opt.Columns = None,
    max_drop: opt.MaxDrop = None,
    settings: opt.EvalSettings = None,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    offline: opt.Offline = False,
    num_processes: opt.Workers = 1,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Score base, tuned and recovered on the same prompts. Writes the report.

    With --max-drop, exit code 3 if a larger drop is shown, 5 if the scores do not decide it.
    """
    start(json, quiet, num_processes)
    shared: Options = {"settings": settings, "dry_run": dry_run, "force": force, "quiet": quiet or json}
    files = dict(map(_suite_and_file, data or ()))
    suites = [suite for names in retention or () for suite in names.split(",")]
    show(
        opdcl.evaluate(
            source, suites, domain or (), files, limit, out, base, columns, _drops(max_drop), **shared
        )
    )


def fetch(
    workflow: opt.Workflow,
    model: opt.Model = None,
    settings: opt.Settings = None,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Download what a workflow needs from the Hub into the cache. The workflow then runs with --offline."""
    start(json, quiet)
    show(opdcl.fetch(workflow, model, settings, dry_run, quiet or json))
    if not dry_run:
        lead("run", *workflow, "--offline")


def _drops(texts: list[str] | None) -> float | dict[str, float] | None:
    """Return `--max-drop` as the setting `gates.max_drop`."""
    found: dict[str, float] = {}
    for text in texts or ():
        suite, _, number = text.rpartition("=")
        try:
            found[suite] = float(number)
        except ValueError:
            raise UsageError(f"--max-drop {text!r} is not a number", "--max-drop 5, or SUITE=3") from None
    if "" in found and len(found) > 1:
        raise UsageError("--max-drop names a limit for all suites and one for some", "name all suites")
    return found.get("", found or None)


def _suite_and_file(text: str) -> tuple[str, str]:
    suite, separator, path = text.partition("=")
    if not separator:
        raise UsageError(f"--data {text!r} is not SUITE=PATH", "--data ifeval=input_data.jsonl")
    return suite, path
