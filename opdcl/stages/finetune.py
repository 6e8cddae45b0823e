"""Learn the domain: supervised fine-tuning of a LoRA adapter with TRL's SFTTrainer.

opdcl finetune rows.jsonl -o runs/mine
"""

from __future__ import annotations

import math
import random
from pathlib import Path

from trl import SFTConfig

from opdcl.config.finetune import FinetuneConfig
from opdcl.config.recover import MOST_COMPLETIONS, OnPolicySection, RecoverConfig
from opdcl.config.section import LARGEST, MOST_STEPS
from opdcl.config.teacher import TeacherSection
from opdcl.data.examples import Examples
from opdcl.distill.prompts import read_recovery_source
from opdcl.distill.replay import replayed_rows
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone
from opdcl.rundir.layout import StageDir
from opdcl.stages.answer_trainer import AnswerTrainer, StageCallback, trainer_arguments
from opdcl.stages.recover import recover
from opdcl.training import Schedule, StageLog, StageReport, save_adapter


def finetune(
    config: FinetuneConfig,
    examples: Examples,
    backbone: Backbone,
    start: Path | None,
    out: StageDir,
    report: StageReport,
) -> None:
    """Train the adapter in `start`, or a new one, on the examples; resume from the stage's last checkpoint.

    Method `self-distill` is the recovery loop with another teacher: an EMA copy of the student, shown the
    reference answer, grades the student's completions (SDFT, arXiv 2601.19897, algorithm 1).
    """
    if config.method == "self-distill":
        start = start or out.path / "start"
        if not start.exists():
            backbone.new_adapter(config.lora, config.seed)
            save_adapter(backbone, start)
        recovery = as_distillation(config, len(examples.rows))
        source = read_recovery_source(recovery, lambda *_: examples.rows)
        recover(recovery, source, backbone, start, out, report)
        return
    steps = planned_steps(config, len(examples.encoded))
    rows = examples.encoded + replayed_rows(config, examples, backbone, out.replay, report)
    if start:
        backbone.drop_adapters()
        model = backbone.load_adapter(start, "student", trainable=True)
        report.note(f"continuing the adapter of {start}, which keeps its shape")
    else:
        model = backbone.new_adapter(config.lora, config.seed)
    lengths = [len(row.ids) for row in rows]
    order = lay_out(lengths, config.batch_size, steps, config.seed)
    tokens_per_step = round(sum(lengths) / len(lengths) * config.batch_size)
    callback = StageCallback(StageLog(report, out, steps), backbone, tokens_per_step)
    trainer = AnswerTrainer(
        backbone,
        Schedule.of(steps, config.warmup, config.schedule),
        rows,
        order,
        model=model,
        args=SFTConfig(**trainer_arguments(config, backbone, out, steps)),
        callbacks=[callback],
    )
    callback.run(trainer)
    save_adapter(backbone, out.adapter)


def as_distillation(config: FinetuneConfig, rows: int) -> RecoverConfig:
    """Return self-distillation as a recovery: domain steps only, an EMA copy as teacher.

    Raises:
        UsageError: There are too many steps.
    """
    own, steps = config.self_distill, planned_steps(config, rows)
    if steps > MOST_STEPS or steps * config.batch_size > MOST_COMPLETIONS:
        message = f"{rows} rows in {config.epochs:g} epochs are {steps} steps of self-distillation"
        raise UsageError(f"{message}, more than can be planned", "lower finetune.epochs, or take fewer rows")
    return RecoverConfig(
        general=None,
        general_per_domain=0,
        domain=config.data,
        steps=steps,
        lmbda=1.0,  # a teacher that sees the answer would write it: then this is imitation
        on_policy=OnPolicySection(domain=True),
        rollouts=config.batch_size,
        micro_batch_tokens=2048,
        max_new_tokens=own.max_new_tokens,
        domain_teacher="average",
        teachers={"average": TeacherSection(kind="ema", context=own.context)},
        learning_rate=config.learning_rate,
        save_steps=config.save_steps,
        validate_every=config.save_steps,
        keep="last",
        seed=config.seed,
    )


def planned_steps(config: FinetuneConfig, rows: int) -> int:
    """Return the number of optimizer steps for a number of rows, and those that are replayed beside them.

    Raises:
        UsageError: The rows are seen too often for the order of all steps to be planned.
    """
    seen = (rows + config.replay.count(rows)) * config.epochs
    if seen > LARGEST:
        message = f"{rows} rows in {config.epochs:g} epochs are {seen:.0f} rows to learn from"
        raise UsageError(f"{message}; at most {LARGEST} can be planned", "lower finetune.epochs")
    return max(1, math.ceil(seen / config.batch_size))


def lay_out(lengths: list[int], batch_size: int, steps: int, seed: int) -> list[int]:
    """Return the rows of all batches in order, epoch after epoch; rows of similar length share a batch.

    Otherwise half of a batch of short rows would be padding. The order is fixed beforehand, so that a resumed
    run draws the same rows as an uninterrupted one.
    """
    shuffle = random.Random(seed)
    order: list[int] = []
    # Sorted within stretches of fifty batches, as in transformers: similar, not identical, each epoch.
    stretch = 50 * batch_size
    while len(order) < steps * batch_size:
        rows = list(range(len(lengths)))
        shuffle.shuffle(rows)
        starts = range(0, len(rows), stretch)
        rows = [r for i in starts for r in sorted(rows[i : i + stretch], key=lambda r: lengths[r])]
        batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        shuffle.shuffle(batches)
        order += [row for batch in batches for row in batch]
    return order[: steps * batch_size]
