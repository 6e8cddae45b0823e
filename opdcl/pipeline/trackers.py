"""Show a run in a tracker, through transformers' own integrations: its metrics as they are written, then scores and verdict.

The run's files stay the source of truth: a tracker is fed from them, and one that fails is left alone, not the run.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from opdcl.errors import EnvironmentFault
from opdcl.results.scores import STATES
from opdcl.rundir.files import read_json, read_jsonl, write_json
from opdcl.rundir.layout import RunDir, StageDir

if TYPE_CHECKING:
    from opdcl.training import StageReport


logger = logging.getLogger(__name__)

PLACES = (
    "TENSORBOARD_LOGGING_DIR",
    "WANDB_DIR",
    "WANDB_SILENT",
    "WANDB_CONSOLE",
    "WANDB_RUN_ID",
    "WANDB_RESUME",
    "MLFLOW_RUN_ID",
)

# What the user chose, before a run of ours puts in its own; several may follow each other in one process.
USERS = {key: os.environ.get(key) for key in PLACES}


class Tracking:
    """The trackers of one run; with none it does nothing.

    Args:
        names: Which, by their names in `transformers.TrainingArguments.report_to`.
        run: Whose files feed them.
        tell: Where a sentence goes when a tracker fails.
    """

    def __init__(self, names: list[str], run: RunDir, tell: Callable[[str], None]):
        self.run, self.tell = run, tell
        self._record = run.path / "tracking.json"
        # Its name in a tracker is the run's own, however often it is interrupted, and nobody else's.
        self._known: dict[str, Any] = {"id": uuid.uuid4().hex[:8], "sent": {}} | (
            read_json(self._record) if self._record.exists() else {}
        )
        self._open: dict[str, Any] = {}
        if not names:
            return
        from transformers import TrainerControl, TrainerState, TrainingArguments

        folder = run.path / "tracking"
        folder.mkdir(parents=True, exist_ok=True)
        # Read when an integration is made. stdout is for results, so that nothing of wandb's may appear there.
        ours = {
            "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
            "WANDB_DIR": str(folder),
            "WANDB_SILENT": "true",
            "WANDB_CONSOLE": "off",
            "WANDB_RUN_ID": self._known["id"],
            "WANDB_RESUME": "allow",
            "MLFLOW_RUN_ID": self._known.get("mlflow"),
        }
        for key, value in ours.items():
            if (chosen := USERS[key] or value) is not None:
                os.environ[key] = chosen
            else:
                os.environ.pop(key, None)
        self._arguments = TrainingArguments(
            output_dir=str(folder),
            run_name=f"{run.path.resolve().name}-{self._known['id']}",
            project="opdcl",
            report_to=[],
            use_cpu=True,
            trackio_static_space_id=False,
        )
        self._state, self._control = TrainerState(), TrainerControl()
        for name in names:
            self._open[name] = None
            self._try(name, lambda _, name=name: self._open.update({name: _integration(name)}))
            self._try(
                name, lambda one: one.on_train_begin(self._arguments, self._state, self._control, model=None)
            )
        if "mlflow" in self._open:
            self._try("mlflow", lambda one: self._known.update(mlflow=one._ml_flow.active_run().info.run_id))
        write_json(self._record, self._known)

    def follow(self, stage: StageDir, offset: int) -> None:
        """Send what a stage has written since the last call; its steps begin at `offset`."""
        if not self._open:
            return
        name = stage.path.name.split("-", 1)[1]
        rows = read_jsonl(stage.metrics)
        sent = self._known["sent"]
        if fresh := rows[min(sent.get(name, 0), len(rows)) :]:
            for row in fresh:
                self._log({f"{name}/{key}": value for key, value in _numbers(row)}, offset + row["step"])
            sent[name] = len(rows)
            write_json(self._record, self._known)

    def finish(self, step: int, numbers: dict[str, float], texts: dict[str, str]) -> None:
        """Send scores and words, and let go."""
        if not self._open:
            return
        self._log({f"eval_{key}": value for key, value in numbers.items()}, step)
        for name in list(self._open):
            if name == "mlflow":  # its integration takes numbers only
                self._try(
                    name,
                    lambda one: [one._ml_flow.log_text(text, f"{key}.md") for key, text in texts.items()],
                )
            else:
                self._try(
                    name,
                    lambda one: one.on_log(
                        self._arguments,
                        self._state,
                        self._control,
                        logs={f"eval_{k}": v for k, v in texts.items()},
                    ),
                )
        self.close()

    def close(self) -> None:
        """End all trackers' runs."""
        for name in list(self._open):
            self._try(
                name, lambda one: one.on_train_end(self._arguments, self._state, self._control, model=None)
            )
        self._open.clear()

    def _log(self, values: dict[str, float], step: int) -> None:
        self._state.global_step = step
        for name in list(self._open):
            self._try(
                name,
                lambda one: one.on_log(
                    self._arguments, self._state, self._control, model=None, logs=dict(values)
                ),
            )

    def _try(self, name: str, do: Callable[[Any], Any]) -> None:
        if name not in self._open:
            return
        try:
            do(self._open[name])
        except Exception as fault:  # whatever a tracker raises, the run goes on
            logger.exception("tracker %s", name)
            self.tell(
                f"tracker {name} failed and is left out from here: {type(fault).__name__}: {str(fault)[:200]}"
            )
            del self._open[name]


class Followed:
    """A stage's line whose progress also feeds the trackers."""

    def __init__(self, line: StageReport, tracking: Tracking, stage: StageDir, offset: int):
        self._line, self._tracking, self._stage, self._offset = line, tracking, stage, offset

    def progress(self, done: int, total: int, **values: float | str) -> None:
        self._line.progress(done, total, **values)
        self._tracking.follow(self._stage, self._offset)

    def note(self, text: str) -> None:
        self._line.note(text)


@contextmanager
def tracking(names: list[str], run: RunDir, tell: Callable[[str], None]) -> Iterator[Tracking]:
    """Open a run's trackers, and let go of them whatever happens."""
    opened = Tracking(names, run, tell)
    try:
        yield opened
    finally:
        with suppress(Exception):
            opened.close()


def check_trackers(names: list[str]) -> None:
    """Refuse a tracker whose package is not there."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise EnvironmentFault(f"tracker {name} is not installed", f"pip install {name}")


def scores(summary: dict[str, Any]) -> dict[str, float]:
    """Return every score of a run's summary by suite and state, with R and D where they are known."""
    found = {
        f"{name}/{state}": suite[state]["value"]
        for name, suite in summary["suites"].items()
        for state in STATES
        if suite[state]
    }
    return found | {key: summary[key]["value"] for key in ("recovery", "domain_retention") if summary[key]}


def _integration(name: str) -> Any:
    from transformers.integrations import get_reporting_integration_callbacks

    (made,) = get_reporting_integration_callbacks([name])
    return made()


def _numbers(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if isinstance(value, dict) and key in ("validation", "warm_start"):
            yield from ((f"{key}/{inner}", float(number)) for inner, number in value.items())
        elif isinstance(value, int | float) and key != "step":
            yield key, float(value)
