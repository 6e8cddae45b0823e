"""PURE: a workflow and what lies in its run directory -> which stages run, resume or are skipped, and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opdcl.config.identity import MACHINE, meaningful_settings
from opdcl.config.workflow import Workflow
from opdcl.rundir.files import read_json
from opdcl.rundir.hashes import ADAPTER, file_hash, hash_files, hash_value
from opdcl.rundir.layout import RunDir, StageDir

Action = Literal["run", "resume", "skip", "stale", "take"]

STATES = ("base", "tuned", "recovered")


@dataclass(frozen=True)
class Task:
    """One unit of work: a training stage, or one state measured on one suite."""

    name: str
    action: Action
    why: str
    fingerprint: str
    state: str = ""
    suite: str = ""
    role: str = ""
    changed: tuple[str, ...] = ()


def source_hash(source: str | None, files: list[Path]) -> str:
    """Return what identifies a data source: its content where it is on this machine, else its name."""
    return hash_files(files) if files else str(source)


def training_stages(run: RunDir, workflow: Workflow) -> dict[str, StageDir]:
    """Return the folders of the workflow's training stages, in order."""
    names = [
        n for n in ("finetune", "recover") if getattr(workflow, n) or (n == "finetune" and workflow.start)
    ]
    if names == ["recover"]:
        return {"recover": run.stage(2, "recover")}
    return {name: run.stage(i, name) for i, name in enumerate(names, 1)}


def stage_inputs(workflow: Workflow, run: RunDir, data: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return, for each training stage, all that its result depends on; its hash is the stage's fingerprint."""
    inputs: dict[str, dict[str, Any]] = {}
    parent = hash_value(workflow.model.model_dump(exclude=MACHINE))
    origin = "model"
    for name in training_stages(run, workflow):
        contents = {
            f"content of {k.split('.', 1)[1]}": v for k, v in data.items() if k.startswith(f"{name}.")
        }
        if name == "recover" and "finetune" not in inputs:
            origin, parent = "finetune stage", _finished_fingerprint(run, "finetune") or parent
        if name == "finetune" and "start" in data:
            contents["start"] = data["start"]
        config = getattr(
            workflow, name
        )  # None where the fine-tune was done elsewhere, and its adapter is taken over
        inputs[name] = {
            **(meaningful_settings(config.model_dump()) if config else {}),
            **contents,
            origin: parent,
        }
        origin, parent = f"{name} stage", hash_value(inputs[name])
    return inputs


def make_plan(workflow: Workflow, run: RunDir, data: dict[str, str]) -> list[Task]:
    """Lay out all tasks in order.

    Args:
        workflow: What is wanted.
        run: Where it is to lie; it need not exist.
        data: Hash of each data source, by the name of its field (`finetune.data`, `recover.general`, ...).
    """
    stages = training_stages(run, workflow)
    tasks = [
        _training_task(name, stages[name], inputs)
        for name, inputs in stage_inputs(workflow, run, data).items()
    ]
    return tasks + (_eval_tasks(workflow, run, data, tasks) if workflow.eval else [])


def _finished_fingerprint(run: RunDir, name: str) -> str | None:
    found = run.find_stage(name)
    return found.state()["fingerprint"] if found and found.state().get("status") == "done" else None


def _training_task(name: str, stage: StageDir, inputs: dict[str, Any]) -> Task:
    fingerprint = hash_value(inputs)
    record = stage.state()
    if not record:
        return Task(name, "run", "not started", fingerprint)
    if record["fingerprint"] != fingerprint:
        before = record.get("inputs", {})
        changed = tuple(sorted(k for k in {*before, *inputs} if before.get(k) != inputs.get(k)))
        return Task(name, "stale", f"changed: {', '.join(changed)}", fingerprint, changed=changed)
    if record["status"] == "done":
        weights = stage.adapter / ADAPTER
        if weights.is_file() and file_hash(weights) == record.get("adapter_sha256"):
            return Task(name, "skip", "done", fingerprint)
        what = "has changed" if weights.is_file() else "is missing"
        return Task(name, "stale", f"was done, but its adapter {what}", fingerprint)
    checkpoint = stage.last_checkpoint()
    why = f"from {checkpoint.name}" if checkpoint else "stopped before its first checkpoint"
    return Task(name, "resume", why, fingerprint)


def _eval_tasks(workflow: Workflow, run: RunDir, data: dict[str, str], training: list[Task]) -> list[Task]:
    config = workflow.eval
    assert config is not None
    by_name = {t.name: t for t in training}
    # An adapter of an earlier command, where this workflow does not make it itself.
    model = hash_value(workflow.model.model_dump(exclude=MACHINE))
    states = {"base": model}
    for state, stage in (("tuned", "finetune"), ("recovered", "recover")):
        if stage in by_name:
            states[state] = by_name[stage].fingerprint
        elif done := _finished_fingerprint(run, stage):
            states[state] = done
    tasks = []
    for suite, role in config.suites().items():
        for state, weights in states.items():
            contents = [data.get(f"eval.data.{suite}"), data.get(f"eval.suite.{suite}")]
            fingerprint = hash_value([weights, suite, role, config.limit, config.max_new_tokens, *contents])
            result = run.eval_result(state, suite)
            action: Action = "run"
            why = "not measured"
            if result.exists():
                same = read_json(result).get("fingerprint") == fingerprint
                action, why = ("skip", "done") if same else ("run", "the model or the suite has changed")
            tasks.append(Task("eval", action, why, fingerprint, state, suite, role))
    return tasks
