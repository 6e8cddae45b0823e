"""Send a run's numbers, verdict and report to trackers, through accelerate's classes for them.

Trackers are fed from the run's files, which hold all results, and get no settings: those may hold secrets. A
tracker that fails is dropped, and the run continues.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opdcl.errors import EnvironmentFault
from opdcl.results.status import STATES
from opdcl.rundir.files import read_json, read_new_rows, write_json
from opdcl.rundir.layout import RunDir, StageDir

if TYPE_CHECKING:
    from opdcl.training import StageReport

logger = logging.getLogger(__name__)

# The step of a row in W&B.
GLOBAL_STEP = "train/global_step"


class Tracking:
    """The open trackers of one run, if any. Failures are reported to `note`."""

    def __init__(self, names: Sequence[str], run: RunDir, note: Callable[[str], None]):
        self._note = note
        self._file = run.path / "tracking.json"
        # The id names this run in a tracker across interruptions; `sent` counts rows by stage.
        self._record: dict[str, Any] = {"id": uuid.uuid4().hex[:8], "sent": {}}
        if self._file.exists():
            self._record |= read_json(self._file)
        self._trackers: dict[str, Any] = dict.fromkeys(names)
        self._each(lambda name: self._start(name, run))

    def send_row(self, stage: str, number: int, values: dict[str, float], step: int) -> None:
        """Send a stage's row of this number, counted from 1, unless an earlier process has sent it."""
        if self._trackers and number > self._record["sent"].get(stage, 0):
            self.send({f"train/{stage}/{key}": value for key, value in values.items()}, step)
            self._record["sent"][stage] = number
            write_json(self._file, self._record)

    def send(self, values: dict[str, Any], step: int) -> None:
        """Send numbers and texts."""
        self._each(lambda name: _log(self._trackers[name], values, step))

    def close(self) -> None:
        """Close all trackers."""
        self._each(lambda name: self._trackers[name].finish())
        self._trackers.clear()

    def _start(self, name: str, run: RunDir) -> None:
        tracker = self._trackers[name] = _tracker(name, run, self._record)
        tracker.start()
        if name == "wandb":
            tracker.tracker.define_metric("*", step_metric=GLOBAL_STEP)
        if name == "mlflow":
            self._record["mlflow"] = tracker.tracker.info.run_id
        write_json(self._file, self._record)

    def _each(self, act: Callable[[str], None]) -> None:
        """Do something with every tracker, and drop those that fail."""
        for name in list(self._trackers):
            try:
                act(name)
            except Exception as fault:  # each tracker has exceptions of its own
                logger.exception("tracker %s", name)
                reason = f"{type(fault).__name__}: {str(fault)[:200]}"
                self._note(f"tracker {name} failed and is dropped: {reason}")
                del self._trackers[name]


@dataclass
class TrackedReport:
    """A stage's report that also sends the stage's metrics; `offset` is added to their steps."""

    report: StageReport
    tracking: Tracking
    stage: StageDir
    offset: int
    place: int = 0
    """The bytes of metrics.jsonl that were read."""
    rows: int = 0
    """The rows in them."""

    def progress(self, done: int, total: int, **values: float | str) -> None:
        self.report.progress(done, total, **values)
        self.follow()

    def note(self, text: str) -> None:
        self.report.note(text)

    def follow(self) -> None:
        """Send the metrics that the stage has written since the last call."""
        self.place, rows = read_new_rows(self.stage.metrics, self.place)
        for row in rows:
            self.rows += 1
            name = self.stage.path.name.split("-", 1)[1]
            self.tracking.send_row(name, self.rows, _numbers(row), self.offset + row["step"])


def check_trackers(names: Sequence[str]) -> None:
    """Raise an `EnvironmentFault` if a tracker's package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise EnvironmentFault(f"tracker {name} is not installed", f"pip install {name}")


def scores(summary: dict[str, Any]) -> dict[str, float]:
    """Return the scores of a run's summary by `suite/state`, and R and D if they are known."""
    pairs = [(name, suite, state) for name, suite in summary["suites"].items() for state in STATES]
    values = {f"{name}/{state}": suite[state]["value"] for name, suite, state in pairs if suite[state]}
    return values | {key: summary[key]["value"] for key in ("recovery", "domain_retention") if summary[key]}


def _tracker(name: str, run: RunDir, record: dict[str, Any]) -> Any:
    """Return one of accelerate's trackers, not started. It continues the run that has the record's ids."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=True)  # without it accelerate's trackers refuse to log
    folder, title = str(run.path / "tracking"), f"{run.path.resolve().name}-{record['id']}"
    named = {"name": title, "resume": "allow"}
    # What accelerate calls `run_name` is the project, or TensorBoard's folder.
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"run_name": "tensorboard", "logging_dir": folder},
        "wandb": {"run_name": os.environ.get("WANDB_PROJECT", "opdcl"), "id": record["id"], **named},
        "trackio": {"run_name": "opdcl", **named},
        "mlflow": {"experiment_name": "opdcl", "run_name": title, "run_id": record.get("mlflow")},
    }
    options["wandb"] |= {"dir": folder, "settings": {"console": "off"}}  # what it would show stays here
    return LOGGER_TYPE_TO_CLASS[name](**options[name])


def _log(tracker: Any, values: dict[str, Any], step: int) -> None:
    if tracker.name == "wandb":
        # As `step`, it would lose each row of a step that was reached before an interruption.
        tracker.log(values | {GLOBAL_STEP: step})
    elif tracker.name == "mlflow":
        import mlflow

        texts = {key: value for key, value in values.items() if isinstance(value, str)}
        tracker.log({key: value for key, value in values.items() if key not in texts}, step)
        for key, text in texts.items():  # accelerate's class leaves them out
            mlflow.log_text(text, f"{key}.md")
    else:
        tracker.log(values, step)


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of metrics, with those of its validation and, at step 0, of base."""
    flat = dict(row)
    for part in ("validation", "base"):
        for key, value in row.get(part, {}).items():
            flat[f"{part}/{key}"] = value
    del flat["step"]
    return {key: float(value) for key, value in flat.items() if isinstance(value, int | float)}
