"""One training stage on disk: its folder, its record, its metrics; and how any record of a run is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from opdcl.errors import UsageError
from opdcl.rundir.files import RESTORE, read_json, read_jsonl
from opdcl.rundir.hashes import damage


class Record(BaseModel):
    """A JSON object that may have further keys."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Spent(Record):
    seconds: float
    tokens: int
    peak_memory_bytes: int
    steps: int = 0


def _as_spent(cost: Any) -> Any:
    """Check a cost; it is empty, or null, before a stage has done a step."""
    if cost:
        _Spent.model_validate(cost)
    return cost or {}


Cost = Annotated[dict[str, Any], BeforeValidator(_as_spent)]


class StageRecord(Record):
    """A training stage, as its `stage.json` describes it; what is None is not in the file."""

    stage: str = ""
    status: str
    fingerprint: str = ""
    config: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    taken_from: str | None = None
    started: str | None = None
    cost: Cost = {}
    rows: int | None = None
    tuned_model: dict[str, Any] | None = None
    finished: str | None = None
    adapter_sha256: str | None = None


class _Step(Record):
    step: int


@dataclass(unsafe_hash=True)
class StageDir:
    """The folder of one training stage."""

    path: Path

    def __post_init__(self) -> None:
        self.record = self.path / "stage.json"
        self.metrics = self.path / "metrics.jsonl"
        self.replay = self.path / "replay.jsonl"  # general prompts with their answers
        self.learned = self.path / "learned.json"  # which rows a fine-tune learns, by hashes
        self.adapter = self.path / "adapter"
        self.trainer = self.path / "trainer"  # holds checkpoint-N/
        self.best = self.trainer / "best"  # the adapter that a recovery would end with now

    def state(self) -> dict:
        """Return the content of `stage.json`, or an empty dict before the stage has started."""
        return read_as(self.record, StageRecord) if self.record.exists() else {}

    @property
    def name(self) -> str:
        """The name of the stage, without its number."""
        return self.path.name.partition("-")[2]

    def progress(self) -> str:
        """Say how many steps are done, of how many where that was fixed."""
        steps = max((row["step"] for row in read_metrics(self.metrics)), default=0)
        total = self.state().get("config", {}).get("steps")
        return f"{steps} of {total} steps" if isinstance(total, int) else f"{steps} steps"

    def is_done(self) -> bool:
        return bool(self.state().get("status") == "done")

    def checkpoints(self) -> list[Path]:
        """Return the folders of all trainer checkpoints, newest first, including damaged ones."""
        steps = {
            int(step): folder
            for folder in self.trainer.glob("checkpoint-*")
            if (step := folder.name.removeprefix("checkpoint-")).isdecimal()
        }
        return [steps[step] for step in sorted(steps, reverse=True)]

    def last_checkpoint(self) -> Path | None:
        """Return the newest undamaged checkpoint, or None."""
        return next((folder for folder in self.checkpoints() if not damage(folder)), None)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a stage's `metrics.jsonl`."""
    return read_rows_as(file, _Step)


def read_as(file: Path, kind: type[Record]) -> dict[str, Any]:
    """Return the content of a file.

    Raises:
        UsageError: It is no JSON, or lacks what later code reads.
    """
    record: dict[str, Any] = read_json(file)
    _check(record, kind, str(file))
    return record


def read_rows_as(file: Path, kind: type[Record]) -> list[dict[str, Any]]:
    """Return the rows of a file, each checked as by `read_as`."""
    rows = read_jsonl(file)
    for number, row in enumerate(rows, 1):
        _check(row, kind, f"{file}, row {number}")
    return rows


def _check(record: Any, kind: type[Record], place: str) -> None:
    """Raise a `UsageError` that says what is wrong with a record at a place."""
    try:
        kind.model_validate(record)
    except ValidationError as fault:
        first = fault.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        problem = f"{key}: {first['msg']}" if key else "it is not a JSON object"
        raise UsageError(f"{place} is damaged: {problem}", RESTORE) from fault
