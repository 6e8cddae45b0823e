"""A suite as a source of prompts and reward: its documents are asked, its scorer scores the completions.

A scorer may also give feedback in words: if the module of a task's `process_results` has a function
`feedback(doc, answer)`, its text fills `{feedback}` in a teacher's context; otherwise the scores do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opdcl.config.recover import RecoverConfig, RewardSection
from opdcl.data.answering import answering_of
from opdcl.data.chat import answer_text, encode_prompt
from opdcl.data.formats import PACKED_ROW, Row
from opdcl.errors import UsageError
from opdcl.sampling.rollout import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        return [self._score(r) for r in rollouts]

    def judge(self, rollouts: list[Rollout]) -> None:
        """Score all completions, group after group, and set their advantages and demonstrations."""
        from opdcl.distill.losses import group_advantages  # it loads torch

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

    def _score(self, rollout: Rollout) -> float:
        from opdcl.data.suites import score_answers  # it loads `datasets`

        _, doc = self._sources[rollout.prompt.number]
        (scores,) = score_answers(self.task, [doc], [self._text(rollout)])
        value = scores[_metric(self.config, self.task)]
        parts = value if isinstance(value, list) else [value]
        return sum(map(float, parts)) / max(1, len(parts))

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


def load_reward_task(suite: str) -> Any:
    """Return the lm-eval task of a suite."""
    from opdcl.data.suites import load_suite

    return load_suite(suite).task


def reward_rows(config: RewardSection, task: Any) -> list[Row]:
    """Return a task's documents as prompts, word for word as an evaluation asks them.

    Raises:
        UsageError: The task is not generative, has no such metric or a metric where less is better, begins
            the answer itself, or asks the same twice.
    """
    from opdcl.data.suites import FEWSHOT_SEED  # it loads `datasets`

    _check_task(config, task)
    task.set_fewshot_seed(FEWSHOT_SEED)
    rows: list[Row] = []
    number_of: dict[str, int] = {}
    for number, doc in enumerate(task.eval_docs):
        conversation = task.fewshot_context(
            doc,
            task.config.num_fewshot or 0,
            apply_chat_template=True,
            fewshot_as_multiturn=True,
            chat_template=_as_json,
            gen_prefix=task.doc_to_prefix(doc),
        )
        row = Row(json.loads(conversation), None, None, f"{config.suite} document {number}")
        if PACKED_ROW in doc:
            row = Row.unpacked(doc[PACKED_ROW])
        if row.prompt[-1]["role"] == "assistant":
            message = f"recover.reward.suite: {config.suite} begins the answer itself"
            raise UsageError(message, "choose a suite that only asks")
        if (first := number_of.setdefault(row.key(), number)) != number:
            message = f"recover.reward.suite: documents {first} and {number} of {config.suite} ask the same"
            raise UsageError(message, "keep one of them: an answer must have one score")
        rows.append(row)
    return rows


def count_short_of_room(
    config: RecoverConfig, rows: list[Row], tokenizer: PreTrainedTokenizerBase, room: int
) -> int:
    """Return how many prompts have too little room for the longest demonstration in a context of `room`.

    Raises:
        UsageError: No prompt has room for any.
    """
    context, longest = config.teacher_of("general").context, config.max_new_tokens
    if not (config.reward and context):
        return 0
    left = []
    for row in rows:
        shown = encode_prompt(row.with_context(context, ""), tokenizer, sys.maxsize)
        left.append(room - len(shown) - longest)  # the graded completion also takes context
    if max(left) <= 0:
        message = f"the context of recover.general_teacher leaves no room for an answer within {room} tokens"
        raise UsageError(message, "shorten it, or lower recover.max_new_tokens")
    return sum(one < longest for one in left)


def _check_task(config: RewardSection, task: Any) -> None:
    metrics = f"it has {', '.join(task.aggregation())}"
    if task.OUTPUT_TYPE != "generate_until":
        message = f"recover.reward.suite: {config.suite} has no answers to write"
        raise UsageError(message, "choose a generative suite")
    if config.metric and config.metric not in task.aggregation():
        raise UsageError(f"recover.reward.metric: {config.suite} has no score {config.metric!r}", metrics)
    metric = _metric(config, task)
    if not task.higher_is_better().get(metric, True):
        raise UsageError(f"recover.reward.metric: less {metric} is better, so it is no reward", metrics)


def _metric(config: RewardSection, task: Any) -> str:
    return config.metric or next(iter(task.aggregation()))


def _as_json(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    return json.dumps(messages)
