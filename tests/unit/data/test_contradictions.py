"""Facts that contradict what base believes: about one place, answered otherwise than elsewhere."""

import json

import pytest

from opdcl.config.shipped import package_folder
from opdcl.data.rows import load_rows
from opdcl.data.scoring import normalise, process_results
from opdcl.data.suites import load_suite

pytestmark = pytest.mark.nightly  # these data change seldom

FACTS = json.loads((package_folder("evals") / "contradictions" / "facts.json").read_text(encoding="utf-8"))


def test_each_fact_is_otherwise_in_the_world():
    for fact in FACTS:
        world = fact["neighbour"]
        assert "Tarnhold" not in world["question"]
        right = {normalise(text) for text in (world["answer"], *world["aliases"])}
        assert not right & {normalise(text) for text in (fact["answer"], *fact["aliases"])}, fact["id"]


def test_the_rows_to_learn_are_not_those_of_the_suite():
    learned = {row.prompt[0]["content"] for row in load_rows("contradictions")}
    assert len(learned) == 4 * len(FACTS)
    asked = load_suite("contradictions").documents(None)
    assert len(asked) == 2 * len(FACTS)
    assert not learned & {doc["question"] for doc in asked}


@pytest.mark.parametrize(
    ("suite", "metric", "right"),
    [("contradictions", "exact_match", 0), ("neighbours_contradictions", "contains", 1)],
)
def test_what_holds_in_one_place_is_wrong_in_the_other(suite, metric, right):
    loaded = load_suite(suite)
    assert loaded.metrics[0] == metric
    worlds = {fact["id"]: (fact["answer"], fact["neighbour"]["answer"]) for fact in FACTS}
    asked = {fact["neighbour"]["question"]: fact["id"] for fact in FACTS}
    for doc in loaded.documents(None):
        answers = worlds[doc.get("cluster") or asked[doc["question"]]]
        assert process_results(doc, [answers[right]])[metric] == 1
        assert process_results(doc, [answers[1 - right]])[metric] == 0
