"""Sample completions ahead of the steps that learn from them, choose the useful ones, hand them out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import pvariance
from typing import TYPE_CHECKING, Any, Literal

from opdcl import parallel
from opdcl.config.recover import RecoverConfig
from opdcl.distill.losses import group_advantages
from opdcl.distill.schedule import Step, Stream, sampled_together
from opdcl.distill.teachers import AnyTeacher, Teacher
from opdcl.errors import UsageError
from opdcl.rundir.files import write_atomic
from opdcl.sampling.rollout import Prompt, Rollout

if TYPE_CHECKING:
    from opdcl.distill.reward import Reward

Author = Literal["student", "teacher"]


@dataclass(frozen=True)
class StepRollouts:
    """The completions of one step, and who wrote them; `fresh` if the current weights sampled every token."""

    rollouts: list[Rollout]
    fresh: bool
    author: Author


class Selection:
    """Score rewarded completions, and keep the groups with the most to learn."""

    def __init__(self, config: RecoverConfig, reward: Reward | None = None):
        self.config, self.reward = config, reward

    def is_rewarded(self, stream: Stream) -> bool:
        """Return whether a stream's completions are scored."""
        return self.reward is not None and stream == "general"

    def choose(self, rollouts: list[Rollout], step: Step) -> list[Rollout]:
        """Return the completions that a step learns from, in their order."""
        return self._most_divided(rollouts, step.keep) if self.is_rewarded(step.stream) else rollouts

    def _most_divided(self, rollouts: list[Rollout], keep: int) -> list[Rollout]:
        """Score all completions, set their advantages, and return the groups whose rewards vary most.

        A group with equal rewards has nothing to teach (DAPO, arXiv 2503.14476, section 3.2).
        """
        size = self.config.reward.group
        rewards = self.reward(rollouts)
        advantages = group_advantages(rewards, size)
        for rollout, reward, advantage in zip(rollouts, rewards, advantages, strict=True):
            rollout.reward, rollout.advantage = reward, advantage
            rollout.step_reward = sum(rewards) / len(rewards)
        starts = range(0, len(rollouts), size)
        by_variance = sorted(starts, key=lambda i: pvariance(rewards[i : i + size]), reverse=True)
        chosen = sorted(by_variance[: keep // size])
        selected = [rollout for i in chosen for rollout in rollouts[i : i + size]]
        self.reward.demonstrate(selected)
        return selected


class RolloutQueue:
    """Completions for the steps to come.

    The student completes the prompts of on-policy steps, the stream's teacher those of the others. Steps of
    one stream are sampled together: at most `recover.sample_ahead`, because the student's completions go
    stale as it learns, but more if a frozen teacher samples. The last, long completions of such a batch may
    stay unfinished: they resume in the stream's next batch and are learned from then (partial rollouts, arXiv
    2501.12599).
    """

    def __init__(
        self,
        config: RecoverConfig,
        steps: list[Step],
        prompts: dict[Stream, list[Prompt]],
        student: Teacher,
        teachers: dict[Stream, AnyTeacher],
        selection: Selection,
    ):
        self.config, self.steps, self.prompts = config, steps, prompts
        self.student, self.teachers, self.selection = student, teachers, selection
        self.latest: dict[Stream, list[Rollout]] = {}
        """The completions handed out last, by stream."""
        self._ahead: dict[int, list[Rollout]] = {}
        self._unfinished: dict[Stream, list[Rollout]] = {}

    def take(self, index: int) -> StepRollouts:
        """Return the completions of step `index`, sampling them first if they are not there yet."""
        step = self.steps[index]
        fresh = index not in self._ahead and self._sample_from(index) and step.on_policy
        self.latest[step.stream] = rollouts = self._ahead.pop(index)
        return StepRollouts(rollouts, fresh, "student" if step.on_policy else "teacher")

    def _sample_from(self, index: int) -> bool:
        """Sample step `index` and the next ones of its kind; return whether all of its tokens are new."""
        step = self.steps[index]
        stream, teacher = step.stream, self.teachers[step.stream]
        batch = sampled_together(self.config, self.steps, index, teacher.is_dynamic)
        rewarded, later = self.selection.is_rewarded(stream), self.steps[batch[-1] + 1 :]
        goes_on = any((s.stream, s.on_policy) == (stream, step.on_policy) for s in later)
        may_resume = step.on_policy and goes_on and not rewarded
        resumed = self._unfinished.pop(stream, []) if step.on_policy else []
        rollouts = self.sample(
            [self.prompts[stream][p] for i in batch for p in self.steps[i].prompts],
            stream,
            seed=self.config.seed * 1_000_003 + index,
            author=None if step.on_policy else teacher,
            # A remote teacher grades finished completions while the others are still being sampled.
            on_finished=None if rewarded else teacher.prefetch,
            unfinished=resumed,
            max_unfinished=self._max_unfinished(batch) if may_resume else 0,
        )
        limit = self.config.limit(stream, step.on_policy)
        if unfinished := [r for r in rollouts if not _is_done(r, limit)]:
            self._unfinished[stream] = unfinished
        resumed, new = rollouts[: len(resumed)], iter(rollouts[len(resumed) :])
        for i in batch:
            of_step = [next(new) for _ in self.steps[i].prompts]
            of_step += resumed if i == batch[-1] else []
            done = [r for r in of_step if _is_done(r, limit)]
            self._ahead[i] = self.selection.choose(done, self.steps[i])
        return not (resumed and batch == [index])

    def _max_unfinished(self, batch: list[int]) -> int:
        """Return how many completions of these steps may stay unfinished: a sixteenth, never all of a step.

        None if each step is strictly on-policy, if a server samples, or if there are several workers, whose
        unfinished completions would differ from those of one.
        """
        config = self.config
        if len(batch) == 1 or config.server or parallel.worker_count() > 1:
            return 0
        sizes = [len(self.steps[i].prompts) for i in batch]
        return min(sum(sizes) // 16, min(sizes) - 1)

    def sample(
        self,
        prompts: list[Prompt],
        stream: Stream,
        seed: int,
        author: AnyTeacher | None = None,
        on_finished: Callable[[list[Rollout]], None] | None = None,
        unfinished: Sequence[Rollout] = (),
        max_unfinished: int = 0,
    ) -> list[Rollout]:
        """Sample one completion per prompt from the student, or from `author`, which sees the contexts.

        `recover.on_policy` says how the student writes; an author writes at temperature 1. The student alone
        can resume completions: those in `unfinished` come first in the result.
        """
        if not prompts and not unfinished:
            return []
        how = self.config.limit(stream, author is None), seed, on_finished
        temperature = 1.0 if author else self.config.on_policy.temperature
        if unfinished or max_unfinished:
            partial: dict[str, Any] = {"unfinished": unfinished, "max_unfinished": max_unfinished}
            return self.student.complete(prompts, *how, temperature, **partial)
        by_position: dict[int, Rollout] = {}
        writer, seen = author or self.student, prompts
        if writer is not self.student:  # which sees no context as an author either
            seen = [replace(p, ids=p.shown, context=None) for p in prompts]
        for _, single, positions in writer.split(prompts):
            rollouts = single.complete([seen[i] for i in positions], *how, temperature)
            for i, rollout in zip(positions, rollouts, strict=True):
                rollout.prompt = prompts[i]
                by_position[i] = rollout
        return [by_position[i] for i in range(len(prompts))]

    def save(self, folder: Path) -> None:
        """Write the completions not yet learned from, and those handed out last, into a checkpoint."""
        content = {"ahead": self._ahead, "unfinished": self._unfinished, "latest": self.latest}
        write_atomic(folder / "rollouts.json", json.dumps(content, default=asdict))

    def restore(self, folder: Path) -> None:
        """Take back what `save` wrote.

        Raises:
            UsageError: Another version of opdcl wrote it, in another format.
        """
        content = json.loads((folder / "rollouts.json").read_text())
        try:
            self._ahead = {int(i): [*map(_rollout, rows)] for i, rows in content["ahead"].items()}
            self._unfinished = {s: [*map(_rollout, rows)] for s, rows in content["unfinished"].items()}
            self.latest = {s: [*map(_rollout, rows)] for s, rows in content["latest"].items()}
        except (KeyError, TypeError) as fault:
            hint = "remove that folder: the run resumes from the checkpoint before it, or starts over"
            raise UsageError(f"another version of opdcl wrote {folder}", hint) from fault


def _rollout(row: dict[str, Any]) -> Rollout:
    return Rollout(**row | {"prompt": Prompt(**row["prompt"])})


def _is_done(rollout: Rollout, limit: int) -> bool:
    """Return whether a completion has ended or reached the maximum length."""
    return rollout.finished or len(rollout.completion_ids) >= limit
