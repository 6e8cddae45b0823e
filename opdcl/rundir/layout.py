"""Every path of a run, and how files get there: whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opdcl.errors import UsageError
from opdcl.rundir.files import now, read_json

# Which stage's adapter a state stands for.
STAGE_OF = {"tuned": "finetune", "recovered": "recover"}


@dataclass(frozen=True)
class StageDir:
    """The folder of one stage: `stage.json`, `metrics.jsonl`, `adapter/`, `trainer/checkpoint-N/`, `samples.jsonl`."""

    path: Path

    @property
    def record(self) -> Path:
        return self.path / "stage.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def trainer(self) -> Path:
        return self.path / "trainer"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    def state(self) -> dict:
        """Return what `stage.json` says, or an empty dict before the stage has started."""
        return read_json(self.record) if self.record.exists() else {}

    def checkpoints(self) -> list[Path]:
        """Return the folders of all trainer checkpoints, whole or not, newest first."""
        found = [p for p in self.trainer.glob("checkpoint-*") if p.name.rsplit("-", 1)[1].isdecimal()]
        return sorted(found, key=lambda p: int(p.name.rsplit("-", 1)[1]), reverse=True)

    def last_checkpoint(self) -> Path | None:
        """Return the newest checkpoint that is as it was written, or None."""
        from opdcl.rundir.seals import damage

        return next((p for p in self.checkpoints() if not damage(p)), None)


@dataclass(frozen=True)
class RunDir:
    """A run directory. Nothing outside this module joins its paths."""

    path: Path

    @property
    def workflow(self) -> Path:
        return self.path / "workflow.yaml"

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def reports(self) -> tuple[Path, Path, Path]:
        """The report as Markdown, the report as a page, and the model card."""
        return self.path / "report.md", self.path / "report.html", self.path / "README.md"

    @property
    def evals(self) -> Path:
        return self.path / "evals"

    def stage(self, index: int, name: str) -> StageDir:
        return StageDir(self.path / "stages" / f"{index:02d}-{name}")

    def stages(self) -> list[StageDir]:
        return [StageDir(p) for p in sorted((self.path / "stages").glob("[0-9][0-9]-*"))]

    def find_stage(self, name: str) -> StageDir | None:
        """Return the last stage of that name, or None."""
        found = [s for s in self.stages() if s.path.name.split("-", 1)[1] == name]
        return found[-1] if found else None

    def last_stage(self) -> StageDir | None:
        """Return the last training stage if it is done."""
        stages = self.stages()
        return stages[-1] if stages and stages[-1].state().get("status") == "done" else None

    def adapters(self) -> dict[str, Path]:
        """Return the folders of finished adapters by the state that they stand for."""
        stages = {state: self.find_stage(name) for state, name in STAGE_OF.items()}
        return {
            state: stage.adapter
            for state, stage in stages.items()
            if stage and stage.state().get("status") == "done"
        }

    def eval_result(self, state: str, suite: str) -> Path:
        return self.evals / state / f"{suite}.json"

    def eval_samples(self, state: str, suite: str) -> Path:
        return self.evals / state / f"{suite}.samples.jsonl"

    def new_log(self) -> Path:
        """Return the path of the next attempt's log."""
        return self.path / "logs" / f"attempt_{len(list((self.path / 'logs').glob('attempt_*.log'))) + 1}.log"

    @contextlib.contextmanager
    def lock(self) -> Iterator[dict | None]:
        """Hold the run for this process: a second writer is refused, a dead owner's lock is taken over.

        Yields:
            The dead owner, if there was one.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / ".lock"
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": now()}
        # The system holds the lock and drops it when its owner dies; the file says who that is, and stays, because
        # removing it would let two processes hold locks on two files of one name. An owner that ended well leaves it empty.
        handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free = True
            except BlockingIOError:
                free = False
            except OSError as fault:
                raise UsageError(
                    f"{self.path}: this file system cannot lock ({fault.strerror})",
                    "choose a local disk with -o",
                ) from fault
            other = _lock_owner(file)
            elsewhere = (
                other.get("host", me["host"]) != me["host"]
            )  # a shared disk's locks may not reach every machine
            if not free or elsewhere:
                raise UsageError(
                    f"{self.path} is in use by process {other.get('pid')} on {other.get('host')} since {other.get('since')}",
                    f"wait for it, or remove {file} if that process is gone"
                    if elsewhere
                    else "wait for it, or stop it",
                )
            os.truncate(handle, 0)
            os.write(handle, json.dumps(me).encode())
            try:
                yield other or None
            finally:
                os.truncate(handle, 0)
        finally:
            os.close(handle)


def _lock_owner(file: Path) -> dict:
    try:
        owner: dict = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


STATE_OF = {stage: state for state, stage in STAGE_OF.items()}
