"""Texts of frozen models, kept in the cache for every later run that asks for the same.

Sampling takes most of a recovery's time, and what base answers does not depend on what is learned from it.
One file holds the completions of one call: a prompt's place among the others decides its draws.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from opdcl import parallel
from opdcl.config.teacher import BUILT_IN
from opdcl.model.backbone import Backbone, State
from opdcl.rundir.environment import machine_of, versions
from opdcl.rundir.files import UNFINISHED, cache_home, write_atomic
from opdcl.rundir.hashes import hash_files, hash_value
from opdcl.train.teachers import Completions, OnFinished, Teacher
from opdcl.types import Prompt, Rollout

logger = logging.getLogger(__name__)

# The folder's size in bytes, above which the files that were not used for longest are removed.
MOST_BYTES = 2**30

# The code that decides what a model writes, beside the libraries.
CODE = ("model", "sampling")

# The names of the files here, and of those that a killed process left half-written; no other file is touched.
OWN_NAME = re.compile(r"[0-9a-f]{16}\.json|\.[0-9a-f]{16}\.json" + re.escape(UNFINISHED) + r"\w+")

# The mark of the folder, by which backups leave it out too: https://bford.info/cachedir/
MARK = "CACHEDIR.TAG"
MARKED = (
    "Signature: 8a477f597d28d172789f06886806bc55\n# Answers of models, kept by opdcl. It may be deleted.\n"
)

# More than a token and its log-probability take in a file, in bytes, and more than what is around a row.
BYTES_OF_TOKEN, BYTES_OF_ROW = 64, 1024


def texts_folder() -> Path:
    """Return the folder of the kept texts; without it, all are sampled again."""
    return cache_home() / "texts"


class CompletionCache(Completions):
    """What the frozen states of a backbone write in one stage; `hits` counts answers of earlier runs."""

    def __init__(self, backbone: Backbone):
        self.backbone = backbone
        self.hits: Counter[str] = Counter()
        self._writers: dict[State, dict[str, Any]] = {}

    @cached_property
    def folder(self) -> Path | None:
        """The folder of the texts, if it is ours alone: what others write there would be taught."""
        folder = texts_folder()
        if problem := _made_ours(folder):
            logger.warning("texts are not kept for later runs: %s: %s", folder, problem)
            return None
        return folder

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
        name = f"{hash_value(self._writer(state) | asked)}.json"
        words = self.backbone.causal_lm.config.get_text_config().vocab_size

        def kept() -> list[list[Any]] | None:
            if self.folder is None:
                return None
            return _read(self.folder / name, len(prompts), options["max_new_tokens"], words)

        # One worker looks: if another had a folder of its own, one might sample where the other does not.
        rows = parallel.on_first_worker(kept)
        if rows is None:
            rollouts = write()
            if parallel.rank() == 0 and self.folder:
                _keep(self.folder / name, rollouts)
            return rollouts
        self.hits[state if state in BUILT_IN else "other teachers"] += len(rows)
        rollouts = [Rollout(prompt, *row) for prompt, row in zip(prompts, rows, strict=True)]
        if on_finished:
            on_finished(list(parallel.my_share(rollouts)))
        return rollouts

    def log_hits(self, note: Callable[[str], None]) -> None:
        """Note how many answers of earlier runs were used, if any."""
        if counts := [f"{count} answers of {state}" for state, count in self.hits.items()]:
            note(f"{', '.join(counts)}: kept from earlier, not sampled again")

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


def _made_ours(folder: Path) -> str:
    """Make the folder, for its user alone, and mark it; return why it cannot hold texts, or ""."""
    try:
        folder.mkdir(0o755, parents=True, exist_ok=True)
        if folder.lstat().st_uid != os.geteuid() or folder.stat().st_uid != os.geteuid():
            return "it belongs to another user"
        if folder.stat().st_mode & 0o022:
            return f"others may write there; chmod go-w {shlex.quote(str(folder))} keeps them out"
        mark = folder / MARK
        if mark.is_file() and not mark.is_symlink():
            return "" if mark.read_bytes() == MARKED.encode() else f"{MARK} is not of opdcl"
        if others := [file.name for file in folder.iterdir() if not OWN_NAME.fullmatch(file.name)]:
            return f"it holds other files, such as {others[0]}; OPDCL_CACHE names another place"
        write_atomic(mark, MARKED)
    except OSError as fault:
        return str(fault.strerror)
    return ""


def _read(file: Path, count: int, longest: int, words: int) -> list[list[Any]] | None:
    """Return the rows of a file, as `_keep` wrote them; None if it is missing, damaged or of another kind.

    Each row has at most `longest` tokens of a vocabulary of as many `words`.
    """
    most_bytes = count * (longest * BYTES_OF_TOKEN + BYTES_OF_ROW)
    try:
        # A pipe would wait for a writer, and a device might never end.
        if file.is_symlink() or not file.is_file() or file.stat().st_size > most_bytes:
            return None
        kept = json.loads(file.read_bytes())
        if kept["hash"] != hash_value(kept["rows"]) or len(kept["rows"]) != count:
            return None
        os.utime(file)  # the files that were not used for longest go first
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return list(kept["rows"]) if all(_is_answer(row, longest, words) for row in kept["rows"]) else None


def _is_answer(row: Any, longest: int, words: int) -> bool:
    """Return whether a row is an answer that a model can have written."""
    if not isinstance(row, list) or [type(part) for part in row] != [list, list, bool]:
        return False
    ids, logprobs, _ = row
    if not 0 < len(ids) <= longest or len(logprobs) not in (0, len(ids)):
        return False
    has_tokens = all(type(token) is int and 0 <= token < words for token in ids)
    return has_tokens and all(type(value) is float and -math.inf < value <= 1e-3 for value in logprobs)


def _keep(file: Path, rollouts: Sequence[Rollout]) -> None:
    """Write a file, and remove the oldest ones if they are too many; a fault costs the next run some time."""
    rows = [[r.completion_ids, r.logprobs, r.finished] for r in rollouts]
    try:
        write_atomic(file, json.dumps({"hash": hash_value(rows), "rows": rows}))
        _remove_oldest(file.parent)
    except OSError as fault:
        logger.warning("texts are not kept for later runs: %s: %s", fault.filename, fault.strerror)


def _remove_oldest(folder: Path) -> None:
    """Remove texts until the rest is at most `MOST_BYTES`; another process may remove them meanwhile."""
    found = []
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            about = file.lstat()
            if OWN_NAME.fullmatch(file.name) and stat.S_ISREG(about.st_mode):
                found.append((about.st_mtime, about.st_size, file))
    size = 0
    for _, bytes_of_file, file in sorted(found, reverse=True):
        size += bytes_of_file
        if size > MOST_BYTES:
            file.unlink(missing_ok=True)
