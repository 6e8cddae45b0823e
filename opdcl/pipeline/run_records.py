"""The records of a run: its manifest, that of each training stage, and the fingerprint of each result."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opdcl.data.formats import Row
from opdcl.errors import UsageError, typed
from opdcl.results.origins import question_key
from opdcl.rundir import seals
from opdcl.rundir.files import RESTORE, now, write_json
from opdcl.rundir.hashes import ADAPTER, adapter_hash, file_hash
from opdcl.rundir.layout import RunDir, read_result, versions
from opdcl.rundir.stage import StageDir, StageRecord
from opdcl.sanitize import redact
from opdcl.version import __version__

STAGE_NUMBERS = {"finetune": 1, "recover": 2}


@dataclass(frozen=True)
class StoredStage:
    """A training stage on disk: its record, its adapter's hash as it is now, its newest checkpoint's name."""

    record: StageRecord
    weights: str | None = None
    checkpoint: str | None = None

    @property
    def is_done(self) -> bool:
        return self.record.status == "done"


@dataclass(frozen=True)
class Records:
    """What a run directory holds: stages by name, and fingerprints of results by state and suite."""

    stages: Mapping[str, StoredStage] = field(default_factory=dict)
    results: Mapping[tuple[str, str], str | None] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether nothing was made: no finished stage, no checkpoint, no result."""
        return not self.results and not any(s.is_done or s.checkpoint for s in self.stages.values())

    def finished(self, stage: str) -> str | None:
        """Return the fingerprint of a stage that is done, or None."""
        stored = self.stages.get(stage)
        return stored.record.fingerprint if stored and stored.is_done else None


def stage_folder(run: RunDir, name: str) -> StageDir:
    return run.stage(STAGE_NUMBERS[name], name)


def read_record(stage: StageDir) -> StageRecord | None:
    """Return the record of a training stage; None before it has started.

    Raises:
        UsageError: The record lacks a value that later code reads.
    """
    state = stage.state()
    if not state:
        return None
    for key in ["fingerprint", "adapter_sha256"] if stage.is_done() else ["fingerprint"]:
        if not state.get(key):
            raise UsageError(f"{stage.record} is damaged: it has no {key}", RESTORE)
    return StageRecord.model_validate(state)


def write_record(stage: StageDir, record: StageRecord) -> None:
    write_json(stage.record, record.model_dump(exclude_none=True))


def finish_stage(stage: StageDir, record: StageRecord) -> None:
    """Write the record of a stage whose adapter is complete."""
    made = {"status": "done", "finished": now(), "adapter_sha256": adapter_hash(stage.adapter)}
    write_record(stage, record.model_copy(update=made))


def read_records(run: RunDir) -> Records:
    """Read the records of a run directory, with the hashes of the adapters that are there."""
    stages = {}
    for name in STAGE_NUMBERS:
        stage = stage_folder(run, name)
        if (record := read_record(stage)) is None:
            continue
        if record.status == "done":
            weights = stage.adapter / ADAPTER
            stages[name] = StoredStage(record, weights=file_hash(weights) if weights.is_file() else None)
        else:
            checkpoint = stage.last_checkpoint()
            stages[name] = StoredStage(record, checkpoint=checkpoint.name if checkpoint else None)
    results = {}
    for file in run.evals.glob("*/*.json"):
        results[file.parent.name, file.stem] = read_result(file).get("fingerprint")
    return Records(stages, results)


def learned_rows(rows: Iterable[Row]) -> set[str]:
    """Return what a model learns of rows, as `learned_by`: a conversation asks a question for each answer."""
    turns = [turn for row in rows for turn in row.turns() if turn.prompt]
    questions = {question_key(turn.shown(), len(turn.prompt) > 1) for turn in turns}
    return questions | {f"cluster {turn.cluster}" for turn in turns if turn.cluster}


def write_learned(stage: StageDir, rows: Iterable[Row], set_aside: str | None) -> None:
    """Record what a fine-tune learns, and the hash of the file of rows that were set aside from it."""
    write_json(stage.learned, {"learned": sorted(learned_rows(rows)), "set_aside": set_aside})


def write_manifest(run: RunDir, manifest: dict[str, Any]) -> None:
    """Add to a manifest what a run was made with, its versions, commands and adapters, and write it."""
    manifest.setdefault("created", now())
    manifest["commands"] = [*dict.fromkeys([*manifest.get("commands", []), command_line(run)])]
    manifest |= {"opdcl": __version__, "versions": versions()}
    adapters = {}
    for state, folder in run.adapters().items():
        digest = StageDir(folder.parent).state()["adapter_sha256"]
        adapters[state] = {"path": str(folder.relative_to(run.path)), "sha256": digest}
    manifest["adapters"] = adapters
    seals.forget(run, run.manifest)
    write_json(run.manifest, manifest)


def command_line(run: RunDir) -> str:
    """Return the command that started this process; from Python, one that continues the run."""
    program = Path(sys.argv[0])
    words = sys.argv[1:]
    if program.stem != "opdcl" and program.parent.name != "opdcl":  # neither the script nor `python -m opdcl`
        words = ["run", str(run.workflow), "-o", str(run.path)]
    return redact(typed("opdcl", *words))
