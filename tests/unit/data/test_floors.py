"""Answers without content: what they are made from, and how little the shipped suites give for them."""

import json

import pytest

from opdcl.config.evaluate import EvalConfig
from opdcl.data.floors import LISTED, LONG_ANSWER, content_free
from opdcl.data.suites import load_suite

PROMPT = (
    'Describe a lamp. Use "lit" and \u201cdim\u201d. Begin with a title, like <<title>>, and end with a P.S.'
)


def test_each_answer_is_made_from_the_prompt_alone():
    answers = {name: texts[0] for name, texts in content_free([PROMPT]).items()}
    assert answers["empty"] == ""
    assert answers["copy"] == PROMPT
    assert answers["copy and constant"] == f"{PROMPT}\n\n{LONG_ANSWER}"
    assert answers["first sentence"] == "Describe a lamp."
    assert answers["title and first sentence"] == "<<A>>\nDescribe a lamp."
    assert answers["first sentence in form"] == "<<A>>\nDescribe a lamp.\n\nP.S. A"
    assert (answers["first quote"], answers["quotes"]) == ("lit", "lit dim")
    plain = {name: texts[0] for name, texts in content_free(["Describe a lamp. Be short."]).items()}
    assert plain["first sentence in form"] == "Describe a lamp."
    assert (plain["first quote"], plain["quotes"]) == ("", "")
    assert plain.keys() == answers.keys()


COLOURS = [
    ("What colour is grass?", "green"),
    ("What colour is a leaf?", "green"),
    ("What colour is soot?", "black"),
]
COUNTS = [(f"How many legs has animal {i}?", "four") for i in range(4)]


def test_frequent_targets_are_learned_by_first_words_from_other_prompts():
    prompts, targets = zip(*COLOURS, *COUNTS, strict=True)
    answers = content_free(prompts, targets)
    assert answers["frequent target"] == ["four"] * 7
    assert answers["target by question word"][3:] == ["four"] * 4
    assert answers["target by question word"][2] == "green"
    # The only black thing does not know that it is black.
    assert "black" not in answers["targets by question word"][2]
    assert set(answers["targets by question word"][0].split(", ")) == {"green", "black"}


def test_a_target_is_never_learned_from_a_prompt_of_the_same_cluster():
    prompts = [f"What is the code of room {i // 3}, wording {i}?" for i in range(30)]
    targets, clusters = ([f"{name}{i // 3}" for i in range(30)] for name in ("code", "room"))
    answers = content_free(prompts, targets, clusters)
    for name in (
        "frequent target",
        "frequent targets",
        "target by question word",
        "targets by question word",
    ):
        assert [
            target in answer.split(", ") for target, answer in zip(targets, answers[name], strict=True)
        ] == [False] * 30
        assert all(len(answer.split(", ")) <= LISTED for answer in answers[name])


def test_a_call_is_filled_in_by_type():
    tools = [
        {"name": "set_alarm", "description": "Ring at a time.", "parameters": {
            "properties": {"time": {"type": "string", "description": "HH:MM"}, "label": {"type": "string"}},
            "required": ["time", "label"]}},
        {"name": "add_to_cart", "description": "Put a product into the cart.", "parameters": {
            "properties": {"product": {"type": "string"}, "count": {"type": "integer"},
                           "size": {"type": "string", "enum": ["small", "large"]},
                           "gift": {"type": "boolean"},
                           "on": {"type": "string", "description": "YYYY-MM-DD"}, "tags": {"type": "array"}},
            "required": ["product", "count", "size", "gift", "on", "tags"]}},
    ]  # fmt: skip
    offered = json.dumps([{"function": tool} for tool in tools])
    prompts = [
        'Add 3 large Teapots to my cart on 2026-05-01, labelled "new".',
        "Ring an alarm at 21:10 for Mina.",
    ]
    calls = [json.loads(text) for text in content_free(prompts, tools=[offered] * 2)["filled-in call"]]
    assert calls == [
        {"name": "add_to_cart", "arguments": {
            "product": "new", "count": 3, "size": "large", "gift": True, "on": "2026-05-01",
            "tags": ["Teapots"]}},
        {"name": "set_alarm", "arguments": {"time": "21:10", "label": "Mina"}},
    ]  # fmt: skip
    assert "filled-in call" not in content_free(prompts)


@pytest.mark.parametrize(
    "suite", ["neighbours", "neighbours_quick", "neighbours_validation", "handbook", "tool_calls"]
)
def test_the_shipped_suites_give_little_to_answers_without_content(suite):
    loaded = load_suite(suite)
    docs = loaded.documents(None)
    found = loaded.floors(None, [loaded.task.doc_to_target(doc) for doc in docs])
    means = {name: loaded.means(scores)[loaded.metrics[0]] for name, scores in found.items()}
    assert max(means.values()) <= {"tool_calls": 0.25}.get(suite, 0.1), means
    assert means["shuffled"] <= 0.02


def test_a_list_of_all_answers_of_a_kind_contains_none(tmp_path):
    suite = load_suite("neighbours")
    (doc,) = [doc for doc in suite.documents(None) if doc["question"] == "What colour is a ripe banana?"]
    assert {"green", "red"} < set(doc["others"])
    assert "yellow" not in doc["others"]
    answers = ["It is yellow.", "Yellow, red, green."]
    assert [suite._score([doc], [a])[0]["contains"] for a in answers] == [1, 0]


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
    right = suite._score(suite.documents(None), [row["answer"] for row in rows])
    assert [row["token_f1"] for row in right] == [1] * 3
