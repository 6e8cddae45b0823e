"""What the runs of a command read from files and models: each once, whatever the number of runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from opdcl.config.model import ModelConfig
from opdcl.config.shipped import SHIPPED_DATA, package_folder
from opdcl.config.workflow import Workflow
from opdcl.data.examples import TrainingRows, with_answers
from opdcl.data.rows import Row, RowError, Tell, check_lines, load_rows, on_hub, pinned, source_files
from opdcl.errors import UsageError
from opdcl.rundir.files import write_atomic
from opdcl.rundir.hashes import hash_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class Sources:
    """The data of a run, or of all arms of a sweep. Each file is parsed once, and each suite is built once.

    A file that is edited during a run is not read again, so the rows are those that were hashed.
    """

    def __init__(self, given: Mapping[str, str] | None = None, tell: Tell | None = None) -> None:
        """Take `given`, the contents of JSONL files by path, as files that `save` will write.

        `tell` is told how many rows have been read, where that takes long.
        """
        self.tell = tell
        self.given = dict(given or {})
        self.files: dict[str, list[Row]] = {}
        """The user's files that were read, with their rows."""
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made under this key; make it now if it was not."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def rows(
        self,
        source: str,
        split: str = "train",
        columns: Mapping[Any, str] | None = None,
        bad: list[UsageError] | None = None,
    ) -> list[Row]:
        """Return the checked rows of a source; the list is the caller's own.

        Rows that cannot be used are left out if there is a list `bad`, which takes their errors.

        Raises:
            UsageError: The source cannot be read, or a row of it is refused.
        """
        names = dict(columns or {})

        def read() -> tuple[list[Row], list[UsageError]]:
            errors: list[UsageError] | None = None if bad is None else []
            if text := self.given.get(source):
                rows = check_lines(text, Path(source).stem, names, errors)
            else:
                rows = load_rows(source, split, names, errors, self.tell)
            return rows, errors or []

        rows, errors = self.once(("rows", pinned(source), split, *names.items()), read)
        if source not in SHIPPED_DATA:
            self.files[source] = rows
        if bad is not None:
            bad += errors
        elif errors:
            raise errors[0]
        return list(rows)

    def finetune_rows(self, workflow: Workflow) -> TrainingRows:
        """Return the checked rows of the fine-tune, and what is known of those that `bad_rows` leaves out.

        Raises:
            UsageError: The source is missing or malformed, or a row has no answer to learn.
        """
        config = workflow.finetune

        def read() -> TrainingRows:
            bad: list[UsageError] = []
            skipped = bad if config.bad_rows == "skip" else None
            try:
                rows = self.rows(config.data, columns=workflow.columns, bad=skipped)
            except RowError as fault:
                hint = f"{fault.hint}; --set finetune.bad_rows=skip leaves such rows out"
                raise UsageError(fault.message, hint) from fault
            return with_answers(rows, config, bad)

        key = "rows to learn", pinned(config.data), config.bad_rows, *workflow.columns.items()
        return self.once(key, read)

    def tokenizer(self, model: ModelConfig) -> PreTrainedTokenizerBase:
        """Return a model's tokenizer, which has a chat template."""
        from opdcl.model.load import load_tokenizer

        return self.once(("tokenizer", model.model_dump_json()), lambda: load_tokenizer(model))

    def hash(self, source: str) -> str:
        """Return the hash of what a source contains; one on the Hub is identified by its pinned id."""
        files = [Path(source)] if source in self.given else source_files(source)
        return self.hash_of(files) if files else pinned(source)

    def hash_of(self, files: list[Path]) -> str:
        """Return the hash of files' contents, read once."""
        return self.once(("hash", *files), lambda: hash_files(files, self.given))

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
                self.finetune_rows(workflow)
            else:
                self.rows(source, columns=workflow.columns)
