"""What a command reads, once: rows, suites, tokenizers, hashes, and the records of the run directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from opdcl.config.evaluate import CLOSENESS, EvalConfig
from opdcl.config.model import ModelConfig
from opdcl.config.shipped import SHIPPED_DATA, package_folder, shipped_suites
from opdcl.config.workflow import Workflow
from opdcl.data import scoring
from opdcl.data.chat import encode_prompt
from opdcl.data.examples import Examples, read_examples, with_answers
from opdcl.data.rows import (
    Row,
    check_lines,
    check_prompts,
    load_rows,
    on_hub,
    pinned,
    recognised,
    source_files,
)
from opdcl.data.stock_tasks import group_tasks
from opdcl.errors import UsageError
from opdcl.pipeline.plan import STAGE_NUMBERS, Records, StageRecord, Task, make_plan, stage_folder
from opdcl.rundir.files import read_json, write_atomic
from opdcl.rundir.hashes import ADAPTER, file_hash, hash_files, hash_value
from opdcl.rundir.layout import RunDir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from opdcl.data.suites import Suite
    from opdcl.distill.prompts import RecoverySource


# The settings of a fine-tune on which its encoded rows depend.
ENCODING = {"data", "max_length", "long_rows", "empty_answers", "replay"}


class Sources:
    """The data of a run, or of all arms of a sweep. Each file is parsed once, and each suite is built once.

    A file that is edited during a run is not read again, so the rows are those that were hashed.
    """

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        """Take `given`, the contents of JSONL files by path, as files that `save` will write."""
        self._given = dict(given or {})
        self.columns: dict[str, str] = {}
        self._rows: dict[tuple[str, ...], list[Row]] = {}
        self._suites: dict[tuple[str, ...], Suite] = {}
        self._hashes: dict[tuple[Path, ...], str] = {}
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        self._examples: dict[tuple[str, str], Examples] = {}
        self._prompt_ids: dict[str, dict[str, list[int]]] = {}
        self._lengths: dict[tuple[Suite | str | None, int | None, str], list[int]] = {}

    def rows(self, source: str, split: str = "train") -> list[Row]:
        """Return the checked rows of a source; the list is the caller's own."""
        key = pinned(source), split, *map(str, self.columns.items())
        if key not in self._rows:
            text = self._given.get(source)
            given = check_lines(text, Path(source).stem, self.columns) if text else None
            self._rows[key] = given or load_rows(source, split, self.columns)
        return list(self._rows[key])

    def suite(self, name: str, config: EvalConfig | None = None) -> Suite:
        """Return a loaded suite; `config` names its local data, if it has any."""
        from opdcl.data.suites import load_suite

        # The data of a group are those of its tasks.
        data = config.data if config else {}
        key = name, *map(str, data.items()), str(config.max_new_tokens if config and name in data else None)
        if key not in self._suites:
            self._suites[key] = load_suite(name, config, self.rows)
        return self._suites[key]

    def save(self) -> None:
        """Write the rows that were given in memory, where that has not been done."""
        for path, text in self._given.items():
            if not os.path.isfile(path) or Path(path).read_text(encoding="utf-8") != text:
                write_atomic(Path(path), text)

    def recognised(self) -> list[str]:
        """Describe the rows of the user's files that were read: their formats, and the first of each file."""
        read = ((source, rows) for (source, *_), rows in self._rows.items())
        return [recognised(source, rows) for source, rows in read if source not in SHIPPED_DATA]

    def inherit(self, workflow: Workflow) -> Workflow:
        """Make the fine-tune's rows the recovery's domain, if it has none and the rows have prompts.

        From here on, rows are read by the workflow's names of columns.
        """
        self.columns = {str(ours): theirs for ours, theirs in workflow.columns.items()}
        finetune, recover = workflow.finetune, workflow.recover
        # Plain text has no question to sample on.
        if finetune and recover and not recover.domain and all(r.prompt for r in self.rows(finetune.data)):
            domain = recover.model_copy(update={"domain": finetune.data})
            return workflow.model_copy(update={"recover": domain})
        return workflow

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
        for source in self.inherit(workflow).data_sources().values():
            if not on_hub(source):
                self.rows(source)
        if workflow.finetune and not on_hub(workflow.finetune.data):
            with_answers(self.rows(workflow.finetune.data), workflow.finetune)

    def check(self, workflow: Workflow) -> None:
        """Check that every row can be used where the workflow uses it.

        Raises:
            UsageError: A source is missing or malformed, or a row lacks what its stage needs.
        """
        if workflow.finetune:
            with_answers(self.rows(workflow.finetune.data), workflow.finetune)
        if workflow.recover:
            self.recovery(workflow)
        for suite, path in (workflow.eval.data if workflow.eval else {}).items():
            if path not in self._given and not os.path.isfile(path):
                raise UsageError(f"eval.data.{suite}: {path} does not exist", f"--data {suite}=PATH")
        self.closeness(workflow)

    def tokenizer(self, model: ModelConfig) -> PreTrainedTokenizerBase:
        """Return a model's tokenizer, which has a chat template."""
        from opdcl.model.load import load_tokenizer

        key = model.model_dump_json()
        if key not in self._tokenizers:
            self._tokenizers[key] = load_tokenizer(model)
        return self._tokenizers[key]

    def examples(self, workflow: Workflow) -> Examples:
        """Return the encoded rows of the fine-tune; raise a UsageError if any is refused."""
        config, model = workflow.finetune, workflow.model
        assert config
        if config.method == "self-distill":  # which samples answers, and so has no sequences beforehand
            return Examples(*with_answers(self.rows(config.data), config))
        key = config.model_dump_json(include=ENCODING), model.model_dump_json()
        if key not in self._examples:
            replay = self.rows(config.replay.prompts) if config.replay.share else []
            rows, tokenizer = self.rows(config.data), self.tokenizer(model)
            self._examples[key] = read_examples(rows, config, tokenizer, replay)
        return self._examples[key]

    def learned_rows(self, workflow: Workflow) -> list[Row]:
        """Return the rows that the fine-tune learns from, without those that it leaves out."""
        config = workflow.finetune
        assert config
        if config.method == "sft" and config.long_rows != "refuse":
            return self.examples(workflow).rows
        return with_answers(self.rows(config.data), config)[0]

    def prompt_lengths(self, name: str, workflow: Workflow) -> list[int]:
        """Return the length of each prompt of a suite, or of those of closeness, in tokens of the model."""
        config, tokenizer = workflow.eval, self.tokenizer(workflow.model)
        assert config
        suite = None if name == CLOSENESS else self.suite(name, config)
        key = suite or config.closeness, config.limit, workflow.model.model_dump_json()
        if key not in self._lengths:
            self._lengths[key] = (
                suite.lengths(config.limit, tokenizer)
                if suite
                else [len(encode_prompt(row, tokenizer, sys.maxsize)) for row in self.closeness(workflow)]
            )
        return self._lengths[key]

    def recovery(self, workflow: Workflow) -> RecoverySource:
        """Return the checked prompts of a recovery, and the suite of its reward.

        Of a domain that the fine-tune has learned, rows that it left out are no prompts either. Conversations
        about the domain, and those with tools, give one prompt per answer or call. Prompts that base has yet
        to write have placeholders.
        """
        from opdcl.distill.own_prompts import planned_prompts
        from opdcl.distill.prompts import read_recovery_source

        finetune, recover = workflow.finetune, workflow.recover
        assert recover

        def read(source: str, split: str = "train") -> list[Row]:
            if finetune and source == finetune.data and split == "train":
                return self.learned_rows(workflow)
            return self.rows(source, split)

        source = read_recovery_source(recover, read, lambda suite: self.suite(suite).task)
        source.rows["domain"] = [turn for row in source.rows["domain"] for turn in row.turns()]
        general = (row.turns() if row.tools else [row] for row in source.rows["general"])
        source.rows["general"] = [turn for turns in general for turn in turns]
        if recover.general == "self":
            source.rows["general"] = planned_prompts(recover, bool(source.rows["domain"]))
        return replace(source, encoded=self._prompt_ids.setdefault(workflow.model.model_dump_json(), {}))

    def closeness(self, workflow: Workflow) -> list[Row]:
        """Return the prompts on which closeness to base is measured."""
        config = workflow.eval
        if config is None or config.closeness is None:
            return []
        return check_prompts(self.rows(config.closeness))[: config.limit]

    def tests(self, workflow: Workflow) -> list[str]:
        """Return all prompts of the run's suites."""
        suites = [self.suite(name, workflow.eval) for name in workflow.eval.suites()] if workflow.eval else []
        asked = ["\n".join(m["content"] for m in row.prompt) for row in self.closeness(workflow)]
        return [prompt for suite in suites for prompt in suite.prompts(None)] + asked

    def hashes(self, workflow: Workflow) -> dict[str, str]:
        """Return the hash of each source's content, by the name of its field."""
        from opdcl.model.adapters import start_files

        recover, evaluation = workflow.recover, workflow.eval
        fields = workflow.data_sources()
        if evaluation:
            fields |= {f"eval.data.{suite}": path for suite, path in evaluation.data.items()}
        # A source on the Hub is identified by its pinned id.
        hashes = {k: self._hash(self._files(s)) or pinned(s) for k, s in fields.items()}
        if workflow.columns:  # they decide what is read
            hashes = {key: hash_value([value, workflow.columns]) for key, value in hashes.items()}
        for field, place in workflow.adapters().items():
            hashes[field] = self._hash(start_files(place, may_be_model=field == "start"))
        suites = {f"eval.suite.{suite}": suite for suite in evaluation.suites()} if evaluation else {}
        if recover and recover.reward:
            suites["recover.reward.suite"] = recover.reward.suite
        for field, suite in suites.items():
            if shipped := shipped_suites().get(suite):
                files = sorted(p for p in shipped.parent.iterdir() if p.is_file())
                hashes[field] = self._hash([*files, Path(scoring.__file__)])
            elif evaluation and evaluation.data and suite not in evaluation.data:
                members = [hashes.get(f"eval.data.{task}") for task in group_tasks(suite)]
                if any(members):
                    hashes[field] = hash_value(members)
        return hashes

    def _files(self, source: str) -> list[Path]:
        return [Path(source)] if source in self._given else source_files(source)

    def _hash(self, files: list[Path]) -> str:
        """Return the hash of files' contents, read once; "" for no files."""
        key = tuple(files)
        if files and key not in self._hashes:
            self._hashes[key] = hash_files(files, self._given)
        return self._hashes.get(key, "")

    def plan(self, workflow: Workflow, run: RunDir) -> list[Task]:
        """Return what there is to do in a run directory, as it is now."""
        return make_plan(workflow, self.hashes(workflow), read_records(run))


def read_records(run: RunDir) -> Records:
    """Read what a run directory holds: stage records with the hashes of their adapters, and results."""
    stages = {}
    for name in STAGE_NUMBERS:
        stage = stage_folder(run, name)
        weights = stage.adapter / ADAPTER
        if stage.is_done():
            stages[name] = StageRecord(stage.state(), file_hash(weights) if weights.is_file() else None)
        elif state := stage.state():
            checkpoint = stage.last_checkpoint()
            stages[name] = StageRecord(state, checkpoint=checkpoint.name if checkpoint else None)
    files = run.evals.glob("*/*.json")
    return Records(stages, {(f.parent.name, f.stem): read_json(f).get("fingerprint") for f in files})
