"""What the runs of a command read, each once: rows by source, tokenizers by model, hashes by file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.config.model import ModelConfig
from opdcl.config.shipped import SHIPPED_DATA, package_folder
from opdcl.config.workflow import Workflow
from opdcl.data.examples import TrainingRows, with_answers
from opdcl.data.rows import CheckedRows, Row, Tell, check_lines, on_hub, pinned, read_rows, source_files
from opdcl.errors import UsageError
from opdcl.model.load import load_tokenizer
from opdcl.rundir.files import write_atomic
from opdcl.rundir.hashes import hash_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Inputs:
    """The inputs of a run, or of all arms of a sweep. What a run makes of them is its own, in its `Job`.

    A file that is edited during a run is not read again, so the rows are those that were hashed.
    """

    def __init__(self, given: Mapping[str, str] | None = None, tell: Tell | None = None) -> None:
        """Take `given`, the contents of JSONL files by path, as files that `save` will write.

        `tell` reports how many rows have been read, where that takes long.
        """
        self.tell = tell
        self.given = dict(given or {})
        self.files: dict[str, list[Row]] = {}
        """The user's files that were read, with their rows."""
        self._rows: dict[tuple[Any, ...], CheckedRows] = {}
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        self._hashes: dict[tuple[Path, ...], str] = {}

    def rows(self, source: str, split: str = "train", columns: Mapping[Any, str] | None = None) -> list[Row]:
        """Return the rows of a source; the list is the caller's own.

        Raises:
            UsageError: The source cannot be read, or a row of it is bad.
        """
        return list(self._checked(source, split, columns).all())

    def _checked(self, source: str, split: str, columns: Mapping[Any, str] | None) -> CheckedRows:
        names = dict(columns or {})
        key = pinned(source), split, *names.items()
        if key not in self._rows:
            if text := self.given.get(source):
                self._rows[key] = check_lines(text, Path(source).stem, names)
            else:
                self._rows[key] = read_rows(source, split, names, self.tell)
        if source not in SHIPPED_DATA:
            self.files[source] = self._rows[key].usable
        return self._rows[key]

    def renamed(self, source: str) -> set[str]:
        """Return the columns of ours that the rows which were read from a source have under other names."""
        read = [checked for key, checked in self._rows.items() if key[0] == pinned(source)]
        return {name for checked in read for row in checked.usable for name in row.renamed}

    def training_rows(self, workflow: Workflow) -> TrainingRows:
        """Return the checked rows of the fine-tune, and what is known of those that `bad_rows` leaves out.

        Raises:
            UsageError: The source is missing or malformed, or a row has no answer to learn.
        """
        usable, bad = self._checked(workflow.finetune.data, "train", workflow.columns)
        return with_answers(usable, workflow.finetune, bad)

    def tokenizer(self, model: ModelConfig) -> PreTrainedTokenizerBase:
        """Return a model's tokenizer, which has a chat template."""
        key = model.model_dump_json()
        if key not in self._tokenizers:
            self._tokenizers[key] = load_tokenizer(model)
        return self._tokenizers[key]

    def hash(self, source: str) -> str:
        """Return the hash of what a source contains; one on the Hub is identified by its pinned id."""
        files = [Path(source)] if source in self.given else source_files(source)
        return self.hash_of(files) if files else pinned(source)

    def hash_of(self, files: list[Path]) -> str:
        """Return the hash of files' contents, read once."""
        key = tuple(files)
        if key not in self._hashes:
            self._hashes[key] = hash_files(files, self.given)
        return self._hashes[key]

    def save(self) -> None:
        """Write the rows that were given in memory, where that has not been done."""
        for path, text in self.given.items():
            if not os.path.isfile(path) or Path(path).read_text(encoding="utf-8") != text:
                write_atomic(Path(path), text)

    def read(self, workflow: Workflow) -> None:
        """Read and check the rows that lie here, before a library is imported that takes seconds.

        Raises:
            UsageError: A source is missing or malformed, or a row has no answer to learn.
        """
        shipped, finetune = package_folder("workflows"), workflow.finetune
        for key, source in workflow.data_sources().items():
            if Path(source).is_relative_to(shipped) and not os.path.exists(source):
                file = Path(source).relative_to(shipped)
                hint = f"opdcl workflows cp {workflow.name} .  # then put {file} beside it"
                raise UsageError(f"recipe {workflow.name} needs data of yours: {key} is {file}", hint)
        for source in workflow.data_sources().values():
            if on_hub(source):
                continue
            if finetune and source == finetune.data:
                self.training_rows(workflow)
            else:
                self.rows(source, columns=workflow.columns)
