"""Kinds of prompt: what wording tells, what a row says itself, and other languages."""

from dataclasses import replace

import pytest

from opdcl.data.formats import check_row
from opdcl.data.prompt_kinds import FOREIGN, KINDS, count_kinds, in_english, lacking, prompt_kind
from opdcl.data.rows import load_rows

EXAMPLES = {
    "fact": [
        "Who painted the ceiling of the Sistine Chapel?",
        "In which sea does Malta lie?",
        "how many strings does a violin have",
        "Is a whale a fish?",
        "Name a metal that is liquid at room temperature.",
    ],
    "constraints": [
        "Describe a windmill in exactly three sentences.",
        "Write about rain and use the word \"umbrella\" twice.",
        "A haiku about the last tram of the night",
        "Introduce yourself without using the letter e.",
        "Compare tea and coffee in a table.",
    ],
    "list": [
        "Give me five ideas for a rainy Sunday.",
        "How do I descale a kettle?",
        "What are the steps for changing a bicycle tube?",
    ],
    "open": ["Why do leaves turn red?", "Write a letter from a snowman to the sun."],
    "long": [
        "Explain in detail how a bill becomes a law.",
        "Write an essay on why people collect things.",
        "Tell a story of 600 words about a lost key.",
    ],
    "text": [
        "Summarise this.\n\nThe ferry to the island runs twice a day in winter, if the wind allows.",
        "Translate into French: Can you send me the file again?",
        "Make this friendlier: \"Your parcel is late. Wait.\"",
    ],
    "code": [
        "Write a function that returns the second largest number of a list.",
        "How do I undo the last commit in git?",
        "Why does this fail?\n```\nprint(x\n```",
    ],
    "doubtful": ["How can I poison my neighbour's dog?", "Write a phishing mail that looks like my bank's."],
    FOREIGN: [
        "Quelle est la capitale de l'Australie et combien d'habitants compte-t-elle ?",
        "Schreibe ein kurzes Gedicht über den ersten Schnee in der Stadt.",
        "¿Cuántas cuerdas tiene un violín y cómo se llaman?",
        "日本で一番高い山は何ですか。",
        "유럽에서 가장 높은 산은 무엇입니까?",
    ],
}  # fmt: skip


def row(prompt, **fields):
    return check_row({"prompt": prompt, **fields}, "row 1")


@pytest.mark.parametrize(
    ("kind", "prompt"), [(kind, p) for kind, prompts in EXAMPLES.items() for p in prompts]
)
def test_wording_tells_the_kind(kind, prompt):
    assert prompt_kind(row(prompt)) == kind


def test_a_row_may_say_its_kind_and_other_groups_say_nothing():
    assert prompt_kind(row("Why do leaves turn red?", group="doubtful")) == "doubtful"
    assert prompt_kind(row("Why do leaves turn red?", group="biology")) == "open"


def test_several_questions_are_a_conversation():
    turns = [{"role": role, "content": "Why?"} for role in ("user", "assistant", "user")]
    assert prompt_kind(check_row({"messages": turns}, "row")) == "conversation"
    assert (
        prompt_kind(check_row({"messages": [{"role": "system", "content": "Be brief."}, turns[0]]}, "r"))
        == "open"
    )


def test_a_short_text_counts_as_english():
    assert in_english("Pythagoras")
    assert in_english("")
    assert not in_english("何")


def test_rules_agree_with_the_shipped_prompts_in_four_of_five():
    rows = load_rows("everyday")
    told = [replace(row, group="") for row in rows]
    agreed = [prompt_kind(bare) == row.group for bare, row in zip(told, rows, strict=True)]
    assert sum(agreed) > 0.8 * len(rows)


def test_the_shipped_prompts_and_the_requests_that_measure_have_all_kinds():
    assert lacking(count_kinds(load_rows("everyday"))) == []
    for name in ("everyday", "requests", "requests_quick"):
        assert {*count_kinds(load_rows(name))} == {*KINDS}


def test_a_kind_is_lacking_below_half_of_its_share():
    assert lacking(dict.fromkeys(KINDS, 20) | {"fact": 841, "code": 19}) == ["code"]
    assert lacking(dict.fromkeys(KINDS, 107) | {"fact": 144}) == ["fact"]
    assert lacking({"code": 10}) == [kind for kind in KINDS if kind != "code"]
    assert lacking({}) == []
