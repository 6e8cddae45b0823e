"""Whether answers are about their prompts, and say something, as base sees it.

An answer is about its prompt if base finds its own words more likely after the prompt than after the same
prompt with any of six other requests: the three that are most like it, and three others. Words of the prompt
do not count: base repeats them after every request, so an empty text would pass.

It says something if base finds it more likely than the same words in random order: a bag of topical words is
not an answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from opdcl import parallel
from opdcl.data.chat import render
from opdcl.data.grading import Scores
from opdcl.data.own_words import own_text
from opdcl.data.similarity import similarity
from opdcl.data.suites import Suite
from opdcl.model.backbone import Backbone
from opdcl.model.distributions import HiddenStates
from opdcl.model.forward import answer_ids
from opdcl.stages.answers import read_states
from opdcl.train.losses import token_logprobs
from opdcl.training import StageReport, counted
from opdcl.types import Example

# Answers, or prompts, by the number of their document.
Texts = dict[int, str]
# Receives how many answers base has read.
Report = StageReport | None

LONGEST = 64
"""Tokens of an answer that are read."""
OTHERS = (17, 71, 113)
"""Offsets, in prompts, of three of the requests that replace a prompt's own."""
NEAREST = 3
"""How many more of them are those that are most like it."""
LEAST_RELEVANCE = 0.0
"""An answer is more likely after its own request by more than this, in nats."""
LEAST_COHERENCE = 2.0
"""An answer is more likely than its words in random order by more than this, in nats per token.

Answers of the embedded model are so by 4 to 7, its answers with shuffled words by -0.6 to 1.2.
"""
FEWEST_WORDS = 4
"""An answer of fewer words than this is not asked for its order."""


def grade(
    backbone: Backbone, suite: Suite, docs: list[dict], texts: list[str], report: Report = None
) -> list[Scores]:
    """Return the scores of answers to a suite's first documents: by its rules, then by base if it asks base.

    An answer that base rejects fails; `gain` is by how much its likelihood gains from its request.
    """
    scores = suite.scores(docs, texts)
    metric = suite.metrics[0]
    passed = {i: texts[i] for i, row in enumerate(scores) if row[metric]}
    if suite.ordered:  # first: it takes two readings, and the gain up to seven
        prompts = {i: str(suite.task.doc_to_text(docs[i])) for i in passed}
        for i, order in coherence_of(backbone, prompts, passed, report).items():
            if order <= LEAST_COHERENCE:
                scores[i] = scores[i] | {metric: type(scores[i][metric])(False)}
                del passed[i]
    if suite.content:
        requests = [doc["request"] for doc in suite.documents(None)]
        for i, gain in relevance_of(backbone, docs, requests, passed, report).items():
            scores[i] = scores[i] | {metric: gain > LEAST_RELEVANCE, "gain": round(gain, 4)}
    return scores


def relevance_of(
    backbone: Backbone, docs: Sequence[dict], requests: list[str], texts: Texts, report: Report = None
) -> dict[int, float]:
    """Return by how many nats each answer is more likely after its own request, by its document's number.

    Where one request is enough to fail an answer, the others are not tried.
    """
    own = {i: own_text(docs[i]["prompt"], text) for i, text in texts.items()}
    asked = logprobs(backbone, [(docs[i]["prompt"], text) for i, text in own.items()], report)
    likelihoods = dict(zip(own, asked, strict=True))
    found = dict.fromkeys(own, float("inf"))
    others = stand_ins(requests, list(own))
    for number in range(NEAREST + len(OTHERS)):
        open_ones = [i for i in own if found[i] > LEAST_RELEVANCE]
        pairs = []
        for i in open_ones:
            other = requests[others[i][number]]
            pairs.append((docs[i]["prompt"].replace(docs[i]["request"], other), own[i]))
        for i, likelihood in zip(open_ones, logprobs(backbone, pairs, report), strict=True):
            found[i] = min(found[i], likelihoods[i] - likelihood)
    return found


def coherence_of(backbone: Backbone, prompts: Texts, texts: Texts, report: Report = None) -> dict[int, float]:
    """Return by how much each answer is more likely than its words in random order, in nats per token.

    An answer of fewer words than `FEWEST_WORDS` is left out.
    """
    texts = {i: text for i, text in texts.items() if len(text.split()) >= FEWEST_WORDS}
    shuffled = {}
    for i, text in texts.items():
        words = text.split()
        random.Random(text).shuffle(words)
        shuffled[i] = " ".join(words)
    ordered, random_order = (_per_token(backbone, prompts, each, report) for each in (texts, shuffled))
    return {i: ordered[i] - random_order[i] for i in texts}


def _per_token(backbone: Backbone, prompts: Texts, texts: Texts, report: Report) -> dict[int, float]:
    sums = logprobs(backbone, [(prompts[i], text) for i, text in texts.items()], report)
    means = {}
    for (i, text), found in zip(texts.items(), sums, strict=True):
        means[i] = found / len(read_ids(backbone, text))
    return means


def stand_ins(requests: list[str], numbers: Sequence[int]) -> dict[int, list[int]]:
    """Return the numbers of the requests that take the place of each of these, the most alike first."""
    if not numbers:
        return {}
    alike = similarity([requests[i] for i in numbers], requests)
    found = {}
    for i, row in zip(numbers, alike, strict=True):
        nearest = [int(j) for j in (-row).argsort(kind="stable") if requests[j] != requests[i]]
        others = [(i + step) % len(requests) for step in OTHERS]
        found[i] = nearest[:NEAREST] + others
    return found


def logprobs(backbone: Backbone, pairs: Sequence[tuple[str, str]], report: Report = None) -> list[float]:
    """Return the log-probability under base of each text as the answer to its prompt."""
    tokenizer = backbone.tokenizer
    rows = []
    for prompt, text in pairs:
        asked = render(tokenizer, [{"role": "user", "content": prompt}], True)
        prompt_ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
        rows.append(Example.of(prompt_ids, read_ids(backbone, text)))
    head_VH = backbone.head_of("base")
    count = counted(report, "base reads answers", len(rows)) if report else None
    with backbone.merged("base") as model:
        states = read_states(model, rows, count)
    sums = []
    for i in sorted(states):
        tokens_N = answer_ids([rows[i]], states[i].device)
        sums.append(float(token_logprobs(HiddenStates(states[i], head_VH), tokens_N, len(head_VH)).sum()))
    return parallel.gather_shares(sums)


def read_ids(backbone: Backbone, text: str) -> list[int]:
    """Return the tokens of an answer that are read: the first ones that base knows."""
    ids: list[int] = backbone.tokenizer(text, add_special_tokens=False)["input_ids"]
    known = [id for id in ids if id < len(backbone.head_of("base"))]
    return known[:LONGEST]
