"""Learn the domain: supervised fine-tuning of a LoRA adapter with TRL's SFTTrainer.

opdcl finetune --data rows.jsonl -o runs/mine
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from opdcl import parallel
from opdcl.config.finetune import FinetuneConfig
from opdcl.config.recover import MOST_COMPLETIONS, OnPolicySection, RecoverConfig
from opdcl.config.section import LARGEST, MOST_STEPS
from opdcl.config.teacher import LossSection, TeacherSection
from opdcl.data.examples import Examples
from opdcl.distill.losses import token_losses
from opdcl.distill.prompts import read_recovery_source
from opdcl.distill.replay import replayed_rows
from opdcl.errors import OpdclError, UsageError
from opdcl.model.backbone import Backbone
from opdcl.model.costs import Work, sized
from opdcl.model.distributions import HiddenStates
from opdcl.model.forward import Sequences, answer_ids, answer_states
from opdcl.model.memory import is_out_of_memory
from opdcl.model.positions import cross_entropy
from opdcl.rundir.layout import StageDir
from opdcl.stages.recover import recover
from opdcl.training import (
    FINETUNE_SCHEDULE,
    StageCallback,
    StageReport,
    StageTrainer,
    finite_or_skipped,
    save_adapter,
    trainer_arguments,
)

logger = logging.getLogger(__name__)


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
    replayed = replayed_rows(config, examples, backbone, out.replay, report.note)
    encoded = examples.encoded + replayed
    if start:
        backbone.drop_adapters()
        model = backbone.load_adapter(start, "student", trainable=True)
        report.note(f"continuing the adapter of {start}, which keeps its shape")
    else:
        model = backbone.new_adapter(config.lora, config.seed)
    lengths = [len(e.input_ids) for e in encoded]
    order = lay_out(lengths, config.batch_size, steps, config.seed)
    callback = StageCallback(report, steps, backbone)
    callback.work = FinetuneWork.of(lengths, order, config.batch_size)
    callback.tokens_per_step = round(sum(lengths) / len(lengths) * config.batch_size)
    stage = _stage_arguments(config)
    arguments = trainer_arguments(config, FINETUNE_SCHEDULE, backbone, out, steps, **stage)
    trainer = AnswerTrainer(
        backbone,
        [row.input_ids for row in replayed],
        model=model,
        args=SFTConfig(**arguments),
        train_dataset=Dataset.from_list([vars(e) for e in encoded]).select(order),
        processing_class=backbone.tokenizer,
        callbacks=[callback],
    )
    callback.run(trainer, out)
    save_adapter(backbone, out.adapter)


@dataclass(frozen=True)
class FinetuneWork:
    """The tokens of each step of a fine-tune."""

    kind: str
    sizes: list[int]

    @classmethod
    def of(cls, lengths: Sequence[int], order: Sequence[int], batch_size: int) -> FinetuneWork:
        """Return the work of steps on rows of these lengths, which come in this order."""
        starts = range(0, len(order), batch_size)
        sizes = [sum(lengths[row] for row in order[start : start + batch_size]) for start in starts]
        return cls(sized("train", fmean(sizes)), sizes)

    def portion(self, step: int, tokens: float) -> tuple[str, float]:
        """Return kind and amount of a step's work."""
        return self.kind, self.sizes[step - 1]

    def left(self, step: int) -> Work:
        """Return the work after a step."""
        return {self.kind: sum(self.sizes[step:])}


def _stage_arguments(config: FinetuneConfig) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": config.batch_size,
        "max_length": None,  # `read_examples` has seen to it
        "completion_only_loss": True,
        "router_aux_loss_coef": 0.0,  # routers are frozen
    }


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
        optimizer=config.optimizer,
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


class AnswerTrainer(StageTrainer, SFTTrainer):
    """SFTTrainer that computes the rows' shared prefix once and projects answer positions only.

    The loss of a domain row is cross-entropy. A replayed row, whose answer base wrote, is held to base's
    distribution at every token: the same gradient on average, without the noise of one answer.
    """

    pieces = 1  # micro-batches per batch; doubled whenever memory runs out

    def __init__(self, backbone: Backbone, replayed: Iterable[Sequence[int]] = (), **options: Any):
        weights = {weight: weight.data for weight in options["model"].parameters() if weight.requires_grad}
        super().__init__(**options)
        # On a quantized base TRL rounds the adapter to bf16, where small updates vanish.
        for weight, original in weights.items():
            weight.data = original
        self.backbone, self.replayed = backbone, {*map(tuple, replayed)}

    def training_step(self, model, inputs, num_items_in_batch=None):
        tokens = (inputs["labels"] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        while True:
            try:
                # Each piece divides by the tokens of the whole batch, so that the gradients of all pieces
                # and workers add up to the batch's.
                step = super().training_step
                losses = [step(model, piece, tokens) for piece in _pieces(inputs, self.pieces)]
                break
            except (RuntimeError, MemoryError) as fault:
                # A worker of a sharded base cannot repeat a step alone.
                if not is_out_of_memory(fault) or parallel.sharded():
                    raise
                model.zero_grad()
                self._cut_finer(inputs)
        parallel.add_gradients(model)
        loss = torch.stack(losses).sum()
        total = parallel.sum_over_workers({"loss": float(loss)})["loss"]
        return finite_or_skipped(self, model, loss.new_tensor(total))

    def _cut_finer(self, inputs: dict[str, torch.Tensor]) -> None:
        if self.pieces >= len(parallel.my_share(range(len(inputs["input_ids"])))):
            hint = "lower finetune.max_length, or choose a smaller model"
            raise OpdclError("one training row alone does not fit into memory", hint)
        self.pieces *= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        logger.warning("out of memory: continuing with batches cut into %d", self.pieces)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean loss over the answer tokens of the optimizer step."""
        if return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        causal_lm = model.get_base_model()
        # Whole tensors: on a GPU every copy to the host waits for the device.
        lengths = inputs["attention_mask"].sum(1).tolist()
        rows, learned = inputs["input_ids"].tolist(), (inputs["labels"] != -100).tolist()
        sequences = [
            (ids[:length], answer[:length])
            for ids, answer, length in zip(rows, learned, lengths, strict=True)
        ]
        targets_N = answer_ids(sequences, causal_lm.device)
        is_replayed_N = self._replayed_positions(sequences).to(causal_lm.device)
        needs_base, base_NH = bool(is_replayed_N.any()), None
        if parallel.sharded():  # its workers take every pass together
            needs_base = parallel.any_worker(needs_base)
        if needs_base:
            # A context of its own: autocast reuses its copies of weights, and these have no gradients.
            with self.compute_loss_context_manager(), torch.no_grad(), self.backbone.state("base"):
                base_NH = answer_states(causal_lm, sequences)
        with self.compute_loss_context_manager():
            states_NH = answer_states(causal_lm, sequences)
            if base_NH is None:
                total = cross_entropy(states_NH, self.backbone.head_VH, targets_N).sum()
            else:
                total = self._mixed_loss(states_NH, base_NH, targets_N, is_replayed_N)
        return total / (len(targets_N) if num_items_in_batch is None else num_items_in_batch)

    def _replayed_positions(self, sequences: Sequences) -> torch.Tensor:
        """Return for each answer token of a batch, in order, whether its row is replayed, `(N,)`."""
        positions = []
        for ids, answer in sequences:
            positions += [tuple(ids) in self.replayed] * sum(answer[1:])
        return torch.tensor(positions, dtype=torch.bool)

    def _mixed_loss(
        self,
        states_NH: torch.Tensor,
        base_NH: torch.Tensor,
        targets_N: torch.Tensor,
        is_replayed_N: torch.Tensor,
    ) -> torch.Tensor:
        """Return the summed loss in nats: cross-entropy of domain tokens, KL(base, student) of the others."""
        head_VH, is_domain_N = self.backbone.head_VH, ~is_replayed_N
        imitation = cross_entropy(states_NH[is_domain_N], head_VH, targets_N[is_domain_N]).sum()
        divergence = token_losses(
            states_NH[is_replayed_N],
            head_VH,
            HiddenStates(base_NH[is_replayed_N], head_VH.detach()),
            targets_N[is_replayed_N],
            sampler_N=torch.zeros_like(base_NH[is_replayed_N, 0]),
            temperature=1.0,
            loss=LossSection(kind="forward_kl"),
        ).loss.sum()
        return imitation + divergence


def _pieces(inputs: dict[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Split this worker's rows of a batch; a worker without any gets the first row with its answer masked."""
    if count == 1 and parallel.worker_count() == 1:
        return [inputs]
    rows = parallel.my_share(range(len(inputs["input_ids"])))
    if not rows:
        masked = torch.full_like(inputs["labels"][:1], -100)
        return [{name: values[:1] for name, values in inputs.items()} | {"labels": masked}]
    size = math.ceil(len(rows) / count)
    groups = [list(rows[i : i + size]) for i in range(0, len(rows), size)]
    return [{name: values[group] for name, values in inputs.items()} for group in groups]
