"""Send a run's metrics, scores and verdict to trackers, through transformers' integrations.

Trackers are fed from the run's files, which hold all results. A tracker that fails is dropped and the run
continues. With the trainers' `report_to` a failure would end the run, and a resume would send the steps after
the last checkpoint twice.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.errors import EnvironmentFault
from opdcl.results.status import STATES
from opdcl.rundir.files import read_json, read_new_rows, write_json
from opdcl.rundir.layout import RunDir, StageDir

if TYPE_CHECKING:
    from opdcl.training import StageReport

logger = logging.getLogger(__name__)


class Tracking:
    """The open trackers of one run, if any. Failures are reported to `note`."""

    def __init__(self, names: Sequence[str], run: RunDir, note: Callable[[str], None]):
        self._note = note
        self._file = run.path / "tracking.json"
        # The id identifies this run in a tracker across interruptions; `sent` counts rows by stage.
        self._record: dict[str, Any] = {"id": uuid.uuid4().hex[:8], "sent": {}}
        self._record |= read_json(self._file) if self._file.exists() else {}
        self._trackers: dict[str, Any] = {}
        # How far each stage's metrics have been read: in bytes, and in rows.
        self._place: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        if names:
            self._open(names, run.path.resolve().name, run.path / "tracking")

    def _open(self, names: Sequence[str], name: str, folder: Path) -> None:
        from transformers import TrainerControl, TrainerState, TrainingArguments
        from transformers.integrations import get_reporting_integration_callbacks

        folder.mkdir(parents=True, exist_ok=True)
        options = {"report_to": [], "use_cpu": True, "trackio_static_space_id": False, "project": "opdcl"}
        options |= {"output_dir": str(folder), "run_name": f"{name}-{self._record['id']}"}
        self._state = TrainerState()
        self._context = (TrainingArguments(**options), self._state, TrainerControl())
        with _environment(folder, self._record):
            for tracker in names:
                with self._drop_if_it_fails(tracker):
                    (integration,) = get_reporting_integration_callbacks([tracker])
                    self._trackers[tracker] = integration()
                    self._trackers[tracker].on_train_begin(*self._context, model=None)
        with self._drop_if_it_fails("mlflow"):
            if mlflow := self._trackers.get("mlflow"):
                self._record["mlflow"] = mlflow._ml_flow.active_run().info.run_id
        write_json(self._file, self._record)

    def follow(self, stage: StageDir, offset: int) -> None:
        """Send the metrics that a stage has written since the last call; `offset` is added to its steps."""
        if not self._trackers:
            return
        name = stage.path.name.split("-", 1)[1]
        seen, sent = self._seen.get(name, 0), self._record["sent"].get(name, 0)
        self._place[name], rows = read_new_rows(stage.metrics, self._place.get(name, 0))
        self._seen[name] = seen + len(rows)
        # An earlier process may have sent some of them.
        if fresh := [row for number, row in enumerate(rows, seen) if number >= sent]:
            for row in fresh:
                self._log({f"{name}/{key}": value for key, value in _numbers(row)}, offset + row["step"])
            self._record["sent"][name] = self._seen[name]
            write_json(self._file, self._record)

    def finish(self, step: int, scores: dict[str, float], texts: dict[str, str]) -> None:
        """Send scores and texts, and close the trackers."""
        self._log({f"eval_{key}": value for key, value in scores.items()}, step)
        with self._drop_if_it_fails("mlflow"):
            if mlflow := self._trackers.get("mlflow"):  # its integration accepts numbers only
                for key, text in texts.items():
                    mlflow._ml_flow.log_text(text, f"{key}.md")
                mlflow.on_train_end(*self._context)
                del self._trackers["mlflow"]
        self._log({f"eval_{key}": text for key, text in texts.items()}, step)
        self.close()

    def close(self) -> None:
        """Close all trackers."""
        self._call("on_train_end")
        self._trackers.clear()

    def _log(self, values: dict[str, Any], step: int) -> None:
        if self._trackers:
            self._state.global_step = step
            self._call("on_log", logs=values)

    def _call(self, event: str, **values: Any) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._drop_if_it_fails(name):
                getattr(tracker, event)(*self._context, model=None, **values)

    @contextmanager
    def _drop_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as fault:  # each tracker has exceptions of its own
            logger.exception("tracker %s", name)
            self._note(f"tracker {name} failed and is dropped: {type(fault).__name__}: {str(fault)[:200]}")
            self._trackers.pop(name, None)


@dataclass
class TrackedReport:
    """A stage's report that also sends the stage's metrics; `offset` is added to their steps."""

    report: StageReport
    tracking: Tracking
    stage: StageDir
    offset: int

    def progress(self, done: int, total: int, **values: float | str) -> None:
        self.report.progress(done, total, **values)
        self.tracking.follow(self.stage, self.offset)

    def note(self, text: str) -> None:
        self.report.note(text)


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


@contextmanager
def _environment(folder: Path, record: dict[str, Any]) -> Iterator[None]:
    """Set variables that the user has not set, for the block only: a process may do several runs."""
    defaults = {
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",  # stdout is for results
        "WANDB_CONSOLE": "off",
        "WANDB_RUN_ID": record["id"],
        "WANDB_RESUME": "allow",
        "MLFLOW_RUN_ID": record.get("mlflow"),
    }
    added = {key: value for key, value in defaults.items() if value and not os.environ.get(key)}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def _numbers(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if isinstance(value, dict) and key in ("validation", "base"):
            yield from ((f"{key}/{name}", float(number)) for name, number in value.items())
        elif isinstance(value, int | float) and key != "step":
            yield key, float(value)
