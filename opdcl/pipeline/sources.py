"""Everything a command reads before it trains: rows, suites, their hashes, and what a run directory already holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from opdcl.config.evaluate import EvalConfig
from opdcl.config.recover import RecoverConfig
from opdcl.config.shipped import package_folder
from opdcl.config.workflow import Workflow
from opdcl.data import scoring
from opdcl.data.rows import Row, load_rows, pinned, source_files
from opdcl.errors import UsageError
from opdcl.pipeline.plan import STAGE_NUMBERS, Records, StageRecord, stage_folder
from opdcl.rundir.files import read_json
from opdcl.rundir.hashes import ADAPTER, file_hash, hash_files
from opdcl.rundir.layout import RunDir

if TYPE_CHECKING:
    from opdcl.data.suites import Suite


class Sources:
    """The data of a run, or of all arms of a sweep. Each file is parsed once, each suite is built once.

    Local sources are identified by path, sources on the Hub by the pinned id. A file that is edited during a run is
    therefore not read again: what is trained on is what was hashed.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], list[Row]] = {}
        self._suites: dict[tuple[str, str | None, int | None], Suite] = {}
        self._hashes: dict[str, str] = {}

    def rows(self, source: str, split: str = "train") -> list[Row]:
        """Return the checked rows of a source; the list is the caller's own."""
        key = pinned(source), split
        if key not in self._rows:
            self._rows[key] = load_rows(source, split)
        return list(self._rows[key])

    def suite(self, name: str, config: EvalConfig | None = None) -> Suite:
        """Return a loaded suite; `config` names its local data, if it has any."""
        from opdcl.data.suites import load_suite

        config = config or EvalConfig()
        path = config.data.get(name)
        key = name, path, config.max_new_tokens if path else None
        if key not in self._suites:
            self._suites[key] = load_suite(name, config, self.rows)
        return self._suites[key]

    def inherit(self, workflow: Workflow) -> Workflow:
        """Give the recovery the fine-tune's rows as its domain, if it has none and the rows have prompts."""
        finetune, recover = workflow.finetune, workflow.recover
        # Plain text has no question to sample on.
        if finetune and recover and not recover.domain and all(r.prompt for r in self.rows(finetune.data)):
            domain = recover.model_copy(update={"domain": finetune.data})
            return workflow.model_copy(update={"recover": domain})
        return workflow

    def check(self, workflow: Workflow) -> None:
        """Check that every row can be used where the workflow uses it.

        Raises:
            UsageError: A source is missing or malformed, or a row lacks what its stage needs.
        """
        if workflow.finetune:
            for row in self.rows(workflow.finetune.data):
                if row.text is None and row.answer is None:
                    raise UsageError(
                        f"{row.where} has no answer to learn",
                        "fine-tune rows need completion, answer or text",
                    )
        if workflow.recover:
            self.check_recovery(workflow.recover)
        for suite, path in (workflow.eval.data if workflow.eval else {}).items():
            if not os.path.isfile(path):
                raise UsageError(f"eval.data.{suite}: {path} does not exist", f"--data {suite}=PATH")

    def check_recovery(self, config: RecoverConfig) -> None:
        """Check the prompts of a recovery."""
        from opdcl.distill.prompts import STREAMS, stream_rows

        for stream in STREAMS:  # becomes read_recovery_source(config, self.rows, self.suite)
            stream_rows(config, stream)

    def hashes(self, workflow: Workflow) -> dict[str, str]:
        """Return the hash of each source's content, by the name of its field."""
        from opdcl.model.adapters import find_adapter

        recover, evaluation = workflow.recover, workflow.eval
        fields: dict[str, str | None] = {}
        if workflow.finetune:
            fields["finetune.data"] = workflow.finetune.data
        if recover:
            fields |= {
                "recover.general": recover.source("general"),
                "recover.domain": recover.source("domain"),
            }
            fields |= {f"recover.teachers.{k}.prompts": t.prompts for k, t in recover.teachers.items()}
        if evaluation:
            fields |= {f"eval.data.{suite}": path for suite, path in evaluation.data.items()}
        hashes = {field: self._hash(source) for field, source in fields.items() if source}
        for field, place in workflow.adapters().items():
            folder = find_adapter(place)
            hashes[field] = hash_files([folder / ADAPTER, folder / "adapter_config.json"])
        suites = {f"eval.suite.{suite}": suite for suite in evaluation.suites()} if evaluation else {}
        if recover and recover.reward:
            suites["recover.reward.suite"] = recover.reward.suite
        return hashes | {field: hash for field, suite in suites.items() if (hash := self._suite_hash(suite))}

    def _hash(self, source: str) -> str:
        """Return the hash of a local source's content, or the pinned id of one on the Hub."""
        if source not in self._hashes:
            files = source_files(source)
            self._hashes[source] = hash_files(files) if files else pinned(source)
        return self._hashes[source]

    def _suite_hash(self, suite: str) -> str | None:
        """Return the hash of a shipped suite's files and of the scorer they import; None for other suites."""
        shipped = next(package_folder("evals").glob(f"*/{suite}.yaml"), None)
        if shipped is None:
            return None
        folder = str(shipped.parent)
        if folder not in self._hashes:
            files = sorted(p for p in shipped.parent.iterdir() if p.is_file())
            self._hashes[folder] = hash_files([*files, Path(scoring.__file__)])
        return self._hashes[folder]


def read_records(run: RunDir) -> Records:
    """Read what a run directory holds: stage records with the hashes of their adapters, and results."""
    stages = {}
    for name in STAGE_NUMBERS:
        stage = stage_folder(run, name)
        if not (state := stage.state()):
            continue
        done = state.get("status") == "done"
        weights = stage.adapter / ADAPTER
        checkpoint = None if done else stage.last_checkpoint()
        stages[name] = StageRecord(
            state,
            file_hash(weights) if done and weights.is_file() else None,
            checkpoint.name if checkpoint else None,
        )
    files = run.evals.glob("*/*.json")
    return Records(stages, {(f.parent.name, f.stem): read_json(f).get("fingerprint") for f in files})
