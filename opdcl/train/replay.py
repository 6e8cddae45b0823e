"""Replay: general rows among the domain's. Base writes their answers, and grades them."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from opdcl import parallel
from opdcl.config.finetune import REPLAYED_TOKENS, FinetuneConfig
from opdcl.model.backbone import Backbone
from opdcl.model.hardware import is_out_of_memory, release
from opdcl.rundir.files import read_jsonl, write_atomic
from opdcl.train.learner import Learner
from opdcl.train.loop import StageReport, counted, endless
from opdcl.train.teachers import SAMPLED, Completions, Teacher
from opdcl.words import Batch, Example, Loss, Prompt, Rollout, Stream, StreamName

# How many answers are written between two savings.
REPLAYED_AT_ONCE = 512


def let_base_write(
    config: FinetuneConfig,
    prompts: Sequence[list[int]],
    count: int,
    backbone: Backbone,
    file: Path,
    report: StageReport,
    completions: Completions = SAMPLED,
) -> list[Rollout]:
    """Let base write `count` answers, before the first step, and return them (arXiv 2602.20162).

    `file` keeps the rows, so that a resumed run learns from the same ones. Base writes in pieces: a run that
    breaks off loses one. The prompts come in seeded order. If there are too few, they come again, with other
    answers.
    """
    rows = parallel.on_first_worker(partial(read_jsonl, file))
    asked = [Prompt(prompts[i]) for i in itertools.islice(endless(len(prompts), config.seed), count)]
    progress = counted(report, "base writes answers to replay", count, min(len(rows), count))
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
