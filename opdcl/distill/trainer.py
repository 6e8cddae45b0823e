"""The optimizer steps of a recovery: take a step's completions, grade them, update the student, log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import TrainerCallback, TrainingArguments

from opdcl import parallel
from opdcl.distill.grading import Grader, Sums, kl_by_route
from opdcl.distill.rollout_queue import RolloutQueue, StepRollouts
from opdcl.errors import UsageError
from opdcl.repetition import repetition
from opdcl.training import StageTrainer, finite_or_skipped


class RecoveryTrainer(StageTrainer):
    """Distil each stream's teacher into the student, on completions that the step's author has written.

    The dataset is the schedule: one row, a step's index, is one optimizer step.
    """

    def __init__(
        self,
        queue: RolloutQueue,
        grader: Grader,
        args: TrainingArguments,
        callbacks: Sequence[TrainerCallback] = (),
    ):
        if args.n_gpu > 1:
            hint = "set CUDA_VISIBLE_DEVICES=0, or start a worker per GPU with --num-processes"
            raise UsageError(f"one process sees {args.n_gpu} GPUs", hint)
        self.queue, self.grader = queue, grader
        self._step_metrics: dict[str, float | str] = {}
        super().__init__(
            model=grader.backbone.peft,
            args=args,
            train_dataset=range(len(queue.steps)),
            data_collator=lambda indices: {"step": indices[0]},
            processing_class=grader.backbone.tokenizer,
            callbacks=list(callbacks),
        )

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Grade one step's completions and accumulate the gradient; return the mean loss per token."""
        # With dropout, the model that is graded would not be the one that wrote the completions: sampler and
        # trainer would disagree about every token, and frozen teachers would change from reading to reading.
        model.eval()
        step = self.queue.steps[inputs["step"]]
        batch = self.queue.take(inputs["step"])
        config = self.grader.config
        reverse = config.on_policy.reverse if step.on_policy else 0.0
        sums = self.grader.learn(batch.rollouts, step.stream, batch.fresh, reverse)
        parallel.add_gradients(model)
        self._step_metrics = {
            "stream": step.stream,
            "author": batch.author,
            **step_metrics(batch, sums),
            "adapter_norm": self.grader.backbone.adapter_norm("student"),
            "tokens": sums["tokens"],
        }
        loss = torch.tensor(sums["loss"] / sums["tokens"], device=self.args.device)
        return finite_or_skipped(self, model, loss)

    def log(self, logs: dict, start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self._step_metrics)
        super().log(logs, start_time)

    def _save_checkpoint(self, model, trial):
        # First, because the trainer writes its state file last, and that file marks a complete checkpoint.
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        self.queue.save(folder)
        super()._save_checkpoint(model, trial)


def step_metrics(batch: StepRollouts, sums: Sums) -> dict[str, float]:
    """Return what a step logs about its completions: means per token (nats) or per completion."""
    rollouts, tokens = batch.rollouts, sums["tokens"]
    optional = {"mismatch": sums["mismatched"] / tokens} if batch.fresh else {}
    if rollouts[0].reward is not None:
        # Over all completions sampled, and the share whose group is tied: they carry no signal.
        optional["reward"] = rollouts[0].step_reward
        optional["reward_tied"] = sum(not r.advantage for r in rollouts) / len(rollouts)
    return {
        **optional,
        **kl_by_route(sums),
        "kl": sums["kl"] / tokens,
        "student_entropy": sums["student_entropy"] / tokens,
        "teacher_entropy": sums["teacher_entropy"] / tokens,
        "mean_length": tokens / len(rollouts),
        "truncated": sum(not r.finished for r in rollouts) / len(rollouts),
        "repetition": repetition([r.completion_ids for r in rollouts]),
    }
