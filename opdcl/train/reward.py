"""A suite as a source of prompts and reward: its documents are asked, its scorer scores the completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opdcl.config.recover import RewardSection
from opdcl.data.chat import answer_text
from opdcl.data.prompts import metric_of
from opdcl.data.scoring import score_answers
from opdcl.data.stock_tasks import answering_of
from opdcl.words import Rollout

if TYPE_CHECKING:
    from opdcl.model.backbone import Backbone


class Reward:
    """Score completions on a suite's documents; `task` is the suite's lm-eval task."""

    def __init__(self, config: RewardSection, task: Any, backbone: Backbone):
        self.config, self.task, self._tokenizer = config, task, backbone.tokenizer
        self._docs: list[dict] = [*task.eval_docs]

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        """Return the score of each completion, as an evaluation of the suite would score it."""
        docs = [self._docs[rollout.prompt.number] for rollout in rollouts]
        found = []
        for scores in score_answers(self.task, docs, [self._text(rollout) for rollout in rollouts]):
            value = scores[metric_of(self.config, self.task)]
            parts = value if isinstance(value, list) else [value]
            found.append(sum(map(float, parts)) / max(1, len(parts)))
        return found

    def judge(self, rollouts: list[Rollout]) -> None:
        """Score all completions, group after group, and set their advantages."""
        rewards = self(rollouts)
        advantages = group_advantages(rewards, self.config.group)
        for rollout, reward, advantage in zip(rollouts, rewards, advantages, strict=True):
            rollout.reward, rollout.advantage = reward, advantage

    def _text(self, rollout: Rollout) -> str:
        from opdcl.data.suites import cut_at  # it loads `datasets`

        text = answer_text(self._tokenizer, rollout.prompt_ids, rollout.completion_ids)
        return cut_at(text, answering_of(self.task.config.generation_kwargs).stops)


def group_advantages(rewards: list[float], group: int) -> list[float]:
    """Return each reward's distance from its group's mean in standard deviations; 0 in tied groups.

    `rewards` holds one group of size `group` after another.
    """
    import torch

    reward_PG = torch.tensor(rewards, dtype=torch.float64).view(-1, group)
    advantage_PG = (reward_PG - reward_PG.mean(1, keepdim=True)) / (reward_PG.std(1, keepdim=True) + 1e-4)
    tied_P1 = reward_PG.amax(1, keepdim=True) == reward_PG.amin(1, keepdim=True)
    return advantage_PG.masked_fill(tied_P1, 0.0).flatten().tolist()
