"""How long a run takes: what its tasks have to do, and how fast the run has done such tasks so far.

Work is counted in tokens: those that a task learns, and those that it writes if every answer is as long as it
may be. A rate is seconds per token of a kind of task: `finetune`, `recover` or `eval`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from opdcl.config.finetune import REPLAYED_TOKENS
from opdcl.pipeline.forecast import longest_answer, steps_of
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Measure, Task, Train
from opdcl.pipeline.records import stage_folder
from opdcl.results.format import time_range
from opdcl.rundir.files import read_jsonl
from opdcl.stages.answers import partial_file
from opdcl.train.schedule import plan_steps
from opdcl.train.stage import step_of

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
        self.say(f"about {time_range(*found)} for this run{place}")
