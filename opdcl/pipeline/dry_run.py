"""Describe what a run would do: its tasks, their size, and the rows as the model will see them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from opdcl.config.evaluate import CLOSENESS
from opdcl.model.check_adapter import read_lora_config
from opdcl.pipeline.checks import checked_plan, repeated_rows
from opdcl.pipeline.forecast import forecast, memory_words
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Measure, read_records
from opdcl.results.format import Table
from opdcl.rundir.layout import refuse_foreign
from opdcl.rundir.seals import refuse_damaged
from opdcl.train.finetune import planned_steps

# Characters of the rendered row that a terminal shows.
SHOWN = 2000


def describe(job: Job, made_by: dict[str, str] | None = None) -> tuple[list[list[str]], dict[str, Any]]:
    """Return what a run would do, as table rows and as data. Writes nothing.

    In a sweep, `made_by` maps a fingerprint to the earlier run whose result would be copied; this run's
    fingerprints are added.

    Raises:
        OpdclError: The run would refuse it.
    """
    workflow, made_by = job.workflow, {} if made_by is None else made_by
    tasks = []
    refuse_foreign(job.run)
    if not job.order.force:
        refuse_damaged(job.run)
    planned, notes = checked_plan(job, read_records(job.run), dry_run=True)
    for task in planned:
        origin = made_by.get(task.fingerprint) or (workflow.start if task.name == "finetune" else None)
        if task.action == "run" and origin:
            task = replace(task, action="take", why=f"from {origin}")
        else:
            made_by[task.fingerprint] = job.run.path.name
        tasks.append(task)
    sizes = forecast(job, tasks)
    plan, states = [], defaultdict[tuple[str, str, str], list[str]](list)
    for task in tasks:
        why = task.why
        if task.unfinished and task.name in sizes["memory_bytes"]:
            why = f"about {sizes['memory_bytes'][task.name] / 2**30:.1f} GiB; {why}"
        if task.unfinished and task.name in sizes["steps"]:
            why = f"{sizes['steps'][task.name]} steps, {why}"
        state, suite = (task.state, task.suite) if isinstance(task, Measure) else ("", "")
        if suite:
            prompts = job.suite(suite).documents(workflow.eval.limit) if suite != CLOSENESS else job.closeness
            why = f"{len(prompts):,} prompts, {why}"
        # States of a suite with the same action and reason share a row.
        states[f"{task.name} {suite}", task.action, why].append(state)
        shown = {"stage": task.name, "state": state, "suite": suite, "action": task.action}
        plan.append(shown | {"why": task.why})
    totals = f"{sizes['parameters'] / 1e6:,.0f}M parameters; "
    totals += f"about {sizes['disk_bytes'] / 2**20:,.0f} MiB of disk"
    lora = read_lora_config(job.adapter) if isinstance(job.adapter, Path) else job.adapter
    rank = lora.r if lora else None
    totals = f"an adapter of rank {rank} on {totals}" if lora else totals
    rows, words = [["machine", sizes["device"], totals]], memory_words(sizes)
    if words:
        rows.append(["memory", "", words])
    for (name, action, why), of_suite in states.items():
        rows.append([f"{name} {', '.join(of_suite)}".rstrip(), action, why])
    data = _data(job) if "finetune" in sizes["steps"] else {}
    more = {"rank": rank, "data": data, "notes": notes}
    return rows, {"tasks": plan, **sizes, **more}


def _data(job: Job) -> dict[str, Any]:
    """Return the figures of the fine-tune's rows and the first one as the model will see it."""
    finetune, examples = job.workflow.finetune, job.examples
    rows = job.training_rows
    replayed, parts, first = None, [], examples.encoded[0]
    if count := finetune.replayed(len(examples.encoded)):
        replayed = {"rows": count, "prompts": finetune.replay.prompts}
    pairs = zip(first.ids, first.learned, strict=True)
    for learned, part in itertools.groupby(pairs, key=lambda pair: pair[1]):
        text = job.tokenizer.decode([token for token, _ in part])
        parts.append({"text": text, "learned": learned})
    size, where = examples.longest
    rows_seen = planned_steps(finetune, len(examples.encoded))[0] * finetune.batch_size
    return {
        "source": finetune.data,
        "rows": rows.count,
        "used": len(examples.rows),
        "tokens": sum(len(example.ids) for example in examples.encoded),
        "learned_tokens": sum(sum(example.learned) for example in examples.encoded),
        "longest": {"tokens": size, "where": where},
        "duplicates": len(repeated_rows(rows.usable)),
        "passes": round(rows_seen / len(examples.encoded), 1),
        "replayed": replayed,
        "example": {"where": examples.rows[0].where, "parts": parts},
    }


def data_table(plan: dict[str, Any]) -> list[Table]:
    """Return a table of the rows to be learned with one as the model sees it; nothing without a fine-tune."""
    data = plan["data"]
    if not data:
        return []
    learned = f"{data['tokens']:,} per epoch, of which {data['learned_tokens']:,} are learned"
    rows = [
        ["rows", f"{data['used']:,} of {data['rows']:,} in {data['source']}"],
        ["passes", f"{data['passes']:g}: steps of whole batches learn each row that often"],
        ["tokens", learned],
        ["longest row", f"{data['longest']['tokens']:,} tokens, {data['longest']['where']}"],
        ["duplicated rows", f"{data['duplicates']:,}"],
    ]
    if replayed := data["replayed"]:
        words = f"{replayed['rows']:,} more: base's answers to {replayed['prompts']}"
        words += "; --set finetune.replay.share=0 for none"
        rows.append(["replayed rows", words])
    shown = ""
    for part in data["example"]["parts"]:
        shown += f"⟦{part['text']}⟧" if part["learned"] else part["text"]
    if len(shown) > SHOWN:
        shown = f"{shown[: SHOWN // 2]}\n[...]\n{shown[-SHOWN // 2 :]}"
    rows.append([f"{data['example']['where']}\nlearned: ⟦...⟧", shown])
    return [Table("rows of the fine-tune", ["", ""], rows, "")]
