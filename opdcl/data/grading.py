"""Score answers to the documents of a task of lm-eval by its own rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# The scores of an answer, by metric.
Scores = dict[str, Any]


def score_answers(task: Any, docs: list[dict], answers: list[str]) -> list[Scores]:
    """Return the scores of an answer to each document."""
    return score_documents(task, docs, [[answer] for answer in answers])


def score_documents(task: Any, docs: Sequence[dict], answers: Sequence[Sequence[Any]]) -> list[Scores]:
    """Return the scores of documents by the answers to each: one text, or the likelihood of each choice.

    lm-eval's chains of filters leave the part of a text that counts, such as a number. Each chain has a score
    of its own, named as lm-eval does, `METRIC,CHAIN`; that of the first has the metric's name, too.
    """
    from lm_eval.api.instance import Instance

    requests = []
    for number, (doc, own) in enumerate(zip(docs, answers, strict=True)):
        place = None, number, 1
        requests.append([Instance(task.OUTPUT_TYPE, doc, ("", {}), 0, place, [answer]) for answer in own])
    # Likelihoods have no parts.
    chains = task._filters if task.OUTPUT_TYPE == "generate_until" else task._filters[:1]
    for chain in chains:
        chain.apply([request for own in requests for request in own])
    scores = []
    for doc, own in zip(docs, requests, strict=True):
        found: Scores = {}
        for chain in chains:
            by_chain = task.process_results(doc, [request.filtered_resps[chain.name] for request in own])
            found = by_chain | found | {f"{metric},{chain.name}": by_chain[metric] for metric in by_chain}
        scores.append(found)
    return scores
