"""One worker's part of a run: it does the planned tasks, and keeps the manifest and the stage records."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl import parallel
from opdcl.config.evaluate import CLOSENESS
from opdcl.console import Output
from opdcl.errors import OpdclError, UsageError
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Task, stage_folder
from opdcl.pipeline.reuse import take_start
from opdcl.pipeline.trackers import TrackedReport, Tracking
from opdcl.rundir.environment import machine, versions
from opdcl.rundir.files import now, write_json
from opdcl.rundir.hashes import adapter_hash
from opdcl.rundir.layout import RunDir, StageDir
from opdcl.rundir.records import read_metrics
from opdcl.rundir.seals import forget, seal_new
from opdcl.sanitize import redact
from opdcl.version import __version__

if TYPE_CHECKING:
    from opdcl.model.backbone import Backbone


class OtherBase(UsageError):
    """The base is not the one that the run began with; nothing was done."""


class Session:
    """One worker's part of a run, in the run directory or the worker's copy of it."""

    def __init__(self, job: Job, output: Output, tracked: Tracking):
        self.job, self.workflow, self.run = job, job.workflow, job.run
        self.output, self.tracked = output, tracked
        self.manifest = self.run.read_manifest()
        self._backbone: Backbone | None = None
        self._recorded = False
        self._measured_state = "base"
        self._started = time.perf_counter()

    def do(self, tasks: list[Task]) -> None:
        """Do all tasks that the plan does not skip.

        Raises:
            OpdclError: A task failed, or the base weights changed on the way.
        """
        try:
            for task in tasks:
                if task.action == "skip":
                    self.output.note(f"{task.label}: skipped, {task.why}")
                elif task.name == "eval":
                    self._measure(task)
                elif task.name == "finetune" and self.workflow.finetune is None:
                    self._record_command()
                    self.output.note(f"{task.name}: taken from {self.workflow.start}")
                    take_start(self.workflow, self.run, task, lambda: self.backbone)
                    self._save_manifest()
                else:
                    self._train(task)
                seal_new(self.run)
        finally:
            # The fingerprint of a sharded base needs all workers; after an error some may have exited.
            if self._backbone and not (parallel.sharded() and sys.exc_info()[0]):
                self.manifest["base"]["fingerprint_after"] = self._backbone.fingerprint()
            if self._recorded:
                seconds = self.manifest.get("seconds", 0) + time.perf_counter() - self._started
                self.manifest["seconds"] = round(seconds, 1)
                self._save_manifest()
        base = self.manifest.get("base", {})
        if self._backbone and base["fingerprint_after"] != base["fingerprint_before"]:
            hint = "this is a defect of opdcl: please report it"
            raise OpdclError("the base weights changed during the run", hint)

    def _train(self, task: Task) -> None:
        from opdcl.results.notes import start_notes
        from opdcl.training import peak_memory, reset_peak_memory

        _ = self.backbone  # loading it is no part of the stage's cost
        stage = stage_folder(self.run, task.name)
        earlier = stage.state() if task.action == "resume" else {}
        cost = earlier.get("cost", {})
        record = {
            "stage": task.name,
            "status": "running",
            "fingerprint": task.fingerprint,
            "config": getattr(self.workflow, task.name).model_dump(),
            "inputs": task.inputs,
            "started": earlier.get("started", now()),
            "cost": cost,
        }
        if task.name == "finetune":
            rows, bad = self.job.sources.finetune_rows(self.workflow)
            record["rows"] = len(rows) + len(bad)
        write_json(stage.record, record)
        reset_peak_memory()
        started = time.perf_counter()
        try:
            self._run_stage(task, stage, record)
        finally:
            steps = [row for row in read_metrics(stage.metrics) if "tokens" in row]
            record["cost"] = {
                "seconds": round(cost.get("seconds", 0) + time.perf_counter() - started, 1),
                "tokens": sum(row["tokens"] for row in steps),
                "steps": max((row["step"] for row in steps), default=0),
                "peak_memory_bytes": max(cost.get("peak_memory_bytes", 0), peak_memory()),
            }
            write_json(stage.record, record)
        record |= {"status": "done", "finished": now(), "adapter_sha256": adapter_hash(stage.adapter)}
        write_json(stage.record, record)
        self._save_manifest()
        if task.name == "recover":
            for note in start_notes(read_metrics(stage.metrics)):
                self.output.note(f"{task.label}: {note}")

    def _run_stage(self, task: Task, stage: StageDir, record: dict[str, Any]) -> None:
        """Train one stage, showing its progress on the console and in the trackers."""
        from opdcl.model.adapters import find_adapter
        from opdcl.stages.finetune import finetune
        from opdcl.stages.recover import recover

        workflow, name = self.workflow, task.name
        offset = steps_done(self.run, before=stage)
        with self.output.stage(task.label) as line:
            report = TrackedReport(line, self.tracked, stage, offset)
            if name == "finetune":
                start = find_adapter(workflow.start) if workflow.start else None
                finetune(workflow.finetune, self.job.examples, self.backbone, start, stage, report)
            else:
                recover(
                    workflow.recover,
                    self.job.recovery,
                    self.backbone,
                    self.run.adapters()["tuned"],
                    stage,
                    report,
                )
            report.follow()

    def _measure(self, task: Task) -> None:
        from opdcl.stages.closeness import measure_closeness
        from opdcl.stages.evaluate import evaluate

        config, backbone = self.workflow.eval, self.backbone
        adapter = self.run.adapters()[task.state] if task.state != "base" else None
        if adapter and self._measured_state != task.state:
            backbone.drop_adapters()
            backbone.load_adapter(adapter, "student")
            self._measured_state = task.state
        run, suite = self.run, task.suite
        forget(run, run.eval_result(task.state, suite), run.eval_samples(task.state, suite))
        model = {"id": self.workflow.model.id, "adapter_sha256": adapter_hash(adapter) if adapter else None}
        record = {"role": task.role, "model": model, "fingerprint": task.fingerprint}
        measure: Any = evaluate
        asked: Any
        if task.suite == CLOSENESS:
            measure, asked = measure_closeness, self.job.closeness
        else:
            asked = self.job.suite(task.suite)
            if config.server and asked.generative:
                model["decoded"] = "on a server"
        with self.output.stage(task.label) as line:
            result = measure(config, asked, backbone, task.state, self.run, record, line, adapter)
            metric = result["metric"]
            line.note(f"{metric} {result['metrics'][metric]:.3f} (n = {result['n']})")

    @property
    def backbone(self) -> Backbone:
        """The model, loaded by the first task that needs it."""
        if self._backbone is None:
            from opdcl.model.adapters import tuned_model
            from opdcl.model.backbone import Backbone

            tuned = tuned_model(self.workflow.start, self.workflow.model)
            with self.output.stage("load") as line:
                line.note(f"{tuned.id} beside {self.workflow.model.id}" if tuned else self.workflow.model.id)
                backbone = Backbone.load(self.workflow.model, tuned, self.job.tokenizer)
                if parallel.worker_count() > 1:
                    part = "a part of the" if parallel.sharded() else "the whole"
                    line.note(f"{parallel.worker_count()} processes, each with {part} base")
                if self.workflow.model.deterministic:
                    line.note(_cost_of_determinism(backbone.device.type))
            self._check_base(backbone)
            self._backbone = backbone
        return self._backbone

    def _check_base(self, backbone: Backbone) -> None:
        """Check that the base is the one that the run began with, and record base, device and command.

        A run that is refused is left as it was.
        """
        model = self.workflow.model
        dtype = str(backbone.causal_lm.dtype).removeprefix("torch.")
        fingerprint = backbone.fingerprint()
        if self.manifest.get("base", {}).get("fingerprint_before", fingerprint) != fingerprint:
            names = " or ".join(filter(None, [model.id, self.workflow.start if backbone.base_lm else None]))
            message = f"the weights of {names} are not those that this run began with"
            raise OtherBase(message, "restore the model, or start a new run directory")
        base = self.manifest.setdefault("base", {"id": model.id, "revision": model.revision})
        base.setdefault("parameters", backbone.causal_lm.num_parameters())
        base["fingerprint_before"] = fingerprint
        self.manifest["device"] = machine() | {
            "kind": str(backbone.causal_lm.device),
            "dtype": dtype,
            "processes": parallel.worker_count(),
        }
        self._record_command()

    def _record_command(self) -> None:
        commands = [*dict.fromkeys([*self.manifest.get("commands", []), command_line(self.run)])]
        made_with = {"commands": commands, "opdcl": __version__, "versions": versions()}
        self.manifest = {"created": now()} | self.manifest | made_with
        self._recorded = True
        self._save_manifest()

    def _save_manifest(self) -> None:
        self.manifest["adapters"] = {
            state: {
                "path": str(folder.relative_to(self.run.path)),
                "sha256": StageDir(folder.parent).state()["adapter_sha256"],
            }
            for state, folder in self.run.adapters().items()
        }
        forget(self.run, self.run.manifest)
        write_json(self.run.manifest, self.manifest)


def steps_done(run: RunDir, before: StageDir | None = None) -> int:
    """Return the optimizer steps of all stages, or of those before one."""
    stages = [stage for stage in run.stages() if before is None or stage.path < before.path]
    return sum(stage.state().get("cost", {}).get("steps", 0) for stage in stages)


def command_line(run: RunDir) -> str:
    """Return the command that started this process; from Python, one that continues the run."""
    program = Path(sys.argv[0])
    words = sys.argv[1:]
    if program.stem != "opdcl" and program.parent.name != "opdcl":  # neither the script nor `python -m opdcl`
        words = ["run", str(run.workflow), "-o", str(run.path)]
    return redact(shlex.join(["opdcl", *words]))


def _cost_of_determinism(device: str) -> str:
    if device == "cpu":
        return "deterministic: costs nothing here; on a CPU, runs repeat bit for bit anyway"
    return (
        "deterministic: slower, since sums keep their order and the fastest kernels are left out. "
        "A kernel without a deterministic form ends the run with its name. "
        "Results repeat only on the same kind of GPU with the same versions"
    )
