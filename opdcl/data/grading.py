"""Score answers to the requests of a task of lm-eval by its own rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

# The scores of an answer, by metric.
Scores = dict[str, Any]


def score_answers(task: Any, docs: list[dict], answers: list[str]) -> list[Scores]:
    """Return the scores of an answer to each document."""
    from lm_eval.api.instance import Instance

    requests = []
    for number, doc in enumerate(docs):
        requests.append(Instance("generate_until", doc, ("", {}), 0, (None, number, 1)))
    return [graded.scores for graded in grade_requests(task, requests, answers)]


class GradedDocument(NamedTuple):
    """A document with the model's answers and their scores."""

    doc: dict
    answers: list[Any]
    scores: Scores


def grade_requests(task: Any, requests: list[Instance], answers: Sequence[Any]) -> list[GradedDocument]:
    """Return the documents of requests, scored by what each of lm-eval's chains of filters leaves of answers.

    That is the part of an answer that counts, such as a number. Each chain has a score of its own, named as
    lm-eval does, `METRIC,CHAIN`; that of the first has the metric's name, too.
    """
    of_document: dict[int, list[Instance]] = {}
    for request, answer in zip(requests, answers, strict=True):
        request.resps = [answer]
        of_document.setdefault(request.doc_id, []).append(request)
    # Likelihoods have no parts.
    chains = task._filters if task.OUTPUT_TYPE == "generate_until" else task._filters[:1]
    for chain in chains:
        chain.apply(requests)
    graded = []
    for asked in of_document.values():
        scores: Scores = {}
        for chain in chains:
            found = task.process_results(asked[0].doc, [one.filtered_resps[chain.name] for one in asked])
            scores = found | scores | {f"{metric},{chain.name}": found[metric] for metric in found}
        graded.append(GradedDocument(asked[0].doc, [one.resps[0] for one in asked], scores))
    return graded
