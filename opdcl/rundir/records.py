"""Read the records of a run, and refuse those that lack what later code reads."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from opdcl.errors import UsageError
from opdcl.rundir.files import RESTORE, read_json, read_jsonl


class _Record(BaseModel):
    """A JSON object that may have further keys."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Config(_Record):
    workflow: dict[str, Any]
    origins: dict[str, str] = {}


class _Spent(_Record):
    seconds: float
    tokens: int
    peak_memory_bytes: int
    steps: int = 0


def _as_spent(cost: Any) -> Any:
    """Check a cost; it is empty, or null, before a stage has done a step."""
    if cost:
        _Spent.model_validate(cost)
    return cost or {}


_Cost = Annotated[dict[str, Any], BeforeValidator(_as_spent)]


class StageRecord(_Record):
    """A training stage, as its `stage.json` describes it; what is None is not in the file."""

    stage: str = ""
    status: str
    fingerprint: str = ""
    config: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    taken_from: str | None = None
    started: str | None = None
    cost: _Cost = {}
    rows: int | None = None
    tuned_model: dict[str, Any] | None = None
    finished: str | None = None
    adapter_sha256: str | None = None


class _Weights(_Record):
    sha256: str
    path: str = ""


class _Base(_Record):
    fingerprint_before: str | None = None
    fingerprint_after: str | None = None
    id: str | None = None
    revision: str | None = None
    parameters: int | None = None


class _Device(_Record):
    dtype: str | None = None
    kind: str | None = None
    name: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None


def _is_date(value: str) -> str:
    datetime.fromisoformat(value.replace("Z", "+00:00"))
    return value


class _Manifest(_Record):
    base: _Base | None = None
    device: _Device | None = None
    adapters: dict[str, _Weights] | None = None
    commands: list[str] = []
    command: str = ""  # of earlier versions
    seconds: float = 0
    created: Annotated[str, AfterValidator(_is_date)] | None = None
    opdcl: str | None = None
    versions: dict[str, str | None] | None = None


class _Measured(_Record):
    adapter_sha256: str | None = None


class _Result(_Record):
    metric: str
    n: int
    metrics: dict[str, Any]
    role: str = ""
    fingerprint: str | None = None
    model: _Measured | None = None
    floor: dict[str, dict[str, Any]] | None = None
    cost: _Cost = {}


class _Sample(_Record):
    doc_id: int | str
    prompt: str
    scores: dict[str, Any]


class _Step(_Record):
    step: int


def read_config(file: Path) -> dict[str, Any]:
    """Return the content of a run's `config.json`: its `workflow`, and the `origins` of its settings.

    Rows that the run itself holds are named where they lie now: it may have been moved or copied.
    """
    config = _read(file, _Config)
    texts = [*_texts(config["workflow"])]
    # The places are whole. Rows in memory are written into a file that is named as their setting.
    earlier = {Path(section[name]).parent for section, name, key in texts if _is_own(section[name], key)}
    for section, name, _ in texts:
        place, here = Path(section[name]), file.parent / "data" / Path(section[name]).name
        if place.parent in earlier and here.is_file():
            section[name] = str(here.resolve())
    return config


def _texts(section: dict[str, Any], above: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield each text among settings: the section that holds it, its name there, and its whole key."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _texts(value, f"{above}{name}.")
        elif isinstance(value, str):
            yield section, name, f"{above}{name}"


def _is_own(place: str, key: str) -> bool:
    return Path(place).parts[-2:] == ("data", f"{key}.jsonl")


def read_stage(file: Path) -> dict[str, Any]:
    """Return the content of a `stage.json`."""
    return _read(file, StageRecord)


def read_manifest(file: Path) -> dict[str, Any]:
    """Return the content of a `manifest.json`."""
    return _read(file, _Manifest)


def read_result(file: Path) -> dict[str, Any]:
    """Return the content of a result: one state measured on one suite."""
    return _read(file, _Result)


def read_samples(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a result's samples."""
    return _read_rows(file, _Sample)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a stage's `metrics.jsonl`."""
    return _read_rows(file, _Step)


def _read(file: Path, kind: type[_Record]) -> dict[str, Any]:
    record: dict[str, Any] = read_json(file)
    _check(record, kind, str(file))
    return record


def _read_rows(file: Path, kind: type[_Record]) -> list[dict[str, Any]]:
    rows = read_jsonl(file)
    for number, row in enumerate(rows, 1):
        _check(row, kind, f"{file}, row {number}")
    return rows


def _check(record: Any, kind: type[_Record], place: str) -> None:
    """Raise a `UsageError` that says what is wrong with a record at a place."""
    try:
        kind.model_validate(record)
    except ValidationError as fault:
        first = fault.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        problem = f"{key}: {first['msg']}" if key else "it is not a JSON object"
        raise UsageError(f"{place} is damaged: {problem}", RESTORE) from fault
