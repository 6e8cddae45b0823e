"""The suite `coherence`: stories of which only the order of the sentences differs."""

from collections import Counter

import numpy as np
import pytest
from helpers.recovering import Silent
from helpers.wording import nearest

from opdcl.config.evaluate import EvalConfig
from opdcl.config.shipped import package_folder
from opdcl.data.rows import load_rows
from opdcl.data.suites import load_suite
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir
from opdcl.stages.evaluate import evaluate

SUITE = load_suite("coherence")
DOCS = SUITE.documents(None)
STORIES = read_jsonl(package_folder("evals") / "coherence" / "test.jsonl")


def test_each_story_is_of_three_sentences_and_begins_with_its_name():
    for row in STORIES:
        assert len({*row["sentences"]}) == 3, row
        assert row["sentences"][0].startswith(row["name"])
        assert all(sentence[0].isupper() and sentence.endswith(".") for sentence in row["sentences"])
    assert len({row["name"] for row in STORIES}) == len(STORIES)


def test_only_the_order_tells_the_right_one_from_the_others():
    for doc, row in zip(DOCS, STORIES, strict=True):
        assert len({*doc["orders"]}) == 6
        assert len({tuple(sorted(order.split())) for order in doc["orders"]}) == 1
        assert doc["orders"][doc["answer"]] == " ".join(row["sentences"])


def test_the_right_order_is_known_by_no_place():
    counts = Counter(doc["answer"] for doc in DOCS)
    assert sorted(counts) == [*range(6)]
    assert max(counts.values()) - min(counts.values()) <= 1
    assert SUITE.means(SUITE.floors(None, [])["chance"])["acc"] == pytest.approx(1 / 6, abs=1e-6)


@pytest.mark.parametrize("source", ["everyday", "requests"])
def test_no_prompt_of_the_recovery_or_of_closeness_is_near_to_a_story(source):
    prompts = ["\n".join(message["content"] for message in row.prompt) for row in load_rows(source)]
    near = nearest(prompts, [" ".join(row["sentences"]) for row in STORIES])
    assert {prompts[i]: float(near[i]) for i in np.flatnonzero(near > 0.6)} == {}


def test_the_likeliest_order_is_the_answer(backbone, tmp_path):
    run = RunDir(tmp_path)
    result = evaluate(EvalConfig(limit=6, batch_size=8), SUITE, backbone, "base", run, {}, Silent())
    rows = read_jsonl(run.eval_samples("base", "coherence"))
    assert (result["metric"], result["n"]) == ("acc", 6)
    for row, doc in zip(rows, DOCS, strict=False):
        assert row["response"] == doc["orders"][int(np.argmax(row["likelihoods"]))]
        assert row["scores"]["acc"] == (row["response"] == doc["orders"][doc["answer"]])
