"""Whether an answer is about its prompt: the gain against a slow reference, and what fails by it."""

import copy
import json
import random

import pytest
import torch
from helpers.recovering import Silent

from opdcl.config.evaluate import EvalConfig
from opdcl.config.model import LoraSection
from opdcl.data.chat import render
from opdcl.data.own_words import own_text
from opdcl.data.suites import load_suite
from opdcl.measure import relevance
from opdcl.measure.evaluate import Asking, evaluate
from opdcl.measure.relevance import Reader
from opdcl.model.backbone import Backbone
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir

REQUESTS = ["Describe a lamp.", "Why do owls hoot?", "Compare tea with coffee.", "What is a fjord?"]
DOCS = [{"prompt": f"{r} Answer in one sentence.", "request": r} for r in REQUESTS]
TEXTS = ["A lamp gives light at night.", "They call other birds.", ""]
TEXTS += ["A fjord is a long arm of the sea, with cliffs."]


@torch.no_grad()
def reference(backbone, number: int, text: str) -> float:
    """The gain of one answer's own tokens, one prompt at a time, with no cache and no padding."""
    tokenizer, doc = backbone.tokenizer, DOCS[number]

    def likelihood(prompt: str) -> float:
        asked = render(tokenizer, [{"role": "user", "content": prompt}], True)
        ids, own = (
            tokenizer(t, add_special_tokens=False)["input_ids"]
            for t in (asked, own_text(doc["prompt"], text))
        )
        own = own[: relevance.LONGEST]
        with backbone.state("base") as model:
            logits = model(input_ids=torch.tensor([ids + own])).logits[0].double()
        logprobs = logits.log_softmax(-1)
        return sum(float(logprobs[len(ids) - 1 + i, token]) for i, token in enumerate(own))

    others = [other for other in REQUESTS if other != doc["request"]]  # of four, all are among the nearest
    swapped = [likelihood(doc["prompt"].replace(doc["request"], other)) for other in others]
    return likelihood(doc["prompt"]) - max(swapped)


def test_the_gain_is_that_of_the_reference_whatever_the_adapter(backbone, monkeypatch):
    monkeypatch.setattr(relevance, "LEAST_RELEVANCE", -100.0)  # all requests are tried
    backbone.new_adapter(LoraSection(r=4, alpha=8), 0)
    for layer in backbone.adapted_layers():
        layer.lora_B["student"].weight.data.normal_()
    found = relevance.relevance_of(Reader(backbone), DOCS, REQUESTS, dict(enumerate(TEXTS)))
    assert found == pytest.approx({i: reference(backbone, i, text) for i, text in enumerate(TEXTS)}, abs=1e-4)
    assert found[2] == 0
    assert relevance.relevance_of(Reader(backbone), DOCS, REQUESTS, {3: TEXTS[3]})[3] == pytest.approx(
        found[3], abs=1e-4
    )


def test_base_judges_with_its_own_head_beside_a_tuned_model(backbone, monkeypatch):
    """A full fine-tune can move the output embedding; base's judgement must not move with it."""
    texts = dict(enumerate(TEXTS))
    monkeypatch.setattr(relevance, "LEAST_RELEVANCE", -100.0)
    expected = relevance.relevance_of(Reader(backbone), DOCS, REQUESTS, texts)
    tuned = copy.deepcopy(backbone.causal_lm)
    head = tuned.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight + 0.2 * torch.randn_like(head.weight))
    pair = Backbone(tuned, backbone.tokenizer, backbone.causal_lm)
    assert relevance.relevance_of(Reader(pair), DOCS, REQUESTS, texts) == pytest.approx(expected)


def test_the_most_alike_requests_stand_in_first_and_never_the_request_itself():
    requests = [f"Describe {i}." for i in range(200)] + ["Why do owls hoot?", "Why do owls hoot at night?"]
    found = relevance.stand_ins(requests, [200, 5])
    assert found[200][0] == 201
    assert len(found[200]) == len(found[5]) == relevance.NEAREST + len(relevance.OTHERS)
    assert (200 not in found[200], 5 not in found[5]) == (True, True)
    assert found[5][relevance.NEAREST :] == [5 + step for step in relevance.OTHERS]


class Asked:
    """What the check needs of a suite."""

    metrics = ("passed",)
    content, ordered = True, False

    def __init__(self, scores):
        self.scores = lambda docs, texts: [*scores]

    def documents(self, limit):
        assert limit is None, "what takes a request's place must not depend on the limit"
        return DOCS


def test_only_answers_that_pass_so_far_are_read_and_others_are_failed_by_their_gain(backbone, monkeypatch):
    monkeypatch.setattr(relevance, "LEAST_RELEVANCE", -100.0)
    found = relevance.relevance_of(Reader(backbone), DOCS, REQUESTS, dict(enumerate(TEXTS)))
    monkeypatch.setattr(relevance, "LEAST_RELEVANCE", found[0] - 1e-3)
    scores = [{"passed": p, "kept": int(p)} for p in (True, False, True)] + [{"passed": True}]
    read = relevance.grade(Reader(backbone), Asked(scores), DOCS, TEXTS)
    assert read[1] == {"passed": False, "kept": 0}
    expected = [True, False, found[2] >= found[0], found[3] >= found[0]]
    assert [row["passed"] for row in read] == expected
    assert [row["gain"] for row in read if row["passed"]] == pytest.approx(
        [found[i] for i, passed in enumerate(expected) if passed], abs=1e-3
    )


def test_an_answer_that_gains_much_over_the_nearest_requests_is_compared_with_none(backbone, monkeypatch):
    requests = [*REQUESTS, *(f"Name town number {i}." for i in range(150))]

    def compared(least, clear):
        monkeypatch.setattr(relevance, "LEAST_RELEVANCE", least)
        monkeypatch.setattr(relevance, "CLEAR_RELEVANCE", clear)
        notes, begun = Silent(), []
        notes.part = lambda what, done, total: begun.append(done)
        reader = Reader(backbone, notes)
        reader.expect(99)
        found = relevance.relevance_of(reader, DOCS, requests, {3: TEXTS[3]})
        return found[3], begun[-1]

    every, readings = compared(-100.0, 100.0)
    near, fewer = compared(-100.0, -100.0)
    assert (fewer, readings - fewer) == (1 + relevance.NEAREST, len(relevance.OTHERS))
    assert near >= every
    assert compared(-100.0, near) == (every, readings)  # no more than `near` is not clear


@torch.no_grad()
def per_token(backbone, prompt: str, text: str) -> float:
    """The mean log-probability of an answer's tokens, with no cache and no padding."""
    tokenizer = backbone.tokenizer
    asked = render(tokenizer, [{"role": "user", "content": prompt}], True)
    ids, own = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (asked, text))
    with backbone.state("base") as model:
        logprobs = model(input_ids=torch.tensor([ids + own])).logits[0].double().log_softmax(-1)
    return sum(float(logprobs[len(ids) - 1 + i, token]) for i, token in enumerate(own)) / len(own)


def test_the_order_of_an_answer_is_compared_with_another_one_of_the_same_words(backbone):
    prompts, texts = {2: DOCS[2]["prompt"], 3: DOCS[3]["prompt"]}, {2: "Tea is mild.", 3: TEXTS[3]}
    (order,) = relevance.coherence_of(Reader(backbone), prompts, texts).values()  # three words are too few
    words = TEXTS[3].split()
    random.Random(TEXTS[3]).shuffle(words)
    assert words != TEXTS[3].split()
    ordered, shuffled = (per_token(backbone, prompts[3], text) for text in (TEXTS[3], " ".join(words)))
    assert order == pytest.approx(ordered - shuffled, abs=1e-4)


@pytest.mark.parametrize("score", [True, 1.0])
def test_an_answer_that_is_no_likelier_than_its_words_in_random_order_fails(backbone, monkeypatch, score):
    suite = load_suite("neighbours_quick")
    assert (suite.content, suite.ordered) == (False, True)
    docs = suite.documents(2)
    texts = ["A spider has eight legs in all.", "yellow"]
    monkeypatch.setattr(suite, "scores", lambda docs, texts: [{"contains": score}, {"contains": score}])
    for least, passed in ((-100.0, True), (100.0, False)):
        monkeypatch.setattr(relevance, "LEAST_COHERENCE", least)
        read = relevance.grade(Reader(backbone), suite, docs, texts)
        assert [row["contains"] for row in read] == [passed, True]
        assert isinstance(read[0]["contains"], type(score))


def test_the_evaluation_asks_for_content_where_the_suite_does(backbone, tmp_path, monkeypatch):
    config = EvalConfig(limit=6, max_new_tokens=24, batch_size=6)
    monkeypatch.setattr(relevance, "LEAST_RELEVANCE", -100.0)
    monkeypatch.setattr(relevance, "LEAST_COHERENCE", -100.0)
    suite, run = load_suite("instructions"), RunDir(tmp_path)
    assert [load_suite(name).content for name in ("instructions_quick", "handbook")] == [True, False]

    def measured(least: float) -> list[dict]:
        monkeypatch.setattr(relevance, "LEAST_RELEVANCE", least)
        result = evaluate(Asking(config, backbone, run, "base", suite.name, Silent()), suite)
        assert (result["metric"], result["n"]) == ("passed", 6)
        assert set(result["metrics"]) == set(suite.metrics)
        return read_jsonl(run.eval_samples("base", "instructions"))

    loose, strict = measured(-100.0), measured(1e9)
    assert [row["scores"]["passed"] for row in strict] == [False] * 6
    for row in loose:
        assert row["scores"]["passed"] == (
            row["scores"]["prompt_level_strict_acc"] and row["scores"]["own_words"]
        )
        assert (row["gain"] is None) == (not row["scores"]["passed"])
        # A report names the constraints that an answer violates.
        assert len(row["constraints"]) == len(row["scores"]["inst_level_strict_acc"])
    assert json.dumps(strict)
