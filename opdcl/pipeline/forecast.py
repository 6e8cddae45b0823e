"""Forecast steps, memory and disk of a run from the model's config and its data."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PretrainedConfig

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.finetune import REPLAYED_TOKENS
from opdcl.config.lora import LoraSection
from opdcl.config.model import ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.model.adapter_files import read_lora_config
from opdcl.model.architecture import architecture
from opdcl.model.llama import FAMILY, WIDE, attends_within_rows
from opdcl.model.load import pick_device, pick_dtype, skeleton
from opdcl.model.lora import base_weight
from opdcl.model.targets import lora_config
from opdcl.pipeline.defaults import text_config
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Measure, Task
from opdcl.results.format import memory
from opdcl.rundir.environment import machine
from opdcl.stages.answers import SAMPLING_BATCH
from opdcl.stages.evaluate import LOGIT_BYTES, max_answer_tokens
from opdcl.train.finetune import planned_steps
from opdcl.train.losses import CHUNK, CUDA_CHUNK
from opdcl.train.schedule import FULL_BATCH
from opdcl.train.stage import endless
from opdcl.types import STREAMS, Prompts, StreamName

# Bytes that the libraries take on a CPU.
LIBRARIES = 1_100_000_000

TOO_LARGE = (
    "Warning: it may run out of memory; lower finetune.batch_size, recover.micro_batch_tokens or "
    "eval.batch_size, or take a smaller model"
)


@dataclass(frozen=True)
class Size:
    """How large a model with an adapter on all linear layers is. All but the counts are bytes."""

    parameters: int
    """The number of the model's weights."""
    adapter: int
    """The number of the adapter's weights."""
    weights: int
    merged: int
    """The second copy of the weights while sampling; quantized weights are not merged."""
    cached_token: int
    """The keys and values of one token."""
    trained_token: int
    """What the gradient needs of one token of a micro-batch."""
    loss: int
    """The loss on the positions that are projected onto the vocabulary at once, in fp32."""


def size_of(
    config: PretrainedConfig, dtype: str, device: str, rank: int, quantization: str | None = None
) -> Size:
    """Return the size of a model of this shape, with an adapter of this rank."""
    shape, hidden = architecture(config), config.hidden_size
    # The inner width of a layer, and of each expert of a mixture.
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    query = shape.heads * shape.head_dim or hidden
    width = 4 if dtype == "float32" else 2

    tied = getattr(config, "tie_word_embeddings", True)
    embeddings = shape.vocabulary * hidden * (1 if tied else 2)
    of_layer = (2 * query + 2 * shape.key_width + 3 * inner * shape.experts) * hidden
    # A quantized weight takes one byte, or half of one and its part of the scales.
    each = {None: width, "8bit": 1, "4bit": 0.516}[quantization]
    weights = round(shape.layers * of_layer * each) + embeddings * width
    in_experts = 3 * (hidden + inner) * shape.experts // shape.active_experts

    # Inputs and outputs of products are kept in the model's precision, those of norms in fp32.
    products = 4 * inner * shape.active_experts + 3 * hidden + 7 * rank
    kept = shape.layers * (products * width + 4 * (4 * hidden + query))
    within_rows = attends_within_rows(config, torch.device(device), getattr(torch, dtype))
    if within_rows and config.model_type in FAMILY:
        products = 4 * inner + 4 * hidden + 2 * (query + shape.key_width) + 7 * rank
        kept = shape.layers * products * width
        if hidden >= WIDE:
            # Of wide layers only the input is kept, and while one is computed again, what is inside.
            kept = (shape.layers * hidden + products) * width
    positions = CUDA_CHUNK if device.startswith("cuda") else CHUNK
    return Size(
        parameters=shape.layers * of_layer + embeddings,
        adapter=shape.layers * rank * (6 * hidden + 2 * shape.key_width + in_experts),
        weights=weights,
        merged=0 if quantization else weights,
        cached_token=shape.layers * 2 * shape.key_width * width,
        trained_token=kept,
        loss=5 * 4 * positions * shape.vocabulary,
    )


def forecast(job: Job, tasks: Sequence[Task]) -> dict[str, Any]:
    """Return steps, memory and disk of the stages that will run.

    Memory counts the weights, their merged copy for sampling, the adapter with its gradient and two Adam
    moments in fp32, the activations and the loss of one micro-batch, and the key-value cache of rollouts or
    answers.
    """
    workflow = job.workflow
    device = pick_device()
    on_cuda = device == "cuda"
    rank = workflow.finetune.lora.r if workflow.finetune else 32
    size = _size(workflow.model, rank)
    steps = steps_of(job, tasks)
    todo = {task.name for task in tasks if task.unfinished}
    needs: dict[str, int] = {}
    if "finetune" in steps:
        needs["finetune"] = _finetune_need(job, size)
    if workflow.recover and "recover" in todo:
        needs["recover"] = _recovery_need(workflow.recover, job.prompts, size)
    if suites := {task.suite for task in tasks if task.unfinished and isinstance(task, Measure)}:
        needs["eval"] = max(_eval_need(job, suite, size) for suite in suites)
    models = 2 if job.tuned else 1
    held = models * size.weights + (0 if on_cuda else LIBRARIES)
    peaks: dict[str, int] = {}
    for name, need in needs.items():
        # What a stage has freed on a CPU stays with the process, and the next one uses it again.
        peaks[name] = max(held + need, 0 if on_cuda else max(peaks.values(), default=0))
    return {
        "device": device,
        "dtype": pick_dtype(workflow.model.dtype),
        "parameters": size.parameters,
        "steps": steps,
        "memory_bytes": peaks,
        "disk_bytes": size.adapter * 4 * (2 + 6 * len(steps)),
    }


def memory_words(sizes: dict[str, Any]) -> str:
    """Return what a run needs beside the memory that is here, and a warning if that is too little."""
    if not sizes["memory_bytes"]:
        return ""
    needed, here = max(sizes["memory_bytes"].values()), int(machine()["memory_bytes"])
    if on_cuda := sizes["device"] == "cuda":
        here = torch.cuda.get_device_properties().total_memory
    words = f"needs about {memory(needed)}; this {'GPU' if on_cuda else 'machine'} has {here / 2**30:.0f}"
    return words if needed <= here else f"{words}. {TOO_LARGE}"


def steps_of(job: Job, tasks: Sequence[Task]) -> dict[str, int]:
    """Return the optimizer steps of the stages that will run."""
    steps: dict[str, int] = {}
    for task in tasks:
        if task.unfinished and task.name == "finetune" and job.workflow.finetune:
            rows = len(job.examples.encoded or job.examples.rows)
            steps["finetune"] = sum(planned_steps(job.workflow.finetune, rows))
        if task.unfinished and task.name == "recover" and job.workflow.recover.steps:
            steps["recover"] = job.workflow.recover.steps
    return steps


def _size(model: ModelConfig, rank: int) -> Size:
    return size_of(text_config(model), pick_dtype(model.dtype), pick_device(), rank, model.quantization)


def _finetune_need(job: Job, size: Size) -> int:
    """Return the bytes that a fine-tune takes on top of the base."""
    config, examples = job.workflow.finetune, job.examples
    if config.method == "self-distill":
        return _recovery_need(*job.self_distillation, size)
    longest = max(len(example.ids) for example in examples.encoded)
    if count := config.replayed(len(examples.encoded)):
        drawn = itertools.islice(endless(len(examples.replay), config.seed), count)
        longest = max(longest, max(len(examples.replay[i]) for i in drawn) + REPLAYED_TOKENS)
    return size.adapter * 16 + int(config.batch_size) * longest * size.trained_token + size.loss


def _recovery_need(config: RecoverConfig, prompts: dict[StreamName, Prompts], size: Size) -> int:
    """Return the bytes that a recovery takes on top of the base, if all answers have their maximum length."""
    need = size.merged + size.adapter * 20
    named = {config.general_teacher, config.domain_teacher}
    named |= {prompt.teacher for prompt in prompts["domain"].train}
    for name, teacher in config.teachers.items():
        if name not in named:
            continue
        if teacher.model:
            need += _size(teacher.model.resident(), rank=0).weights
        if teacher.kind in ("ema", "adapter"):
            need += size.adapter * 4
    shown = [prompt.shown for of_stream in prompts.values() for prompt in of_stream.train]
    longest = max(map(len, shown), default=0)
    answer = max(config.max_new_tokens, config.domain_max_new_tokens or 0)
    ahead = 1 if config.sample_ahead == "auto" else config.sample_ahead
    rows = max(config.completions("general") * ahead, FULL_BATCH)
    cache = rows * (answer + 128) * size.cached_token
    # A micro-batch holds one sequence at least, and no more than a step has.
    sequence = longest + answer
    most = sequence * max(config.completions(stream) for stream in STREAMS)
    tokens = max(min(int(config.micro_batch_tokens), most), sequence)
    step = tokens * size.trained_token + size.loss
    # On a GPU the step uses the memory of the sampler's cache again.
    return need + (max(cache, step) if pick_device() == "cuda" else cache + step)


def _eval_need(job: Job, suite: str, size: Size) -> int:
    """Return the bytes that measuring a state on a suite takes if all answers are as long as they may be."""
    config, asked = job.workflow.eval, job.prompt_ids[suite]
    if not asked:
        return size.merged + LOGIT_BYTES
    if config.server and suite != CLOSENESS:
        return 0
    batch = SAMPLING_BATCH if suite == CLOSENESS else int(config.batch_size)
    sequence = max(map(len, asked)) + longest_answer(job, suite)
    return size.merged + min(batch, len(asked)) * sequence * size.cached_token


def longest_answer(job: Job, suite: str) -> int:
    """Return the tokens that an answer to a suite has at most."""
    config = job.workflow.eval
    if suite == CLOSENESS:
        return config.closeness_tokens
    return max_answer_tokens(config, job.suite(suite).answering.max_tokens, 0, sys.maxsize)


def adapted_share(model: ModelConfig, adapter: LoraSection | Path) -> float:
    """Return the share of a model's weights that an adapter changes. No weights are loaded."""
    lora = adapter if isinstance(adapter, Path) else adapter.model_dump_json()
    return _share(model.model_dump_json(), lora)


@functools.cache  # the arms of a comparison mostly share both
def _share(model: str, adapter: str | Path) -> float:
    bare = skeleton(ModelConfig.model_validate_json(model))
    total = sum(parameter.numel() for parameter in bare.parameters())
    lora = adapter if isinstance(adapter, Path) else LoraSection.model_validate_json(adapter)
    config = read_lora_config(lora) if isinstance(lora, Path) else lora_config(lora, bare)
    with torch.device("meta"):
        adapted = get_peft_model(bare, config)
    layers = [layer for layer in adapted.modules() if isinstance(layer, BaseTunerLayer)]
    return sum(base_weight(layer).numel() for layer in layers) / total
