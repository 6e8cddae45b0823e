"""Describe what a run would do, and estimate its size from the model's config alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from opdcl.config.model import ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.config.workflow import Workflow
from opdcl.data.formats import Row
from opdcl.distill.rollout_queue import FULL_BATCH
from opdcl.model.architecture import architecture
from opdcl.model.load import EMBEDDED, pick_device, pick_dtype
from opdcl.pipeline.defaults import resolve_for_machine, text_config
from opdcl.pipeline.plan import Task
from opdcl.pipeline.sources import Sources, checked_plan
from opdcl.rundir.layout import RunDir
from opdcl.stages.finetune import planned_steps


def describe(
    workflow: Workflow, run: RunDir, made_by: dict[str, str] | None = None, sources: Sources | None = None
) -> tuple[list[list[str]], dict[str, Any]]:
    """Return what a run would do, as table rows and as data, with steps, memory and disk. Writes nothing.

    In a sweep, `made_by` maps a fingerprint to the earlier run whose result would be copied; this run's
    fingerprints are added.
    """
    sources = sources or Sources()
    workflow, _ = resolve_for_machine(sources.inherit(workflow))
    made_by = {} if made_by is None else made_by
    tasks = []
    for task in checked_plan(workflow, run, sources):
        if task.action == "run" and task.fingerprint in made_by:
            task = replace(task, action="take", why=f"from {made_by[task.fingerprint]}")
        tasks.append(task)
    made_by |= {t.fingerprint: run.path.name for t in tasks if t.action != "take"}
    sizes = estimate(workflow, tasks, sources)
    rows = []
    for task in tasks:
        size = ""
        if task.name in sizes["steps"] and task.action != "take":
            memory = sizes["memory_bytes"][task.name] / 2**30
            size = f"{sizes['steps'][task.name]} steps, about {memory:.1f} GiB; "
        rows.append([task.label, task.action, size + task.why])
    parameters, disk = sizes["parameters"] / 1e6, sizes["disk_bytes"] / 2**20
    totals = f"{parameters:,.0f}M parameters; about {disk:,.0f} MiB of disk"
    rows.append(["machine", sizes["device"], totals])
    plan = [
        {"stage": t.name} | {k: getattr(t, k) for k in ("state", "suite", "action", "why")} for t in tasks
    ]
    return rows, {"tasks": plan, **sizes}


@dataclass(frozen=True)
class _Shape:
    """The dimensions of a model, the bytes of one number, and the device."""

    layers: int
    hidden: int
    inner: int
    vocabulary: int
    keys: int
    width: int
    device: str

    @property
    def parameters(self) -> int:
        per_layer = self.hidden * (2 * self.hidden + 2 * self.keys + 3 * self.inner)
        return self.layers * per_layer + self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        return self.parameters * self.width  # bytes

    @property
    def activations(self) -> int:
        """Bytes per token of a micro-batch, at about 17 values per layer and hidden unit.

        Korthikanti et al. (arXiv 2205.05198) count 34 bytes in 16 bits, with fused attention and without
        tensor parallelism.
        """
        return self.layers * self.hidden * 17 * self.width

    def adapter(self, rank: int) -> int:
        """Return the number of parameters of an adapter on all linear layers."""
        return self.layers * rank * (9 * self.hidden + 2 * self.keys + 3 * self.inner)


def estimate(workflow: Workflow, tasks: list[Task], sources: Sources) -> dict[str, Any]:
    """Estimate steps, memory and disk for a dry run, from the model's config alone.

    Memory counts the weights, their merged copy while sampling, the adapter with its gradient and two Adam
    moments in fp32, the activations of one micro-batch, and the key-value cache of the rollouts.
    """
    device = pick_device(workflow.model.device)
    shape = _shape(workflow.model, device)
    finetune, recover = workflow.finetune, workflow.recover
    adapter = shape.adapter(finetune.lora.r if finetune else 32)
    fixed = shape.weights + (0 if device.startswith("cuda") else 900_000_000)
    memory: dict[str, int] = {}
    steps: dict[str, int] = {}
    names = {task.name for task in tasks}
    if finetune and "finetune" in names:
        rows = sources.rows(finetune.data)
        steps["finetune"] = planned_steps(finetune, len(rows))
        longest = max(_tokens(r, r.text, r.answer) for r in rows)
        tokens = finetune.batch_size * min(finetune.max_length, longest)
        memory["finetune"] = fixed + adapter * 16 + tokens * shape.activations
    if recover and "recover" in names:
        if recover.method != "interpolate":  # which scales the adapter and trains nothing
            steps["recover"] = recover.steps
        rows = [row for stream in sources.recovery(recover).rows.values() for row in stream]
        memory["recover"] = fixed + _recovery_memory(recover, rows, shape, adapter)
    return {
        "device": device,
        "parameters": shape.parameters,
        "steps": steps,
        "memory_bytes": memory,
        "disk_bytes": (adapter * 4) * (2 + 2 * 3 * len(steps)),
    }


def _recovery_memory(recover: RecoverConfig, rows: list[Row], shape: _Shape, adapter: int) -> int:
    """Return the bytes that a recovery needs besides the base."""
    teachers = recover.all_teachers().values()
    other_models = sum(_shape(t.model, shape.device).weights for t in teachers if t.model)
    copies = sum(t.kind in ("ema", "adapter") for t in teachers)
    rows_at_once = max(recover.rollouts * recover.sample_ahead, FULL_BATCH)
    cache = rows_at_once * (recover.max_new_tokens + 128) * shape.layers * 2 * shape.keys * shape.width
    longest = max(map(_tokens, rows), default=0) + recover.max_new_tokens
    # A micro-batch holds one sequence at least.
    step = max(recover.micro_batch_tokens, longest) * shape.activations
    return other_models + adapter * (20 + 4 * copies) + max(shape.weights + cache, step)


def _shape(model: ModelConfig, device: str) -> _Shape:
    width = {"float32": 4}.get(pick_dtype(model.dtype, device), 2)
    if model.id == EMBEDDED:
        return _Shape(30, 576, 1536, 49152, 192, width, device)
    c = text_config(model)
    size = c.num_hidden_layers, c.hidden_size, c.intermediate_size, c.vocab_size, architecture(c).key_width
    return _Shape(*size, width, device)


def _tokens(row: Row, *answer: str | None) -> int:
    """Guess a row's length without a tokenizer: three characters per token, plus the chat template."""
    return sum(len(text or "") for text in (*(m["content"] for m in row.prompt), *answer)) // 3 + 32
