"""The records of a run, and the plan: settings, hashes and records -> what to run, resume or skip, and why.

Records are its manifest, that of each training stage, and the fingerprint of each result.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.finetune import FinetuneConfig, ReplaySection
from opdcl.config.recover import split_share
from opdcl.config.section import FINGERPRINT
from opdcl.config.workflow import MACHINE, Workflow, meaningful_settings
from opdcl.data.formats import Row
from opdcl.errors import UsageError, typed
from opdcl.results.origins import question_key
from opdcl.rundir import seals
from opdcl.rundir.files import RESTORE, now, write_json
from opdcl.rundir.hashes import ADAPTER, Identity, adapter_hash, file_hash
from opdcl.rundir.layout import STAGE_OF, RunDir, read_result, versions
from opdcl.rundir.stage import StageDir, StageRecord
from opdcl.sanitize import redact
from opdcl.version import __version__

Action = Literal["run", "resume", "skip", "stale", "take"]

# What the answers of an evaluation depend on, besides model and suite.
DECODING = {"limit", "max_new_tokens", "thought_tokens", "batch_size", "server"}

STAGE_NUMBERS = {"finetune": 1, "recover": 2}


@dataclass(frozen=True)
class StoredStage:
    """A training stage on disk: its record, its adapter's hash as it is now, its newest checkpoint's name."""

    record: StageRecord
    weights: str | None = None
    checkpoint: str | None = None

    @property
    def is_done(self) -> bool:
        return self.record.status == "done"


@dataclass(frozen=True)
class Records:
    """What a run directory holds: stages by name, and fingerprints of results by state and suite."""

    stages: Mapping[str, StoredStage] = field(default_factory=dict)
    results: Mapping[tuple[str, str], str | None] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether nothing was made: no finished stage, no checkpoint, no result."""
        return not self.results and not any(s.is_done or s.checkpoint for s in self.stages.values())

    def finished(self, stage: str) -> str | None:
        """Return the fingerprint of a stage that is done, or None."""
        stored = self.stages.get(stage)
        return stored.record.fingerprint if stored and stored.is_done else None


def stage_folder(run: RunDir, name: str) -> StageDir:
    return run.stage(STAGE_NUMBERS[name], name)


def read_record(stage: StageDir) -> StageRecord | None:
    """Return the record of a training stage; None before it has started.

    Raises:
        UsageError: The record lacks a value that later code reads.
    """
    state = stage.state()
    if not state:
        return None
    for key in ["fingerprint", "adapter_sha256"] if stage.is_done() else ["fingerprint"]:
        if not state.get(key):
            raise UsageError(f"{stage.record} is damaged: it has no {key}", RESTORE)
    return StageRecord.model_validate(state)


def write_record(stage: StageDir, record: StageRecord) -> None:
    write_json(stage.record, record.model_dump(exclude_none=True))


def finish_stage(stage: StageDir, record: StageRecord) -> None:
    """Write the record of a stage whose adapter is complete."""
    made = {"status": "done", "finished": now(), "adapter_sha256": adapter_hash(stage.adapter)}
    write_record(stage, record.model_copy(update=made))


def read_records(run: RunDir) -> Records:
    """Read the records of a run directory, with the hashes of the adapters that are there."""
    stages = {}
    for name in STAGE_NUMBERS:
        stage = stage_folder(run, name)
        if (record := read_record(stage)) is None:
            continue
        if record.status == "done":
            weights = stage.adapter / ADAPTER
            stages[name] = StoredStage(record, weights=file_hash(weights) if weights.is_file() else None)
        else:
            checkpoint = stage.last_checkpoint()
            stages[name] = StoredStage(record, checkpoint=checkpoint.name if checkpoint else None)
    results = {}
    for file in run.evals.glob("*/*.json"):
        results[file.parent.name, file.stem] = read_result(file).get("fingerprint")
    return Records(stages, results)


def learned_rows(rows: Iterable[Row]) -> set[str]:
    """Return what a model learns of rows, as `learned_by`: a conversation asks a question for each answer."""
    turns = [turn for row in rows for turn in row.turns() if turn.prompt]
    questions = {question_key(turn.shown(), len(turn.prompt) > 1) for turn in turns}
    return questions | {f"cluster {turn.cluster}" for turn in turns if turn.cluster}


def write_learned(stage: StageDir, rows: Iterable[Row], set_aside: str | None) -> None:
    """Record what a fine-tune learns, and the hash of the file of rows that were set aside from it."""
    write_json(stage.learned, {"learned": sorted(learned_rows(rows)), "set_aside": set_aside})


def write_manifest(run: RunDir, manifest: dict[str, Any]) -> None:
    """Add to a manifest what a run was made with, its versions, commands and adapters, and write it."""
    manifest.setdefault("created", now())
    manifest["commands"] = [*dict.fromkeys([*manifest.get("commands", []), command_line(run)])]
    manifest |= {"opdcl": __version__, "versions": versions()}
    adapters = {}
    for state, folder in run.adapters().items():
        digest = StageDir(folder.parent).state()["adapter_sha256"]
        adapters[state] = {"path": str(folder.relative_to(run.path)), "sha256": digest}
    manifest["adapters"] = adapters
    seals.forget(run, run.manifest)
    write_json(run.manifest, manifest)


def command_line(run: RunDir) -> str:
    """Return the command that started this process; from Python, one that continues the run."""
    program = Path(sys.argv[0])
    words = sys.argv[1:]
    if program.stem != "opdcl" and program.parent.name != "opdcl":  # neither the script nor `python -m opdcl`
        words = ["run", str(run.workflow), "-o", str(run.path)]
    return redact(typed("opdcl", *words))


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
    """Return all tasks in order; this reads no file.

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
