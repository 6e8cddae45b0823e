"""What a dry run says: which stages would run, and their size, from the model's config alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import AutoConfig

from opdcl.config.model import ModelConfig
from opdcl.config.workflow import Workflow
from opdcl.data.rows import Row, load_rows
from opdcl.distill.prompts import read_recovery_source
from opdcl.distill.rollout_queue import FULL_BATCH
from opdcl.model.architecture import architecture
from opdcl.model.embedded import EMBEDDED
from opdcl.model.load import model_source, pick_device, pick_dtype
from opdcl.pipeline.defaults import resolve_for_machine
from opdcl.pipeline.execute import plan_run
from opdcl.pipeline.plan import Task
from opdcl.pipeline.preflight import check_servers, check_tasks, refuse_foreign
from opdcl.pipeline.session import label
from opdcl.pipeline.sources import inherit
from opdcl.rundir.layout import RunDir
from opdcl.stages.finetune import planned_steps


def describe(
    workflow: Workflow, run: RunDir, made: dict[str, str] | None = None
) -> tuple[list[list[str]], dict[str, Any]]:
    """Return what a run would do, as table rows and as data, with steps, memory and disk. Writes nothing.

    Args:
        workflow: What is wanted.
        run: Where it is to lie; it need not exist.
        made: Fingerprint -> the run that has made it by then, from which it would be taken; this run's own are added.
    """
    refuse_foreign(run)
    workflow, _ = resolve_for_machine(inherit(workflow))
    made = {} if made is None else made
    tasks = [
        replace(t, action="take", why=f"from {made[t.fingerprint]}")
        if t.action == "run" and t.fingerprint in made
        else t
        for t in plan_run(workflow, run)
    ]
    made |= {t.fingerprint: run.path.name for t in tasks if t.action != "take"}
    check_tasks(workflow)
    check_servers(workflow, tasks)
    sizes = estimate(workflow, tasks)
    rows = []
    for task in tasks:
        todo = task.name in sizes["steps"] and task.action != "take"
        steps = (
            f"{sizes['steps'][task.name]} steps, about {sizes['memory_bytes'][task.name] / 2**30:.1f} GiB; "
            if todo
            else ""
        )
        rows.append([label(task), task.action, steps + task.why])
    rows.append(
        [
            "machine",
            sizes["device"],
            f"{sizes['parameters'] / 1e6:,.0f}M parameters; about {sizes['disk_bytes'] / 2**20:,.0f} MiB of disk",
        ]
    )
    plan = [
        {"stage": t.name, "state": t.state, "suite": t.suite, "action": t.action, "why": t.why} for t in tasks
    ]
    return rows, {"tasks": plan, **sizes}


def estimate(workflow: Workflow, tasks: list[Task]) -> dict[str, Any]:
    """Estimate steps, memory and disk for a dry run, from the model's config alone.

    Memory: weights, their merged copy while sampling, adapter with gradient and two Adam moments in fp32, activations
    of one micro-batch at about 17 values per token, layer and hidden unit (Korthikanti et al., arXiv 2205.05198, which
    counts 34 bytes in 16 bits, without tensor parallelism and with fused attention), and the rollouts' key-value cache.
    """
    device = pick_device(workflow.model.device)
    width, shape = _width(workflow.model, device), _shape(workflow.model)
    weights = _parameters(shape)
    rank = workflow.finetune.lora.r if workflow.finetune else 32
    adapter = (
        shape["layers"]
        * rank
        * (7 * shape["hidden"] + 2 * shape["kv"] + 3 * shape["inner"] + 2 * shape["hidden"])
    )
    per_token = shape["layers"] * shape["hidden"] * 17 * width
    fixed = 0 if device.startswith("cuda") else 900_000_000
    memory: dict[str, int] = {}
    steps: dict[str, int] = {}
    for task in tasks:
        if task.name == "finetune" and workflow.finetune:
            rows = load_rows(workflow.finetune.data)
            steps["finetune"] = planned_steps(workflow.finetune, len(rows))
            tokens = workflow.finetune.batch_size * min(
                workflow.finetune.max_length, max(_tokens(r, r.text, r.answer) for r in rows)
            )
            memory["finetune"] = fixed + weights * width + adapter * 16 + tokens * per_token
        if task.name == "recover" and workflow.recover:
            r = workflow.recover
            if r.method != "interpolate":  # which scales the adapter and trains nothing
                steps["recover"] = r.steps
            rows_at_once = max(r.rollouts * r.sample_ahead, FULL_BATCH)
            cache = rows_at_once * (r.max_new_tokens + 128) * shape["layers"] * 2 * shape["kv"] * width
            streams = read_recovery_source(r).rows.values()
            longest = max((_tokens(row) for rows in streams for row in rows), default=0)
            step = (
                max(r.micro_batch_tokens, longest + r.max_new_tokens) * per_token
            )  # a micro-batch is one sequence at least
            others = sum(
                _parameters(_shape(m)) * _width(m, device)
                for t in r.all_teachers().values()
                if (m := t.model)
            )
            states = sum(t.kind in ("ema", "adapter") for t in r.all_teachers().values())
            memory["recover"] = (
                fixed
                + weights * width
                + others
                + adapter * (20 + 4 * states)
                + max(weights * width + cache, step)
            )
    return {
        "device": device,
        "parameters": weights,
        "steps": steps,
        "memory_bytes": memory,
        "disk_bytes": (adapter * 4) * (2 + 2 * 3 * len(steps)),
    }


def _shape(model: ModelConfig) -> dict[str, int]:
    if model.id == EMBEDDED:
        return {"layers": 30, "hidden": 576, "inner": 1536, "vocabulary": 49152, "kv": 192}
    source, extra = model_source(model)
    c = AutoConfig.from_pretrained(source, revision=model.revision, **extra).get_text_config()
    return {
        "layers": c.num_hidden_layers,
        "hidden": c.hidden_size,
        "inner": c.intermediate_size,
        "vocabulary": c.vocab_size,
        "kv": architecture(c).key_width,
    }


def _tokens(row: Row, *answer: str | None) -> int:
    """Guess a row's length in tokens without a tokenizer: about three characters to each, and the chat template's own."""
    return sum(len(text or "") for text in (*(m["content"] for m in row.prompt), *answer)) // 3 + 32


def _parameters(shape: dict[str, int]) -> int:
    per_layer = shape["hidden"] * (2 * shape["hidden"] + 2 * shape["kv"] + 3 * shape["inner"])
    return shape["layers"] * per_layer + shape["vocabulary"] * shape["hidden"]


def _width(model: ModelConfig, device: str) -> int:
    return {"float32": 4}.get(pick_dtype(model.dtype, device), 2)
