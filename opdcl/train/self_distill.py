"""Learn the domain from oneself, shown the answer: a fine-tune that is a recovery with another teacher."""

from __future__ import annotations

from pathlib import Path

from opdcl.config.finetune import SHOWN_ANSWER, FinetuneConfig
from opdcl.config.recover import MOST_COMPLETIONS, OnPolicySection, RecoverConfig
from opdcl.config.section import MOST_STEPS
from opdcl.config.teacher import TeacherSection
from opdcl.data.chat import check_turn_end
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone
from opdcl.rundir.layout import StageDir
from opdcl.train.answer_cache import CompletionCache
from opdcl.train.finetune import planned_steps
from opdcl.train.recover import recover
from opdcl.train.stage import StageReport, save_adapter
from opdcl.train.teachers import Provided
from opdcl.words import Prompts, StreamName


def self_distill(
    config: FinetuneConfig,
    recovery: RecoverConfig,
    prompts: dict[StreamName, Prompts],
    backbone: Backbone,
    start: Path | None,
    out: StageDir,
    report: StageReport,
) -> None:
    """Train the adapter in `start`, or a new one, as a recovery with another teacher; resume likewise.

    An EMA copy of the student, shown the reference answer, grades the student's completions (SDFT, arXiv
    2601.19897, algorithm 1). `recovery` is what `as_distillation` returned.
    """
    check_turn_end(backbone.tokenizer, backbone.eos_ids)
    start = start or out.path / "start"
    if not start.exists():
        backbone.new_adapter(config.lora, config.seed)
        save_adapter(backbone, start)
    more = Provided(completions=CompletionCache(backbone))
    recover(recovery, prompts, backbone, start, out, report, more)


def as_distillation(config: FinetuneConfig, rows: int) -> RecoverConfig:
    """Return self-distillation as a recovery: domain steps only, an EMA copy as teacher.

    Raises:
        UsageError: There are too many steps.
    """
    steps, _ = planned_steps(config, rows)
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
        max_new_tokens=config.self_distill.max_new_tokens,
        domain_teacher="average-shown-the-answer",
        teachers={"average-shown-the-answer": TeacherSection(kind="ema", context=SHOWN_ANSWER)},
        learning_rate=config.learning_rate,
        validate_every=config.save_steps,
        keep="last",
        seed=config.seed,
    )
