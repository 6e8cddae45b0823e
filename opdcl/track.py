"""Show a run in a tracker, through transformers' own integrations: its metrics as they are written, then scores and verdict.

The run's files stay the source of truth: a tracker is fed from them, and one that fails is left alone, not the run.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from opdcl.errors import EnvironmentFault
from opdcl.rundir import RunDir, StageDir, read_json, read_jsonl, write_json

if TYPE_CHECKING:
    from opdcl.training import StageReport

logger = logging.getLogger(__name__)


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
        known = read_json(self._record) if self._record.exists() else {}
        self._sent: dict[str, int] = dict(known.get("sent", {}))
        self._open: dict[str, Any] = {}
        if not names:
            return
        from transformers import TrainerControl, TrainerState, TrainingArguments

        folder = run.path / "tracking"
        folder.mkdir(parents=True, exist_ok=True)
        # Read when an integration is made. stdout is for results, so that nothing of wandb's may appear there.
        ours = {"TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"), "WANDB_DIR": str(folder), "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
        for key, value in ours.items():
            os.environ.setdefault(key, value)
        self._open = {name: _integration(name) for name in names}
        self._arguments = TrainingArguments(
            output_dir=str(folder), run_name=run.path.resolve().name, project="opdcl", report_to=[], use_cpu=True, trackio_static_space_id=False,
        )  # fmt: skip
        self._state, self._control = TrainerState(), TrainerControl()
        for name in names:
            self._try(name, lambda one: one.on_train_begin(self._arguments, self._state, self._control, model=None))

    def follow(self, stage: StageDir, offset: int) -> None:
        """Send what a stage has written since the last call; its steps begin at `offset`."""
        if not self._open:
            return
        name = stage.path.name.split("-", 1)[1]
        rows = read_jsonl(stage.metrics)
        for row in rows[min(self._sent.get(name, 0), len(rows)) :]:
            self._log({f"{name}/{key}": value for key, value in _numbers(row)}, offset + row["step"])
        self._sent[name] = len(rows)

    def finish(self, step: int, numbers: dict[str, float], texts: dict[str, str]) -> None:
        """Send scores and words, and let go."""
        if not self._open:
            return
        self._log({f"eval_{key}": value for key, value in numbers.items()}, step)
        for name in list(self._open):
            if name == "mlflow":  # its integration takes numbers only
                self._try(name, lambda one: [one._ml_flow.log_text(text, f"{key}.md") for key, text in texts.items()])
            else:
                self._try(name, lambda one: one.on_log(self._arguments, self._state, self._control, logs={f"eval_{k}": v for k, v in texts.items()}))
        write_json(self._record, {"sent": self._sent})
        self.close()

    def close(self) -> None:
        """End all trackers' runs."""
        for name in list(self._open):
            self._try(name, lambda one: one.on_train_end(self._arguments, self._state, self._control, model=None))
        self._open.clear()

    def _log(self, values: dict[str, float], step: int) -> None:
        self._state.global_step = step
        for name in list(self._open):
            self._try(name, lambda one: one.on_log(self._arguments, self._state, self._control, model=None, logs=dict(values)))

    def _try(self, name: str, do: Callable[[Any], Any]) -> None:
        try:
            do(self._open[name])
        except Exception as fault:  # whatever a tracker raises, the run goes on
            logger.exception("tracker %s", name)
            self.tell(f"tracker {name} failed and is left out from here: {type(fault).__name__}: {str(fault)[:200]}")
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
    found = {f"{name}/{state}": suite[state]["value"] for name, suite in summary["suites"].items() for state in ("base", "tuned", "recovered") if suite[state]}
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
