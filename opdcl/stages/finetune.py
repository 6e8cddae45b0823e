"""Learn the domain: supervised fine-tune of a LoRA adapter with TRL's SFTTrainer.

opdcl finetune --data rows.jsonl -o runs/mine
"""

from __future__ import annotations

import logging
import math
import random

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from opdcl import parallel
from opdcl.config.finetune import FinetuneConfig
from opdcl.config.recover import RecoverConfig
from opdcl.config.teacher import TeacherSection
from opdcl.data.chat import Encoded, encode_example
from opdcl.data.rows import load_rows
from opdcl.distill.prompts import read_recovery_source
from opdcl.errors import OpdclError
from opdcl.model.adapters import ModelRef
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
    config: FinetuneConfig, backbone: Backbone, parent: ModelRef, out: StageDir, report: StageReport
) -> ModelRef:
    """Train an adapter on the domain's answers, a new one or the parent's, resuming from the stage's last checkpoint."""
    if config.method == "self-distill":
        return self_distill(config, backbone, parent, out, report)
    rows = encode(config, backbone)
    if parent.adapter:
        backbone.drop_adapters()
        model = backbone.load_adapter(parent.adapter, "student", trainable=True)
        report.note(f"going on with the adapter of {parent.adapter}; its shape stays")
    else:
        model = backbone.new_adapter(config.lora, config.seed)
    steps = planned_steps(config, len(rows))
    arguments = trainer_arguments(
        config,
        backbone,
        out,
        steps,
        per_device_train_batch_size=config.batch_size,
        lr_scheduler_type="cosine",
        warmup_steps=math.ceil(steps * 0.05),
        max_length=config.max_length,
        packing=_packs(config, backbone),
        completion_only_loss=True,
    )
    dataset = Dataset.from_list(
        [{"input_ids": r.input_ids, "completion_mask": r.completion_mask} for r in rows]
    )
    order = lay_out([len(r.input_ids) for r in rows], config.batch_size, steps, config.seed)
    trainer = AnswerTrainer(
        model=model,
        args=SFTConfig(**arguments),
        train_dataset=dataset.select(order),
        processing_class=backbone.tokenizer,
        callbacks=[callback := StageCallback(report, steps, backbone)],
    )
    tokens = sum(len(r.input_ids) for r in rows) / len(rows)
    callback.tokens_per_step = round(tokens * config.batch_size)
    callback.run(trainer, out)
    save_adapter(backbone, out.adapter)
    return ModelRef(parent.base, out.adapter)


def self_distill(
    config: FinetuneConfig, backbone: Backbone, parent: ModelRef, out: StageDir, report: StageReport
) -> ModelRef:
    """Learn the domain on the student's own completions, graded by a running mean of itself that is shown the answer.

    The same loop as recovery, with another teacher (SDFT, arXiv 2601.19897, algorithm 1).
    """
    start = parent.adapter or out.path / "start"
    if not start.exists():
        backbone.new_adapter(config.lora, config.seed)
        save_adapter(backbone, start)
    recovery = as_distillation(config)
    source = read_recovery_source(recovery)
    return recover(recovery, source, backbone, ModelRef(parent.base, start), out, report)


def as_distillation(config: FinetuneConfig) -> RecoverConfig:
    """Return self-distillation as the settings of a recovery: domain steps only, the student's own mean the teacher."""
    steps = planned_steps(config, len(load_rows(config.data)))
    own = config.self_distill
    return RecoverConfig(
        general=None,
        general_per_domain=0,
        domain=config.data,
        steps=steps,
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


def encode(config: FinetuneConfig, backbone: Backbone) -> list[Encoded]:
    """Load and encode the training rows."""
    return [
        e
        for row in load_rows(config.data)
        for e in encode_example(row, backbone.tokenizer, config.max_length)
    ]


def planned_steps(config: FinetuneConfig, rows: int) -> int:
    """Return the number of optimizer steps for so many rows."""
    return max(1, math.ceil(rows * config.epochs / config.batch_size))


def lay_out(lengths: list[int], batch_size: int, steps: int, seed: int) -> list[int]:
    """Return the row of every place in every batch, epoch after epoch, rows of like length sharing a batch.

    Without the grouping half of a batch of short rows is padding. Laid out beforehand, so that a resumed run draws
    what the uninterrupted one would have drawn, whatever the state of any random generator.
    """
    shuffle = random.Random(seed)
    order: list[int] = []
    while len(order) < steps * batch_size:
        rows = list(range(len(lengths)))
        shuffle.shuffle(rows)
        # Sorted within stretches of fifty batches, as transformers' own grouping does: like, but not the same, each epoch.
        stretch = 50 * batch_size
        rows = [
            r
            for i in range(0, len(rows), stretch)
            for r in sorted(rows[i : i + stretch], key=lambda r: lengths[r])
        ]
        batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        shuffle.shuffle(batches)
        order += [row for batch in batches for row in batch]
    return order[: steps * batch_size]


def _packs(config: FinetuneConfig, backbone: Backbone) -> bool:
    """Pack only where a flash-attention kernel keeps packed rows from seeing one another."""
    if config.packing == "auto":
        return "flash" in (backbone.causal_lm.config._attn_implementation or "")
    return config.packing == "on"


class AnswerTrainer(SFTTrainer):
    """SFTTrainer that computes what the rows of a batch share once, and projects answer positions only."""

    pieces = 1
    """Into how many micro-batches a batch is cut; doubled whenever memory runs out."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        tokens = (inputs["labels"] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        mine = _my_rows(inputs)
        while True:
            try:
                # Every piece divides by the tokens of the whole batch, so that the gradients of all pieces, and of all
                # processes, add up to its own.
                losses = [
                    super(AnswerTrainer, self).training_step(model, piece, tokens)
                    for piece in _cut(mine, self.pieces)
                ]
                break
            except (RuntimeError, MemoryError) as fault:
                if (
                    not is_out_of_memory(fault) or parallel.sharded()
                ):  # where all run the base together, none may start anew
                    raise
                model.zero_grad()
                self._cut_finer(mine)
        parallel.add_gradients(model)
        loss = torch.stack(losses).sum()
        return finite_or_skipped(
            self, model, loss.new_tensor(parallel.sum_over_workers({"loss": float(loss)})["loss"])
        )

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
        logger.warning("out of memory: going on with batches cut into %d", self.pieces)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean cross-entropy over the answer tokens of the optimizer step."""
        packed = "position_ids" in inputs
        if packed or return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        causal_lm = model.get_base_model()
        sequences = [
            (ids[:length].tolist(), (labels[:length] != -100).tolist())
            for ids, labels, length in zip(
                inputs["input_ids"], inputs["labels"], inputs["attention_mask"].sum(1).tolist(), strict=True
            )
        ]
        with self.compute_loss_context_manager():
            states_NH = answer_states(causal_lm, sequences)
            logits_NV = causal_lm.get_output_embeddings()(states_NH)
        targets_N = answer_ids(sequences, logits_NV.device)
        total = torch.nn.functional.cross_entropy(logits_NV.float(), targets_N, reduction="sum")
        return total / (len(targets_N) if num_items_in_batch is None else num_items_in_batch)


def _my_rows(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this process's rows of a batch; if there are too few for it, one whose answer does not count."""
    if parallel.worker_count() == 1:
        return inputs
    mine = {name: parallel.my_share(rows) for name, rows in inputs.items()}
    if len(mine["input_ids"]):
        return mine
    return {
        name: rows[:1] if name != "labels" else torch.full_like(rows[:1], -100)
        for name, rows in inputs.items()
    }


def _cut(inputs: dict[str, torch.Tensor], pieces: int) -> list[dict[str, torch.Tensor]]:
    """Split a batch into groups of rows."""
    if pieces == 1:
        return [inputs]
    size = math.ceil(len(inputs["input_ids"]) / pieces)
    return [
        dict(zip(inputs, rows, strict=True))
        for rows in zip(*(value.split(size) for value in inputs.values()), strict=True)
    ]
