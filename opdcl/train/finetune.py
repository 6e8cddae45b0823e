"""Learn the domain: supervised fine-tuning of a LoRA adapter with TRL's SFTTrainer.

opdcl finetune rows.jsonl -o runs/mine

Replay mixes general rows among the domain's: base answers their prompts, and is the teacher at these answers.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback
from trl import SFTConfig, SFTTrainer

from opdcl import parallel
from opdcl.config.finetune import REPLAYED_TOKENS, WARM_UP, FinetuneConfig
from opdcl.config.section import LARGEST
from opdcl.errors import UsageError
from opdcl.model.backbone import Backbone
from opdcl.model.hardware import is_out_of_memory, release
from opdcl.model.lora import describe_adapter
from opdcl.rundir.files import read_jsonl, write_atomic
from opdcl.rundir.stage import StageDir, read_metrics
from opdcl.train.checkpoints import (
    CHECKPOINTS,
    last_checkpoint,
    refuse_changed_base,
    save_adapter,
    seal_with_records,
)
from opdcl.train.learner import ROOM_IN_MEMORY, Learner, mean_loss
from opdcl.train.loop import LONGEST_GRADIENT, Interruption, Schedule, StageLog, StageReport, counted, endless
from opdcl.train.teachers import SAMPLED, Completions, Teacher
from opdcl.words import Batch, Example, Loss, Prompt, Rollout, Stream, StreamName

# Steps over whose losses a mean is shown: that of one step depends on its rows.
RECENT_STEPS = 5

# How many answers are sampled between two savings.
REPLAYED_AT_ONCE = 512


def finetune(
    config: FinetuneConfig,
    rows: Sequence[Example],
    general: Sequence[list[int]],
    backbone: Backbone,
    start: Path | None,
    out: StageDir,
    report: StageReport,
    completions: Completions = SAMPLED,
) -> None:
    """Train the adapter in `start`, or a new one, on rows; resume from the stage's last checkpoint.

    `general` holds the token ids of the prompts that base answers for replay; `completions` may have its
    answers.
    """
    domain_steps, replay_steps = planned_steps(config, len(rows))
    log = StageLog(report, out, domain_steps + replay_steps, Losses().add)
    of_base: list[Rollout] = []
    if replay_steps:
        count = config.replayed(len(rows))
        of_base = generate_replay(config, general, count, backbone, log, completions)
    elif config.replays:
        report.note("so few rows, with so small a share, make no step of replayed rows: nothing is replayed")
    if start:
        backbone.drop_adapters()
        backbone.load_adapter(start, "student", trainable=True)
        report.note(f"continuing the adapter of {start}, which keeps its shape")
    else:
        backbone.new_adapter(config.lora, config.seed)
    report.note(describe_adapter(backbone.peft))
    streams, size = finetune_streams(config), int(config.batch_size)
    of_domain = lay_out(rows, size, domain_steps, config.seed)
    learner = Learner(
        backbone, {"general": {"": Teacher(backbone, "base")}}, "finetune.max_length", room=ROOM_IN_MEMORY
    )
    examples = read_by_base(config, of_base, learner, report)
    replayed = lay_out(examples, size, replay_steps, config.seed)
    batches = interleave(
        [Batch(streams["domain"], rows, "rows") for rows in of_domain],
        [Batch(streams["general"], rows, "base") for rows in replayed],
    )
    LearnerTrainer(config, learner, log, batches).run()
    save_adapter(backbone, out.adapter)


class Losses:
    """The losses of a fine-tune's steps, by stream: replayed rows have low ones from the start."""

    def __init__(self, steps: Iterable[Mapping[str, Any]] = ()):
        self.by_stream: dict[str, list[float]] = {"domain": [], "general": []}
        for values in steps:
            self.add(values)

    def add(self, values: Mapping[str, Any]) -> str:
        """Take a step's values; say how high the loss is."""
        if "loss" in values:
            self.by_stream[values["stream"]].append(values["loss"])
        done = sum(map(len, self.by_stream.values()))
        domain, general = map(self.recent, self.by_stream)
        own = f"your rows: loss {domain:.2f} ({len(self.by_stream['domain'])} of {done} steps)"
        return f"{own}; general rows {general:.2f}" if self.by_stream["general"] else own

    def recent(self, stream: str) -> float:
        """Return the mean of a stream's last losses; not a number without any."""
        last = self.by_stream[stream][-RECENT_STEPS:]
        return sum(last) / len(last) if last else math.nan


def planned_steps(config: FinetuneConfig, rows: int) -> tuple[int, int]:
    """Return the numbers of optimizer steps: those on a number of domain rows, those on replayed rows.

    Raises:
        UsageError: The rows are seen too often for the order of all steps to be planned.
    """
    replayed = config.replayed(rows)
    seen = (rows + replayed) * config.epochs
    if seen > LARGEST:
        raise UsageError(
            f"{rows} rows in {config.epochs:g} epochs are {seen:.0f} rows to learn from; "
            f"at most {LARGEST} can be planned",
            "lower finetune.epochs",
        )
    domain = max(1, math.ceil(rows * config.epochs / config.batch_size))
    if replayed < config.replayed_by_share(rows):  # as many as `replay.most` allows
        return domain, max(1, round(domain * replayed / rows))
    # Rows and steps are rounded apart: of a few rows none may be replayed, and then no step has any.
    return domain, config.replayed_by_share(domain) if replayed else 0


def generate_replay(
    config: FinetuneConfig,
    prompts: Sequence[list[int]],
    count: int,
    backbone: Backbone,
    log: StageLog,
    completions: Completions,
) -> list[Rollout]:
    """Let base answer `count` prompts, before the first step, and return the answers (arXiv 2602.20162).

    A file of the stage keeps them, so that a resumed run learns from the same ones. They are sampled in
    pieces: a run that breaks off loses one. The prompts come in seeded order. If there are too few, they come
    again, with other answers.
    """
    file = log.out.replay
    rows = parallel.on_first_worker(partial(read_jsonl, file))
    asked = [Prompt(prompts[i]) for i in itertools.islice(endless(len(prompts), config.seed), count)]
    progress = counted(log.report, "base writes answers to replay", count, min(len(rows), count))
    for begin in range(len(rows), count, REPLAYED_AT_ONCE):
        piece = asked[begin : begin + REPLAYED_AT_ONCE]
        options = {"max_new_tokens": REPLAYED_TOKENS, "seed": config.seed + begin, "on_finished": progress}
        for rollout in completions.complete(Teacher(backbone, "base"), piece, **options):
            rows.append({"prompt_ids": rollout.prompt_ids, "completion_ids": rollout.completion_ids})
        if parallel.rank() == 0:
            write_atomic(file, "".join(json.dumps(row) + "\n" for row in rows))
    return [Rollout(Prompt(row["prompt_ids"]), row["completion_ids"]) for row in rows[:count]]


def finetune_streams(config: FinetuneConfig) -> dict[StreamName, Stream]:
    """Return what a fine-tune learns, by stream; `replay.most` may allow the general one less."""
    replay = config.replay
    share = replay.share if config.replays else 0.0
    domain = Stream("domain", config.data, "rows", "", Loss("cross_entropy"), 1 - share)
    general = Stream("general", replay.prompts, "base", "base", Loss(), share)
    return {"domain": domain, "general": general}


def lay_out(rows: Sequence[Example], batch_size: int, steps: int, seed: int) -> list[list[Example]]:
    """Return the rows of each step, epoch after epoch; rows of similar length mostly share a step.

    Otherwise half of a batch of short rows would be padding. Every step has `batch_size` rows: after the last
    rows of an epoch come the first of the next. The order is fixed beforehand, so that a resumed run draws
    the same rows as an uninterrupted one.
    """
    shuffle = random.Random(seed)
    lengths = [row.length for row in rows]
    order: list[int] = []
    # Sorted within stretches of fifty batches, as in transformers: similar, not identical, each epoch.
    stretch = 50 * batch_size
    while len(order) < steps * batch_size:
        epoch = list(range(len(rows)))
        shuffle.shuffle(epoch)
        starts = range(0, len(epoch), stretch)
        epoch = [r for i in starts for r in sorted(epoch[i : i + stretch], key=lambda r: lengths[r])]
        batches = [epoch[i : i + batch_size] for i in range(0, len(epoch), batch_size)]
        shuffle.shuffle(batches)
        order += [row for batch in batches for row in batch]
    starts = range(0, steps * batch_size, batch_size)
    return [[rows[row] for row in order[start : start + batch_size]] for start in starts]


def interleave(domain: list[Batch], replayed: list[Batch]) -> list[Batch]:
    """Return the domain's and the replayed steps in one order, both spread evenly over the run.

    No step holds both kinds: its loss is the mean over tokens, so base's long answers would outweigh the
    domain's short ones.
    """
    total = len(domain) + len(replayed)
    batches = []
    for step in range(total):
        # Rounded up, so that the domain comes first: a new adapter is base, with nothing to learn from it.
        done, due = (math.ceil(s * len(domain) / total) for s in (step, step + 1))
        batches.append(domain[done] if due > done else replayed[step - done])
    return batches


def read_by_base(
    config: FinetuneConfig, replayed: list[Rollout], learner: Learner, report: StageReport
) -> list[Example]:
    """Return the answers to replay as examples; base reads them first, and the learner keeps its states.

    Base says the same of a row in every epoch. It reads the rows of each step instead if each row comes once,
    if the learner has no room for the states, or if workers share the rows.
    """
    backbone = learner.backbone
    examples = [rollout.to_example() for rollout in replayed]
    hidden, dtype = backbone.head_VH.shape[1], backbone.causal_lm.dtype
    size = sum(example.answer_length for example in examples) * hidden * dtype.itemsize
    if not replayed or config.epochs < 2 or size > learner.room or parallel.worker_count() > 1:
        return examples
    base, count = Teacher(backbone, "base"), counted(report, "base reads rows to replay", len(replayed))
    # A batch of similar lengths has little padding.
    ordered = sorted(range(len(examples)), key=lambda i: examples[i].length)
    backbone.causal_lm.eval()
    for start in range(0, len(ordered), int(config.batch_size)):
        rows = ordered[start : start + int(config.batch_size)]
        try:
            read = base.states([replayed[i] for i in rows])
        except (RuntimeError, MemoryError) as fault:
            if not is_out_of_memory(fault):
                raise
            release()
            break  # steps cut their rows finer
        for i, states_NH in zip(rows, read.split([examples[i].answer_length for i in rows]), strict=True):
            examples[i] = replayed[i].to_example(f"general/{i}")
            learner.keep(examples[i].place, states_NH)
        count(rows)
    return examples


def trainer_arguments(
    config: FinetuneConfig, backbone: Backbone, out: StageDir, steps: int
) -> dict[str, Any]:
    """Return the arguments of the fine-tune's trainer, but for the schedule of the rate, which is ours."""
    return {
        "output_dir": str(out.trainer),
        "bf16": False,  # autocast, whereas the learner's layers meet their fp32 adapter as in a recovery
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


class LearnerTrainer(SFTTrainer):
    """TRL's trainer, with the learner's step on batches that are laid out in advance.

    TRL has the loop: it bounds the gradient, lets AdamW take its step, and writes and reads the checkpoints.
    This class gives it each step's gradient and rate, writes the metrics, seals the checkpoints, and lets a
    signal end the loop with one.
    """

    def __init__(self, config: FinetuneConfig, learner: Learner, metrics: StageLog, batches: list[Batch]):
        backbone = learner.backbone
        weights = [(weight, weight.data) for weight in backbone.peft.parameters() if weight.requires_grad]
        super().__init__(
            model=backbone.peft,
            args=SFTConfig(**trainer_arguments(config, backbone, metrics.out, metrics.steps)),
            train_dataset=Dataset.from_dict({"step": range(metrics.steps)}),
            data_collator=lambda items: {"batch": batches[items[0]["step"]]},
            processing_class=backbone.tokenizer,
        )
        # On a quantized base TRL rounds the adapter to bf16, where small updates vanish.
        for weight, original in weights:
            weight.data = original
        self.remove_callback(PrinterCallback)  # stdout is for results
        self.learner, self.metrics = learner, metrics
        self.schedule = Schedule(metrics.steps, WARM_UP, "cosine")
        self.interruption = Interruption(metrics.report)
        self._base = backbone.checksum()

    def run(self) -> None:
        """Train from the last checkpoint to the end.

        Raises:
            Interrupted: A signal came; the checkpoint is saved.
        """
        steps = self.metrics.steps
        checkpoint = last_checkpoint(self.metrics.out, self.metrics.report, steps)
        for values in read_metrics(self.metrics.out.metrics):
            self.metrics.describe(values)
        with self.interruption.awaited():
            self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        self.model.eval()  # later stages measure and sample without dropout
        self.interruption.end(self.state.global_step, steps)

    def create_scheduler(self, num_training_steps, optimizer=None):
        if getattr(self, "lr_scheduler", None) is None:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, self.schedule.share)
        return self.lr_scheduler

    def training_step(self, model, inputs, num_items_in_batch=None):
        self._started, self._batch = time.perf_counter(), inputs["batch"]
        sums = self.learner.learn(self._batch)
        # Without gradients, the optimizer leaves weights and moments as they are.
        self._is_skipped = sums is None
        if self._is_skipped:
            self.metrics.skip(self.state.global_step + 1)
        loss = mean_loss(sums) if sums else torch.tensor(0.0)  # not NaN: the trainer sums losses up
        return loss.to(self.learner.backbone.device)

    def log(self, logs, start_time=None):
        """Take a step's values, not into the trainer's history, which would grow in every checkpoint."""
        self.control.should_log = False
        if "loss" not in logs:  # the summary at the end
            return
        if self.interruption.has_come():
            self.control.should_training_stop = self.control.should_save = True
        if not self._is_skipped:
            examples = self._batch.examples
            graded = sum(example.answer_length for example in examples)
            values = {**logs, "stream": self._batch.stream.name, "author": self._batch.author}
            values |= {"answers": len(examples), "graded": graded, "parts": self.learner.clock.take()}
            tokens, seconds = sum(e.length for e in examples), time.perf_counter() - self._started
            self.metrics.step(self.state.global_step, values, tokens, seconds)

    def _save_checkpoint(self, model, trial):
        step = self.state.global_step
        refuse_changed_base(self.learner.backbone, self._base, step)
        super()._save_checkpoint(model, trial)
        seal_with_records(self.metrics.out, self.metrics.out.trainer / f"checkpoint-{step}")
