"""Suites that compare log-likelihoods: their floors, and what local files and groups are refused for."""

import json
import re

import pytest
from helpers.likelihood import QUESTIONS, ROWS, write_rows

from opdcl.config.evaluate import EvalConfig
from opdcl.data.suites import load_suite
from opdcl.errors import UsageError

ARC = ROWS["arc_easy"]


def load(folder, task, rows=None):
    return load_suite(task, EvalConfig(data={task: str(write_rows(folder, task, rows))}))


@pytest.mark.parametrize(
    ("task", "metrics", "chance"),
    [
        ("arc_easy", ["acc_norm", "acc"], [1 / len(choices) for _, choices, _ in QUESTIONS]),
        ("leaderboard_mmlu_pro", ["acc"], [1 / len(choices) for _, choices, _ in QUESTIONS]),
        ("winogrande", ["acc"], [0.5] * 8),
        ("lambada_openai", ["acc"], [0.0] * 6),
    ],
)
def test_the_floor_is_chance_on_each_document(tmp_path, task, metrics, chance):
    suite = load(tmp_path, task)
    assert suite.metrics == metrics
    (floor,) = suite.floors(None, []).values()
    assert [scores[metrics[0]] for scores in floor] == pytest.approx(chance)
    assert len(suite.floors(2, [])["chance"]) == 2


def test_chance_is_the_share_of_true_answers_where_several_are_true(tmp_path):
    targets = {"choices": ["It melts.", "It turns to water.", "It sings."], "labels": [1, 1, 0]}
    rows = [{"question": "What does ice do in warm water?", "mc1_targets": targets, "mc2_targets": targets}]
    assert load(tmp_path, "truthfulqa_mc2", rows).floors(None, [])["chance"] == [
        {"acc": pytest.approx(2 / 3)}
    ]


def changed(number, **fields):
    """Return the questions with other fields in one of them."""
    rows = [dict(row) for row in ARC]
    rows[number - 1] |= fields
    return rows


def choices(*texts):
    return {"text": list(texts), "label": list("ABCD"[: len(texts)])}


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("arc_easy", [{"sentence": "Rain."}], "cannot read .*arc_easy.jsonl:1: 'question' is und"),
        ("arc_easy", [{k: v for k, v in row.items() if k != "choices"} for row in ARC], "'choices' is und"),
        ("arc_easy", changed(1, answerKey="E"), "cannot read .*arc_easy.jsonl:1: 'E' is not in list"),
        ("arc_easy", changed(3, answerKey="E"), r"arc_easy.jsonl:3 of suite .* cannot be scored: 'E' is not"),
        ("arc_easy", changed(4, choices=None), r"arc_easy.jsonl:4 of suite 'arc_easy' cannot be scored"),
        ("arc_easy", changed(5, choices=choices("only"), answerKey="A"), r"jsonl:5 .* at least two choices"),
        ("arc_easy", changed(6, choices=choices("a", "b", " ", "d")), r"arc_easy.jsonl:6 .* choice is empty"),
        ("arc_easy", changed(7, choices="a, b"), r"jsonl:7 holds other kinds of values than .*jsonl:1"),
        ("mmlu_anatomy", [{"question": "Q?", "choices": list("wxyz"), "answer": n} for n in (3, 4)],
         "jsonl:2 .* the answer 4 is none of its 4"),
        ("mmlu_anatomy", [{"question": "Q?", "choices": ["x"], "answer": 0}],
         "cannot read .*:1: list object has no element 1"),
        ("hellaswag", [{"ctx": "A man"}], "cannot read .*hellaswag.jsonl: no column"),
        ("winogrande", [{"sentence": "No gap.", "option1": "a", "option2": "b", "answer": "1"}],
         "cannot read .*jsonl:1"),
        ("lambada_openai", [{"sentence": "It rains."}], "cannot read .*jsonl:1|jsonl:1 of suite"),
        ("wikitext", [{"page": "It rains."}] * 2, "measures perplexity"),
        ("cola", [{"sentence": "It rains.", "label": 1}] * 2, "does not score prompt by prompt"),
    ],
)  # fmt: skip
def test_rows_and_tasks_that_do_not_fit_are_refused_with_the_reason(tmp_path, task, rows, message):
    with pytest.raises(UsageError, match=message) as caught:
        load(tmp_path, task, rows)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "hint"),
    [("blimp", "blimp_adjunct_island, .* and 57 more"), ("mmlu", "mmlu_abstract_algebra, .* and \\d+ more")],
)
def test_a_group_is_refused_with_the_names_of_its_tasks(name, hint):
    with pytest.raises(UsageError, match=f"suite '{name}' is a group of tasks") as caught:
        load_suite(name)
    assert re.fullmatch(f"name its tasks instead: {hint}", caught.value.hint)


def test_a_file_under_the_name_of_a_group_is_a_file_of_questions(tmp_path):
    (tmp_path / "mmlu.jsonl").write_text(json.dumps({"question": "Colour?", "answer": "red"}) + "\n")
    assert load_suite("mmlu", EvalConfig(data={"mmlu": str(tmp_path / "mmlu.jsonl")})).generative
