"""PURE: a workflow, its data's hashes and its run's records -> what to run, resume or skip, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.finetune import FinetuneConfig, ReplaySection
from opdcl.config.recover import split_share
from opdcl.config.section import FINGERPRINT
from opdcl.config.workflow import MACHINE, Workflow, meaningful_settings
from opdcl.pipeline.run_records import STAGE_NUMBERS, Records, StoredStage
from opdcl.rundir.hashes import Identity
from opdcl.rundir.layout import STAGE_OF

Action = Literal["run", "resume", "skip", "stale", "take"]

# What the answers of an evaluation depend on, besides model and suite.
DECODING = {"limit", "max_new_tokens", "thought_tokens", "batch_size", "server"}


@dataclass(frozen=True)
class _Task:
    """Something that a run has to do, or has done already."""

    action: Action
    why: str
    fingerprint: str

    @property
    def unfinished(self) -> bool:
        """Whether this run has to do it: it is neither done nor taken from elsewhere."""
        return self.action not in ("skip", "take")


@dataclass(frozen=True)
class Train(_Task):
    """A training stage; `inputs` is what its result depends on."""

    name: str
    inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.name


@dataclass(frozen=True)
class Measure(_Task):
    """One state measured on one suite."""

    state: str
    suite: str
    role: str
    name: ClassVar[str] = "eval"

    @property
    def label(self) -> str:
        return f"eval {self.suite} {self.state}"


Task: TypeAlias = Train | Measure


def make_plan(
    workflow: Workflow,
    hashes: dict[str, str],
    records: Records,
    earlier_hashes: dict[str, str] | None = None,
    donor: Records | None = None,
    trains: bool = True,
) -> list[Task]:
    """Return all tasks in order.

    `hashes` has the hash of each data source by its key, as `finetune.data`, and `earlier_hashes` what
    earlier versions recorded of the same content. `donor` holds the records of a run that this one continues.
    A plan that does not train leaves out what is not finished, and measures the states that are there.
    """
    stages, earlier = list[Train](), earlier_hashes or {}
    stored = Records({**(donor or records).stages, **records.stages})
    base = _base_key(workflow, stored)
    for name, inputs in _stage_inputs(workflow, hashes, earlier, stored, base).items():
        identity = Identity(inputs)
        action, why = _training_action(records.stages.get(name), identity)
        stages.append(Train(action, why, identity.key, name, inputs))
    if not trains:
        is_taken = bool(workflow.start and not workflow.finetune)
        finished = [name for name in STAGE_NUMBERS if records.finished(name)] + ["finetune"] * is_taken
        stages = [stage for stage in stages if stage.name in finished]
    made = {stage.name: stage.fingerprint for stage in stages}
    return [*stages, *_eval_tasks(workflow, hashes, earlier, records, {"base": base, **made})]


def _stage_inputs(
    workflow: Workflow, hashes: dict[str, str], earlier_hashes: dict[str, str], stored: Records, base: str
) -> dict[str, dict[str, Any]]:
    """Return everything that each training stage's result depends on; its hash is the stage's fingerprint."""
    inputs: dict[str, dict[str, Any]] = {}
    origin, parent = "model", base
    for name in STAGE_NUMBERS:
        config, made = getattr(workflow, name), stored.stages.get(name)
        starts_elsewhere = name == "finetune" and workflow.start
        if config is None and not starts_elsewhere:
            continue
        if name == "recover" and "finetune" not in inputs:
            origin, parent = "finetune stage", stored.finished("finetune") or parent
        inputs[name] = meaningful_settings(config.model_dump(context=FINGERPRINT)) if config else {}
        if config:
            inputs[name]["dtype"] = workflow.model.dtype
            if not inputs[name].get("system"):  # which runs of an earlier version do not have
                inputs[name].pop("system", None)
        if isinstance(config, FinetuneConfig) and not (config.replays and _has_limit(config, made)):
            del inputs[name]["replay"]["most"]
        recorded = made.record.inputs if made else {}
        for key, value in hashes.items():
            setting = key.removeprefix(f"{name}.")
            part = f"content of {setting}"
            # Earlier versions did not record the contents of other models.
            was_recorded = made is None or not part.endswith(".model") or part in recorded
            if key.startswith(f"{name}.") and was_recorded:
                earlier = earlier_hashes.get(key, value)
                inputs[name][part] = earlier if recorded.get(part) == earlier else value
                if recorded.get(part) == inputs[name][part]:
                    _name_as_recorded(inputs[name], recorded, setting)
        if starts_elsewhere:
            inputs[name]["start"] = hashes["start"]
        inputs[name][origin] = parent
        origin, parent = f"{name} stage", Identity(inputs[name]).key
    return inputs


def _has_limit(config: FinetuneConfig, made: StoredStage | None) -> bool:
    """Return whether the limit of a fine-tune's replay is part of its key.

    Keys did not have today's limit, though earlier versions replayed without one. What these have finished
    stays finished; what they have begun is not continued by steps of another order.
    """
    if made is None or "most" in made.record.inputs.get("replay", {"most": None}):
        return True
    had_limit = made.is_done or "most" in made.record.config.get("replay", {})
    return not had_limit or config.replay.most != ReplaySection().most


def _name_as_recorded(inputs: dict[str, Any], recorded: Mapping[str, Any], setting: str) -> None:
    """Give a source that has its recorded content its recorded name, wherever it lies now."""
    key, _, number = setting.partition(".")
    now, then = inputs.get(key), recorded.get(key)
    if isinstance(now, str) and isinstance(then, str):
        inputs[key] = then
    elif number and isinstance(now, list) and isinstance(then, list) and len(now) == len(then):
        place = int(number)  # general prompts of several sources, each with its share
        if split_share(now[place])[1] == split_share(then[place])[1]:
            now[place] = then[place]


def _training_action(stored: StoredStage | None, identity: Identity) -> tuple[Action, str]:
    """Return what to do about a training stage, and why."""
    if stored is None:
        return "run", "not started"
    if stored.record.fingerprint != identity.key:
        if not (stored.is_done or stored.checkpoint):
            return "run", "an earlier try with other settings or data made nothing"
        return "stale", f"changed: {', '.join(identity.changed_since(stored.record.inputs))}"
    if stored.is_done:
        if stored.weights and stored.weights == stored.record.adapter_sha256:
            return "skip", "done"
        return "stale", f"was done, but its adapter {'has changed' if stored.weights else 'is missing'}"
    why = f"from {stored.checkpoint}" if stored.checkpoint else "stopped before its first checkpoint"
    return "resume", why


def _eval_tasks(
    workflow: Workflow,
    hashes: dict[str, str],
    earlier: dict[str, str],
    records: Records,
    made: dict[str, str],
) -> list[Measure]:
    config = workflow.eval
    if config is None:
        return []
    # How answers are decoded changes them too, if only by rounding.
    decoding = config.model_dump(include=DECODING, context=FINGERPRINT)
    how = meaningful_settings(decoding) | {"dtype": workflow.model.dtype}
    if system := workflow.system_of("eval"):
        how["system"] = system
    states = {"base": made["base"]}
    for state, stage in STAGE_OF.items():
        # An earlier command may have made the adapter that this workflow does not make itself.
        if weights := made.get(stage) or records.finished(stage):
            states[state] = weights
    measured = config.suites()
    if config.closeness and len(states) > 1:  # base alone is at no distance from anything
        measured[CLOSENESS] = CLOSENESS
    tasks = []
    for suite, role in measured.items():
        for state, weights in states.items():
            keys = []
            for of in (hashes, hashes | earlier):
                contents = [of.get(f"eval.data.{suite}"), of.get(f"eval.suite.{suite}")]
                if suite == CLOSENESS:
                    contents = [of.get("eval.closeness"), str(config.closeness_tokens)]
                keys.append(Identity([weights, suite, role, how, *contents]).key)
            task = Measure("run", "not measured", keys[0], state, suite, role)
            if (state, suite) in records.results:
                if (known := records.results[state, suite]) in keys:
                    task = replace(task, action="skip", why="done", fingerprint=known)
                else:
                    task = replace(task, why="the model, suite or decoding has changed")
            tasks.append(task)
    return tasks


def _base_key(workflow: Workflow, stored: Records) -> str:
    """Return a hash of base's settings; that its weights are the same is asked when they are loaded.

    Consent to run code is none of them, but earlier versions counted it.
    """
    settings = meaningful_settings(workflow.model.model_dump(context=FINGERPRINT), MACHINE | {"dtype"})
    without, given = (Identity(settings | {"trust_remote_code": consent}).key for consent in (False, True))
    return given if given in [made.record.inputs.get("model") for made in stored.stages.values()] else without
