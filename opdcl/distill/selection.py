"""Choose which completions of a step to learn from, where more were sampled than a step keeps."""

from __future__ import annotations

from statistics import pvariance
from typing import TYPE_CHECKING

from opdcl.config.recover import RecoverConfig
from opdcl.distill.grading import Grader
from opdcl.distill.losses import group_advantages
from opdcl.distill.schedule import Step, Stream
from opdcl.sampling.rollout import Rollout

if TYPE_CHECKING:
    from opdcl.distill.reward import Reward


class Selection:
    """Keep the completions with the most to learn: by reward if there is one, else by gap to the teacher."""

    def __init__(self, config: RecoverConfig, grader: Grader, reward: Reward | None = None):
        self.config, self.grader, self.reward = config, grader, reward

    def is_rewarded(self, stream: Stream) -> bool:
        """Return whether a stream's completions are scored."""
        return self.reward is not None and stream == "general"

    def choose(self, rollouts: list[Rollout], step: Step) -> list[Rollout]:
        """Return the completions that a step learns from, in their order."""
        if self.is_rewarded(step.stream):
            return self._most_divided(rollouts, step.keep)
        if self.config.oversample > 1:
            return self._largest_gap(rollouts, step.stream, step.keep)
        return rollouts

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

    def _largest_gap(self, rollouts: list[Rollout], stream: Stream, keep: int) -> list[Rollout]:
        """Return the completions about which teacher and sampler differ most."""
        if len(rollouts) <= keep:
            return rollouts
        gaps = self.grader.gaps(rollouts, stream)
        by_gap = sorted(range(len(rollouts)), key=gaps.__getitem__, reverse=True)
        return [rollouts[i] for i in sorted(by_gap[:keep])]
