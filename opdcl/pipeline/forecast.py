"""Forecast steps, memory and disk of a run from the model's config and its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.finetune import REPLAYED_TOKENS, FinetuneConfig
from opdcl.config.model import ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.data.examples import Examples
from opdcl.data.rows import Row
from opdcl.distill.schedule import FULL_BATCH, STREAMS
from opdcl.model.adapters import tuned_model
from opdcl.model.architecture import Architecture, architecture
from opdcl.model.llama_pass import FAMILY, WIDE, attends_within_rows
from opdcl.model.load import pick_device, pick_dtype
from opdcl.model.positions import CHUNK, CUDA_CHUNK
from opdcl.pipeline.defaults import text_config
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Task
from opdcl.stages.finetune import planned_steps


@dataclass(frozen=True)
class _Shape:
    """The dimensions of a model, how its numbers are stored, and where it runs.

    A layer has an inner width of `inner`, each expert of a mixture too. `tied` models have one matrix of
    embeddings.
    """

    of: Architecture
    hidden: int
    inner: int
    tied: bool
    dtype: str
    device: str
    quantization: str | None
    packed: bool
    """Whether a GPU trains on packed rows, with less kept for the gradient."""

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return 4 if self.dtype == "float32" else 2

    @property
    def parameters(self) -> int:
        per_layer = 2 * self.query + 2 * self.of.key_width + 3 * self.inner * self.of.experts
        return self.of.layers * per_layer * self.hidden + self.embeddings

    @property
    def query(self) -> int:
        """How many numbers one token's queries take in one layer."""
        return self.of.heads * self.of.head_dim or self.hidden

    @property
    def embeddings(self) -> int:
        return self.of.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def weights(self) -> int:
        """Bytes. A quantized weight takes one, or half of one and its part of the scales."""
        embedding = self.embeddings
        each = {None: self.width, "8bit": 1, "4bit": 0.516}[self.quantization]
        return round((self.parameters - embedding) * each) + embedding * self.width

    @property
    def merged(self) -> int:
        """Bytes of the second copy of the weights while sampling; quantized weights are not merged."""
        return 0 if self.quantization else self.weights

    def activations(self, rank: int) -> int:
        """Return the bytes per token of a micro-batch that the gradient needs, with an adapter of this rank.

        Counted on the Llama family: inputs and outputs of products in the model's precision, those of norms
        in fp32, or of packed rows in the model's too.
        """
        if self.packed:
            products = 4 * self.inner + 4 * self.hidden + 2 * (self.query + self.of.key_width) + 7 * rank
            # Of wide layers only the input is kept, and while one is computed again, what is inside.
            wide = self.hidden >= WIDE
            kept = self.of.layers * self.hidden + products if wide else self.of.layers * products
            return kept * self.width
        inside = 4 * self.inner * self.of.active_experts + 3 * self.hidden + 7 * rank
        normed = 4 * self.hidden + self.query
        return self.of.layers * (inside * self.width + 4 * normed)

    @property
    def chunk(self) -> int:
        """Bytes of the loss on the positions that are projected onto the vocabulary at once, in fp32."""
        positions = CUDA_CHUNK if self.device.startswith("cuda") else CHUNK
        return 5 * 4 * positions * self.of.vocabulary

    def cache(self, tokens: int) -> int:
        """Return the bytes that the keys and values of `tokens` tokens take."""
        return tokens * self.of.layers * 2 * self.of.key_width * self.width

    def adapter(self, rank: int) -> int:
        """Return the number of parameters of an adapter on all linear layers."""
        mixture = 3 * (self.hidden + self.inner) * self.of.experts // self.of.active_experts
        return self.of.layers * rank * (6 * self.hidden + 2 * self.of.key_width + mixture)


def forecast(job: Job, tasks: Sequence[Task]) -> dict[str, Any]:
    """Return steps, memory and disk of the stages that will run.

    Memory counts the weights, their merged copy for sampling, the adapter with its gradient and two Adam
    moments in fp32, the activations and the loss of one micro-batch, and the key-value cache of rollouts or
    answers.
    """
    workflow = job.workflow
    shape = _shape(workflow.model, pick_device(workflow.model.device))
    on_cuda = shape.device.startswith("cuda")
    finetune, recover = workflow.finetune, workflow.recover
    rank = finetune.lora.r if finetune else 32
    adapter = shape.adapter(rank)
    unfinished = [task for task in tasks if task.unfinished]
    names = {task.name for task in unfinished}
    needs: dict[str, int] = {}
    steps: dict[str, int] = {}
    if finetune and "finetune" in names:
        steps["finetune"] = planned_steps(finetune, len(job.examples.encoded or job.examples.rows))
        needs["finetune"] = _finetune_need(finetune, job.examples, shape, adapter)
    if recover and "recover" in names:
        if recover.method != "interpolate":  # which scales the adapter and trains nothing
            steps["recover"] = recover.steps
        needs["recover"] = _recovery_need(recover, job.recovery.rows, shape, rank)
    if measured := [task for task in unfinished if task.suite]:
        needs["eval"] = max(_eval_need(task, job, shape) for task in measured)
    memory: dict[str, int] = {}
    models = 2 if tuned_model(workflow.start, workflow.model) else 1
    held = models * shape.weights + (0 if on_cuda else 1_100_000_000)  # on a CPU with the libraries
    for name, need in needs.items():
        memory[name] = held + need
        # What a stage has freed on a CPU mostly stays with the process.
        held = held if on_cuda else memory[name]
    return {
        "device": shape.device,
        "dtype": shape.dtype,
        "parameters": shape.parameters,
        "steps": steps,
        "memory_bytes": memory,
        "disk_bytes": (adapter * 4) * (2 + 2 * 3 * len(steps)),
    }


def opening(job: Job, tasks: Sequence[Task]) -> str:
    """Return the line that opens a run: model, device, rows, tokens, stages, directory."""
    sizes = forecast(job, tasks)
    parts = [f"{job.workflow.model.id} on {sizes['device']} in {sizes['dtype']}"]
    if job.workflow.finetune and "finetune" in sizes["memory_bytes"]:
        tokens = sum(len(example.input_ids) for example in job.examples.encoded)
        per_epoch = f", {tokens:,} tokens per epoch" if tokens else ""
        parts.append(f"{len(job.examples.rows):,} rows{per_epoch}")
    count = sum(task.name == "eval" for task in tasks if task.unfinished)
    stages = [f"{name} ({sizes['steps'][name]} steps)" for name in sizes["steps"]]
    if count:
        stages.append(f"{count} measurements" if count > 1 else "1 measurement")
    parts.append(", ".join(stages or list(sizes["memory_bytes"])))
    return "; ".join([*filter(None, parts), f"in {job.run.path}"])


def _finetune_need(config: FinetuneConfig, examples: Examples, shape: _Shape, adapter: int) -> int:
    lengths = [len(example.input_ids) for example in examples.encoded]
    lengths = lengths or [_tokens(row, row.answer) for row in examples.rows]
    if replayed := config.replay.count(len(lengths)):
        lengths += [max(map(len, examples.replay)) + REPLAYED_TOKENS] * replayed
    step = int(config.batch_size) * max(lengths) * shape.activations(config.lora.r)
    sampling = adapter * 4 + shape.merged if config.method == "self-distill" else 0
    return adapter * 16 + step + shape.chunk + sampling


def _recovery_need(config: RecoverConfig, rows: dict[Any, list[Row]], shape: _Shape, rank: int) -> int:
    named = {row.teacher for row in rows["domain"]} - {""}
    teachers = [config.teacher_of(stream) for stream in STREAMS]
    teachers += [config.teacher_of("domain", name) for name in named]
    models = [t.model.resident() for t in teachers if t.model]
    other_models = sum(_shape(model, shape.device).weights for model in models)
    copies = sum(t.kind in ("ema", "adapter") for t in teachers)
    prompts = [_tokens(row) for of_stream in rows.values() for row in of_stream]
    longest_answer = max(config.max_new_tokens, config.domain_max_new_tokens or 0)
    rows_at_once = max(config.completions("general") * config.sample_ahead, FULL_BATCH)
    cache = shape.cache(rows_at_once * (longest_answer + 128))
    longest = max(prompts, default=0) + longest_answer
    # A micro-batch holds one sequence at least, and no more than a step has.
    most = longest * max(config.completions(stream) for stream in STREAMS)
    tokens = max(min(int(config.micro_batch_tokens), most), longest)
    step = tokens * shape.activations(rank) + shape.chunk
    need = other_models + shape.adapter(rank) * (20 + 4 * copies) + shape.merged
    # On a GPU the step uses the memory of the sampler's cache again.
    return need + (max(cache, step) if shape.device.startswith("cuda") else cache + step)


def _eval_need(task: Task, job: Job, shape: _Shape) -> int:
    """Return the bytes that measuring a state on a suite takes if all answers are as long as they may be.

    Closeness also keeps the hidden states of two models, on the state's answers and on base's.
    """
    from opdcl.stages.answers import DRAWN_TOGETHER
    from opdcl.stages.evaluate import LOGIT_BYTES

    config, asked = job.workflow.eval, job.measurement(task.suite)
    if not asked.encoded:
        return shape.merged + LOGIT_BYTES
    if task.suite != CLOSENESS and config.server:
        return 0
    at_once = DRAWN_TOGETHER if task.suite == CLOSENESS else int(config.batch_size)
    batch = min(at_once, len(asked.lengths))
    need = shape.merged + shape.cache(batch * (max(asked.lengths) + asked.longest))
    if task.suite == CLOSENESS:
        return need + 4 * batch * asked.longest * shape.hidden * shape.width
    return need + batch * shape.of.vocabulary * shape.width


def _shape(model: ModelConfig, device: str) -> _Shape:
    c = text_config(model)
    inner = getattr(c, "moe_intermediate_size", None) or c.intermediate_size
    dtype = pick_dtype(model.dtype, device)
    tied = getattr(c, "tie_word_embeddings", True)
    within_rows = attends_within_rows(c, torch.device(device), getattr(torch, dtype))
    packed = within_rows and c.model_type in FAMILY
    return _Shape(architecture(c), c.hidden_size, inner, tied, dtype, device, model.quantization, packed)


def _tokens(row: Row, *answer: str | None) -> int:
    """Guess a row's length without a tokenizer: three characters per token, plus the chat template."""
    texts = [message["content"] for message in row.prompt]
    return sum(len(text or "") for text in (*texts, *answer)) // 3 + 32
