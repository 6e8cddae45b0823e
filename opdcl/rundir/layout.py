"""The paths of a run directory, and the lock that lets one process write to it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from opdcl.errors import UsageError
from opdcl.rundir.files import now, read_json
from opdcl.rundir.hashes import ADAPTER, check, damage

# The stage that makes the adapter of each state, and the other way round.
STAGE_OF = {"tuned": "finetune", "recovered": "recover"}
STATE_OF = {stage: state for state, stage in STAGE_OF.items()}

# The file in which transformers and vLLM look for a chat template.
TEMPLATE = "chat_template.jinja"

# Files by which other folders are recognized, so that an error can name them.
OTHER_FOLDERS = {"config.json": "a model folder", "adapter_config.json": "an adapter folder"}


@dataclass(unsafe_hash=True)
class StageDir:
    """The folder of one training stage."""

    path: Path

    def __post_init__(self) -> None:
        self.record = self.path / "stage.json"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.prompts = self.path / "prompts.jsonl"  # those that base has written
        self.replay = self.path / "replay.jsonl"  # general prompts with answers of base
        self.adapter = self.path / "adapter"
        self.trainer = self.path / "trainer"  # holds checkpoint-N/

    def state(self) -> dict:
        """Return the content of `stage.json`, or an empty dict before the stage has started."""
        return read_json(self.record) if self.record.exists() else {}

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


@dataclass(unsafe_hash=True)
class RunDir:
    """A run directory. Other modules do not join its paths."""

    path: Path

    def __post_init__(self) -> None:
        self.workflow = self.path / "workflow.yaml"
        self.config = self.path / "config.json"
        self.manifest = self.path / "manifest.json"
        self.evals = self.path / "evals"
        # The report as Markdown and as HTML, and the model card.
        self.reports = self.path / "report.md", self.path / "report.html", self.path / "README.md"

    def is_run(self) -> bool:
        """Return whether opdcl made this directory: a model's `config.json` has other keys."""
        if not self.config.is_file():
            return False
        try:
            config = read_json(self.config)
        except UsageError:  # damaged; a run has another file by which to recognize it
            return self.workflow.exists()
        return isinstance(config, dict) and {"workflow", "origins"} <= config.keys()

    def settings(self) -> dict[str, Any]:
        """Return the workflow of the run as plain data, or an empty dict before the run has started."""
        return (read_json(self.config).get("workflow") or {}) if self.config.exists() else {}

    def read_manifest(self) -> dict[str, Any]:
        """Return the content of `manifest.json`, or an empty dict before the run has started."""
        return read_json(self.manifest) if self.manifest.exists() else {}

    def stage(self, index: int, name: str) -> StageDir:
        return StageDir(self.path / "stages" / f"{index:02d}-{name}")

    def stages(self) -> list[StageDir]:
        return [StageDir(folder) for folder in sorted((self.path / "stages").glob("[0-9][0-9]-*"))]

    def find_stage(self, name: str) -> StageDir | None:
        """Return the last stage with this name, or None."""
        return next((s for s in reversed(self.stages()) if s.path.name.split("-", 1)[1] == name), None)

    def stage_record(self, name: str) -> dict:
        """Return the record of the last stage with this name, or an empty dict before it has started."""
        stage = self.find_stage(name)
        return stage.state() if stage else {}

    def last_stage(self) -> StageDir | None:
        """Return the last training stage if it is done."""
        return next((stage for stage in self.stages()[-1:] if stage.is_done()), None)

    def adapters(self) -> dict[str, Path]:
        """Return the folders of finished adapters by state, `tuned` before `recovered`."""
        stages = {state: self.find_stage(name) for state, name in STAGE_OF.items()}
        return {state: stage.adapter for state, stage in stages.items() if stage and stage.is_done()}

    def adapter_damage(self) -> dict[str, str]:
        """Return state -> problem for finished adapters that are not those which their stages recorded."""
        problems = {}
        for state, folder in self.adapters().items():
            recorded = StageDir(folder.parent).state().get("adapter_sha256")
            if recorded and (problem := check(folder / ADAPTER, recorded)):
                problems[state] = f"{folder / ADAPTER} {problem} since its stage recorded it"
        return problems

    def intact_adapters(self) -> dict[str, Path]:
        """Return `adapters`; raise a UsageError if one is not that which its stage recorded."""
        for problem in self.adapter_damage().values():
            hint = "restore the file from a copy, or repeat the stage: "
            raise UsageError(problem, f"{hint}opdcl run {self.workflow} -o {self.path} --force")
        return self.adapters()

    def eval_result(self, state: str, suite: str) -> Path:
        return self.evals / state / f"{suite}.json"

    def eval_samples(self, state: str, suite: str) -> Path:
        return self.evals / state / f"{suite}.samples.jsonl"

    def new_log(self) -> Path:
        """Return the path of the next attempt's log."""
        folder = self.path / "logs"
        return folder / f"attempt_{len(list(folder.glob('attempt_*.log'))) + 1}.log"

    @contextlib.contextmanager
    def lock(self) -> Iterator[dict | None]:
        """Lock the run for this process and yield the previous owner if it died without unlocking, else None.

        The lock file stays: deleting it would let two processes lock two files of the same name. It contains
        the owner, and is empty while nobody holds the lock.

        Raises:
            UsageError: Another process holds the lock, or the file system has no locks.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / ".lock"
        host = socket.gethostname()
        try:
            held = FileLock(file, mode=0o644, fallback_to_soft=False).acquire(blocking=False)
        except Timeout:
            raise self._in_use(_lock_owner(file), "wait for it, or stop it") from None
        except OSError as fault:
            problem = f"{self.path}: this file system cannot lock ({fault.strerror})"
            raise UsageError(problem, "choose a local disk with -o") from fault
        with held:
            owner = _lock_owner(file)
            if owner.get("host", host) != host:  # locks on a shared disk may not reach every machine
                raise self._in_use(owner, f"wait for it, or remove {file} if that process is gone")
            try:
                file.write_text(json.dumps({"pid": os.getpid(), "host": host, "since": now()}))
                yield owner or None
            finally:
                file.write_text("")

    def _in_use(self, owner: dict, hint: str) -> UsageError:
        pid, host, since = (owner.get(key) for key in ("pid", "host", "since"))
        return UsageError(f"{self.path} is in use by process {pid} on {host} since {since}", hint)


def open_run(path: Path) -> RunDir:
    """Return an existing run directory; raise a `UsageError` that names what else the path is."""
    run = RunDir(path)
    if not run.is_run():
        kind = next((kind for file, kind in OTHER_FOLDERS.items() if (path / file).is_file()), None)
        problem = f"{path} is {kind}, not a run directory" if kind else f"{path} is not a run directory"
        hint = "opdcl finetune --data ROWS -o RUN makes a run directory"
        if kind:
            tuned = f"{path} --base BASE" if kind == OTHER_FOLDERS["config.json"] else path
            repair = f"opdcl recover {tuned} --domain PROMPTS"
            hint = f"measure what it costs: opdcl eval {tuned}; repair it: {repair}"
        raise UsageError(problem, hint)
    return run


def adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of an adapter's `adapter_config.json`."""
    file = folder / "adapter_config.json"
    hint = "copy it from where the adapter was trained"
    if not file.is_file():
        raise UsageError(f"{file} does not exist", hint)
    try:
        config = read_json(file)
    except RecursionError as fault:
        raise UsageError(f"{file} is nested too deeply", hint) from fault
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds no settings: it is no JSON object", hint)
    return config


def _lock_owner(file: Path) -> dict:
    try:
        owner = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}
