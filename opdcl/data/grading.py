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
    """Return the documents of requests, scored by what lm-eval's first chain of filters leaves of answers.

    That is the part of an answer that counts, such as a number.
    """
    of_document: dict[int, list[Instance]] = {}
    for request, answer in zip(requests, answers, strict=True):
        request.resps = [answer]
        of_document.setdefault(request.doc_id, []).append(request)
    first = task._filters[0]
    first.apply(requests)
    graded = []
    for asked in of_document.values():
        scores = task.process_results(asked[0].doc, [one.filtered_resps[first.name] for one in asked])
        graded.append(GradedDocument(asked[0].doc, [one.resps[0] for one in asked], scores))
    return graded
