"""Forecast steps, memory, disk and time of a run from the model's config, its data, and its own pace so far.

Time is counted in tokens: those that a task learns, and those that it writes if every answer is as long as
it may be. A rate is seconds per token of a kind of task: `finetune`, `recover` or `eval`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from opdcl.config.evaluate import CLOSENESS
from opdcl.config.finetune import REPLAYED_TOKENS
from opdcl.config.model import ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.measure.ask import SAMPLING_BATCH, partial_file
from opdcl.measure.evaluate import LOGIT_BYTES, max_answer_tokens
from opdcl.model.architecture import architecture
from opdcl.model.hardware import pick_device, pick_dtype
from opdcl.model.llama import FAMILY, WIDE, attends_within_rows
from opdcl.pipeline.defaults import text_config
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Measure, Task, Train, stage_folder
from opdcl.results.format import memory, time_range
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import machine
from opdcl.train.checkpoints import step_of
from opdcl.train.finetune import planned_steps
from opdcl.train.loop import endless
from opdcl.train.losses import CHUNK, CUDA_CHUNK
from opdcl.train.rollouts import FULL_BATCH, plan_steps
from opdcl.words import STREAMS, Prompts, StreamName

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
            steps["finetune"] = sum(planned_steps(job.workflow.finetune, len(job.examples.encoded)))
        if task.unfinished and task.name == "recover" and job.workflow.recover.steps:
            steps["recover"] = job.workflow.recover.steps
    return steps


def _size(model: ModelConfig, rank: int) -> Size:
    return size_of(text_config(model), pick_dtype(model.dtype), pick_device(), rank, model.quantization)


def _finetune_need(job: Job, size: Size) -> int:
    """Return the bytes that a fine-tune takes on top of the base."""
    config, examples = job.workflow.finetune, job.examples
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


# The least and the most seconds.
Range = tuple[float, float]

# The least and the most that a rate may be of what was timed: answers differ in length, base's long ones come
# first, and machines do other work.
SPREAD = {"finetune": (0.8, 1.25), "recover": (0.8, 1.25), "eval": (0.33, 1.5)}
# The rate of a kind that was not timed yet, beside a fine-tune's, at least and most: they are close together
# on a GPU, and far apart on a CPU, where writing is slow beside learning.
BESIDE = {"finetune": (1.0, 1.0), "recover": (1.0, 8.0), "eval": (1.0, 5.0)}
# After how many steps the pace of a stage counts. How many seconds are too short to speak of.
ENOUGH, SHORT = 4, 60
# Tokens of a question whose answers are given.
GIVEN = 100


class Work(NamedTuple):
    """What a task has left to do, in tokens."""

    kind: str
    tokens: int


def work_of(job: Job, tasks: Sequence[Task]) -> dict[str, Work]:
    """Return what each task that this run will do has left, by its label."""
    works, steps = {}, steps_of(job, tasks)
    for task in tasks:
        if not task.unfinished:
            continue
        if isinstance(task, Measure):
            kept = partial_file(job.run, task.state, task.suite)
            if asked := len(job.prompt_ids[task.suite]):
                tokens = max(asked - len(read_jsonl(kept)), 1) * longest_answer(job, task.suite)
            else:
                tokens = len(job.suite(task.suite).documents(job.workflow.eval.limit)) * GIVEN
            works[task.label] = Work("eval", tokens)
        elif getattr(job.workflow, task.name):
            resumes = task.action == "resume"
            checkpoint = stage_folder(job.run, task.name).last_checkpoint() if resumes else None
            left = 1 - step_of(checkpoint) / steps.get(task.name, 1)
            works[task.label] = Work(task.name, round(left * _tokens_to_train(job, task)))
    return works


def _tokens_to_train(job: Job, task: Train) -> float:
    """Return the tokens of a whole training stage."""
    finetune, recover = job.workflow.finetune, job.workflow.recover
    if task.name == "finetune":
        replayed = finetune.replayed(len(job.examples.rows)) * REPLAYED_TOKENS
        return job.learned_tokens + replayed * (finetune.epochs + 1)
    prompts = job.prompts
    sizes = len(prompts["general"].train), len(prompts["domain"].train)
    steps = plan_steps(recover, *sizes)
    # Base, tuned, the start and then the student write answers, and grade as many of the teachers'.
    measured = 2 * (3 + len(steps) // recover.validate_every)
    held_out = sum(len(of_stream.held_out) * recover.limit(name) for name, of_stream in prompts.items())
    return sum(len(step.prompts) * recover.limit(step.stream) for step in steps) + measured * held_out


def time_of(works: Iterable[Work], rates: Mapping[str, float]) -> Range | None:
    """Return how long work takes at these rates; None if there are none."""
    least = most = 0.0
    for kind, tokens in works:
        known = next((other for other in (kind, *BESIDE) if other in rates), None)
        if known is None:
            return None
        low, high = (rates[known] * factor for factor in SPREAD[known])
        if known != kind:
            low, high = low * BESIDE[kind][0] / BESIDE[known][1], high * BESIDE[kind][1] / BESIDE[known][0]
        least, most = least + tokens * low, most + tokens * high
    return least, most


class Timetable:
    """How long this run takes, by its own steps. It says so when that changes."""

    def __init__(self, works: Mapping[str, Work], say: Callable[[str], None]):
        self.left, self.say = dict(works), say
        self.done: dict[str, Range] = {}
        """The seconds and tokens so far, by kind."""
        self.stages = list(dict.fromkeys(work.kind for work in works.values()))
        self.began = time.monotonic()
        self._said: tuple[str, Range] = "", (0.0, 0.0)
        self._first: tuple[int, float] | None = None
        """The steps done at the first progress of the present task, and when that was."""
        self._pace: Range | None = None
        """The seconds that it has left by the mean of its steps, and the factor by which they may be off."""

    @property
    def rates(self) -> dict[str, float]:
        return {kind: seconds / tokens for kind, (seconds, tokens) in self.done.items()}

    @contextlib.contextmanager
    def timed(self, label: str) -> Iterator[None]:
        """Time a task."""
        self._work, began = self.left.pop(label), time.monotonic()
        self._task_began, self._first, self._pace = began, None, None
        if {self._work.kind, *(work.kind for work in self.left.values())} <= self.done.keys():
            self._tell()
        yield
        if self._work.tokens:
            seconds, tokens = self.done.get(self._work.kind, (0.0, 0.0))
            self.done[self._work.kind] = seconds + time.monotonic() - began, tokens + self._work.tokens

    def progress(self, done: int, total: int) -> None:
        """Take the progress of the task."""
        now = time.monotonic()
        first, began = self._first = self._first or (done, now)
        steps = done - first
        if self._work.kind == "eval":  # its answers come in batches, the short ones first
            self._tell()
        elif steps >= ENOUGH:
            self._pace = (now - began) / steps * (total - done), SPREAD[self._work.kind][1] + 2 / steps
            self._tell()

    def time_in_all(self) -> Range | None:
        """Return how long all tasks take from the start of the first one on."""
        spent, rates = time.monotonic() - self._task_began, self.rates
        if self._pace:
            left, error = self._pace
            rates.setdefault(self._work.kind, (spent + left) / max(self._work.tokens, 1))
            present: Range | None = (spent + left / error, spent + left * error)
        else:
            present = time_of([self._work], rates)
        rest = time_of(self.left.values(), rates)
        if present is None or rest is None:
            return None
        before = self._task_began - self.began
        return before + max(spent, present[0]) + rest[0], before + max(spent, present[1]) + rest[1]

    def _tell(self) -> None:
        """Say the time at the beginning of each stage, and when what was said is no longer true."""
        found, (stage, said), kind = self.time_in_all(), self._said, self._work.kind
        if not found or found[1] < SHORT or (kind == stage and said[0] <= sum(found) / 2 <= said[1]):
            return
        self._said = kind, found
        place = f"; stage {self.stages.index(kind) + 1} of {len(self.stages)}" if self.stages[1:] else ""
        self.say(f"{time_range(*found)} for this run{place}")
