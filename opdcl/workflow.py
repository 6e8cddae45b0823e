"""Execute a plan. The only place that knows the order of the stages."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shlex
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from opdcl import __version__, processes
from opdcl.config import Workflow
from opdcl.errors import GateError, Interrupted, OpdclError, UsageError
from opdcl.integrity import seal_run
from opdcl.load import dump, package_folder
from opdcl.output import Output
from opdcl.plan import Task, make_plan, training_stages
from opdcl.provenance import hash_files, machine, versions
from opdcl.rundir import STAGE_OF, RunDir, StageDir, now, read_json, write_atomic, write_json
from opdcl.share import adopt, take_start
from opdcl.text import redact
from opdcl.track import Followed, Tracking, check_trackers, scores, tracking

if TYPE_CHECKING:
    from opdcl.distill.backbone import Backbone
    from opdcl.models import ModelRef

STATE_OF = {stage: state for state, stage in STAGE_OF.items()}


def plan_run(workflow: Workflow, run: RunDir) -> list[Task]:
    """Check all inputs, and return what would be done. Writes nothing."""
    return make_plan(workflow, run, data_hashes(workflow))


def data_hashes(workflow: Workflow) -> dict[str, str]:
    """Check that every data source exists and is well-formed; return field -> hash of its content."""
    from opdcl.data import load_rows, pinned, source_files
    from opdcl.models import find_adapter
    from opdcl.plan import source_hash
    from opdcl.streams import STREAMS, stream_rows

    sources: dict[str, str] = {}
    if workflow.finetune:
        sources["finetune.data"] = workflow.finetune.data
        for row in load_rows(workflow.finetune.data):
            if row.text is None and row.answer is None:
                raise UsageError(f"{row.where} has no answer to learn", "fine-tune rows need completion, answer or text")
    if workflow.recover:
        prompts = {stream: workflow.recover.source(stream) for stream in STREAMS}
        prompts |= {f"teachers.{name}.prompts": teacher.prompts for name, teacher in workflow.recover.teachers.items()}
        sources |= {f"recover.{name}": source for name, source in prompts.items() if source}
        for stream in STREAMS:
            stream_rows(workflow.recover, stream)
    if workflow.eval:
        for suite, path in workflow.eval.data.items():
            if not os.path.isfile(path):
                raise UsageError(f"eval.data.{suite}: {path} does not exist", f"--data {suite}=PATH")
            sources[f"eval.data.{suite}"] = path
    hashes = {field: source_hash(pinned(source), source_files(source)) for field, source in sources.items()}
    for field, place in workflow.adapters().items():
        folder = find_adapter(place)
        hashes[field] = hash_files([folder / "adapter_model.safetensors", folder / "adapter_config.json"])
    suites = {f"eval.suite.{suite}": suite for suite in workflow.eval.suites()} if workflow.eval else {}
    if workflow.recover and workflow.recover.reward:
        suites["recover.reward.suite"] = workflow.recover.reward.suite
    for field, suite in suites.items():
        if files := sorted(package_folder("evals").glob(f"*/{suite}.yaml")):
            hashes[field] = hash_files(sorted(p for p in files[0].parent.iterdir() if p.is_file()))
    return hashes


def inherit(workflow: Workflow) -> Workflow:
    """Fill in what one stage takes from another: recovery guards the data that the fine-tune learned."""
    if workflow.finetune and workflow.recover and workflow.recover.domain is None:
        from opdcl.data import load_rows

        # Plain text has no question to sample on, so there is no domain stream to be had from it.
        if all(row.prompt for row in load_rows(workflow.finetune.data)):
            domain = workflow.recover.model_copy(update={"domain": workflow.finetune.data})
            return workflow.model_copy(update={"recover": domain})
    return workflow


def execute(workflow: Workflow, origins: dict[str, str], run: RunDir, output: Output, force: bool = False,
            donors: Sequence[RunDir] = ()) -> dict[str, Any]:  # fmt: skip
    """Run what the plan says and write the report; return the report's summary.

    What a donor, a finished run, has made with the same settings and data is copied instead of being made again.

    Raises:
        UsageError: The run directory holds other things, or was made with another configuration.
        Interrupted: The user stopped it.
        GateError: Everything ran, and a required score was missed.
    """
    workflow = inherit(workflow)
    with interruptible(), contextlib.ExitStack() as held:
        tasks = processes.by_first(lambda: _open(workflow, origins, run, output, force, donors, held))
        mine = held.enter_context(processes.own(run))
        held.enter_context(quiet_libraries(mine.new_log()))
        left = any(t.action != "skip" for t in tasks)
        tracked = held.enter_context(tracking(workflow.track if left and not processes.rank() else [], mine, output.note))
        if left:
            Session(workflow, mine, output, tracked).do(tasks)
        else:
            output.note("everything is done already")
        return processes.by_first(lambda: finish(workflow, run, output, tracked))


def _open(workflow: Workflow, origins: dict[str, str], run: RunDir, output: Output, force: bool, donors: Sequence[RunDir],
          held: contextlib.ExitStack) -> list[Task]:  # fmt: skip
    """Check a run, hold its lock, make it ready, and return what there is to do."""
    refuse_foreign(run)
    tasks = plan_run(workflow, run)
    check_tasks(workflow)
    check_servers(workflow, tasks)
    stale = [t for t in tasks if t.action == "stale"]
    if stale and not force:
        raise UsageError(
            f"{run.path} does not hold what this command would make; {'; '.join(f'{t.name} {t.why}' for t in stale)}",
            f"a new directory (-o {run.path}-2), the old settings and files, or --force to do these stages again",
        )
    if dead := held.enter_context(run.lock()):
        output.note(f"the lock of process {dead.get('pid')}, which is gone, is taken over")
    if force:
        _remove_stale(run, workflow, tasks)
        tasks = plan_run(workflow, run)
    _write_head(workflow, origins, run)
    if taken := adopt(tasks, training_stages(run, workflow), run, donors):
        for task, donor in taken:
            output.note(f"{label(task)}: taken from {donor.path.name}")
        tasks = plan_run(workflow, run)
    return tasks


def finish(workflow: Workflow, run: RunDir, output: Output, tracked: Tracking) -> dict[str, Any]:
    """Write the report, show its scores in the trackers, and compare them with the gates."""
    from opdcl.reports import summarise, write

    summary = summarise(run)
    seal_run(run)
    for file in write(run):
        output.note(f"wrote {file}")
    tracked.finish(_steps(run), scores(summary), {"verdict": summary["verdict"], "report": run.reports[0].read_text(encoding="utf-8")})
    for gate, smallest in workflow.gates.model_dump().items():
        value = (summary[gate] or {}).get("value")
        if smallest is not None and (value is None or value < smallest):
            raise GateError(f"gate missed: {gate} is {value}, required {smallest}", f"opdcl report {run.path}")
    return summary


def refuse_foreign(run: RunDir) -> None:
    """Refuse a directory with content that is not a run's, or that leads elsewhere: nothing may be mistaken or overwritten."""
    if run.path.exists() and not run.path.is_dir():
        raise UsageError(f"{run.path} is a file", "choose another directory with -o")
    if (
        run.path.is_dir()
        and not run.config.exists()
        and any(p.name not in (".lock", "logs") for p in run.path.iterdir())
    ):
        raise UsageError(f"{run.path} exists and is not a run directory", "choose another directory with -o")
    for folder, folders, files in os.walk(run.path):
        if link := next((p for name in (*folders, *files) if (p := Path(folder, name)).is_symlink()), None):
            raise UsageError(f"{link} is a symbolic link: what a run writes stays inside its directory",
                             "replace it by what it points to; the run directory itself may be a link")  # fmt: skip


def check_tasks(workflow: Workflow) -> None:
    """Check what needs the libraries but no weights: trainer fields, the model's place, the suites."""
    from trl import DistillationConfig, SFTConfig

    from opdcl.models import check_exists
    from opdcl.training import check_trainer_fields

    check_exists(workflow.model)
    check_trackers(workflow.track)
    if workflow.finetune:
        if workflow.finetune.method == "self-distill":
            from opdcl.stages.finetune import as_distillation
            from opdcl.streams import stream_rows

            check_trainer_fields(DistillationConfig, "finetune", workflow.finetune.trainer)
            stream_rows(as_distillation(workflow.finetune), "domain")
        else:
            check_trainer_fields(SFTConfig, "finetune", workflow.finetune.trainer)
    if workflow.recover:
        check_trainer_fields(DistillationConfig, "recover", workflow.recover.trainer)
        for teacher in workflow.recover.all_teachers().values():
            if teacher.model:
                check_exists(teacher.model)
    if workflow.eval:
        from opdcl.stages.evaluate import load_task

        for suite in workflow.eval.suites():
            load_task(suite, workflow.eval)


def check_servers(workflow: Workflow, tasks: list[Task]) -> None:
    """Ask the servers that open tasks will need whether they let us in."""
    from opdcl.distill.server import knock

    needed = {task.name for task in tasks if task.action != "skip"}
    servers = [workflow.eval.server] if workflow.eval and "eval" in needed else []
    if workflow.recover and "recover" in needed:
        servers += [workflow.recover.server, *(teacher.server for teacher in workflow.recover.all_teachers().values())]
    for server in filter(None, servers):
        knock(server)


class Session:
    """One process's work on a run: the backbone is loaded once, at the first task that needs it."""

    def __init__(self, workflow: Workflow, run: RunDir, output: Output, tracked: Tracking):
        self.workflow, self.run, self.output, self.tracked = workflow, run, output, tracked
        self._backbone: Backbone | None = None
        self.manifest: dict[str, Any] = read_json(run.manifest) if run.manifest.exists() else {}

    @property
    def backbone(self) -> Backbone:
        if self._backbone is None:
            from opdcl.distill.backbone import Backbone

            with self.output.stage("load") as line:
                line.note(f"{self.workflow.model.id}")
                self._backbone = Backbone.load(self.workflow.model)
                if processes.count() > 1:
                    line.note(f"{processes.count()} processes, each with {'its part of the' if processes.sharded() else 'the whole'} base")
                if self.workflow.model.deterministic:
                    line.note(_price_of_determinism(self._backbone.device.type))
            model = self._backbone.causal_lm
            before = self._backbone.fingerprint()
            base = self.manifest.setdefault("base", {"id": self.workflow.model.id, "revision": self.workflow.model.revision})
            if (known := base.get("fingerprint_before")) and known != before:
                raise UsageError(f"the weights of {self.workflow.model.id} are not those that this run began with",
                                 "restore the model, or start a new run directory")  # fmt: skip
            base["fingerprint_before"] = before
            self.manifest["device"] = machine() | {"kind": str(model.device), "dtype": str(model.dtype).removeprefix("torch."),
                                                    "processes": processes.count()}  # fmt: skip
            self._save_manifest()
        return self._backbone

    def do(self, tasks: list[Task]) -> None:
        """Do all tasks that the plan does not skip."""
        started = time.perf_counter()
        self.manifest |= {"created": self.manifest.get("created", now()), "opdcl": __version__, "versions": versions(),
                          "command": self.manifest.get("command", _command())}  # fmt: skip
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
            if self._backbone is not None and not (processes.sharded() and sys.exc_info()[0]):
                self.manifest["base"]["fingerprint_after"] = self._backbone.fingerprint()
            self.manifest["seconds"] = round(self.manifest.get("seconds", 0) + time.perf_counter() - started, 1)
            self._save_manifest()
        if self._backbone is not None and self.manifest["base"]["fingerprint_after"] != self.manifest["base"]["fingerprint_before"]:
            raise OpdclError("the base weights changed during the run", "this is a defect of opdcl: please report it")

    def _save_manifest(self) -> None:
        self.manifest["adapters"] = {
            state: {"path": str(folder.relative_to(self.run.path)), "sha256": StageDir(folder.parent).state()["adapter_sha256"]}
            for state, folder in self.run.adapters().items()
        }
        write_json(self.run.manifest, self.manifest)

    def _train(self, task: Task) -> None:
        from opdcl.models import adapter_hash
        from opdcl.stages.finetune import finetune
        from opdcl.stages.recover import recover
        from opdcl.training import peak_memory, reset_peak_memory

        stage = training_stages(self.run, self.workflow)[task.name]
        config = getattr(self.workflow, task.name)
        if config is None:
            self.output.note(f"{task.name}: taken from {self.workflow.start}")
            inputs = _inputs(self.workflow, self.run, task.name)
            take_start(self.workflow.start, stage, {"stage": task.name, "fingerprint": task.fingerprint, "config": {}, "inputs": inputs})
            self._save_manifest()
            return
        earlier = stage.state() if task.action == "resume" else {}
        record = {
            "stage": task.name, "status": "running", "fingerprint": task.fingerprint, "config": config.model_dump(),
            "inputs": _inputs(self.workflow, self.run, task.name), "started": earlier.get("started", now()),
            "cost": earlier.get("cost", {}),
        }  # fmt: skip
        write_json(stage.record, record)
        backbone = self.backbone
        reset_peak_memory()
        started = time.perf_counter()
        verb = {"finetune": finetune, "recover": recover}[task.name]
        try:
            with self.output.stage(task.name) as line:
                before = _steps(self.run, up_to=stage)
                verb(config, backbone, self._parent(task.name), stage, Followed(line, self.tracked, stage, before))
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
        from opdcl.models import ModelRef, find_adapter

        if name == "finetune":
            return ModelRef(self.workflow.model, find_adapter(self.workflow.start) if self.workflow.start else None)
        tuned = self.run.find_stage("finetune")
        if tuned is None or tuned.state().get("status") != "done":
            raise UsageError(f"{self.run.path} has no fine-tuned adapter to recover", f"opdcl finetune --data ROWS -o {self.run.path}")
        return ModelRef(self.workflow.model, tuned.adapter)

    def _measure(self, task: Task) -> None:
        from opdcl.models import adapter_hash
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
            found = evaluate(config, backbone, state, task.state, task.suite, task.role, self.run, model, line, adapter)
            line.note(f"{found.metric} {found.metrics[found.metric]:.3f} (n = {found.n})")
        file = self.run.eval_result(task.state, task.suite)
        write_json(file, read_json(file) | {"fingerprint": task.fingerprint})


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C into an error that says how to go on."""
    hint = f"{_command()}  # goes on where it stopped"

    def stop(number, frame):
        raise KeyboardInterrupt

    # A scheduler's way of asking; training stages listen for themselves, and save first.
    in_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, stop) if in_main else None
    try:
        yield
    except KeyboardInterrupt as fault:
        raise Interrupted("interrupted; what was finished is saved", hint) from fault
    except Interrupted as fault:
        fault.hint = hint
        raise
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, previous)


class Redacting(io.TextIOBase):
    """A text stream without secrets, for whatever libraries print."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(redact(text))

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


@contextlib.contextmanager
def quiet_libraries(log: Path | None = None) -> Iterator[None]:
    """Send the libraries' prints, bars, warnings and logs to a file, so that the console says only what matters."""
    import datasets
    from transformers.utils import logging as transformers_logging

    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(log or os.devnull, encoding="utf-8")
    handler.stream = Redacting(handler.stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    logging.captureWarnings(True)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.simplefilter("default")
    try:
        # opdcl's own console holds the real streams, see `Output`.
        with contextlib.redirect_stdout(handler.stream), contextlib.redirect_stderr(handler.stream):
            yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        handler.close()


def _write_head(workflow: Workflow, origins: dict[str, str], run: RunDir) -> None:
    write_atomic(run.workflow, dump(workflow))
    write_json(run.config, {"workflow": workflow.model_dump(), "origins": origins})


def _remove_stale(run: RunDir, workflow: Workflow, tasks: list[Task]) -> None:
    """Delete stages that are to be done again, and what was measured on them."""
    stages = training_stages(run, workflow)
    for task in tasks:
        if task.action == "stale":
            shutil.rmtree(stages[task.name].path, ignore_errors=True)
            shutil.rmtree(run.evals / STATE_OF[task.name], ignore_errors=True)


def _inputs(workflow: Workflow, run: RunDir, name: str) -> dict[str, Any]:
    """Return the named inputs of a stage, to tell later which of them changed."""
    from opdcl.plan import stage_inputs

    return stage_inputs(workflow, run, data_hashes(workflow))[name]


def _steps(run: RunDir, up_to: StageDir | None = None) -> int:
    """Return the optimizer steps of all stages, or of those before one."""
    return sum(stage.state().get("cost", {}).get("steps", 0) for stage in run.stages() if up_to is None or stage.path < up_to.path)


def _metric_rows(stage: StageDir) -> list[dict]:
    from opdcl.rundir import read_jsonl

    return read_jsonl(stage.metrics)


def label(task: Task) -> str:
    return f"eval {task.suite} {task.state}" if task.name == "eval" else task.name


def _command() -> str:
    """Return the command that started this process, ready to be pasted."""
    return redact(" ".join(["opdcl", *(shlex.quote(a) for a in sys.argv[1:])]))


def _price_of_determinism(device: str) -> str:
    if device == "cpu":
        return "deterministic: costs nothing here, on the CPU a run repeats bit for bit anyway"
    return ("deterministic: every step is slower, since sums keep their order and the fastest kernels are left out; a kernel without "
            "such a form ends the run with its name. It repeats on the same kind of GPU with the same versions only")  # fmt: skip
