"""Forecast steps, memory, disk and time of a run from the model's config, its data and one matrix product."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

from opdcl.config.model import ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.config.workflow import Workflow
from opdcl.data.rows import Row
from opdcl.distill.rollout_queue import FULL_BATCH
from opdcl.model.adapters import tuned_model
from opdcl.model.architecture import architecture
from opdcl.model.load import pick_device, pick_dtype
from opdcl.pipeline.defaults import text_config
from opdcl.pipeline.plan import Task
from opdcl.pipeline.sources import Sources
from opdcl.results.format import duration
from opdcl.rundir.layout import RunDir
from opdcl.stages.finetune import planned_steps

# Parts of a matrix product's rate that training (4 operations per weight and token), a forward pass (2) and
# decoding (2) reach: measured once, for the embedded model on a CPU, see benchmarks/throughput.json.
TRAINING, FORWARD, DECODING = 0.12, 0.28, 0.037

SECONDS_FROM = (
    "Times are estimates, from a matrix product timed here and the parts of its rate that training, grading "
    "and decoding reached with the embedded model on a CPU; other models and GPUs can differ several times "
    "over. Evaluation is counted with every answer at its longest."
)


@dataclass(frozen=True)
class _Shape:
    """The dimensions of a model, the bytes of one number, and where it runs.

    A layer has `experts` of inner width `inner`, of which a token passes through `active`; 1 if it is dense.
    """

    layers: int
    hidden: int
    inner: int
    vocabulary: int
    keys: int
    experts: int
    active: int
    dtype: str
    device: str
    quantization: str | None = None

    @property
    def width(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def parameters(self) -> int:
        return self.used + self.layers * 3 * self.hidden * self.inner * (self.experts - self.active)

    @property
    def used(self) -> int:
        """How many parameters one token passes through."""
        per_layer = self.hidden * (2 * self.hidden + 2 * self.keys + 3 * self.inner * self.active)
        return self.layers * per_layer + self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """Bytes. A quantized weight takes one, or half of one and its part of the scales."""
        embedding = self.vocabulary * self.hidden
        each = {None: self.width, "8bit": 1, "4bit": 0.516}[self.quantization]
        return round((self.parameters - embedding) * each) + embedding * self.width

    @property
    def merged(self) -> int:
        """Bytes of the second copy of the weights while sampling; quantized weights are not merged."""
        return 0 if self.quantization else self.weights

    @property
    def activations(self) -> int:
        """Bytes per token of a micro-batch, at about 17 values per layer and hidden unit.

        Korthikanti et al. (arXiv 2205.05198) count 34 bytes in 16 bits, with fused attention and without
        tensor parallelism.
        """
        return self.layers * self.hidden * 17 * self.width

    def cache(self, tokens: int) -> int:
        """Return the bytes that the keys and values of `tokens` tokens take."""
        return tokens * self.layers * 2 * self.keys * self.width

    def adapter(self, rank: int) -> int:
        """Return the number of parameters of an adapter on all linear layers."""
        mixture = 3 * (self.hidden + self.inner) * self.experts // self.active
        return self.layers * rank * (6 * self.hidden + 2 * self.keys + mixture)


@dataclass
class _Need:
    """What one stage needs besides the base: bytes, and operations by the part of the rate they reach."""

    memory: int = 0
    training: float = 0
    forward: float = 0
    decoding: float = 0

    def seconds(self, rate: float) -> float:
        parts = (self.training, TRAINING), (self.forward, FORWARD), (self.decoding, DECODING)
        return sum(operations / (rate * share) for operations, share in parts)


def forecast(workflow: Workflow, tasks: list[Task], sources: Sources) -> dict[str, Any]:
    """Return steps, memory, time and disk of the stages that will run.

    Memory counts the weights, their merged copy while sampling, the adapter with its gradient and two Adam
    moments in fp32, the activations of one micro-batch, and the key-value cache of rollouts or answers.
    """
    shape = _shape(workflow.model, pick_device(workflow.model.device))
    on_cuda = shape.device.startswith("cuda")
    finetune, recover = workflow.finetune, workflow.recover
    adapter = shape.adapter(finetune.lora.r if finetune else 32)
    unfinished = [task for task in tasks if task.action not in ("skip", "take")]
    names = {task.name for task in unfinished}
    needs: dict[str, _Need] = {}
    steps: dict[str, int] = {}
    if finetune and "finetune" in names:
        steps["finetune"] = planned_steps(finetune, _examples(workflow, sources))
        needs["finetune"] = _finetune_need(workflow, sources, shape, adapter)
    if recover and "recover" in names:
        if recover.method != "interpolate":  # which scales the adapter and trains nothing
            steps["recover"] = recover.steps
        needs["recover"] = _recovery_need(recover, sources.recovery(workflow).rows, shape, adapter)
    measured = [(task, _eval_need(task.suite, workflow, sources, shape)) for task in unfinished if task.suite]
    if measured:
        needs["eval"] = _Need(max(need.memory for _, need in measured))
    memory: dict[str, int] = {}
    models = 2 if tuned_model(workflow.start, workflow.model) else 1
    held = models * shape.weights + (0 if on_cuda else 1_100_000_000)  # on a CPU with the libraries
    for name, need in needs.items():
        memory[name] = held + need.memory
        # What a stage has freed on a CPU mostly stays with the process.
        held = held if on_cuda else memory[name]
    rate = _matrix_rate(shape) if needs else 0.0
    seconds = {name: round(need.seconds(rate)) for name, need in needs.items() if name != "eval"}
    by_suite = {task.label: round(need.seconds(rate)) for task, need in measured}
    return {
        "device": shape.device,
        "dtype": shape.dtype,
        "parameters": shape.parameters,
        "steps": steps,
        "memory_bytes": memory,
        "seconds": seconds | ({"eval": sum(by_suite.values())} if measured else {}),
        "eval_seconds": by_suite,
        "seconds_from": SECONDS_FROM,
        "flops_per_second": round(rate),
        "disk_bytes": (adapter * 4) * (2 + 2 * 3 * len(steps)),
    }


def opening(workflow: Workflow, run: RunDir, tasks: list[Task], sources: Sources) -> str:
    """Return the line that opens a run: model, device, rows, tokens, stages, directory, time."""
    sizes = forecast(workflow, tasks, sources)
    parts = [f"{workflow.model.id} on {sizes['device']} in {sizes['dtype']}"]
    if workflow.finetune and "finetune" in sizes["memory_bytes"]:
        examples = sources.examples(workflow)
        tokens = sum(len(example.input_ids) for example in examples.encoded)
        parts.append(f"{len(examples.rows):,} rows" + (f", {tokens:,} tokens per epoch" if tokens else ""))
    count = sum(task.name == "eval" and task.action != "skip" for task in tasks)
    stages = [f"{name} ({sizes['steps'][name]} steps)" for name in sizes["steps"]]
    if count:
        stages.append(f"{count} measurements" if count > 1 else "1 measurement")
    parts.append(", ".join(stages or list(sizes["memory_bytes"])))
    total = duration(sum(sizes["seconds"].values()))
    return "; ".join([*filter(None, parts), f"about {total}, estimated", f"in {run.path}"])


def _examples(workflow: Workflow, sources: Sources) -> int:
    """Return the number of sequences, or without them of rows, that a fine-tune goes through per epoch."""
    examples = sources.examples(workflow)
    return len(examples.encoded or examples.rows)


def _finetune_need(workflow: Workflow, sources: Sources, shape: _Shape, adapter: int) -> _Need:
    config, examples = workflow.finetune, sources.examples(workflow)
    assert config
    if examples.encoded:
        lengths = [len(example.input_ids) for example in examples.encoded]
        learned = max(sum(example.completion_mask) for example in examples.encoded)
    else:
        lengths = [_tokens(row, row.answer) for row in examples.rows]
        learned = config.self_distill.max_new_tokens
    replayed, answer = config.replay.count(len(lengths)), config.replay.max_new_tokens
    if replayed:
        learned = max(learned, answer)
        lengths += [max(map(len, examples.replay)) + answer] * replayed
    batch = int(config.batch_size)
    # Logits of the answers, their probabilities and the gradient, in fp32.
    logits = batch * learned * shape.vocabulary * 4 * 3
    memory = adapter * 16 + batch * max(lengths) * shape.activations + logits
    operations = 4.0 * shape.used * sum(lengths) * config.epochs
    need = _Need(memory, training=operations, decoding=2.0 * shape.used * replayed * answer)
    if config.loss.needs_base:
        need.forward = operations / 2
    if config.method == "self-distill":
        need.memory += adapter * 4 + shape.merged
        need.forward = operations / 2
        sampled = len(lengths) * config.epochs * learned
        need.decoding = 2.0 * shape.used * sampled
    return need


def _recovery_need(config: RecoverConfig, rows: dict[Any, list[Row]], shape: _Shape, adapter: int) -> _Need:
    teachers = config.all_teachers().values()
    other_models = sum(_shape(t.model, shape.device).weights for t in teachers if t.model)
    copies = sum(t.kind in ("ema", "adapter") for t in teachers)
    prompts = {stream: list(map(_tokens, of_stream)) for stream, of_stream in rows.items() if of_stream}
    rollouts, longest_answer = int(config.rollouts), config.max_new_tokens
    rows_at_once = max(rollouts * config.sample_ahead, FULL_BATCH)
    cache = shape.cache(rows_at_once * (longest_answer + 128))
    longest = max(map(max, prompts.values()), default=0) + longest_answer
    # A micro-batch holds one sequence at least.
    step = max(int(config.micro_batch_tokens), longest) * shape.activations
    parts = shape.merged + cache, step
    # On a GPU the sampler's memory is used again by the step.
    need = _Need(other_models + adapter * (20 + 4 * copies))
    need.memory += max(parts) if shape.device.startswith("cuda") else sum(parts)
    if config.method == "interpolate":
        return need
    domain_steps = config.steps // (config.general_per_domain + 1) if "domain" in prompts else 0
    sizes = {
        "general": (config.steps - domain_steps, rollouts, longest_answer),
        "domain": (
            domain_steps,
            config.domain_rollouts or rollouts,
            config.domain_max_new_tokens or longest_answer,
        ),
    }
    validations = 1 + config.steps // config.validate_every
    for stream, lengths in prompts.items():
        steps, batch, new_tokens = sizes[stream]
        length = sum(lengths) / len(lengths) + new_tokens
        held_out = min(config.validation_prompts, len(lengths))
        learned, measured = steps * batch * length, validations * held_out * length
        need.training += 4.0 * shape.used * learned
        need.forward += 2.0 * shape.used * (learned + 2 * measured)
        from_rows = stream == "domain" and config.domain_texts == "rows"
        sampled = held_out + (0 if from_rows else steps * batch)
        need.decoding += 2.0 * shape.used * new_tokens * sampled
    return need


def _eval_need(name: str, workflow: Workflow, sources: Sources, shape: _Shape) -> _Need:
    """Return what it takes to measure one state on a suite, all answers at their longest."""
    config = workflow.eval
    assert config
    suite, prompts = sources.suite(name, config), sources.prompt_lengths(name, workflow)
    if not suite.generative:
        from opdcl.stages.evaluate import LOGIT_BYTES

        return _Need(shape.merged + LOGIT_BYTES, forward=2.0 * shape.used * sum(prompts))
    if config.server:
        return _Need()
    new_tokens = min(suite.max_tokens, config.max_new_tokens or suite.max_tokens) + config.thought_tokens
    batch = min(int(config.batch_size), len(prompts))
    cache = shape.cache(batch * (max(prompts) + new_tokens))
    logits = batch * shape.vocabulary * shape.width
    return _Need(
        shape.merged + cache + logits,
        forward=2.0 * shape.used * sum(prompts),
        decoding=2.0 * shape.used * new_tokens * len(prompts),
    )


def _shape(model: ModelConfig, device: str) -> _Shape:
    c = text_config(model)
    shape, inner = architecture(c), getattr(c, "moe_intermediate_size", None) or c.intermediate_size
    size = c.num_hidden_layers, c.hidden_size, inner, c.vocab_size, shape.key_width
    kind = pick_dtype(model.dtype, device), device, model.quantization
    return _Shape(*size, shape.experts, shape.active_experts, *kind)


def _tokens(row: Row, *answer: str | None) -> int:
    """Guess a row's length without a tokenizer: three characters per token, plus the chat template."""
    return sum(len(text or "") for text in (*(m["content"] for m in row.prompt), *answer)) // 3 + 32


@functools.cache
def _matrix_rate(shape: _Shape) -> float:
    """Return the operations per second of one product of the model's sizes, the best within 0.2 seconds."""
    import torch

    options: Any = {"device": shape.device, "dtype": getattr(torch, shape.dtype)}
    on_cuda = shape.device.startswith("cuda")
    x = torch.ones(16384 if on_cuda else 1024, shape.hidden, **options)
    weight = torch.ones(shape.inner, shape.hidden, **options)
    begun, best = time.perf_counter(), float("inf")
    while time.perf_counter() - begun < 0.2:
        started = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        if on_cuda:
            torch.cuda.synchronize(shape.device)
        best = min(best, time.perf_counter() - started)
    return 2.0 * x.numel() * shape.inner / best
