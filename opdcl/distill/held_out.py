"""What was answered to the held-out prompts before the first step: an interrupted stage takes it up again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from opdcl.distill.rollout_queue import as_rollout
from opdcl.rundir.files import read_jsonl, write_atomic
from opdcl.sampling.rollout import Rollout


def keep_answers(file: Path, answers: Mapping[str, Sequence[Rollout]]) -> None:
    """Write answers, given by a name for those of one author."""
    lines = []
    for name, rollouts in answers.items():
        for rollout in rollouts:
            row = {"answers": name, **asdict(rollout)}
            lines.append(json.dumps(row) + "\n")
    write_atomic(file, "".join(lines))


def kept_answers(file: Path) -> dict[str, list[Rollout]]:
    """Return what `keep_answers` wrote; nothing if the file does not exist."""
    answers: dict[str, list[Rollout]] = {}
    for row in read_jsonl(file):
        name = row.pop("answers")
        answers.setdefault(name, []).append(as_rollout(row))
    return answers
