"""A user's rows as a suite: each is asked with its whole conversation, and scored by its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opdcl.data.formats import PACKED_ROW, Row
from opdcl.data.messages import split_thought
from opdcl.data.scoring import process_results
from opdcl.errors import UsageError


def question_task(name: str, rows: Callable[[], list[Row]], max_tokens: int) -> dict[str, Any]:
    """Describe a closed-book task over rows of questions and answers; headline: token F1."""
    import datasets

    def load(**kwargs: Any) -> dict[str, Any]:
        return {"test": datasets.Dataset.from_list([document(row) for row in rows()])}

    metrics = ("token_f1", "exact_match", "contains")
    return {
        "task": name,
        "custom_dataset": load,
        "output_type": "generate_until",
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": "question",
        "doc_to_target": "{{answers[0]}}",
        "process_results": process_results,
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": max_tokens},
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in metrics],
    }


def document(row: Row) -> dict[str, Any]:
    """Return a row as a document: its last question, its answer, and packed, all that the model is shown.

    Raises:
        UsageError: It has no question or no answer in words.
    """
    thought, _, answer = split_thought(row.answer or "")
    answer = answer if thought is None else answer.lstrip()
    if not answer or not row.prompt:
        reason = "its answer is a tool call" if row.reply.get("tool_calls") else "a domain suite needs both"
        raise UsageError(f"{row.where} has no question and answer", reason)
    questions = [message["content"] for message in row.prompt if message["role"] == "user"]
    return {"question": questions[-1], "answers": [answer], "cluster": row.cluster, PACKED_ROW: row.packed()}
