"""Everything that a run checks before it trains; a dry run does the same. No weights are loaded."""

from __future__ import annotations

import functools
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from opdcl.config.model import LoraSection, ModelConfig
from opdcl.config.shipped import split_part
from opdcl.config.workflow import Workflow
from opdcl.data.chat import check_turn_end, note_on_clock
from opdcl.data.formats import PACKED_ROW, Row
from opdcl.data.prompts import SHIPPED, RecoverySource, count_short_of_room, encode_asked
from opdcl.data.rows import left_out, shortened, unread
from opdcl.data.suites import Suite
from opdcl.errors import UsageError, nearest_path, typed
from opdcl.model.adapters import new_tokens, own_template, refuse_unserved
from opdcl.model.check_adapter import check_on_base, checked_settings
from opdcl.model.consent import refuse_stored_places, trackers_of
from opdcl.model.load import check_exists, check_model, declared_eos_ids, skeleton
from opdcl.model.quantized import check_installed
from opdcl.pipeline.defaults import text_config
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Measure, Records, Task, Train, learned_rows
from opdcl.pipeline.tasks import outcomes
from opdcl.pipeline.trackers import check_trackers
from opdcl.results.origins import count_learned, holder, learned_by, line_of
from opdcl.rundir.layout import TEMPLATE, RunDir

# What a tuned model and its base have in common.
SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("num_experts", "num_local_experts", "moe_intermediate_size"),
)


def checked_plan(job: Job, records: Records, dry_run: bool = False) -> tuple[list[Task], list[str]]:
    """Plan a run whose directory holds `records`, and check the data and what the tasks need.

    Writes nothing. Returns the tasks, and notes for the user. A `dry_run` sends no key.

    Raises:
        UsageError: The run would refuse it later.
    """
    workflow = job.workflow
    # Before data is compared with that of earlier stages, so that a bad row is named first.
    recovery, near = job.recovery if workflow.recover else None, job.closeness
    for suite, path in workflow.eval.data.items() if workflow.eval else ():
        if path not in job.inputs.given and not os.path.exists(split_part(path)[0]):
            hint = typed("--data", f"{suite}={nearest_path(path) or 'PATH'}")
            raise UsageError(f"eval.data.{suite}: {path} does not exist", hint)
    tasks = job.plan(records)
    if job.order.continued:
        refuse_other_finetune(job, tasks, job.order.continued)
    if not job.order.force:
        _refuse_stale(job, tasks, records)
    _refuse_other_dtype(job, records)
    todo = {task.name for task in tasks if task.unfinished}
    refuse_stored_places(workflow, job.origins, job.run, todo)
    trackers, untracked = trackers_of(workflow, job.origins)
    _check_machine(workflow, trackers)
    _check_gates(workflow, tasks)
    _check_tuned_model(job)
    notes: list[str] = []
    if todo:
        models = [*workflow.models(), *filter(None, [job.tuned])]
        notes += [untracked, *(note for model in models for note in check_model(model))]
        notes += [*check_adapters(job), note_on_clock(job.tokenizer)]
    if workflow.finetune and "finetune" in todo:
        notes += _check_finetune(job)
    if recovery and "recover" in todo:
        notes += _check_recovery(job, recovery)
    if workflow.eval:
        notes += _check_suites(job, near, "eval" in todo)
    for stage in ("recover", "eval"):
        if stage in todo:
            notes.append(system_note(job, workflow.system_of(stage)))
    _check_servers(job, todo, sends_key=not dry_run)
    files = job.inputs.files  # those of suites are read by now
    of_files = [left_out(source) for source in files]
    of_files += [unread(source, rows) for source, rows in files.items()]
    return tasks, [note for note in dict.fromkeys(of_files + notes) if note]


def refuse_other_finetune(job: Job, tasks: list[Task], donor: RunDir) -> None:
    """Refuse a second recovery whose fine-tune is not the one in `donor`, and would be made again."""
    known = outcomes(donor)
    if all(task.fingerprint in known for task in tasks if task.name == "finetune"):
        return
    again = typed("opdcl", "recover", donor.adapters()["tuned"], "--domain", "PROMPTS", "-o", "RUN")
    message = f"{job.run.path} would have another fine-tune than {donor.path}: its settings or rows differ"
    raise UsageError(message, f"begin from the adapter: {again}")


def _refuse_stale(job: Job, tasks: list[Task], records: Records) -> None:
    """Refuse a run whose finished or begun stages were made with other settings or data."""
    stale = [task for task in tasks if isinstance(task, Train) and task.action == "stale"]
    if not stale:
        return
    # The options that give automatic settings the values with which the stages were made.
    earlier: dict[str, str] = {}
    for task in stale:
        for name, value in records.stages[task.name].record.inputs.items():
            key = "model.dtype" if name == "dtype" else f"{task.name}.{name}"
            if task.inputs.get(name) != value and job.origins.get(key, "").startswith("auto: "):
                earlier[key] = typed("--set", f"{key}={value}")
    ways = ["the old settings and files", "--force to redo these stages"]
    if earlier:
        ways = [f"what it was made with: {' '.join(earlier.values())}"]
    place, other = job.run.path, f"{job.run.path}-2"
    if stale[0].name == "recover":
        again = typed("opdcl", "recover", place, "-o", other)
        ways.insert(0, f"a second recovery beside it ({again}, same options)")
    elif job.order.verb == "run":
        ways.insert(0, f"a new directory ({typed('-o', other)})")
    reasons = "; ".join(f"{task.name} {task.why}" for task in stale)
    message = f"{job.run.path} was made with other settings or data; {reasons}"
    raise UsageError(message, ", or ".join(ways))


def _refuse_other_dtype(job: Job, records: Records) -> None:
    """Refuse a run in another precision, in which the hash of base's weights is another one."""
    dtype = job.workflow.model.dtype
    earlier = job.run.read_manifest().get("device", {}).get("dtype", dtype)
    if earlier != dtype and not records.empty:
        hint = f"--set model.dtype={earlier}, or a new run directory"
        raise UsageError(f"this run started in {earlier} and would continue in {dtype}", hint)


def _check_machine(workflow: Workflow, trackers: list[str]) -> None:
    """Check that the device, the models and the packages are here."""
    for model in workflow.models():
        check_exists(model)
        check_installed(model)
    check_trackers(trackers)


def _check_gates(workflow: Workflow, tasks: list[Task]) -> None:
    """Refuse gates where base is measured alone: each of them compares another state with base."""
    is_gated = any(value is not None for value in workflow.gates.model_dump().values())
    if is_gated and tasks and all(isinstance(task, Measure) and task.state == "base" for task in tasks):
        hint = "--base BASE names the model to compare with; or leave the gate out"
        raise UsageError(f"a gate needs two models, and {workflow.model.id} is measured alone", hint)


def _check_tuned_model(job: Job) -> None:
    """Refuse a whole model with another base, and settings that need an adapter on base."""
    from opdcl.model.check_model import check_same_tokenizer
    from opdcl.model.load_backbone import has_tokenizer

    workflow, base, tuned = job.workflow, job.workflow.model, job.tuned
    if tuned is None:
        return
    hint = "--base names the model that it was fine-tuned from"
    if (Path(base.id).resolve(), base.revision) == (Path(tuned.id).resolve(), tuned.revision):
        raise UsageError(f"base and tuned model are both {tuned.id}", hint)
    shape = text_config(tuned)
    # By its own tokenizer: rows behind base's are tokens that base lacks, or padding.
    has_more = job.has_more_tokens or (has_tokenizer(tuned) and shape.vocab_size > job.shape.vocab_size)
    for key in SHAPE:
        ours, theirs = getattr(job.shape, key, None), getattr(shape, key, None)
        is_longer = key == "vocab_size" and theirs > ours
        if is_longer and not has_more:
            hint = f"copy its tokenizer into {tuned.id}, which says whether they are tokens; or {hint}"
        if ours != theirs and not (is_longer and has_more):
            what = "embeddings of size" if key == "vocab_size" else key
            message = f"{tuned.id} has another shape than {base.id}: {what} {theirs}, there {ours}"
            raise UsageError(message, f"{hint}; opdcl eval MODEL measures each of them alone")
    if has_tokenizer(tuned):
        check_same_tokenizer(
            job.inputs.tokenizer(base),
            job.inputs.tokenizer(tuned),
            tuned.id,
            hint=f"{hint}; it must end a turn with a token that base has",
            may_have_more=True,
        )
    recover, teachers = workflow.recover, workflow.teachers().values()
    used: dict[str, tuple[Any, str]] = {
        "finetune": (workflow.finetune, "opdcl finetune --base trains an adapter on such a model"),
        "a server for the student or the evaluation": (
            (recover and recover.server) or (workflow.eval and workflow.eval.server),
            "leave it out",
        ),
        "a teacher of kind adapter": (any(t.adapter for t in teachers), "use kind model"),
    }
    if recover:
        used["recover.steps 0"] = (recover.steps == 0, "train some steps")
        used["recover.start"] = (recover.start not in ("auto", 1), "leave it out")
    if has_more:
        by_token = recover and (recover.reward or recover.loss.kind in ("policy_gradient", "cross_entropy"))
        used |= {
            "a reward, or a loss of single tokens": (by_token, "use forward_kl"),
            "a teacher on a server": (any(teacher.server for teacher in teachers), "use kind model"),
            "model.shard": (workflow.model.shard, "leave it out"),
        }
    for what, (is_used, remedy) in used.items():
        if is_used:
            reason = "its weights are not base's plus an adapter"
            if has_more:
                reason += ", and it has tokens that base lacks, or more rows of embeddings"
            raise UsageError(f"{what} does not work with {tuned.id}, a whole model: {reason}", remedy)


def _check_finetune(job: Job) -> list[str]:
    """Check the chat template, target modules and every row; return notes on rows."""
    from opdcl.train.finetune import planned_steps

    config, examples = job.workflow.finetune, job.examples
    if not job.workflow.start:
        check_targets(job.workflow.model, config.lora)
    check_turn_end(job.tokenizer, declared_eos_ids(job.workflow.model, job.tokenizer))
    planned_steps(config, len(examples.encoded))  # refuses more than can be planned
    notes = [*examples.notes]
    rows = job.training_rows.usable
    if repeated := repeated_rows(rows):
        first = repeated[0].where
        notes.append(f"{len(repeated)} of {len(rows)} rows repeat an earlier one (first: {first})")
    answers = defaultdict(set)
    for row in rows:
        answers[row.key(), row.text].add(row.answer)
    if several := sum(len(different) > 1 for different in answers.values()):
        notes.append(f"questions with several different answers: {several}")
    return notes


def _check_recovery(job: Job, source: RecoverySource) -> list[str]:
    """Check that there is an adapter to recover, its teachers and every prompt; return notes on prompts."""
    from opdcl.model.check_model import check_same_tokenizer

    workflow, run, config = job.workflow, job.run, job.workflow.recover
    if not (workflow.finetune or workflow.start or "tuned" in run.adapters()):
        hint = typed("opdcl", "finetune", "ROWS", "-o", run.path)
        raise UsageError(f"{run.path} has no fine-tuned adapter to recover", hint)
    for model in workflow.models()[1:]:
        check_same_tokenizer(job.tokenizer, job.inputs.tokenizer(model), f"teacher {model.id}")
    check_turn_end(job.tokenizer, declared_eos_ids(job.workflow.model, job.tokenizer))
    if not any(of_stream.train for of_stream in job.prompts.values()):
        raise UsageError("recovery has no prompts", "set recover.general")
    prompts, teacher, notes = source.rows, config.teacher_of("general"), []
    if short := count_short_of_room(config, prompts["general"], job.tokenizer, job.context):
        lost = "the teacher does not see a demonstration that does not fit"
        notes.append(f"{short} of {len(prompts['general'])} prompts may have too little room: {lost}")
    if teacher.begins_as_tuned:
        notes.append("warning: recover.general_teacher is tuned: a placebo, which recovers nothing")
    # A teacher with a context is shown each prompt's answer, and shipped prompts have none.
    sources = [*config.general_sources()]
    if len(sources) == 1 and sources[0] != SHIPPED and teacher.context is None:
        notes.append(
            "general prompts: your file alone, which may lack kinds of requests; with half shipped "
            "prompts, recover.general: [everyday=0.5, FILE=0.5], it covers more, see docs/data.md"
        )
    if not prompts["domain"]:
        lost = "so the recovery may undo what was learned; name some with --domain"
        notes.append(f"warning: no prompts guard the domain, {lost}")
    if job.tuned and not job.has_more_tokens:
        way = "mergekit-extract-lora makes one of a merged model, see docs/repair.md"
        notes.append(f"base and {job.tuned.id} are two models in memory; one is enough for an adapter: {way}")
    if not prompts["general"]:
        lost = "so general behaviour is not recovered; name some with --prompts"
        notes.append(f"warning: there are no general prompts, {lost}")
    return notes


def system_note(job: Job, used: str | None) -> str:
    """Say where rows were learned with another system prompt than prompts are answered with; else nothing."""
    workflow = job.workflow
    if workflow.finetune:
        rows = job.training_rows.usable
    elif workflow.recover and workflow.recover.domain:
        rows = job.rows(workflow.recover.domain)
    else:
        return ""
    asked = [row for row in rows if row.prompt]
    others = [row for row in asked if row.system != used]
    share, own = f"warning: {len(others)} of {len(asked)} rows", [row.system for row in others if row.system]
    if own and not used:
        found = f"{share} have a system prompt ({shortened(own[0], 60)})"
        return f"{found}; general prompts and suites have none: --system TEXT gives it to them"
    if own:
        return f"{share} have another system prompt than --system: {shortened(own[0], 60)}"
    if others and workflow.finetune:  # what an adapter learned elsewhere is not known
        return f"{share} were learned without a system prompt: a column `system` in the rows teaches it"
    return ""


def check_adapters(job: Job) -> list[str]:
    """Check that the adapters of a run's start and of its teachers fit its base; return notes."""
    from opdcl.model.check_model import template_difference

    model, start, notes = job.workflow.model, job.adapter, list[str]()
    if isinstance(start, Path):
        template = own_template(start)
        difference = template_difference(job.tokenizer, template) if template else ""
        if difference:
            file = start / TEMPLATE if (start / TEMPLATE).is_file() else "FILE"
            problem = f"warning: adapter {start} was saved with another chat template than that of its base"
            way = typed("--set", f"model.chat_template={file}")
            notes.append(f"{problem}: {difference}; {way} takes the adapter's")
        if more := new_tokens(start, job.tokenizer):
            shown = ", ".join(more[:5])
            notes.append(
                f"warning: adapter {start} was saved with tokens that base lacks: {shown}; they are not used"
            )
    for folder in job.foreign_adapters:
        notes += check_on_base(folder, model)
    return notes


def check_targets(model: ModelConfig, lora: LoraSection) -> None:
    """Refuse `target_modules` that match no layer of the model: PEFT would leave them out silently."""
    targets = lora.target_modules
    if targets == "all-linear":
        return
    from opdcl.model.lora import adaptable, is_target

    layers = adaptable(skeleton(model))
    wanted = [targets] if isinstance(targets, str) else [[target] for target in targets]
    missing = [one for one in wanted if not any(is_target(layer, one) for layer in layers)]
    if not missing:
        return
    names = sorted({name.rpartition(".")[2] for name in layers})
    hint = f"linear layers of this model: {', '.join(names)}"
    if isinstance(targets, str) and "," in targets:
        hint = f"write a list: {typed('--set', f'finetune.lora.target_modules=[{targets}]')}; {hint}"
    named = ", ".join(repr(one if isinstance(one, str) else one[0]) for one in missing)
    raise UsageError(f"finetune.lora.target_modules: {named} matches no linear layer of {model.id}", hint)


def _check_suites(job: Job, near: list[Row], to_do: bool) -> list[str]:
    """Check that each prompt and its longest answer fit; note answers that would be cut, and learned rows."""
    from opdcl.measure.evaluate import max_answer_tokens
    from opdcl.results.summary import learned_note  # it brings numpy

    config, notes = job.workflow.eval, []
    suites = [job.suite(name) for name in config.suites()]
    if not to_do:
        return []
    start, rows = job.workflow.start, job.training_rows.usable if job.workflow.finetune else []
    learned = learned_rows(rows) | learned_by(*line_of(holder(start)[0] if start else None))
    for suite in suites:
        # As in lm-eval, texts whose likelihood is asked for lose their beginning.
        for number, ids in enumerate(job.prompt_ids[suite.name]):
            place = functools.partial(suite.place, number)
            max_answer_tokens(config, suite.answering.max_tokens, len(ids), job.context, place)
        notes.append(_note_on_cut(job, suite))
        if suite.generative:
            samples = [suite.record(doc, [None]) for doc in suite.documents(config.limit)]
            notes.append(learned_note(suite.name, count_learned(samples, learned), len(samples)))
    limit = config.closeness_tokens
    encode_asked(near, job.tokenizer, job.context - limit, limit)
    return notes


def _note_on_cut(job: Job, suite: Suite) -> str:
    """Say how many expected answers of a user's rows are longer than the model's may be; else nothing."""
    config = job.workflow.eval
    golds = [doc["answers"][0] for doc in suite.documents(config.limit) if PACKED_ROW in doc]
    lengths = [len(job.tokenizer(gold, add_special_tokens=False)["input_ids"]) for gold in golds]
    limit = suite.answering.max_tokens if golds else 0
    longer = sum(length > limit for length in lengths)
    if not longer:
        return ""
    room = job.context - max(map(len, job.prompt_ids[suite.name])) - config.thought_tokens
    needed = min(max(lengths), room)
    found = f"warning: {longer} of {len(golds)} expected answers of suite {suite.name!r} are longer than the"
    hint = f"--set eval.max_new_tokens={needed}" if needed > limit else "use shorter ones"
    return f"{found} {limit} tokens at which answers are cut, so a perfect one scores less: {hint}"


def _check_servers(job: Job, todo: set[str], sends_key: bool) -> None:
    """Check that every server that the unfinished stages need grants access."""
    from opdcl.model.lora import lora_config
    from opdcl.sampling.server import check_access

    workflow, own = job.workflow, []
    if workflow.eval and "eval" in todo:
        own.append(workflow.eval.server)
    if workflow.recover and "recover" in todo:
        own.append(workflow.recover.server)
        named = workflow.recover.served_tokens
        for teacher in workflow.teachers().values():
            if teacher.server:
                check_access(teacher.server.url, named, teacher.server.model, sends_key)
    adapter = job.adapter if any(own) else None
    if isinstance(adapter, Path):
        refuse_unserved(checked_settings(adapter))
    elif adapter:
        refuse_unserved(vars(lora_config(adapter, skeleton(workflow.model))))
    for server in filter(None, own):
        check_access(server.url, sends_key=sends_key)


def repeated_rows(rows: list[Row]) -> list[Row]:
    """Return the rows that say the same as an earlier one."""
    seen: set[str] = set()
    repeated = []
    for row in rows:
        key = json.dumps([row.key(), row.answer, row.text, row.reply])
        if key in seen:
            repeated.append(row)
        seen.add(key)
    return repeated
