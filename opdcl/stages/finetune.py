"""Learn the domain: supervised fine-tuning of a LoRA adapter with TRL's SFTTrainer.

opdcl finetune --data rows.jsonl -o runs/mine
"""

from __future__ import annotations

import logging
import math
import random
from pathlib import Path

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from opdcl import parallel
from opdcl.config.finetune import FinetuneConfig
from opdcl.config.recover import RecoverConfig
from opdcl.config.teacher import TeacherSection
from opdcl.data.chat import encode_example
from opdcl.data.rows import Row
from opdcl.distill.prompts import read_recovery_source
from opdcl.errors import OpdclError
from opdcl.model.backbone import Backbone
from opdcl.model.forward import answer_ids, answer_states
from opdcl.rundir.layout import StageDir
from opdcl.stages.recover import recover
from opdcl.training import (
    StageCallback,
    StageReport,
    finite_or_skipped,
    is_out_of_memory,
    save_adapter,
    trainer_arguments,
)

logger = logging.getLogger(__name__)


def finetune(
    config: FinetuneConfig,
    rows: list[Row],
    backbone: Backbone,
    start: Path | None,
    out: StageDir,
    report: StageReport,
) -> None:
    """Train an adapter on the rows' answers, resuming from the stage's last checkpoint.

    It continues the adapter in `start`, or begins with a new one. Method `self-distill` trains on the
    student's own completions, graded by an EMA copy of it that sees the reference answer: the recovery loop
    with another teacher (SDFT, arXiv 2601.19897, algorithm 1).
    """
    if config.method == "self-distill":
        start = start or out.path / "start"
        if not start.exists():
            backbone.new_adapter(config.lora, config.seed)
            save_adapter(backbone, start)
        recovery = as_distillation(config, len(rows))
        source = read_recovery_source(recovery, lambda *_: rows)
        recover(recovery, source, backbone, start, out, report)
        return
    encoded = [e for row in rows for e in encode_example(row, backbone.tokenizer, config.max_length)]
    if start:
        backbone.drop_adapters()
        model = backbone.load_adapter(start, "student", trainable=True)
        report.note(f"continuing the adapter of {start}, which keeps its shape")
    else:
        model = backbone.new_adapter(config.lora, config.seed)
    steps = planned_steps(config, len(encoded))
    stage = {
        "per_device_train_batch_size": config.batch_size,
        "lr_scheduler_type": "cosine",
        "warmup_steps": math.ceil(steps * 0.05),
        "max_length": config.max_length,
        "packing": _packs(config, backbone),
        "completion_only_loss": True,
    }
    lengths = [len(e.input_ids) for e in encoded]
    order = lay_out(lengths, config.batch_size, steps, config.seed)
    callback = StageCallback(report, steps, backbone)
    callback.tokens_per_step = round(sum(lengths) / len(lengths) * config.batch_size)
    trainer = AnswerTrainer(
        model=model,
        args=SFTConfig(**trainer_arguments(config, backbone, out, steps, **stage)),
        train_dataset=Dataset.from_list([vars(e) for e in encoded]).select(order),
        processing_class=backbone.tokenizer,
        callbacks=[callback],
    )
    callback.run(trainer, out)
    save_adapter(backbone, out.adapter)


def as_distillation(config: FinetuneConfig, rows: int) -> RecoverConfig:
    """Return self-distillation as a recovery: domain steps only, an EMA copy as teacher."""
    own = config.self_distill
    return RecoverConfig(
        general=None,
        general_per_domain=0,
        domain=config.data,
        steps=planned_steps(config, rows),
        rollouts=config.batch_size,
        micro_batch_tokens=2048,
        max_new_tokens=own.max_new_tokens,
        domain_teacher=TeacherSection(
            kind="ema", rate=own.rate, context=own.context, skip_tokens=own.skip_tokens
        ),
        loss=own.loss,
        learning_rate=config.learning_rate,
        save_steps=config.save_steps,
        validate_every=config.save_steps,
        keep="last",
        seed=config.seed,
        trainer=config.trainer,
    )


def planned_steps(config: FinetuneConfig, rows: int) -> int:
    """Return the number of optimizer steps for a number of rows."""
    return max(1, math.ceil(rows * config.epochs / config.batch_size))


def lay_out(lengths: list[int], batch_size: int, steps: int, seed: int) -> list[int]:
    """Return the row for each place in each batch, epoch after epoch; rows of similar length share a batch.

    Without the grouping, half of a batch of short rows is padding. The order is fixed beforehand, so that a
    resumed run draws the same rows as an uninterrupted one, whatever the state of the random generators.
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


def _packs(config: FinetuneConfig, backbone: Backbone) -> bool:
    """Return whether to pack rows: by default only where a flash-attention kernel keeps them apart."""
    if config.packing == "auto":
        return "flash" in (backbone.causal_lm.config._attn_implementation or "")
    return config.packing == "on"


class AnswerTrainer(SFTTrainer):
    """SFTTrainer that computes the rows' shared prefix once and projects answer positions only."""

    pieces = 1
    """Number of micro-batches that a batch is cut into; doubled whenever memory runs out."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        tokens = (inputs["labels"] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        batch = _local_rows(inputs)
        while True:
            try:
                # Each piece divides by the tokens of the whole batch, so that the gradients of all pieces
                # and workers add up to the batch's.
                step = super().training_step
                losses = [step(model, piece, tokens) for piece in _cut(batch, self.pieces)]
                break
            except (RuntimeError, MemoryError) as fault:
                # The workers of a sharded base run it together: one of them cannot repeat a step alone.
                if not is_out_of_memory(fault) or parallel.sharded():
                    raise
                model.zero_grad()
                self._cut_finer(batch)
        parallel.add_gradients(model)
        loss = torch.stack(losses).sum()
        total = parallel.sum_over_workers({"loss": float(loss)})["loss"]
        return finite_or_skipped(self, model, loss.new_tensor(total))

    def _cut_finer(self, inputs: dict[str, torch.Tensor]) -> None:
        if "position_ids" in inputs:
            raise OpdclError(
                "a batch of packed rows does not fit into memory",
                "lower finetune.batch_size, or finetune.packing: off",
            )
        if self.pieces >= len(inputs["input_ids"]):
            raise OpdclError(
                "one training row alone does not fit into memory",
                "lower finetune.max_length, or choose a smaller model",
            )
        self.pieces *= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        logger.warning("out of memory: continuing with batches cut into %d", self.pieces)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean cross-entropy over the answer tokens of the optimizer step."""
        if "position_ids" in inputs or return_outputs:  # packed rows have position ids
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        causal_lm = model.get_base_model()
        lengths = inputs["attention_mask"].sum(1).tolist()
        sequences = [
            (ids[:length].tolist(), (labels[:length] != -100).tolist())
            for ids, labels, length in zip(inputs["input_ids"], inputs["labels"], lengths, strict=True)
        ]
        with self.compute_loss_context_manager():
            states_NH = answer_states(causal_lm, sequences)
            logits_NV = causal_lm.get_output_embeddings()(states_NH)
        targets_N = answer_ids(sequences, logits_NV.device)
        total = torch.nn.functional.cross_entropy(logits_NV.float(), targets_N, reduction="sum")
        return total / (len(targets_N) if num_items_in_batch is None else num_items_in_batch)


def _local_rows(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this worker's rows of a batch; if there are none, the first row with its answer masked."""
    if parallel.worker_count() == 1:
        return inputs
    rows = parallel.my_share(range(len(inputs["input_ids"])))
    if rows:
        return {name: values[list(rows)] for name, values in inputs.items()}
    masked = torch.full_like(inputs["labels"][:1], -100)
    return {name: values[:1] for name, values in inputs.items()} | {"labels": masked}


def _cut(inputs: dict[str, torch.Tensor], pieces: int) -> list[dict[str, torch.Tensor]]:
    """Split a batch into groups of rows."""
    if pieces == 1:
        return [inputs]
    size = math.ceil(len(inputs["input_ids"]) / pieces)
    groups = zip(*(values.split(size) for values in inputs.values()), strict=True)
    return [dict(zip(inputs, group, strict=True)) for group in groups]
