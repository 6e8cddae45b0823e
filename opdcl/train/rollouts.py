"""The schedule: what each step learns from, and its completions, which are sampled ahead and handed out.

General and domain steps alternate, each stream in seeded order, epoch after epoch. In the first general steps
base answers, in the last ones the student; in domain steps tuned does. A student near base answers briefly at
first, and truncated answers teach little: base shows the way before the student meets its own mistakes (arXiv
2604.13016, 2608.06802). The two streams never share a batch, in which their gradients counteract (CaMOPD,
arXiv 2605.27115), but the weights change by both together.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from opdcl import parallel
from opdcl.config.recover import PROMPTS_OF_START, RecoverConfig
from opdcl.rundir.files import write_atomic
from opdcl.train.checkpoints import another_version
from opdcl.train.loop import StageReport, counted, endless
from opdcl.train.teachers import IN_WORDS, OnFinished, Provided, Teachers, by_teacher
from opdcl.words import STREAMS, Author, Batch, Example, Prompt, Rollout, Step, StreamName

# A batch of this many sequences leaves little of the hardware idle; the student's go stale as it learns.
FULL_BATCH, STUDENT_BATCH = 96, 64

# The seeds of a conversation's turns are this far apart.
TURN_SEED = 7_000_003

# The answers to one prompt: one, or those of a conversation's turns.
Talk = list[Rollout]


def converse(prompts: Sequence[Prompt], complete: Callable[..., list[Rollout]], seed: int) -> list[Talk]:
    """Return the answers to each prompt, turn by turn; one that does not end is the last of its conversation.

    `complete` answers prompts, given the seed of the turn.
    """
    talks: list[Talk] = [[] for _ in prompts]
    asked = dict(enumerate(prompts))
    while asked:
        for i, rollout in zip(asked, complete([*asked.values()], seed=seed), strict=True):
            talks[i].append(rollout)
        seed += TURN_SEED
        going_on = [i for i in asked if talks[i][-1].finished and len(talks[i]) < prompts[i].turns]
        asked = {i: prompts[i].after([rollout.message for rollout in talks[i]]) for i in going_on}
    return talks


class RolloutQueue:
    """Completions for the steps to come.

    The student completes the prompts of on-policy steps, the stream's teacher those of the others. Steps of
    one stream are sampled together: at most `recover.sample_ahead`, because the student's completions go
    stale as it learns, but more if a frozen teacher samples. A `reward` chooses which completions of a
    general step are learned from. A conversation is sampled turn by turn, for one step.
    """

    def __init__(
        self,
        config: RecoverConfig,
        prompts: dict[StreamName, list[Prompt]],
        teachers: Mapping[StreamName, Teachers],
        provided: Provided,
        report: StageReport,
    ):
        """Take the sampler of the student, the reward and the cache of answers from what is `provided`."""
        self.config, self.prompts, self.streams = config, prompts, config.streams()
        steps = plan_steps(config, len(prompts["general"]), len(prompts["domain"]))
        self.steps = _dealt(steps, prompts)
        self.student, self.reward, self.completions = provided.student, provided.reward, provided.completions
        self.teachers, self.report = teachers, report
        self.drawn: dict[StreamName, dict[int, Talk]] = {s: {} for s in STREAMS if not self._is_dynamic(s)}
        """Frozen teachers' answers that steps will learn from, by stream and number of the prompt."""
        self.unasked = 0
        """How many turns were not asked, because an answer before them did not end."""
        self._ahead: dict[int, list[Rollout]] = {}

    def take(self, index: int) -> Batch:
        """Return the completions of step `index`, sampling them first if they are not there yet."""
        step = self.steps[index]
        fresh = False
        if step.stream in self.drawn and not step.on_policy:
            examples = self._draw_once(index)
        else:
            if index not in self._ahead:
                fresh = self._sample_from(index)
            examples = [rollout.to_example() for rollout in self._ahead.pop(index)]
        author: Author = "student" if step.on_policy else "teacher"
        if author == "teacher" and self.prompts[step.stream][step.prompts[0]].answer is not None:
            author = "rows"
        return Batch(self.streams[step.stream], examples, author, fresh)

    def _is_dynamic(self, stream: StreamName) -> bool:
        return any(teacher.is_dynamic for teacher in self.teachers[stream].values())

    def first_domain_texts(self) -> list[Rollout]:
        """Return the frozen teacher's answers to the prompts of the first domain steps."""
        size = len(self.prompts["domain"])
        order = prompt_order(self.config, "domain", size)
        numbers = list(islice(order, min(PROMPTS_OF_START["domain"], size)))
        return self._sample_once("domain", numbers, 0, self.config.seed + 9)

    def _draw_once(self, index: int) -> list[Example]:
        """Return the frozen teacher's answers for step `index`; those not there yet are sampled first."""
        step = self.steps[index]
        if any(number not in self.drawn[step.stream] for number in step.prompts):
            batch = sampled_together(self.config, self.steps, index, dynamic=False)
            asked = [number for i in batch for number in self.steps[i].prompts]
            self._sample_once(step.stream, asked, index, self._seed(index))
        drawn = self.drawn[step.stream]
        examples = []
        for number in step.prompts:
            recurs = drawn[number][0].recurs
            for turn, rollout in enumerate(drawn[number] if recurs else drawn.pop(number)):
                examples.append(rollout.to_example(f"{step.stream}/{number}/{turn}" if recurs else ""))
        return examples

    def _sample_once(self, stream: StreamName, numbers: list[int], index: int, seed: int) -> list[Rollout]:
        """Return the answers to these prompts; before step `index`, those not there yet are sampled."""
        drawn = self.drawn[stream]
        missing = [number for number in dict.fromkeys(numbers) if number not in drawn]
        if missing:
            prompts = [self.prompts[stream][number] for number in missing]
            left = [s for s in self.steps[index:] if s.stream == stream and not s.on_policy]
            times = Counter(number for s in left for number in s.prompts)
            for number, talk in zip(missing, self._generate(stream, prompts, seed, False), strict=True):
                drawn[number] = talk
                for rollout in talk:
                    rollout.recurs = times[number] > 1
        return [rollout for number in numbers for rollout in drawn[number]]

    def _seed(self, index: int) -> int:
        return self.config.seed * 1_000_003 + index

    def _sample_from(self, index: int) -> bool:
        """Sample step `index` and the next ones of its kind; return whether its completions are fresh."""
        step = self.steps[index]
        batch = sampled_together(self.config, self.steps, index, self._is_dynamic(step.stream))
        prompts = [self.prompts[step.stream][number] for i in batch for number in self.steps[i].prompts]
        rest = iter(self._generate(step.stream, prompts, self._seed(index), step.on_policy))
        for i in batch:
            self._ahead[i] = [*chain(*islice(rest, len(self.steps[i].prompts)))]
            if self._is_rewarded(step.stream):
                self.reward.judge(self._ahead[i])
        return step.on_policy and self.config.on_policy.temperature == 1

    def _generate(self, stream: StreamName, prompts: list[Prompt], seed: int, on_policy: bool) -> list[Talk]:
        """Let the student complete prompts if `on_policy`, else their teachers; have answers scored ahead."""
        name = IN_WORDS["student"] if on_policy else teacher_name(self.config, stream)
        count = counted(self.report, f"{name} answers", turns_of(prompts))

        def finished(rollouts: list[Rollout]) -> None:
            count(rollouts)
            if self._is_rewarded(stream):  # what its teacher sees is known only when all are scored
                return
            # A remote teacher scores them while others are being sampled.
            for name, positions in by_teacher(r.prompt.teacher for r in rollouts).items():
                self.teachers[stream][name].prefetch([rollouts[i] for i in positions])

        if on_policy:
            limit, temperature = self.config.limit(stream), self.config.on_policy.temperature
            answer = partial(self.student.complete, max_new_tokens=limit, temperature=temperature)
            talks = converse(prompts, partial(answer, on_finished=finished), seed)
        else:
            talks = self.teachers_answers(prompts, stream, seed, self.teachers[stream], finished)
        self.unasked += turns_of(prompts) - len([*chain(*talks)])
        return talks

    def _is_rewarded(self, stream: StreamName) -> bool:
        return self.reward is not None and stream == "general"

    def teachers_answers(
        self,
        prompts: Sequence[Prompt],
        stream: StreamName,
        seed: int,
        teachers: Teachers,
        on_finished: OnFinished | None = None,
    ) -> list[Talk]:
        """Let each prompt's own teacher complete it, in its context and at temperature 1.

        An answer that is given with the prompt, cut at the maximum length, takes the place of the teacher's.
        """
        limit = self.config.limit(stream)
        if prompts and prompts[0].answer is not None:
            rollouts = []
            for prompt in prompts:
                given = (prompt.answer or [])[:limit]
                rollouts.append(Rollout(prompt, given, finished=given[-1] in self.student.backbone.eos_ids))
            if on_finished:
                on_finished(list(parallel.my_share(rollouts)))
            return [[rollout] for rollout in rollouts]
        options = {"max_new_tokens": limit, "on_finished": on_finished}

        def complete(asked: list[Prompt], seed: int) -> list[Rollout]:
            rollouts = [Rollout(prompt) for prompt in asked]
            for name, positions in by_teacher(prompt.teacher for prompt in asked).items():
                shown = [replace(asked[i], ids=asked[i].shown, context=None) for i in positions]
                written = self.completions.complete(teachers[name], shown, seed=seed, **options)
                for i, rollout in zip(positions, written, strict=True):
                    rollout.prompt = asked[i]
                    rollouts[i] = rollout
            return rollouts

        return converse(prompts, complete, seed)

    def save(self, folder: Path) -> None:
        """Write into a checkpoint the completions that are still needed."""
        content = {"sampled": self._ahead, "drawn": self.drawn, "unasked": self.unasked}
        write_atomic(folder / "rollouts.json", json.dumps(content, default=vars))

    def restore(self, folder: Path) -> None:
        """Take back what `save` wrote.

        Raises:
            UsageError: Another version of opdcl wrote it, in another format.
        """
        content = json.loads((folder / "rollouts.json").read_text())
        try:
            self._ahead = _restored(content["sampled"])
            self.drawn = {stream: _restored(talks) for stream, talks in content["drawn"].items()}
            self.unasked = content["unasked"]
        except (KeyError, TypeError) as fault:
            raise another_version(folder) from fault


def plan_steps(config: RecoverConfig, general: int, domain: int) -> list[Step]:
    """Return all steps of a recovery, given how many prompts each stream has."""
    sizes: dict[StreamName, int] = {"general": general, "domain": domain}
    draws = {stream: prompt_order(config, stream, size) for stream, size in sizes.items()}
    period = config.general_per_domain + 1
    streams: list[StreamName] = []
    for index in range(config.steps):
        is_domain = domain and index % period == period - 1
        streams.append("domain" if is_domain else "general")
    by_student = {s: iter(on_policy_steps(streams.count(s), config.on_policy_share(s))) for s in STREAMS}
    steps: list[Step] = []
    for index, stream in enumerate(streams):
        size = config.completions(stream)
        reward = config.reward if stream == "general" else None
        group = reward.group if reward else 1
        drawn = [next(draws[stream]) for _ in range(size // group)]
        prompts = tuple(prompt for prompt in drawn for _ in range(group))
        ends_period = not domain or stream == "domain" or index == config.steps - 1
        steps.append(Step(stream, prompts, next(by_student[stream]), ends_period))
    return steps


def prompt_order(config: RecoverConfig, stream: StreamName, count: int) -> Iterator[int]:
    """Yield the numbers of a stream's prompts without end, each epoch in an order of its own."""
    return endless(count, config.seed + STREAMS.index(stream))


def on_policy_steps(steps: int, share: float) -> list[bool]:
    """Return for each of a stream's steps whether the student writes it: the last ones, a share of them.

    Halves are rounded up, and a share above 0 is at least one of two or more steps.
    """
    count = math.floor(share * steps + 0.5)
    if share and steps > 1:
        count = max(count, 1)
    return [step >= steps - count for step in range(steps)]


def sampled_together(config: RecoverConfig, steps: Sequence[Step], index: int, dynamic: bool) -> list[int]:
    """Return the steps whose completions are sampled with those of step `index`: the next of its kind.

    `dynamic` says whether their teacher changes as the student learns.
    """
    step = steps[index]
    is_stale = step.on_policy or dynamic
    ahead = max((STUDENT_BATCH if is_stale else FULL_BATCH) // len(step.prompts), 1)
    if is_stale and config.sample_ahead != "auto":
        ahead = config.sample_ahead
    kind = step.stream, step.on_policy
    return [i for i in range(index, len(steps)) if (steps[i].stream, steps[i].on_policy) == kind][:ahead]


def teacher_name(config: RecoverConfig, stream: StreamName) -> str:
    """Return how a stream's teacher is called on the screen."""
    return IN_WORDS.get(config.teacher_of(stream).kind, f"the teacher of {stream} prompts")


def turns_of(prompts: Sequence[Prompt]) -> int:
    """Return how many answers prompts ask for: one each, or one for each turn of a conversation."""
    return sum(prompt.turns for prompt in prompts)


def _dealt(steps: list[Step], prompts: dict[StreamName, list[Prompt]]) -> list[Step]:
    """Return the steps with as many of their stream's prompts, in order, as ask for each step's answers."""
    order = {s: chain(*(step.prompts for step in steps if step.stream == s)) for s in STREAMS}
    dealt = []
    for step in steps:
        own: list[int] = []
        while turns_of([prompts[step.stream][number] for number in own]) < len(step.prompts):
            own.append(next(order[step.stream]))
        dealt.append(replace(step, prompts=tuple(own)))
    return dealt


def _restored(stored: dict[str, list[dict[str, Any]]]) -> dict[int, list[Rollout]]:
    """Return rollouts by number as they were before JSON."""
    return {
        int(number): [Rollout(**row | {"prompt": Prompt(**row["prompt"])}) for row in rows]
        for number, rows in stored.items()
    }
