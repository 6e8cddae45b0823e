"""Describe what a run would do: its tasks, their size, and the rows as the model will see them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from opdcl.pipeline.forecast import forecast
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Task
from opdcl.pipeline.preflight import checked_plan, planned_adapter, remarks, repeated_rows
from opdcl.results.tables import Table

# Characters of the rendered row that a terminal shows.
SHOWN = 2000


def describe(
    job: Job, force: bool = False, made_by: dict[str, str] | None = None
) -> tuple[list[list[str]], dict[str, Any]]:
    """Return what a run would do, as table rows and as data. Writes nothing.

    In a sweep, `made_by` maps a fingerprint to the earlier run whose result would be copied; this run's
    fingerprints are added.

    Raises:
        OpdclError: The run would refuse it.
    """
    from opdcl.model.targets import adapted_share

    workflow, made_by = job.workflow, {} if made_by is None else made_by
    tasks = []
    for task in checked_plan(job, force):
        origin = made_by.get(task.fingerprint) or (workflow.start if task.name == "finetune" else None)
        if task.action == "run" and origin:
            task = replace(task, action="take", why=f"from {origin}")
        tasks.append(task)
    made_by |= {t.fingerprint: job.run.path.name for t in tasks if t.action != "take"}
    sizes = forecast(job, tasks)
    rows = [[task.label, task.action, _size(task, sizes) + task.why] for task in tasks]
    parameters, disk = sizes["parameters"] / 1e6, sizes["disk_bytes"] / 2**20
    totals = f"{parameters:,.0f}M parameters; about {disk:,.0f} MiB of disk"
    share = adapted_share(workflow.model, adapter) if (adapter := planned_adapter(workflow)) else None
    if share:
        totals = f"the adapter changes {share:.0%} of {totals}"
    rows.append(["machine", sizes["device"], totals])
    plan = [
        {"stage": t.name, "state": t.state, "suite": t.suite, "action": t.action, "why": t.why} for t in tasks
    ]
    learns = any(task.name == "finetune" and task.unfinished for task in tasks)
    data = {"data": _data(job) if learns else {}, "notes": remarks(job, tasks)}
    return rows, {"tasks": plan, **sizes, "adapted_share": share, **data}


def _size(task: Task, sizes: dict[str, Any]) -> str:
    """Return a task's steps and memory as text, or "" if it will not run."""
    if not task.unfinished or task.name not in sizes["memory_bytes"]:
        return ""
    steps = f"{sizes['steps'][task.name]} steps, " if task.name in sizes["steps"] else ""
    memory = sizes["memory_bytes"][task.name] / 2**30
    return f"{steps}about {memory:.1f} GiB; "


def data_table(plan: dict[str, Any]) -> list[Table]:
    """Return a table of the rows to be learned with one as the model sees it; nothing without a fine-tune."""
    data = plan["data"]
    if not data:
        return []
    longest, shown = data["longest"], ""
    for part in data["example"]["parts"]:
        shown += f"⟦{part['text']}⟧" if part["learned"] else part["text"]
    if len(shown) > SHOWN:
        shown = f"{shown[: SHOWN // 2]}\n[...]\n{shown[-SHOWN // 2 :]}"
    rows = [["rows", f"{data['used']:,} of {data['rows']:,} in {data['source']}"]]
    if data["tokens"]:
        learned = f"{data['tokens']:,} per epoch, of which {data['learned_tokens']:,} are learned"
        rows += [["tokens", learned], ["longest row", f"{longest['tokens']:,} tokens, {longest['where']}"]]
    rows.append(["duplicated rows", f"{data['duplicates']:,}"])
    if replayed := data["replayed"]:
        rows.append(["replayed rows", f"{replayed['rows']:,} more: base's answers to {replayed['prompts']}"])
    if shown:
        rows.append([f"{data['example']['where']}\nlearned: ⟦...⟧", shown])
    return [Table("rows of the fine-tune", ["", ""], rows, "")]


def _data(job: Job) -> dict[str, Any]:
    """Return the figures of the fine-tune's rows and the first one as the model will see it."""
    if not (finetune := job.workflow.finetune):
        return {}
    rows, bad = job.sources.finetune_rows(job.workflow)
    examples = job.examples
    size, where = examples.longest
    figures: dict[str, Any] = {
        "source": finetune.data,
        "rows": len(rows) + len(bad),
        "used": len(examples.rows),
        "tokens": sum(len(example.input_ids) for example in examples.encoded),
        "learned_tokens": sum(sum(example.completion_mask) for example in examples.encoded),
        "longest": {"tokens": size, "where": where},
        "duplicates": len(repeated_rows(rows)),
        "replayed": None,
        "example": {"where": "", "parts": []},
    }
    if count := finetune.replay.count(len(examples.encoded)):
        figures["replayed"] = {"rows": count, "prompts": finetune.replay.prompts}
    if examples.encoded:
        first = examples.encoded[0]
        pairs = zip(first.input_ids, first.completion_mask, strict=True)
        figures["example"] = {
            "where": examples.rows[0].where,
            "parts": [
                {"text": job.tokenizer.decode([token for token, _ in part]), "learned": bool(learned)}
                for learned, part in itertools.groupby(pairs, key=lambda pair: pair[1])
            ],
        }
    return figures
