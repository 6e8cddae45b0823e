"""How long the tasks of a run will take: the work of each, times what such work costs on this machine.

Costs come from earlier runs, from a probe of a few seconds after the model is loaded, and from the run itself
as it goes on. Before a run only the first of these counts: a time is announced if such work was measured.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from opdcl import parallel
from opdcl.config.evaluate import CLOSENESS
from opdcl.config.finetune import REPLAYED_TOKENS
from opdcl.config.recover import RecoverConfig
from opdcl.distill.prompts import RecoverySource
from opdcl.distill.schedule import STREAMS
from opdcl.distill.work import RecoveryWork, answer_name
from opdcl.model.adapters import tuned_model
from opdcl.model.costs import Costs, Work, decoding, total
from opdcl.pipeline.earlier_times import machine_name, model_name, read_times, save_times
from opdcl.pipeline.job import Job
from opdcl.pipeline.plan import Task, stage_folder
from opdcl.sampling.rollout import Prompt, Rollout

if TYPE_CHECKING:
    from opdcl.model.backbone import Backbone

# Kinds of teachers that change as the student learns.
DYNAMIC = ("live", "ema", "trust_region")

# Prompts of each suite and of the recovery that a probe answers, and its longest answer.
PROBED, PROBE_TOKENS = 12, 64

# Seconds that a probe decodes many rows, and then two: on a slow machine it stops before its answers end.
PROBE_SECONDS = 10.0, 4.0
LEAST_STEPS = 3


class _ProbeIsOver(Exception):
    """The probe has taken its time."""


class _ProbeCosts(Costs):
    """Costs of a probe, whose decoding ends after `seconds_left`, but not before its third step."""

    seconds_left, steps = 0.0, 0

    def add(self, kind: str, amount: float, cost: float) -> None:
        # Prompts of several suites in one batch are padded more than each suite's own.
        if kind != "read":
            super().add(kind, amount, cost)

    def decoded(self, steps: int, rows: int, seconds: float) -> None:
        super().decoded(steps, rows, seconds)
        self.seconds_left -= seconds
        self.steps += steps
        if self.seconds_left < 0 and self.steps >= LEAST_STEPS:
            raise _ProbeIsOver


class Timetable:
    """The unfinished tasks of a run, in order."""

    def __init__(self, job: Job, tasks: Sequence[Task]) -> None:
        self.job = job
        self.tasks = [task for task in tasks if task.unfinished]
        model = job.workflow.model
        self.machine = machine_name(model)
        self._model = model_name(model, tuned_model(job.workflow.start, model))
        known, self.date = read_times(self.machine, self._model)
        self.costs = Costs(known)
        self._recoveries: dict[str, RecoveryWork] = {}

    def save(self) -> None:
        """Keep what this run has measured for later ones."""
        if parallel.rank() == 0:
            save_times(self.machine, self._model, self.costs.measured())

    def announced(self) -> float | None:
        """Return the seconds of all tasks, from earlier runs alone; None if some of it was never measured."""
        return self._sum(self.tasks, guess=False)

    def origin(self) -> str:
        """Say where the announced times come from, or why there are none."""
        if self.announced() is not None:
            return f"measured in earlier runs on this machine ({self.machine}), the last on {self.date}"
        missing = [task.label for task in self.tasks if self.seconds(task, guess=False) is None]
        what = "this" if len(missing) == len(self.tasks) else f"{missing[0]} as set here"
        reason = f"no earlier run has measured {what} on this machine ({self.machine})"
        return f"not known: {reason}. A run shows the time left once three steps are done"

    def after(self, task: Task) -> float | None:
        """Return the seconds of all tasks after one, as far as can be said now; None if it cannot."""
        later = self.tasks[[t.label for t in self.tasks].index(task.label) + 1 :]
        return self._sum(later)

    def _sum(self, tasks: Sequence[Task], guess: bool = True) -> float | None:
        times = [self.seconds(task, guess) for task in tasks]
        return None if None in times else sum(times)

    def seconds(self, task: Task, guess: bool = True) -> float | None:
        """Return the seconds of a task; without `guess`, only from what was measured."""
        if task.suite:
            work = self._evaluation(task, guess)
        elif task.name == "finetune":
            work = self._finetune(task)
        else:
            work = self._recovery(task, self.job.workflow.recover, self.job.recovery)
        return None if work is None else self.costs.seconds(work, guess)

    def _reached(self, task: Task) -> int:
        stage = stage_folder(self.job.run, task.name)
        checkpoint = stage.last_checkpoint() if task.action == "resume" else None
        return int(checkpoint.name.rsplit("-", 1)[1]) if checkpoint else 0

    def _finetune(self, task: Task) -> Work | None:
        from opdcl.stages.finetune import FinetuneWork, lay_out, planned_steps

        config = self.job.workflow.finetune
        if config is None:  # an adapter made elsewhere
            return {}
        examples = self.job.examples
        if config.method == "self-distill":
            return self._recovery(task, *self.job.self_distillation)
        lengths = [len(example.input_ids) for example in examples.encoded]
        work: Work = {}
        if replayed := config.replay.count(len(lengths)):
            prompts, limit = [*map(len, examples.replay)], REPLAYED_TOKENS
            mean = self.costs.unit(f"answer {config.replay.prompts} {limit}")
            if mean is None:
                return None
            lengths += [round(fmean(prompts) + mean)] * replayed
            if not stage_folder(self.job.run, task.name).replay.exists():
                work = decoding([round(fmean(prompts))] * replayed, mean, limit, 96)
        steps = planned_steps(config, len(examples.encoded))
        order = lay_out(lengths, int(config.batch_size), steps, config.seed)
        return total(work, FinetuneWork.of(lengths, order, int(config.batch_size)).left(self._reached(task)))

    def _recovery(self, task: Task, config: RecoverConfig, source: RecoverySource) -> Work | None:
        if task.name not in self._recoveries:
            streams = self.job.encode(config, source)
            dynamic = [s for s in STREAMS if config.teacher_of(s).kind in DYNAMIC]
            work = RecoveryWork.of(config, self.costs, streams, dynamic)
            self._recoveries[task.name] = work
            if task.name == "recover" and self._learned and config.domain:
                name = f"answer {answer_name(config, 'domain')}"
                self.costs.guesses[name] = min(self._learned, config.limit("domain"))
        return self._recoveries[task.name].whole(self._reached(task))

    @cached_property
    def _learned(self) -> float:
        """The mean length of an answer that the fine-tune teaches; 0 without a fine-tune here."""
        finetune = self.job.workflow.finetune
        if not (finetune and finetune.method == "sft"):
            return 0.0
        examples = self.job.examples.encoded
        return fmean(sum(example.completion_mask) for example in examples) if examples else 0.0

    def _evaluation(self, task: Task, guess: bool) -> Work | None:
        config, asked = self.job.workflow.eval, self.job.measurement(task.suite)
        prompts, score = asked.lengths, {f"score {task.suite}": float(len(asked.lengths))}
        if not asked.encoded:
            likelihood = f"likelihood {task.suite}"
            known = self.costs.unit(likelihood, guess=False) is not None or not guess
            return total(score, {likelihood: len(prompts)} if known else {"read": sum(prompts)})
        mean = self._answer_length(task, task.state, guess)
        if mean is None:
            return None
        if task.suite == CLOSENESS:
            base = self._answer_length(task, "base", guess)
            if base is None:
                return None
            # Both models read the answers, and this one reads base's; base reads its own three times.
            read = {"measure": 3 * sum(prompts) + len(prompts) * (2 * mean + base)}
            return total(score, read, decoding(prompts, mean, asked.longest, len(prompts)))
        if config.server:
            return None
        if self.job.suite(task.suite).content and self.costs.unit(f"score {task.suite}", guess=False) is None:
            # Base reads an answer that passes after its own prompt and six others: half of base's answers
            # do, and few of tuned's.
            passed = len(prompts) * (task.state != "tuned") / 2
            score = {"read": 7 * passed * (fmean(prompts) + mean)}
        return total(score, decoding(prompts, mean, asked.longest, int(config.batch_size)))

    def _answer_length(self, task: Task, state: str, guess: bool) -> float | None:
        """Return the mean length of a state's answers to a suite.

        Until it is measured, tuned is taken to write as it was taught, recovered to write like tuned about
        the domain and like base elsewhere.
        """
        limit = self.job.measurement(task.suite).longest
        known = self.costs.unit(f"answer {task.suite} {state} {limit}", guess)
        if known is not None or not guess or state == "base":
            return known
        if state == "tuned" and self._learned:
            return min(self._learned, limit)
        like_tuned = state == "recovered" and task.role == "domain"
        return self._answer_length(task, "tuned" if like_tuned else "base", guess)

    def probe(self, backbone: Backbone) -> None:
        """Let base answer a few of the run's prompts, where no earlier run tells how long its answers are.

        It takes some seconds. Engines that do not tell their steps, and several processes, are not probed.
        """
        from opdcl.sampling.sample import pick_engine, sample

        groups = self._unknown_answers()
        if parallel.worker_count() > 1 or pick_engine(backbone.causal_lm) != "slab" or not groups:
            return
        costs = _ProbeCosts()
        answers = {name: [Rollout(Prompt(ids)) for ids in prompts] for name, (prompts, _) in groups.items()}
        batch = [rollout for group in answers.values() for rollout in group]
        options: Any = {"eos_ids": backbone.eos_ids, "temperature": 0, "engine": "slab", "costs": costs}
        with backbone.merged("base") as model:
            # Many rows and few rows, to tell what a step costs from what a row costs.
            few = [Rollout(r.prompt) for r in batch[:2]]
            # The first pass warms up.
            sample(model, [batch[0].prompt], max_new_tokens=1, **options | {"costs": None})
            for rows, tokens, seconds in zip((batch, few), (PROBE_TOKENS, 12), PROBE_SECONDS, strict=True):
                costs.seconds_left, costs.steps = seconds, 0
                with contextlib.suppress(_ProbeIsOver):
                    sample(model, [], unfinished=rows, max_new_tokens=tokens, batch_size=len(rows), **options)
        self.costs.guesses |= costs.measured()
        for name, group in answers.items():
            self.costs.guesses[f"answer {name}"] = _mean_length(group, groups[name][1])

    def _unknown_answers(self) -> dict[str, tuple[list[list[int]], int]]:
        """Return prompts and longest answer of all texts of base whose length no earlier run has measured."""
        config, recover = self.job.workflow.eval, self.job.workflow.recover
        groups: dict[str, tuple[list[list[int]], int]] = {}
        for task in self.tasks:
            if task.suite and config:
                asked = self.job.measurement(task.suite)
                if asked.encoded and (task.suite == CLOSENESS or not config.server):
                    groups[f"{task.suite} base {asked.longest}"] = asked.encoded, asked.longest
            elif task.name == "recover" and recover:
                train = self.job.encode(recover, self.job.recovery)["general"].train
                groups[answer_name(recover, "general")] = [p.ids for p in train], recover.limit("general")
        return {
            name: (prompts[:: max(1, len(prompts) // PROBED)][:PROBED], limit)
            for name, (prompts, limit) in groups.items()
            if prompts and self.costs.unit(f"answer {name}", guess=False) is None
        }


def _mean_length(answers: Sequence[Rollout], limit: int) -> float:
    """Estimate the mean length of answers of which some were cut off early; they end at a steady rate."""
    tokens, ended = sum(len(r.completion_ids) for r in answers), sum(r.finished for r in answers)
    if not tokens:
        return float(limit)
    mean = tokens / max(ended, 0.5)
    return mean * (1 - math.exp(-limit / mean))
