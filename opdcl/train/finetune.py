"""Learn the domain: supervised fine-tuning of a LoRA adapter with TRL's SFTTrainer.

opdcl finetune rows.jsonl -o runs/mine
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from opdcl import parallel
from opdcl.config.finetune import WARM_UP, FinetuneConfig
from opdcl.config.section import LARGEST
from opdcl.config.teacher import LossSection
from opdcl.errors import Interrupted, OpdclError, UsageError
from opdcl.model.backbone import Backbone
from opdcl.model.distributions import HiddenStates
from opdcl.model.forward import answer_ids, answer_states
from opdcl.model.memory import is_out_of_memory, release
from opdcl.rundir.hashes import seal
from opdcl.rundir.layout import StageDir
from opdcl.train.losses import cross_entropy, token_losses
from opdcl.train.replay import BaseStates, Replay, interleave, lay_out, read_by_base
from opdcl.training import (
    CHECKPOINTS,
    LONGEST_GRADIENT,
    Clock,
    Interruption,
    Schedule,
    StageLog,
    StageReport,
    is_finite,
    keep_records,
    last_checkpoint,
    save_adapter,
    steps_done,
)
from opdcl.types import Example

logger = logging.getLogger(__name__)


def finetune(
    config: FinetuneConfig,
    rows: Sequence[Example],
    general: Sequence[list[int]],
    backbone: Backbone,
    start: Path | None,
    out: StageDir,
    report: StageReport,
) -> None:
    """Train the adapter in `start`, or a new one, on rows; resume from the stage's last checkpoint.

    `general` holds the token ids of the prompts that base, or the student, answers for replay.
    """
    domain_steps, replay_steps = planned_steps(config, len(rows))
    steps = domain_steps + replay_steps
    replay = Replay(config, general, replay_steps, backbone, out.replay, report)
    of_base: list[Example] = []
    if replay_steps and config.replay.author == "base":
        of_base = replay.let_base_write(config.replayed(len(rows)))
    elif config.replays and not replay_steps:
        report.note("so few rows, with so small a share, make no step of replayed rows: nothing is replayed")
    if start:
        backbone.drop_adapters()
        model = backbone.load_adapter(start, "student", trainable=True)
        report.note(f"continuing the adapter of {start}, which keeps its shape")
    else:
        model = backbone.new_adapter(config.lora, config.seed)
    domain = lay_out(rows, config.batch_size, domain_steps, config.seed)
    batches = interleave(domain, replay.batches)
    base_states = read_by_base(config, of_base, backbone, report)
    callback = StageCallback(StageLog(report, out, steps), backbone, batches, replay)
    trainer = AnswerTrainer(
        backbone,
        Schedule(steps, WARM_UP, "cosine"),
        batches,
        base_states,
        model=model,
        args=SFTConfig(**trainer_arguments(config, backbone, out, steps)),
        callbacks=[callback],
    )
    callback.run(trainer)
    save_adapter(backbone, out.adapter)


def planned_steps(config: FinetuneConfig, rows: int) -> tuple[int, int]:
    """Return the numbers of optimizer steps: those on a number of domain rows, those on replayed rows.

    Raises:
        UsageError: The rows are seen too often for the order of all steps to be planned.
    """
    seen = (rows + config.replayed(rows)) * config.epochs
    if seen > LARGEST:
        raise UsageError(
            f"{rows} rows in {config.epochs:g} epochs are {seen:.0f} rows to learn from; "
            f"at most {LARGEST} can be planned",
            "lower finetune.epochs",
        )
    domain = max(1, math.ceil(rows * config.epochs / config.batch_size))
    # Rows and steps are rounded apart: of a few rows none may be replayed, and then no step has any.
    return domain, config.replayed(domain) if config.replayed(rows) else 0


def trainer_arguments(
    config: FinetuneConfig, backbone: Backbone, out: StageDir, steps: int
) -> dict[str, Any]:
    """Return the arguments of the fine-tune's trainer, but for the schedule of the rate, which is ours."""
    return {
        "output_dir": str(out.trainer),
        # bf16 is autocast, needed where a bf16 base meets its fp32 adapter.
        "bf16": backbone.causal_lm.dtype == torch.bfloat16,
        "use_cpu": backbone.device.type == "cpu",
        # It would recompute without the shared prefix's cache; batches are cut finer instead.
        "gradient_checkpointing": False,
        "max_steps": steps,
        "per_device_train_batch_size": 1,  # an item is a whole batch: the trainer shall not cut them anew
        "learning_rate": config.learning_rate,
        "max_grad_norm": LONGEST_GRADIENT,
        "seed": config.seed,
        "train_sampling_strategy": "sequential",  # the order of steps is planned beforehand
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": config.save_steps,
        "save_total_limit": CHECKPOINTS,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        # Rows are lists until the forward pass, which packs them.
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "router_aux_loss_coef": 0.0,  # routers are frozen
    }


class StageCallback(TrainerCallback):
    """Writes a trainer's metrics, seals its checkpoints, and lets a signal end it with one."""

    def __init__(self, log: StageLog, backbone: Backbone, batches: list[list[Example]], replay: Replay):
        self.log, self.backbone, self.batches, self.replay = log, backbone, batches, replay
        self.clock = Clock()
        self.interruption = Interruption(log.report)
        self.skipped: int | None = None
        self._base = backbone.checksum()
        self._step_started = 0.0

    def run(self, trainer: SFTTrainer) -> None:
        """Train from the last checkpoint to the end.

        Raises:
            Interrupted: A signal came; the checkpoint is saved.
        """
        log = self.log
        checkpoint = last_checkpoint(log.out, log.report)
        if checkpoint:
            log.report.note(f"resuming from step {steps_done(checkpoint)} of {log.steps}")
        trainer.remove_callback(PrinterCallback)  # stdout is for results
        with self.interruption.awaited():
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.model.eval()  # whatever follows measures or samples, without dropout
        if not self.interruption.came:
            return
        reached = trainer.state.global_step
        if reached >= log.steps:
            raise KeyboardInterrupt  # it came in the last step; the stages after this one must not start
        raise Interrupted(f"interrupted at step {reached} of {log.steps}; checkpoint saved")

    def skip(self, step: int) -> None:
        """Record that a step changes nothing: without gradients, the optimizer leaves weights and moments."""
        self.skipped = step
        self.log.skip(step)

    def on_step_begin(self, args, state, control, **kwargs):
        self._step_started = time.perf_counter()
        if not self.batches[state.global_step]:
            with self.clock.part("sampling"):
                self.replay.let_student_write(self.batches[state.global_step])

    def on_step_end(self, args, state, control, **kwargs):
        self.interruption.came = parallel.any_worker(self.interruption.came)
        if self.interruption.came:
            control.should_training_stop = True
            control.should_save = True

    def on_save(self, args, state, control, **kwargs):
        if parallel.any_worker(self.backbone.checksum() != self._base):
            message = f"the base weights changed before step {state.global_step}"
            raise OpdclError(message, "this is a defect of opdcl: please report it")
        parallel.check_same("adapters", self.backbone.adapter_norm("student"))
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        keep_records(self.log.out, checkpoint)
        seal(checkpoint)

    def on_log(self, args, state, control, logs=None, **kwargs):
        # It would grow without bound, in memory and in every checkpoint; metrics.jsonl has it all.
        state.log_history.clear()
        if logs and "loss" in logs and self.skipped != state.global_step:
            values = {key: value for key, value in logs.items() if key != "epoch"}
            seconds = time.perf_counter() - self._step_started
            batch = self.batches[state.global_step - 1]
            author = self.replay.author if batch[0].is_replayed else "rows"
            stream = "general" if batch[0].is_replayed else "domain"
            graded = sum(len(row.predicting) for row in batch)
            values |= {"stream": stream, "author": author, "answers": len(batch), "graded": graded}
            if parts := self.clock.take():
                values["parts"] = parts
            self.log.step(state.global_step, values, sum(len(row.ids) for row in batch), seconds)


class AnswerTrainer(SFTTrainer):
    """SFTTrainer that takes planned batches, computes their rows' shared prefix once, and projects answer
    positions only.

    The loss of domain rows is cross-entropy. Replayed rows are held to base's distribution at every token. If
    base wrote the answers, that is the same gradient on average, without the noise of one answer.
    """

    pieces = 1  # micro-batches per batch; doubled whenever memory runs out

    def __init__(
        self,
        backbone: Backbone,
        schedule: Schedule,
        batches: list[list[Example]],
        base_states: BaseStates,
        **options: Any,
    ):
        weights = {weight: weight.data for weight in options["model"].parameters() if weight.requires_grad}
        super().__init__(
            train_dataset=Dataset.from_dict({"batch": range(len(batches))}),
            data_collator=lambda items: batches[items[0]["batch"]],
            processing_class=backbone.tokenizer,
            **options,
        )
        # On a quantized base TRL rounds the adapter to bf16, where small updates vanish.
        for weight, original in weights.items():
            weight.data = original
        self.backbone, self.schedule, self.base_states = backbone, schedule, base_states
        self.batches = batches

    def create_scheduler(self, num_training_steps, optimizer=None):
        if getattr(self, "lr_scheduler", None) is None:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: self.schedule.share(step))
        return self.lr_scheduler

    def floating_point_ops(self, inputs):
        return 0  # nobody reads it, and it would be counted from tensors

    def training_step(self, model, inputs, num_items_in_batch=None):
        # The loader asks for a step's rows before the student has written them.
        inputs = inputs or self.batches[self.state.global_step]
        # Each piece divides by the tokens of the whole batch, so that the gradients of all pieces and workers
        # add up to the batch's.
        tokens = sum(len(row.predicting) for row in inputs)
        while True:
            try:
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
        loss = loss.new_tensor(total)
        if is_finite(model, loss):
            return loss
        model.zero_grad(set_to_none=True)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, StageCallback):
                callback.skip(self.state.global_step + 1)
        return torch.zeros_like(loss)  # not NaN: the trainer sums losses up

    def _cut_finer(self, rows: list[Example]) -> None:
        if self.pieces >= len(parallel.my_share(rows)):
            hint = "lower finetune.max_length, or choose a smaller model"
            raise OpdclError("one training row alone does not fit into memory", hint)
        self.pieces *= 2
        release()
        logger.warning("out of memory: continuing with batches cut into %d", self.pieces)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the loss of rows of one kind as their share of the mean over the step's answer tokens."""
        causal_lm = model.get_base_model()
        targets_N = answer_ids(inputs, causal_lm.device)
        if not inputs[0].is_replayed:
            with self.compute_loss_context_manager():
                states_NH = answer_states(causal_lm, inputs)
                total = cross_entropy(states_NH, self.backbone.head_VH, targets_N).sum()
            return total / num_items_in_batch
        model.eval()  # with dropout, an adapter without effect would differ from base
        base_NH = self._base_states(causal_lm, inputs)
        with self.compute_loss_context_manager():
            head_VH = self.backbone.head_VH
            divergence = token_losses(
                answer_states(causal_lm, inputs),
                head_VH,
                HiddenStates(base_NH, head_VH.detach()),
                targets_N,
                sampler_N=torch.zeros_like(base_NH[:, 0]),
                loss=LossSection(kind="forward_kl"),
            )
        return divergence.loss.sum() / num_items_in_batch

    def _base_states(self, causal_lm, rows: list[Example]) -> torch.Tensor:
        """Return base's hidden states at the answers of replayed rows, `(N, H)`."""
        if all(id(row) in self.base_states for row in rows):
            return torch.cat([self.base_states[id(row)] for row in rows])
        # A context of its own: autocast reuses its copies of weights, and these have no gradients.
        with self.compute_loss_context_manager(), torch.no_grad(), self.backbone.state("base"):
            return answer_states(causal_lm, rows)


def _pieces(rows: list[Example], count: int) -> list[list[Example]]:
    """Split this worker's rows of a batch; a worker without any gets the first row with its answer masked."""
    own = list(parallel.my_share(rows))
    if not own:
        return [[replace(rows[0], learned=[False] * len(rows[0].ids))]]
    size = math.ceil(len(own) / count)
    return [own[start : start + size] for start in range(0, len(own), size)]
