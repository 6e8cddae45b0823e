"""The commands that run stages: run, finetune, recover and eval."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl import api
from opdcl.cli import options as opt
from opdcl.cli.options import typed
from opdcl.cli.screen import lead, show, start

if TYPE_CHECKING:
    from opdcl.outcomes import Outcome

RUN, SOURCE = typed("RUN", Path), typed("SOURCE")


def _carry_out(
    verb: Callable[..., Outcome],
    json: bool,
    quiet: bool,
    num_processes: int = 1,
    offline: bool = False,
    **given: Any,
) -> Outcome:
    start(json, quiet, num_processes)
    outcome = verb(**given, quiet=quiet or json)
    show(outcome)
    return outcome


@opt.takes(api.run, opt.OF_STAGES, workflow=typed(kind=list[str]), out=RUN)
def run(**given: Any) -> None:
    """Run a workflow: fine-tune, recover, evaluate, report. Run it again to resume where it stopped."""
    outcome = _carry_out(api.run, **given)
    from opdcl.outcomes import Comparison

    if runs := outcome.runs() if isinstance(outcome, Comparison) else []:
        lead("chat", runs[0])


@opt.takes(
    api.finetune, opt.OF_STAGES, data=opt.Rows, out=RUN, columns=opt.Columns, settings=opt.FinetuneSettings
)
def finetune(**given: Any) -> None:
    """Learn a domain: train a LoRA adapter on your rows."""
    _carry_out(api.finetune, **given)


@opt.takes(api.recover, opt.OF_STAGES, path=SOURCE, out=RUN, columns=opt.Columns)
def recover(**given: Any) -> None:
    """Recover what the fine-tune forgot, by distillation. The teacher is the original model."""
    _carry_out(api.recover, **given)


@opt.takes(
    api.evaluate,
    opt.OF_STAGES,
    path=SOURCE,
    retention=typed("SUITE,...", list[str]),
    domain=typed("SUITE", list[str]),
    data=typed("SUITE=PATH", list[str]),
    out=RUN,
    columns=opt.Columns,
    max_drop=typed("POINTS", list[str]),
    settings=opt.EvalSettings,
)
def evaluate(data: list[str] | None, max_drop: list[str] | None, **given: Any) -> None:
    """Score base, tuned and recovered on the same prompts. Writes the report.

    With --max-drop, exit code 3 if a larger drop is shown, 5 if the scores do not decide it.
    """
    _carry_out(api.evaluate, data=opt.suite_files(data), max_drop=opt.drops(max_drop), **given)
