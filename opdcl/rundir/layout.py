"""The paths of a run directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opdcl.errors import UsageError, typed
from opdcl.rundir.files import read_json
from opdcl.rundir.hashes import ADAPTER, SEAL, check, damage, read_seal
from opdcl.rundir.records import read_config, read_manifest, read_metrics, read_stage

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
        self.replay = self.path / "replay.jsonl"  # general prompts with their answers
        self.learned = self.path / "learned.json"  # which rows a fine-tune learns, by hashes
        self.adapter = self.path / "adapter"
        self.trainer = self.path / "trainer"  # holds checkpoint-N/
        self.best = self.trainer / "best"  # the adapter that a recovery would end with now

    def state(self) -> dict:
        """Return the content of `stage.json`, or an empty dict before the stage has started."""
        return read_stage(self.record) if self.record.exists() else {}

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


@dataclass(unsafe_hash=True)
class RunDir:
    """A run directory. Other modules do not join its paths."""

    path: Path

    def __post_init__(self) -> None:
        # In a call from Python, or in quotes, no shell has expanded `~`.
        self.path = Path(os.path.expanduser(self.path))
        self.workflow = self.path / "workflow.yaml"
        self.config = self.path / "config.json"
        self.manifest = self.path / "manifest.json"
        self.seal = self.path / SEAL
        self.evals = self.path / "evals"
        self.data = self.path / "data"  # rows that were given in memory, or split
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
        known = isinstance(config, dict) and {"workflow", "origins"} <= config.keys()
        return known or (self.workflow.exists() and self.seal.exists())

    def settings(self) -> dict[str, Any]:
        """Return the workflow of the run as plain data, or an empty dict before the run has started."""
        settings: dict[str, Any] = read_config(self.config)["workflow"] if self.config.exists() else {}
        return settings

    def read_manifest(self) -> dict[str, Any]:
        """Return the content of `manifest.json`, or an empty dict before the run has started."""
        return read_manifest(self.manifest) if self.manifest.exists() else {}

    def stage(self, index: int, name: str) -> StageDir:
        return StageDir(self.path / "stages" / f"{index:02d}-{name}")

    def stages(self) -> list[StageDir]:
        return [StageDir(folder) for folder in sorted((self.path / "stages").glob("[0-9][0-9]-*"))]

    def find_stage(self, name: str) -> StageDir | None:
        """Return the last stage with this name, or None."""
        return next((stage for stage in reversed(self.stages()) if stage.name == name), None)

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
        problems: dict[str, str] = {}
        for state, folder in self.adapters().items():
            try:
                for file, digest in self._recorded_hashes(folder).items():
                    if problem := check(file, digest):
                        problems.setdefault(state, f"{file} {problem} since its stage recorded it")
            except UsageError as fault:
                problems[state] = fault.message
        return problems

    def _recorded_hashes(self, adapter: Path) -> dict[Path, str]:
        """Return the hashes of an adapter's files: of the weights from its stage, of all from the seal."""
        weights = StageDir(adapter.parent).state().get("adapter_sha256")
        hashes = {adapter / ADAPTER: str(weights)} if weights else {}
        if self.seal.exists():
            for name, digest in read_seal(self.path).items():
                if (self.path / name).parent == adapter:
                    hashes[self.path / name] = digest
        return hashes

    def intact_adapters(self) -> dict[str, Path]:
        """Return `adapters`; raise a UsageError if one, or the run's settings, are not those recorded."""
        problems = list(self.adapter_damage().values())
        if self.seal.exists() and not problems:
            recorded = read_seal(self.path).get(self.config.name)
            if recorded and (problem := check(self.config, recorded)):
                problems.append(f"{self.config} {problem} since opdcl wrote it")
        if problems:
            again = typed("opdcl", "run", self.workflow, "-o", self.path, "--force")
            raise UsageError(problems[0], f"restore the file from a copy, or repeat the stage: {again}")
        return self.adapters()

    def eval_result(self, state: str, suite: str) -> Path:
        return self.evals / state / f"{suite}.json"

    def eval_samples(self, state: str, suite: str) -> Path:
        return self.evals / state / f"{suite}.samples.jsonl"

    def new_log(self) -> Path:
        """Return the path of the next attempt's log."""
        folder = self.path / "logs"
        return folder / f"attempt_{len(list(folder.glob('attempt_*.log'))) + 1}.log"


def open_run(path: Path) -> RunDir:
    """Return an existing run directory; raise a `UsageError` that names what else the path is."""
    run = RunDir(path)
    if not run.is_run():
        kind = next((kind for file, kind in OTHER_FOLDERS.items() if (path / file).is_file()), None)
        problem = f"{path} is {kind}, not a run directory" if kind else f"{path} is not a run directory"
        hint = "opdcl finetune ROWS -o RUN makes a run directory"
        if inside := next((parent for parent in path.parents if RunDir(parent).is_run()), None):
            hint = f"name the run itself: {inside}"
        if kind:
            tuned = typed(path) + " --base BASE" * (kind == OTHER_FOLDERS["config.json"])
            hint = f"measure it: opdcl eval {tuned}; repair it: opdcl recover {tuned} --domain PROMPTS"
        raise UsageError(problem, hint)
    return run


def adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of an adapter's `adapter_config.json`."""
    file = folder / "adapter_config.json"
    hint = "copy it from where the adapter was trained"
    if not file.is_file():
        raise UsageError(f"{file} does not exist", hint)
    config = read_json(file)
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds no settings: it is no JSON object", hint)
    return config
