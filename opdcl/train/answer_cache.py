"""Texts of frozen models, kept in the cache for every later run that asks for the same.

Sampling takes most of a recovery's time, and what base answers does not depend on what is learned from it.
One file holds the completions of one call: a prompt's place among the others decides its draws.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opdcl import parallel
from opdcl.model.backbone import Backbone, State
from opdcl.rundir.files import cache_home, write_atomic
from opdcl.rundir.hashes import hash_files, hash_value
from opdcl.rundir.layout import machine_of, versions
from opdcl.train.teachers import Completions, OnFinished, Teacher
from opdcl.words import Prompt, Rollout

logger = logging.getLogger(__name__)

# The code that decides what a model writes, beside the libraries.
CODE = ("model", "sampling")


def texts_folder() -> Path:
    """Return the folder of the kept texts; without it, all are sampled again."""
    return cache_home() / "texts"


class CompletionCache(Completions):
    """What the frozen states of a backbone write in one stage; `hits` counts answers of earlier runs."""

    def __init__(self, backbone: Backbone):
        self.backbone = backbone
        self.keeps = True
        self._writers: dict[State, dict[str, Any]] = {}

    def complete(
        self,
        teacher: Teacher,
        prompts: Sequence[Prompt],
        on_finished: OnFinished | None = None,
        **options: Any,
    ) -> list[Rollout]:
        """Let a teacher complete prompts, as `Teacher.complete`, or return what it wrote before.

        Both are equal to the bit. What changes with the student, or is written elsewhere, is never kept.
        """
        write = partial(teacher.complete, prompts, on_finished=on_finished, **options)
        state = teacher.frozen_state
        if state is None:
            return write()
        asked = {"prompts": [prompt.ids for prompt in prompts], "options": options}
        file = texts_folder() / f"{hash_value(self._writer(state) | asked)}.json"
        # One worker looks: if another had a folder of its own, one might sample where the other does not.
        rows = parallel.on_first_worker(lambda: _read(file))
        if rows is None:
            rollouts = write()
            if parallel.rank() == 0 and self.keeps:
                self.keeps = _keep(file, rollouts)
            return rollouts
        rollouts = [Rollout(prompt, *row) for prompt, row in zip(prompts, rows, strict=True)]
        if on_finished:
            on_finished(list(parallel.my_share(rollouts)))
        return rollouts

    def _writer(self, state: State) -> dict[str, Any]:
        """Return all that makes a state's answers, apart from the prompts, which the chat template wrote."""
        if state not in self._writers:
            base_lm, model = self.backbone.base_lm, self.backbone.causal_lm
            if state == "base" and base_lm:
                model = base_lm
            settings = model.config.to_dict()
            settings.pop("_name_or_path", None)  # where it lies changes nothing
            device = machine_of(model.device)["name"]
            package = Path(__file__).parents[1]
            code = [file for folder in CODE for file in sorted((package / folder).glob("*.py"))]
            self._writers[state] = {
                "weights": self.backbone.known_fingerprint(),
                "adapter": self.backbone.adapter_fingerprint(state),
                "settings": settings,
                "eos_ids": self.backbone.eos_ids,
                "dtype": str(model.dtype),
                "device": [device, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "workers": [parallel.worker_count(), parallel.sharded()],
                "code": [hash_files(code), versions()],
            }
        return self._writers[state]


def _read(file: Path) -> list[list[Any]] | None:
    """Return the rows of a file, as `_keep` wrote them; None if it is missing or damaged."""
    try:
        kept = json.loads(file.read_bytes()) if file.is_file() else {}
        return list(kept["rows"]) if kept["hash"] == hash_value(kept["rows"]) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _keep(file: Path, rollouts: Sequence[Rollout]) -> bool:
    """Write a file; return whether that worked. A fault costs the next run some time."""
    rows = [[r.completion_ids, r.logprobs, r.finished] for r in rollouts]
    try:
        write_atomic(file, json.dumps({"hash": hash_value(rows), "rows": rows}))
    except OSError as fault:
        logger.warning("texts are not kept for later runs: %s: %s", fault.filename, fault.strerror)
        return False
    return True
