"""A suite as a source of prompts and of reward: its documents are asked, its own scorer says what an answer is worth."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from opdcl.config import EvalConfig, RewardSection
from opdcl.data import Row, encode_prompt
from opdcl.distill.rollouts import Rollout
from opdcl.errors import UsageError

if TYPE_CHECKING:
    from opdcl.distill.backbone import Backbone


class Reward:
    """Score completions on a suite's documents, each between what the suite calls wrong and right."""

    def __init__(self, config: RewardSection, backbone: Backbone):
        self.config = config
        self._task = _task(config)
        self._decode = backbone.tokenizer.decode
        room = backbone.causal_lm.config.max_position_embeddings
        documents = list(self._task.eval_docs)
        self._document = {
            tuple(encode_prompt(row, backbone.tokenizer, room)): doc for row, doc in zip(reward_rows(config), documents, strict=True)
        }

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        """Return the score of each completion, as the suite would give it."""
        return [self._score(r) for r in rollouts]

    def _score(self, rollout: Rollout) -> float:
        from opdcl.evaluate import cut_at

        text = cut_at(self._decode(rollout.completion_ids, skip_special_tokens=True), self._task.config.generation_kwargs.get("until") or [])
        scores = self._task.process_results(self._document[tuple(rollout.prompt_ids)], [text])
        value = scores[self.config.metric or next(iter(self._task.aggregation()))]
        parts = value if isinstance(value, list) else [value]
        return sum(map(float, parts)) / max(1, len(parts))


def reward_rows(config: RewardSection) -> list[Row]:
    """Return the suite's documents as prompts, word for word as an evaluation asks them.

    Raises:
        UsageError: The suite is not one that answers are written for, or has no such score.
    """
    task = _task(config)
    if task.OUTPUT_TYPE != "generate_until":
        raise UsageError(f"recover.reward.suite: {config.suite} has no answers to write", "choose a generative suite")
    if config.metric and config.metric not in task.aggregation():
        raise UsageError(f"recover.reward.metric: {config.suite} has no score {config.metric!r}", f"it has {', '.join(task.aggregation())}")
    rows = []
    for number, doc in enumerate(task.eval_docs):
        asked = task.fewshot_context(doc, task.config.num_fewshot or 0, apply_chat_template=True, fewshot_as_multiturn=False,
                                     chat_template=_as_json, gen_prefix=task.doc_to_prefix(doc))  # fmt: skip
        messages = json.loads(asked)
        if messages[-1]["role"] != "user":
            raise UsageError(f"recover.reward.suite: {config.suite} begins the answer itself", "choose a suite that only asks")
        rows.append(Row(messages, None, None, f"{config.suite} document {number}"))
    return rows


def _as_json(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    return json.dumps(messages)


def _task(config: RewardSection) -> Any:
    from opdcl.evaluate import load_task

    (task,) = load_task(config.suite, EvalConfig())["tasks"].values()
    return task
