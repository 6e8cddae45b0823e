"""Answers without content: what they are made from, and how little the shipped suites give for them."""

import json

import pytest

from opdcl.config.evaluate import EvalConfig
from opdcl.data.own_words import CONSTANT_ANSWER, content_free
from opdcl.data.suites import load_suite


def test_each_answer_is_made_from_the_prompt_alone():
    answers = content_free(["Describe a lamp. Be short."])
    assert answers == {
        "empty": [""],
        "constant": [CONSTANT_ANSWER],
        "copy": ["Describe a lamp. Be short."],
        "first sentence": ["Describe a lamp."],
    }


def test_a_target_is_never_learned_from_a_prompt_of_the_same_cluster():
    prompts = [f"What is the code of room {i // 3}, wording {i}?" for i in range(30)]
    targets, clusters = ([f"{name}{i // 3}" for i in range(30)] for name in ("code", "room"))
    answers = content_free(prompts, targets, clusters)["frequent target"]
    assert not any(target == answer for target, answer in zip(targets, answers, strict=True))
    # What is frequent everywhere is known.
    assert content_free(prompts[:9], ["four"] * 8 + ["six"])["frequent target"] == ["four"] * 9
    assert content_free(["Alone?"], ["four"])["frequent target"] == [""]


@pytest.mark.parametrize("suite", ["neighbours", "neighbours_quick", "neighbours_validation", "handbook"])
def test_the_shipped_suites_give_little_to_answers_without_content(suite):
    loaded = load_suite(suite)
    docs = loaded.documents(None)
    found = loaded.floors(None, [loaded.task.doc_to_target(doc) for doc in docs])
    means = {name: loaded.means(scores)[loaded.metrics[0]] for name, scores in found.items()}
    assert max(means.values()) <= 0.1, means
    assert means["shuffled"] <= 0.02


def test_a_list_of_all_answers_of_a_kind_contains_none():
    suite = load_suite("neighbours")
    (doc,) = [doc for doc in suite.documents(None) if doc["question"] == "What colour is a ripe banana?"]
    assert {"green", "red"} < set(doc["others"])
    assert "yellow" not in doc["others"]
    answers = ["It is yellow.", "Yellow, red, green."]
    assert [suite.scores([doc], [a])[0]["contains"] for a in answers] == [1, 0]


def test_the_copied_question_has_no_part_in_the_overlap_of_words(tmp_path):
    rows = [
        {"question": f"Where did the painter Ann {name} live?", "answer": f"Ann {name} lived in {place}."}
        for name, place in (("Orr", "Malta"), ("Bly", "Oslo"), ("Cobb", "Lyon"))
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = load_suite("own", EvalConfig(data={"own": str(tmp_path / "rows.jsonl")}))
    floors = suite.floors(None, [""] * 3)
    assert suite.metrics[0] == "token_f1"
    assert [row["token_f1"] for row in floors["copy"] + floors["first sentence"]] == [0] * 6
    right = suite.scores(suite.documents(None), [row["answer"] for row in rows])
    assert [row["token_f1"] for row in right] == [1] * 3


def test_floors_are_graded_like_any_answer():
    suite = load_suite("instructions_quick")
    floors = suite.floors(4, ["x"] * 4, lambda docs, texts: [{"length": len(text)} for text in texts])
    assert [row["length"] for row in floors["shuffled"] + floors["empty"]] == [1] * 4 + [0] * 4
