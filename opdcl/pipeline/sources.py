"""What the runs of a command read from files and models: each once, whatever the number of runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from opdcl.config.model import ModelConfig
from opdcl.config.shipped import SHIPPED_DATA, package_folder
from opdcl.config.workflow import Workflow
from opdcl.data.examples import with_answers
from opdcl.data.rows import (
    Row,
    RowError,
    check_lines,
    left_out,
    load_rows,
    on_hub,
    pinned,
    recognised,
    source_files,
    unread,
)
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

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        """Take `given`, the contents of JSONL files by path, as files that `save` will write."""
        self.given = dict(given or {})
        self._rows: dict[tuple[Any, ...], list[Row]] = {}
        self._bad: dict[tuple[Any, ...], list[UsageError]] = {}
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made under this key; make it now if it was not."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def rows(self, source: str, split: str = "train", columns: Mapping[Any, str] | None = None) -> list[Row]:
        """Return the checked rows of a source; the list is the caller's own.

        Raises:
            UsageError: The source cannot be read, or a row of it is refused.
        """
        rows, bad = self._read(source, split, columns, skip=False)
        if bad:
            raise bad[0]
        return rows

    def finetune_rows(self, workflow: Workflow) -> tuple[list[Row], list[UsageError]]:
        """Return the checked rows of the fine-tune, and the errors of rows that `bad_rows` leaves out."""
        config = workflow.finetune
        try:
            return self._read(config.data, "train", workflow.columns, skip=config.bad_rows == "skip")
        except RowError as fault:
            hint = f"{fault.hint}; --set finetune.bad_rows=skip leaves such rows out"
            raise UsageError(fault.message, hint) from fault

    def _read(
        self, source: str, split: str, columns: Mapping[Any, str] | None, skip: bool
    ) -> tuple[list[Row], list[UsageError]]:
        names = {str(ours): theirs for ours, theirs in (columns or {}).items()}
        key = pinned(source), split, *names.items()
        if key not in self._rows:
            text = self.given.get(source)
            bad: list[UsageError] = []
            errors = bad if skip else None
            given = check_lines(text, Path(source).stem, names, errors) if text else None
            self._rows[key] = given or load_rows(source, split, names, errors)
            self._bad[key] = bad
        return list(self._rows[key]), list(self._bad[key])

    def tokenizer(self, model: ModelConfig) -> PreTrainedTokenizerBase:
        """Return a model's tokenizer, which has a chat template."""
        from opdcl.model.load import load_tokenizer

        return self.once(("tokenizer", model.model_dump_json()), lambda: load_tokenizer(model))

    def hash(self, source: str) -> str:
        """Return the hash of what a source contains; one on the Hub is identified by its pinned id."""
        files = [Path(source)] if source in self.given else source_files(source)
        return self.hash_of(files) or pinned(source)

    def hash_of(self, files: list[Path]) -> str:
        """Return the hash of files' contents, read once; "" for no files."""
        return self.once(("hash", *files), lambda: hash_files(files, self.given)) if files else ""

    def save(self) -> None:
        """Write the rows that were given in memory, where that has not been done."""
        for path, text in self.given.items():
            if not os.path.isfile(path) or Path(path).read_text(encoding="utf-8") != text:
                write_atomic(Path(path), text)

    def recognised(self) -> list[str]:
        """Describe the rows of the user's files that were read: their formats, and the first of each file."""
        return [recognised(source, rows) for source, rows in self._files()]

    def unread(self) -> list[str]:
        """Name what the user's files hold that is not read, file by file."""
        notes = [unread(source, rows) for source, rows in self._files()]
        return [note for note in notes if note]

    def _files(self) -> list[tuple[str, list[Row]]]:
        """Return the user's files that were read, with their rows."""
        return [(source, rows) for (source, *_), rows in self._rows.items() if source not in SHIPPED_DATA]

    def left_out(self) -> list[str]:
        """Name what lies in the user's folders beside the files that were read."""
        notes = [left_out(source) for source, *_ in self._rows]
        return [*dict.fromkeys(note for note in notes if note)]

    def read(self, workflow: Workflow) -> None:
        """Read and check the rows that lie here, before a library is imported that takes seconds.

        Raises:
            UsageError: A source is missing or malformed, or a row has no answer to learn.
        """
        shipped = package_folder("workflows")
        for key, source in workflow.data_sources().items():
            if Path(source).is_relative_to(shipped) and not os.path.exists(source):
                file = Path(source).relative_to(shipped)
                hint = f"opdcl workflows cp {workflow.name} .  # then put {file} beside it"
                raise UsageError(f"recipe {workflow.name} needs data of yours: {key} is {file}", hint)
        finetune = workflow.finetune
        for source in workflow.data_sources().values():
            if on_hub(source):
                continue
            if finetune and source == finetune.data:
                with_answers(self.finetune_rows(workflow)[0], finetune)
            else:
                self.rows(source, columns=workflow.columns)
