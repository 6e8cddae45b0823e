"""Everything that a run checks before it trains; a dry run does the same. No weights are loaded."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from opdcl.config.finetune import LoraSection
from opdcl.config.model import ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.config.workflow import Workflow
from opdcl.data.formats import Row
from opdcl.errors import UsageError
from opdcl.pipeline.damage import refuse_damaged
from opdcl.pipeline.defaults import text_config
from opdcl.pipeline.job import Job, read_records
from opdcl.pipeline.plan import Task, stage_folder
from opdcl.pipeline.trackers import check_trackers
from opdcl.rundir.layout import TEMPLATE, RunDir
from opdcl.rundir.records import read_metrics

if TYPE_CHECKING:
    from opdcl.distill.prompts import RecoverySource


# What a model and its base have in common, whatever was trained.
SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("num_experts", "num_local_experts", "moe_intermediate_size"),
)


def checked_plan(job: Job, force: bool = False) -> list[Task]:
    """Check the run directory, the data and what the tasks need; return the tasks. Writes nothing.

    `force` permits stages that were made with other settings.

    Raises:
        UsageError: The run would refuse it later.
    """
    from opdcl.model.adapters import tuned_model
    from opdcl.model.load import check_exists, pick_device
    from opdcl.model.quantized import check_installed

    workflow, run = job.workflow, job.run
    refuse_foreign(run)
    if not force:
        refuse_damaged(run)
    job.check_rows()
    tasks = job.plan()
    if not force:
        _refuse_stale(tasks, job)
    _refuse_other_dtype(workflow, run)
    for task in tasks:
        if task.action == "skip" and task.name != "eval":
            read_metrics(stage_folder(run, task.name).metrics)  # the report, made last, needs them undamaged
    todo = {task.name for task in tasks if task.unfinished}
    pick_device(workflow.model.device)
    for model in workflow.models():
        check_exists(model)
        check_installed(model)
    check_trackers(workflow.track)
    if tuned := tuned_model(workflow.start, workflow.model):
        _check_tuned_model(job, tuned)
    if todo:
        job.check_models()
        check_adapters(job)
    if workflow.finetune and "finetune" in todo:
        _check_finetune(job)
    if workflow.recover and "recover" in todo:
        _check_recovery(job)
    if workflow.eval:
        for suite in workflow.eval.suites():
            job.suite(suite)
        if "eval" in todo:
            _check_suites(job)
    check_servers(workflow, todo)
    return tasks


def refuse_foreign(run: RunDir) -> None:
    """Refuse a directory that is not a run's, or that links out of itself, so that nothing is overwritten."""
    hint = "choose another directory with -o"
    if run.path.exists() and not run.path.is_dir():
        raise UsageError(f"{run.path} is a file", hint)
    names = {p.name for p in run.path.iterdir()} if run.path.is_dir() else set()
    # A crash can leave the temporary file of config.json, which is the first that a run writes.
    begun = {name for name in names if name.startswith(f".{run.config.name}.")}
    if names - begun - {".lock", "logs"} and not run.is_run():
        raise UsageError(f"{run.path} exists and is not a run directory", hint)
    for folder, folders, files in os.walk(run.path):
        if link := next((p for name in (*folders, *files) if (p := Path(folder, name)).is_symlink()), None):
            hint = "replace it by what it points to; the run directory itself may be a link"
            raise UsageError(f"{link} is a symbolic link: what a run writes stays inside its directory", hint)


def _refuse_stale(tasks: list[Task], job: Job) -> None:
    """Refuse a run whose finished or begun stages were made with other settings or data."""
    if not (stale := [task for task in tasks if task.action == "stale"]):
        return
    reasons = "; ".join(f"{t.name} {t.why}" for t in stale)
    ways = ["the old settings and files", "--force to redo these stages"]
    if earlier := [option for task in stale for option in _earlier_values(task, job)]:
        ways = [f"what it was made with: {' '.join(dict.fromkeys(earlier))}"]
    if stale[0].name == "finetune":  # a later stage is added to its run and has no other directory
        ways.insert(0, f"a new directory (-o {job.run.path}-2)")
    hint = ", or ".join(ways)
    raise UsageError(f"{job.run.path} does not hold what this command would make; {reasons}", hint)


def _earlier_values(task: Task, job: Job) -> list[str]:
    """Return the options that give automatic settings the values with which a stage was made."""
    before = stage_folder(job.run, task.name).state().get("inputs", {})
    changed = {
        "model.dtype" if key == "dtype" else f"{task.name}.{key}": value
        for key, value in before.items()
        if task.inputs.get(key) != value
    }
    return [f"--set {k}={v}" for k, v in changed.items() if job.origins.get(k, "").startswith("auto: ")]


def _refuse_other_dtype(workflow: Workflow, run: RunDir) -> None:
    dtype = workflow.model.dtype
    earlier = run.read_manifest().get("device", {}).get("dtype", dtype)
    if earlier != dtype and not read_records(run).empty:
        hint = f"--set model.dtype={earlier}, or a new run directory"
        raise UsageError(f"this run was begun in {earlier} and would go on in {dtype}", hint)


def _check_finetune(job: Job) -> None:
    """Check the chat template, target modules and the length of every row."""
    from opdcl.stages.finetune import planned_steps

    config, model = job.workflow.finetune, job.workflow.model
    if not job.workflow.start:
        check_targets(model, config.lora)
    _check_turn_end(job)
    rows = job.examples.encoded or job.examples.rows
    planned_steps(config, len(rows))  # refuses more than can be planned
    if config.method == "self-distill":
        _check_prompts(job, *job.self_distillation)


def _check_recovery(job: Job) -> None:
    """Check that there is an adapter to recover, that its teachers fit, and the length of every prompt."""
    from opdcl.model.compatibility import check_same_tokenizer

    workflow, run = job.workflow, job.run
    if not (workflow.finetune or workflow.start or "tuned" in run.adapters()):
        hint = f"opdcl finetune ROWS -o {run.path}"
        raise UsageError(f"{run.path} has no fine-tuned adapter to recover", hint)
    for teacher in workflow.models()[1:]:
        check_same_tokenizer(job.tokenizer, job.sources.tokenizer(teacher), f"teacher {teacher.id}")
    _check_prompts(job, workflow.recover, job.recovery)


def _check_tuned_model(job: Job, tuned: ModelConfig) -> None:
    """Refuse a tuned model whose base this is not, and settings that need every adapter to stand on base."""
    from opdcl.model.adapters import start_files
    from opdcl.model.compatibility import check_same_tokenizer

    workflow = job.workflow
    base, recover, teachers = workflow.model, workflow.recover, workflow.teachers().values()
    hint = "--base names the model that it was fine-tuned from"
    if (Path(base.id).resolve(), base.revision) == (Path(tuned.id).resolve(), tuned.revision):
        raise UsageError(f"{tuned.id} is named as its own base", hint)
    shapes = job.shape, text_config(tuned)
    for key in SHAPE:
        ours, theirs = (getattr(shape, key, None) for shape in shapes)
        if ours != theirs:
            what = "embeddings of size" if key == "vocab_size" else key
            raise UsageError(
                f"{tuned.id} has another shape than {base.id}: {what} {theirs}, there {ours}", hint
            )
    # A merged model is often saved without the tokenizer, which is base's.
    if any(start_files(str(workflow.start))[0].parent.glob("tokenizer*")):
        check_same_tokenizer(job.tokenizer, job.sources.tokenizer(tuned), tuned.id, hint)
    servers = [stage and stage.server for stage in (recover, workflow.eval)]
    mixed = [t for t in teachers if t.kind == "trust_region" and t.reference == "base"]
    refused = {
        "finetune": (workflow.finetune, "opdcl finetune --base trains an adapter on such a model"),
        "recover.method interpolate": (recover and recover.method == "interpolate", "use alternating"),
        "recover.start": (recover and recover.start not in ("auto", 1), "leave it out"),
        "a server for the student or the evaluation": (any(servers), "leave it out"),
        "a teacher of kind adapter": (any(t.adapter for t in teachers), "use kind model"),
        "a trust_region around base": (mixed, "set reference: tuned"),
    }
    for what, (used, remedy) in refused.items():
        if used:
            reason = "its weights are not base's plus an adapter"
            raise UsageError(f"start is the whole model {tuned.id}, which excludes {what}: {reason}", remedy)


def _check_turn_end(job: Job) -> None:
    from opdcl.distill.health import check_turn_end
    from opdcl.model.load import declared_eos_ids

    check_turn_end(job.tokenizer, declared_eos_ids(job.workflow.model, job.tokenizer))


def _check_prompts(job: Job, config: RecoverConfig, source: RecoverySource) -> None:
    _check_turn_end(job)
    if not any(prompts.train for prompts in job.encode(config, source).values()):
        raise UsageError("recovery has no prompts", "set recover.general")


def check_adapters(job: Job) -> list[str]:
    """Check that the adapters of a run's start and of its teachers fit its base; return notes."""
    from opdcl.model.adapter_files import check_on_base
    from opdcl.model.adapters import find_adapter

    workflow, notes = job.workflow, list[str]()
    start = planned_adapter(workflow)
    if isinstance(start, Path):
        notes += _other_template(job, start)
    folders = [start] if isinstance(start, Path) else []
    folders += [find_adapter(t.adapter) for t in workflow.teachers().values() if t.adapter]
    for folder in folders:
        key = "checked adapter", folder, workflow.model.model_dump_json()
        notes += job.sources.once(key, functools.partial(check_on_base, folder, workflow.model))
    return notes


def _other_template(job: Job, folder: Path) -> list[str]:
    """Return a note if an adapter was saved with another chat template than the run uses."""
    from opdcl.model.adapters import own_template
    from opdcl.model.compatibility import template_difference

    template = own_template(folder)
    if not template or not (difference := template_difference(job.tokenizer, template)):
        return []
    file = folder / TEMPLATE
    way = f"--set model.chat_template={file}" if file.is_file() else "--set model.chat_template=FILE"
    problem = f"warning: adapter {folder} was saved with another chat template than that of its base"
    return [f"{problem}: {difference}; {way} takes the adapter's"]


def check_targets(model: ModelConfig, lora: LoraSection) -> None:
    """Refuse `target_modules` that match no layer of the model: PEFT would leave them out silently."""
    targets = lora.target_modules
    if targets == "all-linear":
        return
    from opdcl.model.load import skeleton
    from opdcl.model.targets import adaptable, is_target

    bare = skeleton(model)
    layers = adaptable(bare)
    missing = []
    for target in [targets] if isinstance(targets, str) else targets:
        wanted = target if isinstance(targets, str) else [target]
        if not any(is_target(name, wanted) for name in layers):
            missing.append(target)
    if not missing:
        return
    known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
    hint = f"linear layers of this model: {known}"
    if isinstance(targets, str) and "," in targets:
        names = ", ".join(name.strip() for name in targets.split(","))
        hint = f"write a list: --set 'finetune.lora.target_modules=[{names}]'; {hint}"
    named = ", ".join(map(repr, missing))
    raise UsageError(f"finetune.lora.target_modules: {named} matches no linear layer of {model.id}", hint)


def _check_suites(job: Job) -> None:
    """Check that each prompt and its longest answer fit into the context, and that answers can be decoded."""
    from opdcl.data.chat import encode_prompt
    from opdcl.stages.evaluate import max_answer_tokens, temperature_of

    config = job.workflow.eval
    for name in config.suites():
        temperature_of(job.suite(name).task.config.generation_kwargs or {})
        # As in lm-eval, texts whose likelihood is asked for lose their beginning.
        for ids in job.measurement(name).encoded:
            max_answer_tokens(config, job.suite(name).max_tokens, len(ids), job.context)
    for row in job.closeness:
        encode_prompt(row, job.tokenizer, job.context - config.closeness_tokens)


def check_servers(workflow: Workflow, unfinished: set[str]) -> None:
    """Check that every server that the unfinished stages need grants access."""
    from opdcl.model.adapters import refuse_unserved
    from opdcl.model.load import skeleton
    from opdcl.model.targets import lora_config
    from opdcl.sampling.server import check_access

    own = [workflow.eval.server] if workflow.eval and "eval" in unfinished else []
    teachers = []
    if workflow.recover and "recover" in unfinished:
        own.append(workflow.recover.server)
        teachers = [teacher.server for teacher in workflow.teachers().values()]
    if any(own) and (adapter := planned_adapter(workflow)):
        refuse_unserved(vars(lora_config(adapter, skeleton(workflow.model))))
    for server in filter(None, own + teachers):
        check_access(server)


def planned_adapter(workflow: Workflow) -> LoraSection | Path | None:
    """Return the settings of a run's new adapter, or the folder of the one it starts from."""
    from opdcl.model.adapters import find_adapter, tuned_model

    if workflow.start and not tuned_model(workflow.start, workflow.model):
        return find_adapter(workflow.start)
    if workflow.finetune:
        return workflow.finetune.lora
    return LoraSection() if workflow.start else None


def remarks(job: Job, tasks: list[Task]) -> list[str]:
    """Return what a user should know before the training: rows left out, duplicates, an unguarded stream."""
    todo = {task.name for task in tasks if task.unfinished}
    workflow = job.workflow
    notes = [*job.sources.left_out(), *job.sources.unread()]
    if todo:
        notes += [*job.check_models(), *check_adapters(job)]
    if workflow.finetune and "finetune" in todo:
        notes += job.examples.notes
        rows, _ = job.sources.finetune_rows(workflow)
        if repeated := repeated_rows(rows):
            notes.append(
                f"{len(repeated)} of {len(rows)} rows repeat an earlier one (first: {repeated[0].where})"
            )
        if several := _questions_with_several_answers(rows):
            notes.append(f"questions with several different answers: {several}")
    if workflow.recover and "recover" in todo:
        if workflow.recover.teacher_of("general").begins_as_tuned:
            notes.append("warning: recover.general_teacher is tuned: a placebo, which wins nothing back")
        prompts = job.recovery.rows
        if _is_file_alone(workflow.recover):
            notes.append(
                "general prompts: your file alone, which may lack kinds of requests; with half shipped "
                "prompts, recover.general: [everyday=0.5, FILE=0.5], more came back in docs/results.md"
            )
        if not prompts["domain"]:
            lost = "so the recovery may undo what was learned; name some with --domain"
            notes.append(f"warning: no prompts guard the domain, {lost}")
        if not prompts["general"]:
            lost = "so the recovery wins nothing back; name some with --prompts"
            notes.append(f"warning: there are no general prompts, {lost}")
    return notes


def _is_file_alone(config: RecoverConfig) -> bool:
    """Return whether the user's own source is the only one, and shipped prompts could be mixed in."""
    from opdcl.distill.mixture import SHIPPED

    sources = [*config.general_sources()]
    # A teacher with a context is shown each prompt's answer, and shipped prompts have none.
    is_shown = config.teacher_of("general").context is not None
    return len(sources) == 1 and sources[0] != SHIPPED and not is_shown


def repeated_rows(rows: list[Row]) -> list[Row]:
    """Return the rows that say the same as an earlier one."""
    first: dict[str, Row] = {}
    keys = [json.dumps([row.key(), row.answer, row.text, row.reply]) for row in rows]
    return [row for row, key in zip(rows, keys, strict=True) if first.setdefault(key, row) is not row]


def _questions_with_several_answers(rows: list[Row]) -> int:
    pairs = {(json.dumps([row.key(), row.text]), row.answer) for row in rows}
    answers = Counter(question for question, _ in pairs)
    return sum(count > 1 for count in answers.values())
