"""The documents of a suite as the prompts of a recovery, asked word for word as an evaluation asks them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from opdcl.config.recover import RecoverConfig, RewardSection
from opdcl.data.chat import encode_prompt
from opdcl.data.formats import PACKED_ROW, Row
from opdcl.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    metric = metric_of(config, task)
    if not task.higher_is_better().get(metric, True):
        raise UsageError(f"recover.reward.metric: less {metric} is better, so it is no reward", metrics)


def metric_of(config: RewardSection, task: Any) -> str:
    """Return the score of a suite that is the reward: the named one, or its first."""
    return config.metric or next(iter(task.aggregation()))


def _as_json(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    return json.dumps(messages)
