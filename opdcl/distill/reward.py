"""A suite as a source of prompts and of reward: its documents are asked, its own scorer says what an answer is worth.

A scorer may also say it in words: where the module of a task's `process_results` has a function `feedback(doc, answer)`,
that is what a teacher with `{feedback}` in its context reads; else it reads the scores.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opdcl.config.recover import RewardSection
from opdcl.data.chat import encode_prompt
from opdcl.data.rows import Row
from opdcl.errors import UsageError
from opdcl.sampling.rollout import Rollout

if TYPE_CHECKING:
    from opdcl.model.backbone import Backbone


class Reward:
    """Score completions on a suite's documents, and show the best of a group to whoever teaches the others.

    Args:
        config: Which suite and score.
        backbone: Whose tokenizer reads and writes.
        context: What the teacher sees of a better answer and of the scorer's words; None where it sees the bare prompt.
    """

    def __init__(self, config: RewardSection, backbone: Backbone, context: str | None = None):
        self.config, self.context = config, context
        self._tokenizer, self._room = backbone.tokenizer, backbone.causal_lm.config.max_position_embeddings
        self._task = _task(config.suite)
        self._known: dict[tuple[int, ...], tuple[Row, dict]] = {
            tuple(self._encode(row)): (row, doc)
            for row, doc in zip(reward_rows(config), self._task.eval_docs, strict=True)
        }

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        """Return the score of each completion, as the suite would give it."""
        return [self._score(r) for r in rollouts]

    def demonstrate(self, rollouts: list[Rollout]) -> None:
        """Let the teacher of each scored completion see the best one of its group, if that is better (SDPO, arXiv 2601.20802)."""
        if self.context is None:
            return
        for start in range(0, len(rollouts), self.config.group):
            group = rollouts[start : start + self.config.group]
            best = max(group, key=lambda r: r.reward or 0.0)
            for rollout in group:
                if (rollout.reward or 0.0) < (best.reward or 0.0):
                    row, doc = self._known[tuple(rollout.prompt_ids)]
                    said = self._feedback(doc, self._text(rollout)) if "{feedback}" in self.context else ""
                    shown = self._encode(row.with_context(self.context, self._text(best), said))
                    rollout.teacher_prompt_ids = (
                        shown if len(shown) + len(rollout.completion_ids) <= self._room else None
                    )

    def _score(self, rollout: Rollout) -> float:
        _, doc = self._known[tuple(rollout.prompt_ids)]
        value = self._task.process_results(doc, [self._filtered(self._text(rollout), doc)])[
            self.config.metric or next(iter(self._task.aggregation()))
        ]
        parts = value if isinstance(value, list) else [value]
        return sum(map(float, parts)) / max(1, len(parts))

    def _filtered(self, text: str, doc: dict) -> str:
        """Return what the suite's first chain of filters makes of an answer, which is what an evaluation scores."""
        from lm_eval.api.instance import Instance

        if not self._task._filters:
            return text
        instance = Instance(request_type="generate_until", doc=doc, arguments=("", {}), idx=0, resps=[text])
        chain = self._task._filters[0]
        chain.apply([instance])
        found = instance.filtered_resps[chain.name]
        return found[0] if isinstance(found, list) else found

    def _feedback(self, doc: dict, answer: str) -> str:
        scorer: Any = self._task.config.process_results
        words: Callable[[dict, str], str] | None = getattr(scorer, "__globals__", {}).get("feedback")
        return (
            words(doc, answer)
            if words
            else ", ".join(f"{k} {v}" for k, v in self._task.process_results(doc, [answer]).items())
        )

    def _text(self, rollout: Rollout) -> str:
        from opdcl.data.suites import cut_at

        stops = self._task.config.generation_kwargs.get("until") or []
        return cut_at(self._tokenizer.decode(rollout.completion_ids, skip_special_tokens=True), stops)

    def _encode(self, row: Row) -> list[int]:
        return encode_prompt(row, self._tokenizer, self._room)


def reward_rows(config: RewardSection) -> list[Row]:
    """Return the suite's documents as prompts, word for word as an evaluation asks them.

    Raises:
        UsageError: The suite is not one that answers are written for, or has no such score.
    """
    task = _task(config.suite)
    if task.OUTPUT_TYPE != "generate_until":
        raise UsageError(
            f"recover.reward.suite: {config.suite} has no answers to write", "choose a generative suite"
        )
    if config.metric and config.metric not in task.aggregation():
        raise UsageError(
            f"recover.reward.metric: {config.suite} has no score {config.metric!r}",
            f"it has {', '.join(task.aggregation())}",
        )
    metric = config.metric or next(iter(task.aggregation()))
    if not task.higher_is_better().get(metric, True):
        raise UsageError(
            f"recover.reward.metric: of {metric} less is better, so it is no reward",
            f"{config.suite} has {', '.join(task.aggregation())}",
        )
    rows: list[Row] = []
    asked_before: dict[str, int] = {}
    for number, doc in enumerate(task.eval_docs):
        asked = task.fewshot_context(
            doc,
            task.config.num_fewshot or 0,
            apply_chat_template=True,
            chat_template=_as_json,
            gen_prefix=task.doc_to_prefix(doc),
        )
        messages = json.loads(asked)
        if messages[-1]["role"] != "user":
            raise UsageError(
                f"recover.reward.suite: {config.suite} begins the answer itself",
                "choose a suite that only asks",
            )
        if (first := asked_before.setdefault(asked, number)) != number:
            raise UsageError(
                f"recover.reward.suite: documents {first} and {number} of {config.suite} ask the same",
                "keep one of them: an answer must have one score",
            )
        rows.append(Row(messages, None, None, f"{config.suite} document {number}"))
    return rows


def _as_json(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    return json.dumps(messages)


def _task(suite: str) -> Any:
    from opdcl.data.suites import load_suite

    return load_suite(suite).task
