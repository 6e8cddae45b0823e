"""How long a run takes: what its tasks have to do, and how fast such tasks were here, in this run or earlier.

Work is counted in tokens: those that a task learns, and those that it writes if every answer is as long as it
may be. A rate is seconds per token of a kind of task: `finetune`, `recover` or `eval`. A file in the cache
keeps the rates of the last few runs by model, precision and machine. It holds numbers and hashes, no text.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from opdcl import parallel
from opdcl.config.finetune import REPLAYED_TOKENS
from opdcl.config.model import ModelConfig
from opdcl.model.load import pick_device, pick_dtype
from opdcl.pipeline.forecast import longest_answer, steps_of
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Task
from opdcl.pipeline.records import stage_folder
from opdcl.results.format import time_range
from opdcl.rundir.environment import machine_of
from opdcl.rundir.files import cache_home, read_jsonl, write_json
from opdcl.rundir.hashes import hash_value
from opdcl.stages.answers import partial_file
from opdcl.train.schedule import plan_steps
from opdcl.training import step_of

# The rates of some runs by kind, the latest last.
Rates = dict[str, list[float]]
# The least and the most seconds.
Range = tuple[float, float]

# The file in the cache, and how many runs and keys it keeps.
FILE, RUNS, KEYS = "times.json", 5, 50
# By what factor a rate that was timed here may be off: answers differ in length, and machines do other work.
SPREAD = {"finetune": 1.25, "recover": 1.25, "eval": 1.5}
# The rate of a kind that was never timed, beside a fine-tune's, at least and most: they are close together
# on a GPU, and far apart on a CPU, where writing is slow beside learning.
BESIDE = {"finetune": (1.0, 1.0), "recover": (1.0, 8.0), "eval": (1.0, 5.0)}
# After how many steps the pace of a stage counts, if nothing else is known; with earlier runs, three times as
# many. How many seconds are too short to speak of.
ENOUGH, SHORT = 4, 60
# Tokens of a question whose answers are given.
GIVEN = 100


class Work(NamedTuple):
    """What a task has left to do, in tokens, and whether it has done none of it before."""

    kind: str
    tokens: int
    is_whole: bool = True


def work_of(job: Job, tasks: Sequence[Task]) -> dict[str, Work]:
    """Return what each task that this run will do has left, by its label."""
    works, steps = {}, steps_of(job, tasks)
    for task in tasks:
        if task.unfinished and task.suite:
            kept = partial_file(job.run, task.state, task.suite)
            is_whole = not (kept.exists() or job.run.eval_samples(task.state, task.suite).exists())
            if asked := len(job.prompt_ids[task.suite]):
                tokens = max(asked - len(read_jsonl(kept)), 1) * longest_answer(job, task.suite)
            else:
                tokens = len(job.suite(task.suite).documents(job.workflow.eval.limit)) * GIVEN
            works[task.label] = Work("eval", tokens, is_whole)
        elif task.unfinished and getattr(job.workflow, task.name):
            resumes = task.action == "resume"
            checkpoint = stage_folder(job.run, task.name).last_checkpoint() if resumes else None
            left = 1 - step_of(checkpoint) / steps.get(task.name, 1)
            works[task.label] = Work(task.name, round(left * _tokens_to_train(job, task)), not resumes)
    return works


def _tokens_to_train(job: Job, task: Task) -> float:
    """Return the tokens of a whole training stage."""
    finetune, recover, prompts = job.workflow.finetune, job.workflow.recover, {}
    if task.name == "recover":
        prompts = job.prompts
    elif finetune.method == "self-distill":
        recover, prompts = job.self_distillation
    else:
        replayed = finetune.replayed(len(job.examples.rows)) * REPLAYED_TOKENS
        return job.learned_tokens + replayed * (finetune.epochs + 1)
    sizes = len(prompts["general"].train), len(prompts["domain"].train)
    steps = plan_steps(recover, *sizes)
    # Base, tuned, the start and then the student write answers, and grade as many of the teachers'.
    measured = 2 * (3 + len(steps) // recover.validate_every)
    held_out = sum(len(of_stream.held_out) * recover.limit(name) for name, of_stream in prompts.items())
    return sum(len(step.prompts) * recover.limit(step.stream) for step in steps) + measured * held_out


def time_of(works: Iterable[Work], rates: Rates) -> Range | None:
    """Return how long work takes at these rates; None if there are none."""
    least = most = 0.0
    for kind, tokens, _ in works:
        known = next((other for other in (kind, *BESIDE) if other in rates), None)
        if known is None:
            return None
        low, high = min(rates[known]) / SPREAD[known], max(rates[known]) * SPREAD[known]
        if known != kind:
            low, high = low * BESIDE[kind][0] / BESIDE[known][1], high * BESIDE[kind][1] / BESIDE[known][0]
        least, most = least + tokens * low, most + tokens * high
    return least, most


def machine_key(model: ModelConfig) -> str:
    """Return a hash of a model, its precision, and what computes here."""
    here = machine_of(torch.device(pick_device()))["name"], torch.get_num_threads(), parallel.worker_count()
    return hash_value([model.id, model.revision, model.quantization, pick_dtype(model.dtype), *here])


def read_rates() -> dict[str, Rates]:
    """Return what the file holds, by key; nothing if it is missing, or not as this version writes it."""
    try:
        found: dict[str, Rates] = json.loads((cache_home() / FILE).read_bytes())
        every = [rates for kinds in found.values() for rates in kinds.values()]
        return found if all(rates and 0 < min(rates) <= max(rates) < math.inf for rates in every) else {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def write_rates(key: str, rates: Rates) -> None:
    """Put the rates of a key into the file; one that cannot be written does no harm."""
    others = {other: known for other, known in read_rates().items() if other != key}
    with contextlib.suppress(OSError):
        write_json(cache_home() / FILE, dict([*others.items(), (key, rates)][-KEYS:]))


class Timetable:
    """How long a run takes in all, by earlier runs and by its own steps. It says so when that changes."""

    def __init__(self, works: Mapping[str, Work], key: str, say: Callable[[str], None]):
        self.left, self.key, self.say = dict(works), key, say
        self.earlier = read_rates().get(key, {})
        self.own: dict[str, Range] = {}
        """The seconds and tokens of this run, by kind."""
        self.stages = list(dict.fromkeys(work.kind for work in works.values()))
        self.began = time.monotonic()
        self._said: tuple[str, Range] = "", (0.0, 0.0)
        self._first: tuple[int, float] | None = None
        """The steps done at the first progress of the present task, and when that was."""
        self._pace: Range | None = None
        """The seconds that it has left by the mean of its steps, and the factor by which they may be off."""

    @property
    def rates(self) -> Rates:
        found = dict(self.earlier)
        for kind, (seconds, tokens) in self.own.items():
            found[kind] = [*found.get(kind, []), seconds / tokens][-RUNS:]
        return found

    @contextlib.contextmanager
    def timed(self, label: str) -> Iterator[None]:
        """Time a task, and keep its rate if it is whole: the rest of one may be quicker, or slower."""
        self._work, began = self.left.pop(label), time.monotonic()
        self._task_began, self._first, self._pace = began, None, None
        if {self._work.kind, *(work.kind for work in self.left.values())} <= self.rates.keys():
            self._tell()
        yield
        kind, tokens, is_whole = self._work
        if is_whole and tokens and parallel.rank() == 0:
            seconds, before = self.own.get(kind, (0.0, 0.0))
            self.own[kind] = seconds + time.monotonic() - began, before + tokens
            write_rates(self.key, self.rates)

    def progress(self, done: int, total: int) -> None:
        """Take the progress of the task."""
        now = time.monotonic()
        first, began = self._first = self._first or (done, now)
        steps = done - first
        if self._work.kind == "eval":  # its answers come in batches, the short ones first
            self._tell()
        elif steps >= ENOUGH * (3 if self._work.kind in self.earlier else 1):
            left = (now - began) / steps * (total - done)
            self._pace = left, SPREAD[self._work.kind] + 2 / steps
            self._tell()

    def time_in_all(self) -> Range | None:
        """Return how long all tasks take from the start of the first one on."""
        now, rates = time.monotonic(), self.rates
        if "eval" in self.own and "eval" not in self.earlier:  # base's long answers come first
            rates["eval"] = [rates["eval"][0] / 2, rates["eval"][0]]
        spent = now - self._task_began
        if self._pace:
            left, error = self._pace
            rates.setdefault(self._work.kind, [(spent + left) / max(self._work.tokens, 1)])
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
        self.say(f"about {time_range(*found)} in all{place}")
