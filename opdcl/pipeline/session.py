"""One process's work on a run."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl import parallel
from opdcl.config.workflow import Workflow
from opdcl.console import Output
from opdcl.errors import OpdclError, UsageError
from opdcl.pipeline.plan import Task, training_stages
from opdcl.pipeline.reuse import take_start
from opdcl.pipeline.sources import data_hashes
from opdcl.pipeline.trackers import Followed, Tracking
from opdcl.rundir.environment import machine, versions
from opdcl.rundir.files import now, read_json, write_json
from opdcl.rundir.layout import STAGE_OF, RunDir, StageDir
from opdcl.sanitize import redact
from opdcl.version import __version__

if TYPE_CHECKING:
    from opdcl.model.adapters import ModelRef
    from opdcl.model.backbone import Backbone


class Session:
    """One process's work on a run: the backbone is loaded once, at the first task that needs it."""

    def __init__(self, workflow: Workflow, run: RunDir, output: Output, tracked: Tracking):
        self.workflow, self.run, self.output, self.tracked = workflow, run, output, tracked
        self._backbone: Backbone | None = None
        self.manifest: dict[str, Any] = read_json(run.manifest) if run.manifest.exists() else {}

    @property
    def backbone(self) -> Backbone:
        if self._backbone is None:
            from opdcl.model.backbone import Backbone

            with self.output.stage("load") as line:
                line.note(f"{self.workflow.model.id}")
                self._backbone = Backbone.load(self.workflow.model)
                if parallel.worker_count() > 1:
                    line.note(
                        f"{parallel.worker_count()} processes, each with {'its part of the' if parallel.sharded() else 'the whole'} base"
                    )
                if self.workflow.model.deterministic:
                    line.note(_price_of_determinism(self._backbone.device.type))
            model = self._backbone.causal_lm
            before = self._backbone.fingerprint()
            base = self.manifest.setdefault(
                "base", {"id": self.workflow.model.id, "revision": self.workflow.model.revision}
            )
            if (known := base.get("fingerprint_before")) and known != before:
                raise UsageError(
                    f"the weights of {self.workflow.model.id} are not those that this run began with",
                    "restore the model, or start a new run directory",
                )
            base["fingerprint_before"] = before
            self.manifest["device"] = machine() | {
                "kind": str(model.device),
                "dtype": str(model.dtype).removeprefix("torch."),
                "processes": parallel.worker_count(),
            }
            self._save_manifest()
        return self._backbone

    def do(self, tasks: list[Task]) -> None:
        """Do all tasks that the plan does not skip."""
        started = time.perf_counter()
        self.manifest |= {
            "created": self.manifest.get("created", now()),
            "opdcl": __version__,
            "versions": versions(),
            "command": self.manifest.get("command", command_line()),
        }
        self._save_manifest()
        try:
            for task in tasks:
                if task.action == "skip":
                    self.output.note(f"{label(task)}: skipped, {task.why}")
                elif task.name == "eval":
                    self._measure(task)
                else:
                    self._train(task)
        finally:
            # Where the base is spread over processes, all must take part, which after an error is not to be hoped for.
            if self._backbone is not None and not (parallel.sharded() and sys.exc_info()[0]):
                self.manifest["base"]["fingerprint_after"] = self._backbone.fingerprint()
            self.manifest["seconds"] = round(
                self.manifest.get("seconds", 0) + time.perf_counter() - started, 1
            )
            self._save_manifest()
        if (
            self._backbone is not None
            and self.manifest["base"]["fingerprint_after"] != self.manifest["base"]["fingerprint_before"]
        ):
            raise OpdclError(
                "the base weights changed during the run", "this is a defect of opdcl: please report it"
            )

    def _save_manifest(self) -> None:
        self.manifest["adapters"] = {
            state: {
                "path": str(folder.relative_to(self.run.path)),
                "sha256": StageDir(folder.parent).state()["adapter_sha256"],
            }
            for state, folder in self.run.adapters().items()
        }
        write_json(self.run.manifest, self.manifest)

    def _train(self, task: Task) -> None:
        from opdcl.distill.prompts import read_recovery_source
        from opdcl.rundir.hashes import adapter_hash
        from opdcl.stages.finetune import finetune
        from opdcl.stages.recover import recover
        from opdcl.training import peak_memory, reset_peak_memory

        stage = training_stages(self.run, self.workflow)[task.name]
        config = getattr(self.workflow, task.name)
        if config is None:
            self.output.note(f"{task.name}: taken from {self.workflow.start}")
            inputs = _inputs(self.workflow, self.run, task.name)
            take_start(
                self.workflow.start,
                stage,
                {"stage": task.name, "fingerprint": task.fingerprint, "config": {}, "inputs": inputs},
            )
            self._save_manifest()
            return
        earlier = stage.state() if task.action == "resume" else {}
        record = {
            "stage": task.name,
            "status": "running",
            "fingerprint": task.fingerprint,
            "config": config.model_dump(),
            "inputs": _inputs(self.workflow, self.run, task.name),
            "started": earlier.get("started", now()),
            "cost": earlier.get("cost", {}),
        }
        write_json(stage.record, record)
        backbone = self.backbone
        reset_peak_memory()
        started = time.perf_counter()
        try:
            with self.output.stage(task.name) as line:
                before = steps_done(self.run, up_to=stage)
                parent, report = self._parent(task.name), Followed(line, self.tracked, stage, before)
                if task.name == "finetune":
                    finetune(config, backbone, parent, stage, report)
                else:
                    recover(config, read_recovery_source(config), backbone, parent, stage, report)
                self.tracked.follow(stage, before)
        finally:
            cost = record["cost"]
            done = [row for row in _metric_rows(stage) if "tokens" in row]
            record["cost"] = {
                "seconds": round(cost.get("seconds", 0) + time.perf_counter() - started, 1),
                "tokens": sum(row["tokens"] for row in done),
                "steps": max((row["step"] for row in done), default=0),
                "peak_memory_bytes": max(cost.get("peak_memory_bytes", 0), peak_memory()),
            }
            write_json(stage.record, record)
        record |= {"status": "done", "finished": now(), "adapter_sha256": adapter_hash(stage.adapter)}
        write_json(stage.record, record)
        self._save_manifest()

    def _parent(self, name: str) -> ModelRef:
        from opdcl.model.adapters import ModelRef, find_adapter

        if name == "finetune":
            return ModelRef(
                self.workflow.model, find_adapter(self.workflow.start) if self.workflow.start else None
            )
        tuned = self.run.find_stage("finetune")
        if tuned is None or tuned.state().get("status") != "done":
            raise UsageError(
                f"{self.run.path} has no fine-tuned adapter to recover",
                f"opdcl finetune --data ROWS -o {self.run.path}",
            )
        return ModelRef(self.workflow.model, tuned.adapter)

    def _measure(self, task: Task) -> None:
        from opdcl.rundir.hashes import adapter_hash
        from opdcl.stages.evaluate import evaluate

        backbone = self.backbone
        model: dict[str, Any] = {"id": self.workflow.model.id, "adapter_sha256": None}
        adapter: Path | None = None
        if task.state != "base":
            stage = self.run.find_stage(STAGE_OF[task.state])
            assert stage is not None
            adapter = stage.adapter
            model["adapter_sha256"] = adapter_hash(adapter)
            if getattr(self, "_loaded", None) != task.state:
                backbone.drop_adapters()
                backbone.load_adapter(adapter, "student")
                self._loaded = task.state
        config = self.workflow.eval
        assert config is not None
        with self.output.stage(f"eval {task.suite} {task.state}") as line:
            state = "base" if task.state == "base" else "student"
            found = evaluate(
                config, backbone, state, task.state, task.suite, task.role, self.run, model, line, adapter
            )
            line.note(f"{found.metric} {found.metrics[found.metric]:.3f} (n = {found.n})")
        file = self.run.eval_result(task.state, task.suite)
        write_json(file, read_json(file) | {"fingerprint": task.fingerprint})


def _inputs(workflow: Workflow, run: RunDir, name: str) -> dict[str, Any]:
    """Return the named inputs of a stage, to tell later which of them changed."""
    from opdcl.pipeline.plan import stage_inputs

    return stage_inputs(workflow, run, data_hashes(workflow))[name]


def steps_done(run: RunDir, up_to: StageDir | None = None) -> int:
    """Return the optimizer steps of all stages, or of those before one."""
    return sum(
        stage.state().get("cost", {}).get("steps", 0)
        for stage in run.stages()
        if up_to is None or stage.path < up_to.path
    )


def _metric_rows(stage: StageDir) -> list[dict]:
    from opdcl.rundir.files import read_jsonl

    return read_jsonl(stage.metrics)


def label(task: Task) -> str:
    return f"eval {task.suite} {task.state}" if task.name == "eval" else task.name


def command_line() -> str:
    """Return the command that started this process, ready to be pasted."""
    return redact(" ".join(["opdcl", *(shlex.quote(a) for a in sys.argv[1:])]))


def _price_of_determinism(device: str) -> str:
    if device == "cpu":
        return "deterministic: costs nothing here, on the CPU a run repeats bit for bit anyway"
    return (
        "deterministic: every step is slower, since sums keep their order and the fastest kernels are left out; a kernel without "
        "such a form ends the run with its name. It repeats on the same kind of GPU with the same versions only"
    )
