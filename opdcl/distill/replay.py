"""Replay: rows of general prompts with base's own answers, mixed into a fine-tune (arXiv 2602.20162)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from opdcl.config.finetune import REPLAYED_TOKENS, FinetuneConfig
from opdcl.data.examples import Examples
from opdcl.data.learned import Example
from opdcl.distill.kept_texts import KeptTexts
from opdcl.distill.schedule import endless
from opdcl.distill.teachers import Teacher
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_jsonl, write_atomic
from opdcl.sampling.rollout import Prompt
from opdcl.training import StageReport, counted


def replayed_rows(
    config: FinetuneConfig, examples: Examples, backbone: Backbone, file: Path, report: StageReport
) -> list[Example]:
    """Return the rows to replay, and write them into `file` first if it does not exist yet.

    The prompts come in seeded order. If there are too few, they come again, with other answers.
    """
    count = config.replay.count(len(examples.encoded))
    if count == 0:
        return []
    if not file.exists():
        order = endless(len(examples.replay), config.seed)
        prompts = [Prompt(examples.replay[i]) for i in itertools.islice(order, count)]
        texts, base = KeptTexts(backbone), Teacher(backbone, "base")
        progress = counted(report, "base writes answers to replay", count)
        rollouts = texts.complete(base, prompts, progress, max_new_tokens=REPLAYED_TOKENS, seed=config.seed)
        if kept := texts.describe():
            report.note(kept)
        rows = [{"prompt_ids": r.prompt_ids, "completion_ids": r.completion_ids} for r in rollouts]
        write_atomic(file, "".join(json.dumps(row) + "\n" for row in rows))
    rows = read_jsonl(file)
    return [Example.of(row["prompt_ids"], row["completion_ids"], is_replayed=True) for row in rows]
