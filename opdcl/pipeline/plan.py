"""PURE: a workflow, its data's hashes and its run's records -> what to run, resume or skip, and why."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.section import FINGERPRINT
from opdcl.config.workflow import MACHINE, Workflow, meaningful_settings
from opdcl.pipeline.records import STAGE_NUMBERS, Records, StoredStage
from opdcl.rundir.identity import Identity
from opdcl.rundir.layout import STAGE_OF

Action = Literal["run", "resume", "skip", "stale", "take"]

# What the answers of an evaluation depend on, besides model and suite.
DECODING = {"limit", "max_new_tokens", "thought_tokens", "batch_size", "server"}


@dataclass(frozen=True)
class Task:
    """A training stage, or one state measured on one suite; `inputs` is what a stage's result depends on."""

    name: str
    action: Action
    why: str
    fingerprint: str
    state: str = ""
    suite: str = ""
    role: str = ""
    inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def unfinished(self) -> bool:
        """Whether this run has to do it: it is neither done nor taken from elsewhere."""
        return self.action not in ("skip", "take")

    @property
    def label(self) -> str:
        return f"eval {self.suite} {self.state}" if self.name == "eval" else self.name


def make_plan(workflow: Workflow, hashes: dict[str, str], records: Records) -> list[Task]:
    """Return all tasks in order; `hashes` has the hash of each data source by its key, as `finetune.data`."""
    tasks, fingerprints = [], {}
    for name, inputs in _stage_inputs(workflow, hashes, records).items():
        identity = Identity(inputs)
        action, why = _training_action(records.stages.get(name), identity)
        fingerprints[name] = identity.key
        tasks.append(Task(name, action, why, fingerprints[name], inputs=inputs))
    return tasks + _eval_tasks(workflow, hashes, records, fingerprints)


def _stage_inputs(workflow: Workflow, hashes: dict[str, str], records: Records) -> dict[str, dict[str, Any]]:
    """Return everything that each training stage's result depends on; its hash is the stage's fingerprint."""
    inputs: dict[str, dict[str, Any]] = {}
    origin, parent = "model", _model_hash(workflow)
    for name in STAGE_NUMBERS:
        config = getattr(workflow, name)
        starts_elsewhere = name == "finetune" and workflow.start
        if config is None and not starts_elsewhere:
            continue
        if name == "recover" and "finetune" not in inputs:
            origin, parent = "finetune stage", records.finished("finetune") or parent
        inputs[name] = meaningful_settings(config.model_dump(context=FINGERPRINT)) if config else {}
        if config:
            inputs[name]["dtype"] = workflow.model.dtype
            if not inputs[name].get("system"):  # which runs of an earlier version do not have
                inputs[name].pop("system", None)
        for key, value in hashes.items():
            part = f"content of {key.removeprefix(f'{name}.')}"
            if key.startswith(f"{name}.") and not _was_not_recorded(part, records.stages.get(name)):
                inputs[name][part] = value
        if starts_elsewhere:
            inputs[name]["start"] = hashes["start"]
        inputs[name][origin] = parent
        origin, parent = f"{name} stage", Identity(inputs[name]).key
    return inputs


def _was_not_recorded(part: str, stored: StoredStage | None) -> bool:
    """Return whether a stage on disk was made before the contents of other models were recorded."""
    return stored is not None and part.endswith(".model") and part not in stored.record.inputs


def _training_action(stored: StoredStage | None, identity: Identity) -> tuple[Action, str]:
    """Return what to do about a training stage, and why."""
    if stored is None:
        return "run", "not started"
    if stored.record.fingerprint != identity.key:
        if not (stored.record.is_done or stored.checkpoint):
            return "run", "an earlier try with other settings or data made nothing"
        return "stale", f"changed: {', '.join(identity.changed_since(stored.record.inputs))}"
    if stored.record.is_done:
        if stored.weights and stored.weights == stored.record.adapter_sha256:
            return "skip", "done"
        return "stale", f"was done, but its adapter {'has changed' if stored.weights else 'is missing'}"
    why = f"from {stored.checkpoint}" if stored.checkpoint else "stopped before its first checkpoint"
    return "resume", why


def _eval_tasks(
    workflow: Workflow, hashes: dict[str, str], records: Records, training: dict[str, str]
) -> list[Task]:
    config = workflow.eval
    if config is None:
        return []
    # How answers are decoded changes them too, if only by rounding.
    decoding = config.model_dump(include=DECODING, context=FINGERPRINT)
    how = meaningful_settings(decoding) | {"dtype": workflow.model.dtype}
    if system := workflow.system_of("eval"):
        how["system"] = system
    states = {"base": _model_hash(workflow)}
    for state, stage in STAGE_OF.items():
        # An earlier command may have made the adapter that this workflow does not make itself.
        if weights := training.get(stage) or records.finished(stage):
            states[state] = weights
    measured = config.suites()
    if config.closeness and len(states) > 1:  # base alone is at no distance from anything
        measured[CLOSENESS] = CLOSENESS
    tasks = []
    for suite, role in measured.items():
        for state, weights in states.items():
            contents = [hashes.get(f"eval.data.{suite}"), hashes.get(f"eval.suite.{suite}")]
            if suite == CLOSENESS:
                contents = [hashes.get("eval.closeness"), str(config.closeness_tokens)]
            fingerprint = Identity([weights, suite, role, how, *contents]).key
            task = Task("eval", "run", "not measured", fingerprint, state=state, suite=suite, role=role)
            if (state, suite) in records.results:
                if records.results[state, suite] == fingerprint:
                    task = replace(task, action="skip", why="done")
                else:
                    task = replace(task, why="the model, suite or decoding has changed")
            tasks.append(task)
    return tasks


def _model_hash(workflow: Workflow) -> str:
    """Return a hash of base's settings; that its weights are the same is asked when they are loaded."""
    settings = workflow.model.model_dump(context=FINGERPRINT)
    return Identity(meaningful_settings(settings, MACHINE | {"dtype"})).key
