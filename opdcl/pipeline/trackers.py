"""Send a run's numbers, verdict and report to trackers, through accelerate's classes for them.

Trackers are fed from the run's files, which hold all results, and get no settings: those may hold secrets. A
tracker that fails is dropped, and the run continues.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from opdcl.errors import EnvironmentFault
from opdcl.results.status import STATES
from opdcl.rundir.files import read_json, write_json
from opdcl.rundir.layout import RunDir
from opdcl.rundir.stage import StageDir

logger = logging.getLogger(__name__)

# The step of a row in W&B.
GLOBAL_STEP = "train/global_step"


class Tracking:
    """The open trackers of one run, if any. `note` reports those that fail."""

    def __init__(self, names: Sequence[str], run: RunDir, note: Callable[[str], None]):
        self._note, self._file = note, run.path / "tracking.json"
        # The id names this run in a tracker across interruptions.
        self._record: dict[str, Any] = {"id": uuid.uuid4().hex[:8]}
        if self._file.exists():
            self._record |= read_json(self._file)
        self._read: dict[Path, int] = {}  # bytes of metrics.jsonl, by stage
        self._trackers: dict[str, Any] = {}
        for name in names:
            with self._dropped_if_it_fails(name):
                self._trackers[name] = _start(name, run, self._record)
                write_json(self._file, self._record)

    def follow(self, stage: StageDir, offset: int) -> None:
        """Send the metrics that a stage has written since the last call; `offset` is added to their steps."""
        if not self._trackers:
            return
        self._read[stage.path], rows = _new_rows(stage.metrics, self._read.get(stage.path, 0))
        name = stage.path.name.split("-", 1)[1]
        for row in rows:
            values = {f"train/{name}/{key}": value for key, value in _numbers(row).items()}
            self.send(values, offset + row["step"])

    def send(self, values: dict[str, Any], step: int) -> None:
        """Send numbers and texts."""
        for name in list(self._trackers):
            with self._dropped_if_it_fails(name):
                if name == "wandb":
                    # As `step`, it would lose each row of a step that was reached before an interruption.
                    self._trackers[name].log(values | {GLOBAL_STEP: step})
                else:
                    self._trackers[name].log(values, step)

    def close(self) -> None:
        """Close all trackers."""
        for name in list(self._trackers):
            with self._dropped_if_it_fails(name):
                self._trackers[name].finish()
        self._trackers.clear()

    @contextlib.contextmanager
    def _dropped_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as fault:  # each tracker has exceptions of its own
            logger.exception("tracker %s", name)
            reason = f"{type(fault).__name__}: {str(fault)[:200]}"
            self._note(f"tracker {name} failed and is dropped: {reason}")
            self._trackers.pop(name, None)


def check_trackers(names: Sequence[str]) -> None:
    """Raise an `EnvironmentFault` if a tracker's package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise EnvironmentFault(f"tracker {name} is not installed", f"pip install {name}")


def scores(summary: dict[str, Any]) -> dict[str, float]:
    """Return the scores of a run's summary by `suite/state`, and R and D if they are known."""
    values: dict[str, float] = {}
    for name, suite in summary["suites"].items():
        for state in STATES:
            if suite[state]:
                values[f"{name}/{state}"] = suite[state]["value"]
    for key in ("recovery", "domain_retention"):
        if summary[key]:
            values[key] = summary[key]["value"]
    return values


def _start(name: str, run: RunDir, record: dict[str, Any]) -> Any:
    """Start one of accelerate's trackers. It continues the run that has the record's ids."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=True)  # without it accelerate's trackers refuse to log
    folder, title = str(run.path / "tracking"), f"{run.path.resolve().name}-{record['id']}"
    options: dict[str, Any]
    match name:  # what accelerate calls `run_name` is the project, or TensorBoard's folder
        case "tensorboard":
            options = {"run_name": "tensorboard", "logging_dir": folder}
        case "mlflow":
            options = {"experiment_name": "opdcl", "run_name": title, "run_id": record.get("mlflow")}
        case _:
            options = {"run_name": "opdcl", "name": title, "resume": "allow"}
    if name == "wandb":
        options |= {"run_name": os.environ.get("WANDB_PROJECT", "opdcl"), "id": record["id"], "dir": folder}
        options["settings"] = {"console": "off"}  # what it would show stays here
    tracker = LOGGER_TYPE_TO_CLASS[name](**options)
    tracker.start()
    if name == "wandb":
        tracker.tracker.define_metric("*", step_metric=GLOBAL_STEP)
    if name == "mlflow":
        record["mlflow"] = tracker.tracker.info.run_id
    return tracker


def _new_rows(path: Path, place: int) -> tuple[int, list[dict]]:
    """Return the rows that a JSONL file has from byte `place` on, and the place after its last whole line."""
    if not path.exists():
        return place, []
    with open(path, "rb") as file:
        file.seek(place)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    return place + len(whole), [json.loads(line) for line in whole.split(b"\n") if line.strip()]


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of metrics and of its validation, and at step 0 those of tuned and base."""
    from opdcl.results.summary import of_the_student, started_elsewhere  # it brings numpy

    parts = {"": row, "base": row.get("base", {})}
    if row.get("validation"):
        parts["validation"] = of_the_student(row)
        parts["tuned"] = row["validation"] if started_elsewhere(row) else {}
    numbers = {}
    for part, values in parts.items():
        for key, value in values.items():
            if isinstance(value, int | float) and key != "step":
                numbers[f"{part}/{key}".lstrip("/")] = float(value)
    return numbers
