"""A suite as a source of prompts and reward: its documents are asked, its scorer scores the completions.

A scorer may also give feedback in words: if the module of a task's `process_results` has a function
`feedback(doc, answer)`, its text fills `{feedback}` in a teacher's context; otherwise the scores do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opdcl.config.recover import RewardSection
from opdcl.data.chat import answer_text, encode_prompt
from opdcl.data.formats import Row
from opdcl.data.prompts import metric_of
from opdcl.data.scoring import score_answers
from opdcl.data.stock_tasks import answering_of
from opdcl.words import Rollout

if TYPE_CHECKING:
    from opdcl.model.backbone import Backbone


class Reward:
    """Score completions on a suite's documents, and show the best of each group to the teacher of the others.

    `task` is the suite's lm-eval task, `rows` what `reward_rows` returned for it, and `context` the teacher's
    template for the best answer and feedback, or None if it sees the bare prompt.
    """

    def __init__(
        self,
        config: RewardSection,
        task: Any,
        rows: list[Row],
        backbone: Backbone,
        context: str | None,
        notify: Callable[[str], None],
    ):
        self.config, self.task, self.context = config, task, context
        self._notify, self._has_notified = notify, False
        self._tokenizer, self._room = backbone.tokenizer, backbone.context_length
        self._sources: list[tuple[Row, dict]] = [*zip(rows, task.eval_docs, strict=True)]

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        """Return the score of each completion, as an evaluation of the suite would score it."""
        docs = [self._sources[rollout.prompt.number][1] for rollout in rollouts]
        found = []
        for scores in score_answers(self.task, docs, [self._text(rollout) for rollout in rollouts]):
            value = scores[metric_of(self.config, self.task)]
            parts = value if isinstance(value, list) else [value]
            found.append(sum(map(float, parts)) / max(1, len(parts)))
        return found

    def judge(self, rollouts: list[Rollout]) -> None:
        """Score all completions, group after group, and set their advantages and demonstrations."""
        size = self.config.group
        rewards = self(rollouts)
        advantages = group_advantages(rewards, size)
        for rollout, reward, advantage in zip(rollouts, rewards, advantages, strict=True):
            rollout.reward, rollout.advantage = reward, advantage
        for start in range(0, len(rollouts), size):
            self._demonstrate(rollouts[start : start + size])

    def _demonstrate(self, group: list[Rollout]) -> None:
        """Show each completion's teacher the best one of its group, if better (SDPO, arXiv 2601.20802).

        Where the model's context has no room for it, the teacher sees the bare prompt.
        """
        if self.context is None:
            return
        best = max(group, key=lambda r: r.reward or 0.0)
        for rollout in group:
            if (rollout.reward or 0.0) == (best.reward or 0.0):
                continue
            shown = self._with_demonstration(self.context, rollout, self._text(best))
            if len(shown) + len(rollout.completion_ids) <= self._room:
                rollout.prompt = replace(rollout.prompt, context=shown)
            elif not self._has_notified:
                self._has_notified = True
                self._notify("a demonstration does not fit into the context: it is not shown")

    def _with_demonstration(self, context: str, rollout: Rollout, best: str) -> list[int]:
        """Return what a teacher sees: the prompt with the best answer, and feedback on this one."""
        row, doc = self._sources[rollout.prompt.number]
        feedback = self._feedback(doc, self._text(rollout)) if "{feedback}" in context else ""
        return encode_prompt(row.with_context(context, best, feedback), self._tokenizer, sys.maxsize)

    def _feedback(self, doc: dict, answer: str) -> str:
        scorer: Any = self.task.config.process_results
        in_words: Callable[[dict, str], str] | None = getattr(scorer, "__globals__", {}).get("feedback")
        if in_words:
            return in_words(doc, answer)
        return ", ".join(f"{k} {v}" for k, v in self.task.process_results(doc, [answer]).items())

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
