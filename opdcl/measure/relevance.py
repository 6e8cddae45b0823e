"""Whether answers are about their prompts, and say something, as base sees it.

An answer is about its prompt if base finds its own words more likely after the prompt than after the same
prompt with any of six other requests: the three that are most like it, and then, unless these have decided
it, three others. Words of the prompt do not count: base repeats them after every request, so an empty text
would pass.

It says something if base finds it more likely than the same words in random order: a bag of topical words is
not an answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opdcl import parallel
from opdcl.data.chat import render
from opdcl.data.own_words import own_text, similarity
from opdcl.data.scoring import Scores
from opdcl.data.suites import Suite
from opdcl.measure.ask import read_states
from opdcl.model.backbone import Backbone
from opdcl.model.distributions import HiddenStates
from opdcl.model.forward import answer_ids
from opdcl.rundir.hashes import hash_files
from opdcl.train.answer_cache import CompletionCache
from opdcl.train.loop import StageReport
from opdcl.train.losses import token_logprobs
from opdcl.train.teachers import Teacher
from opdcl.words import Example, Prompt, Rollout

# Answers, or prompts, by the number of their document.
Texts = dict[int, str]

LONGEST = 64
"""Tokens of an answer that are read."""
OTHERS = (17, 71, 113)
"""Offsets, in prompts, of three of the requests that replace a prompt's own."""
NEAREST = 3
"""How many more of them are those that are most like it."""
LEAST_RELEVANCE = 0.0
"""An answer is more likely after its own request by more than this, in nats."""
CLEAR_RELEVANCE = 6.0
"""An answer that gains more than this over each of the requests most like its own is compared with no others.

Of 109 answers, base's own and those of cheats, 23 had gained so much, and the other requests failed none of
them. They fail answers that have gained less: four of 29 answers to another prompt, by at most 3.3 nats.
"""
LEAST_COHERENCE = 2.0
"""An answer is more likely than its words in random order by more than this, in nats per token.

Answers of the embedded model are so by 4 to 7, its answers with shuffled words by -0.6 to 1.2.
"""
FEWEST_WORDS = 4
"""An answer of fewer words than this is not asked for its order."""

# The code that decides what is found, beside that of the models.
READING = ("measure/ask.py", "train/learner.py", "train/losses.py")
READING_CODE = [Path(__file__).parents[1] / name for name in READING]


class Reader(Teacher):
    """Base as it reads given answers: what it finds is kept in the cache, as what it writes is.

    So no later state or run reads the same answers again, and what is found is the same to the bit.
    """

    def __init__(self, backbone: Backbone, report: StageReport | None = None):
        super().__init__(backbone, "base")
        self.report, self.kept = report, CompletionCache(backbone)
        self.done = self.expected = 0  # readings of answers

    def expect(self, readings: int) -> None:
        """Count on from what was expected so far: some of that was not needed."""
        self.done, self.expected = self.expected, self.expected + readings
        self._count(())

    def _count(self, read: Sequence[Any]) -> None:
        self.done += len(read) * parallel.worker_count()
        if self.report and self.expected:
            done = min(self.done, self.expected)
            self.report.part("the original model checks answers", done, self.expected)

    def logprobs(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the log-probability under base of each text as the answer to its prompt."""
        if not pairs:
            return []
        prompts = []
        for prompt, _ in pairs:
            asked = render(self.backbone.tokenizer, [{"role": "user", "content": prompt}], True)
            prompts.append(Prompt(self.backbone.tokenizer(asked, add_special_tokens=False)["input_ids"]))
        read = {"given": [self.ids(text) for _, text in pairs], "code": hash_files(READING_CODE)}
        found = self.kept.complete(self, prompts, self._count, max_new_tokens=LONGEST, **read)
        return [sum(rollout.logprobs) for rollout in found]

    def complete(self, prompts: Sequence[Prompt], **options: Any) -> list[Rollout]:
        """Return the answers `given` to prompts, with the log-probability of each token."""
        given: list[list[int]] = options["given"]
        rows = [Example.of(prompt.ids, ids) for prompt, ids in zip(prompts, given, strict=True)]
        with self.backbone.merged("base") as model:
            states = read_states(model, rows, options["on_finished"])
        found = []
        for i in sorted(states):
            tokens_N = answer_ids([rows[i]], states[i].device)
            logprobs_N = token_logprobs(HiddenStates(states[i], self.head_VH), tokens_N, len(self.head_VH))
            found.append(Rollout(prompts[i], given[i], logprobs_N.tolist()))
        return parallel.gather_shares(found)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of an answer that are read: the first ones that base knows."""
        ids: list[int] = self.backbone.tokenizer(text, add_special_tokens=False)["input_ids"]
        known = [id for id in ids if id < len(self.head_VH)]
        return known[:LONGEST]


def grade(reader: Reader, suite: Suite, docs: list[dict], texts: list[str]) -> list[Scores]:
    """Return the scores of answers to a suite's first documents: by its rules, then by base if it asks base.

    An answer that base rejects fails; `gain` is by how much its likelihood gains from its request.
    """
    scores = suite.scores(docs, texts)
    metric = suite.metrics[0]
    passed = {i: texts[i] for i, row in enumerate(scores) if row[metric]}
    reader.expect(len(passed) * (2 * suite.ordered + (1 + NEAREST + len(OTHERS)) * suite.content))
    if suite.ordered:  # first: it takes two readings, and the gain up to seven
        prompts = {i: str(suite.task.doc_to_text(docs[i])) for i in passed}
        for i, order in coherence_of(reader, prompts, passed).items():
            if order <= LEAST_COHERENCE:
                scores[i] = scores[i] | {metric: type(scores[i][metric])(False)}
                del passed[i]
    if suite.content:
        requests = [doc["request"] for doc in suite.documents(None)]
        for i, gain in relevance_of(reader, docs, requests, passed).items():
            scores[i] = scores[i] | {metric: gain > LEAST_RELEVANCE, "gain": round(gain, 4)}
    return scores


def relevance_of(reader: Reader, docs: Sequence[dict], requests: list[str], texts: Texts) -> dict[int, float]:
    """Return by how many nats each answer is more likely after its own request, by its document's number.

    Where one request is enough to fail an answer, or the nearest ones to pass it, the others are not tried.
    """
    own = {i: own_text(docs[i]["prompt"], text) for i, text in texts.items()}
    asked = reader.logprobs([(docs[i]["prompt"], text) for i, text in own.items()])
    likelihoods = dict(zip(own, asked, strict=True))
    found = dict.fromkeys(own, math.inf)
    others = stand_ins(requests, list(own))
    for number in range(NEAREST + len(OTHERS)):
        enough = CLEAR_RELEVANCE if number >= NEAREST else math.inf
        open_ones = [i for i in own if LEAST_RELEVANCE < found[i] <= enough]
        pairs = []
        for i in open_ones:
            other = requests[others[i][number]]
            pairs.append((docs[i]["prompt"].replace(docs[i]["request"], other), own[i]))
        for i, likelihood in zip(open_ones, reader.logprobs(pairs), strict=True):
            found[i] = min(found[i], likelihoods[i] - likelihood)
    return found


def coherence_of(reader: Reader, prompts: Texts, texts: Texts) -> dict[int, float]:
    """Return by how much each answer is more likely than its words in random order, in nats per token.

    An answer of fewer words than `FEWEST_WORDS` is left out.
    """
    numbers = [i for i, text in texts.items() if len(text.split()) >= FEWEST_WORDS]
    pairs = [(prompts[i], texts[i]) for i in numbers]
    for i in numbers:
        words = texts[i].split()
        random.Random(texts[i]).shuffle(words)
        pairs.append((prompts[i], " ".join(words)))
    means = []
    for (_, text), found in zip(pairs, reader.logprobs(pairs), strict=True):
        means.append(found / len(reader.ids(text)))
    return {i: means[n] - means[n + len(numbers)] for n, i in enumerate(numbers)}


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
