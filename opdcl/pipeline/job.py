"""What the runs of a command read, each once, and a run, resolved once. Nothing changes it later.

A run is its settings, its rows and suites, and what it measures.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from opdcl.config.evaluate import CLOSENESS, EvalConfig
from opdcl.config.load import with_setting
from opdcl.config.model import LoraSection, ModelConfig
from opdcl.config.shipped import SHIPPED_DATA, package_folder, shipped_suites
from opdcl.config.workflow import Workflow
from opdcl.data import scoring
from opdcl.data.examples import Examples, TrainingRows, read_examples, with_answers
from opdcl.data.prompts import RecoverySource, encode_asked, encode_prompts, read_recovery_source
from opdcl.data.rows import (
    CheckedRows,
    Row,
    Tell,
    check_lines,
    check_prompts,
    on_hub,
    pinned,
    read_rows,
    source_files,
)
from opdcl.data.suites import Suite, load_suite
from opdcl.errors import UsageError
from opdcl.model.adapters import find_adapter, start_files, tuned_model
from opdcl.model.load import load_tokenizer, model_files
from opdcl.pipeline.defaults import named_after, resolve_for_machine, text_config, with_steps
from opdcl.pipeline.plan import Records, Task, make_plan, read_records
from opdcl.rundir.files import write_atomic
from opdcl.rundir.hashes import hash_files, hash_value
from opdcl.rundir.layout import RunDir
from opdcl.words import Prompts, StreamName

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


@dataclass(frozen=True)
class Order:
    """How a command asks for a run."""

    verb: Literal["run", "recover", "eval"] = "run"
    """`eval` trains nothing."""
    continued: RunDir | None = None
    """A run whose fine-tune and base this one must have."""
    dry_run: bool = False
    force: bool = False
    """Redo stages whose settings or data have changed."""


class Job:
    """What one run is to do. What follows from its settings is made when it is first asked for, and kept."""

    def __init__(
        self,
        workflow: Workflow,
        run: RunDir,
        inputs: Inputs | None = None,
        origins: dict[str, str] | None = None,
        order: Order | None = None,
    ) -> None:
        """Resolve a workflow: its recovery practises the fine-tune's rows if it names no domain, and numbers
        take the place of `auto`.

        Raises:
            UsageError: A file of rows, the model, or the adapter to start from was not found.
        """
        self.run, self.inputs, self.order = run, inputs or Inputs(), order or Order()
        self._suites: dict[str, Suite] = {}
        finetune, recover = workflow.finetune, workflow.recover
        self.training_rows = self.inputs.training_rows(workflow) if finetune else None
        """The checked rows of the fine-tune, if there is one."""
        # Plain text has no question to sample on.
        has_questions = finetune and all(row.prompt for row in self.training_rows.usable)
        if recover and not recover.domain and has_questions:
            workflow = with_setting(workflow, "recover.domain", finetune.data)
        self.workflow, automatic = resolve_for_machine(named_after(workflow, run.path))
        if recover and recover.steps == "auto":
            # What the fine-tune learns is encoded by the settings so far, which stay as they are.
            self.workflow, steps = with_steps(self.workflow, self.learned_tokens if finetune else None)
            automatic |= steps
        self.origins = {**(origins or {}), **automatic}

    def rows(self, source: str, split: str = "train") -> list[Row]:
        """Return the checked rows of a source, read by the workflow's names of columns."""
        return self.inputs.rows(source, split, self.workflow.columns)

    def _asked_in(self, stage: Literal["recover", "eval"], rows: list[Row]) -> list[Row]:
        """Return prompts as a stage asks them: with its system prompt, where they bring none."""
        system = self.workflow.system_of(stage)
        return [row.with_system(system) for row in rows]

    def suite(self, name: str) -> Suite:
        """Return a loaded suite."""
        if name not in self._suites:
            config, trusted = self.workflow.eval or EvalConfig(), self.workflow.model.trust_remote_code
            suite = load_suite(
                name, config, lambda source: self._asked_in("eval", self.rows(source)), trusted
            )
            suite.system = self.workflow.system_of("eval")
            self._suites[name] = suite
        return self._suites[name]

    @cached_property
    def tuned(self) -> ModelConfig | None:
        """The whole model that the run starts from, if it starts from one."""
        return tuned_model(self.workflow.start, self.workflow.model)

    @cached_property
    def adapter(self) -> LoraSection | Path | None:
        """The settings of the run's new adapter, or the folder of the one it starts from."""
        if self.workflow.start and not self.tuned:
            return find_adapter(self.workflow.start)
        if self.workflow.finetune:
            return self.workflow.finetune.lora
        return LoraSection() if self.workflow.start else None

    @cached_property
    def foreign_adapters(self) -> list[Path]:
        """The folders of the adapters that the run takes from elsewhere: its start, and its teachers'."""
        teachers = self.workflow.teachers().values()
        start = [self.adapter] if isinstance(self.adapter, Path) else []
        return start + [find_adapter(teacher.adapter) for teacher in teachers if teacher.adapter]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The base model's tokenizer, or that of a tuned model with more tokens."""
        from opdcl.model.load_backbone import shared_tokenizer

        return shared_tokenizer(self.workflow.model, self.tuned, self.inputs.tokenizer)

    @property
    def has_more_tokens(self) -> bool:
        """Whether a tuned model brings tokens that base lacks."""
        return self.tokenizer is not self.inputs.tokenizer(self.workflow.model)

    @cached_property
    def shape(self) -> Any:
        """The base model's own configuration."""
        return text_config(self.workflow.model)

    @property
    def context(self) -> int:
        """The length of the base model's context, in tokens."""
        return int(self.shape.max_position_embeddings)

    @cached_property
    def examples(self) -> Examples:
        """The encoded rows of the fine-tune.

        Raises:
            UsageError: A row is refused.
        """
        config, rows = self.workflow.finetune, self.training_rows
        replay = self.rows(config.replay.prompts) if config.replays else []
        return read_examples(rows, config, self.tokenizer, replay, self.inputs.tell)

    @property
    def learned_tokens(self) -> int:
        """How many tokens the fine-tune's rows have over all epochs."""
        tokens = sum(len(example.ids) for example in self.examples.encoded)
        return round(tokens * self.workflow.finetune.epochs)

    @cached_property
    def recovery(self) -> RecoverySource:
        """The checked prompts of the recovery, and the suite of its reward.

        Of a domain that the fine-tune has learned, rows that it left out are no prompts either. Conversations
        about the domain, and those with tools, give one prompt per answer or call.
        """
        finetune, recover = self.workflow.finetune, self.workflow.recover

        def read(source: str, split: str = "train") -> list[Row]:
            learned = finetune and source == finetune.data and split == "train"
            return self.examples.rows if learned else self.rows(source, split)

        source = read_recovery_source(recover, read, lambda suite: self.suite(suite).task)
        domain = [turn for row in source.rows["domain"] for turn in row.turns()]
        general: list[Row] = []
        for row in source.rows["general"]:
            general += row.turns() if row.tools else [row]
        rows: dict[StreamName, list[Row]] = {"general": general, "domain": domain}
        rows = {stream: self._asked_in("recover", rows[stream]) for stream in rows}
        held_out = {stream: self._asked_in("recover", of) for stream, of in source.held_out.items()}
        return replace(source, rows=rows, held_out=held_out)

    @cached_property
    def prompts(self) -> dict[StreamName, Prompts]:
        """The prompts of the recovery as token ids, by stream.

        Raises:
            UsageError: A prompt leaves no room for an answer.
        """
        return encode_prompts(self.workflow.recover, self.recovery, self.tokenizer, self.context)

    @cached_property
    def closeness(self) -> list[Row]:
        """The prompts on which closeness to base is measured."""
        config = self.workflow.eval
        if config is None or config.closeness is None:
            return []
        return self._asked_in("eval", check_prompts(self.rows(config.closeness))[: config.limit])

    @cached_property
    def prompt_ids(self) -> dict[str, list[list[int]]]:
        """The token ids of the prompts that each state answers, by suite, closeness among them.

        There are none where the likelihoods of given texts are compared.
        """
        config = self.workflow.eval
        near = [prompt for _, prompt in encode_asked(self.closeness, self.tokenizer, sys.maxsize, 0)]
        ids = {CLOSENESS: [prompt.after([[]] * turn).ids for prompt in near for turn in range(prompt.turns)]}
        for name in config.suites():
            suite = self.suite(name)
            ids[name] = suite.encode(config.limit, self.tokenizer) if suite.generative else []
        return ids

    @cached_property
    def hashes(self) -> dict[str, str]:
        """The hash of each source's content, by the name of its field."""
        workflow, hash_of = self.workflow, self.inputs.hash_of
        recover, evaluation = workflow.recover, workflow.eval
        suites: dict[str, str] = {}
        if evaluation:
            suites = {f"eval.suite.{suite}": suite for suite in evaluation.suites()}
        if recover and recover.reward:
            suites["recover.reward.suite"] = recover.reward.suite
        hashes = {}
        for key, source in self.sources.items():
            hashes[key] = self.inputs.hash(source)
            if workflow.columns and (used := self._names_of_columns(key, source)):
                hashes[key] = hash_value([hashes[key], used])
        for key, place in workflow.adapters().items():
            hashes[key] = hash_of(start_files(place, may_be_model=key == "start"))
        for name, teacher in workflow.teachers().items():
            if teacher.model and (files := model_files(teacher.model)):
                hashes[f"recover.teachers.{name}.model"] = hash_of(files)
        scorer = Path(scoring.__file__)
        for key, suite in suites.items():
            if shipped := shipped_suites().get(suite):
                files = sorted(p for p in shipped.parent.iterdir() if p.is_file())
                hashes[key] = hash_of([*files, scorer])
            elif key.startswith("eval."):
                hashes[key] = hash_of([scorer])
        return hashes

    def _names_of_columns(self, key: str, source: str) -> dict[str, str]:
        """Return the columns that the workflow names and a source has; it is read as the run does."""
        columns: dict[Any, str] = self.workflow.columns
        if key.startswith("eval.data."):
            self.suite(key.removeprefix("eval.data."))
        elif key != "finetune.data":  # whose rows have been read
            self.rows(source)
        return {ours: columns[ours] for ours in self.inputs.renamed(source)}

    @property
    def sources(self) -> dict[str, str]:
        """All rows and the data of suites, by the names of their fields."""
        data = self.workflow.eval.data if self.workflow.eval else {}
        return self.workflow.data_sources() | {f"eval.data.{suite}": path for suite, path in data.items()}

    @cached_property
    def earlier_hashes(self) -> dict[str, str]:
        """The hashes that earlier versions took: with the names of all columns, whatever a source has."""
        columns = self.workflow.columns
        hashes = {key: self.inputs.hash(source) for key, source in self.sources.items()} if columns else {}
        return {key: hash_value([value, columns]) for key, value in hashes.items()}

    def plan(self, records: Records | None = None) -> list[Task]:
        """Return the plan for the present state of the run directory, which `records` describe if given."""
        records, order = records or read_records(self.run), self.order
        donor = read_records(order.continued) if order.continued else None
        trains = order.verb != "eval"
        return make_plan(self.workflow, self.hashes, records, self.earlier_hashes, donor, trains)
