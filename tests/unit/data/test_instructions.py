"""The suite `instructions`: what its verifiers accept, and which answers without skill its prompts reject."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.scripts import load_script

from opdcl.config.shipped import package_folder
from opdcl.data.similarity import nearest, similarity
from opdcl.data.suites import content_free, load_suite

ROOT = Path(__file__).parents[3]
SUITE = package_folder("evals") / "instructions"
SPLITS = {"test": 600, "validation": 150, "train": 200}
CONTENT = {"words", "first"}  # types that name the request's own word
SEEN = {"words", "word_count", "sentence_count", "title", "postscript"}
EVERYDAY = package_folder("workflows") / "data" / "everyday.jsonl"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


UTILS = load_script(SUITE / "utils.py")
FLOORS = load_script(ROOT / "benchmarks" / "floors.py")
MAKE = load_script(ROOT / "benchmarks" / "make_instructions.py")
ROWS = {split: lines(SUITE / f"{split}.jsonl") for split in SPLITS}
ALL = [row for rows in ROWS.values() for row in rows]
RECORD = json.loads(FLOORS.RECORD.read_text())

CASES = [
    ({"type": "words", "words": ["tin"]}, ["A tin can.", "TIN."], ["A tint.", "Satin", ""]),
    ({"type": "word_count", "least": 2, "most": 3}, ["One two.", "It's one-eyed."], ["One.", "a b c d"]),
    (
        {"type": "sentence_count", "least": 1, "most": 2},
        ["Rain.", 'He said "no." Mr. Hill left at 5 p.m. on 3.5 legs!', "no stop at all"],
        ["One. Two. Three.", "Is it? Yes! No.", "...", ""],
    ),
    ({"type": "sentence_count", "least": 2, "most": 2}, ["One. Two."], ["One.", "One. Two. Three."]),
    (
        {"type": "title"},
        ["<<Rain>>\nIt fell.", "\n<<Rain>>\n\nIt fell."],
        [
            "It fell.\n<<Rain>>",
            "<<Rain>> It fell.",
            "<<Rain>>",
            "<<title>>\nIt fell.",
            "<< >>\nIt fell.",
            "Rain\nIt fell.",
        ],
    ),
    (
        {"type": "postscript", "marker": "P.S."},
        ["Dear you.\n\nP.S. Bring a coat."],
        [
            "P.S. Bring a coat.",
            "Dear you.\n\nP.S.",
            "Hi.\n\nP.S. Bring it.\n\nYours",
            "Dear you. P.S. Bring a coat.",
        ],
    ),
    (
        {"type": "numbered", "count": 3},
        ["1. Oak\n2. Elm\n3. Ash", "Trees:\n1) Oak\n2) Elm\n3) Ash"],
        ["1. Oak\n2. Elm", "1. Oak\n3. Elm\n2. Ash", "1. a\n2. b\n3. c\n4. d", "1. 2. 3.", "- a\n- b\n- c"],
    ),
    (
        {"type": "first", "phrase": "The tin"},
        ["The tin is empty.", "The tin, then."],
        ["A tin. The tin.", "The tint", "the tin"],
    ),
    ({"type": "forbidden", "words": ["time"]}, ["Sometimes."], ["It was time.", "Time", ""]),
]


@pytest.mark.parametrize(("constraint", "right", "wrong"), CASES)
def test_a_verifier_accepts_right_answers_and_no_wrong_one(constraint, right, wrong):
    assert [answer for answer in right if not UTILS.keeps(constraint, answer)] == []
    assert [answer for answer in wrong if UTILS.keeps(constraint, answer)] == []


def test_every_verifier_is_in_use_and_has_cases():
    used = {constraint["type"] for row in ALL for constraint in row["constraints"]}
    assert used == {*UTILS.VERIFIERS} == {constraint["type"] for constraint, *_ in CASES}


def test_an_answer_is_scored_by_prompt_and_by_constraint():
    constraints = [{"type": "words", "words": ["rain"]}, {"type": "title"}]
    doc = {"constraints": json.dumps([{**c, "text": c["type"]} for c in constraints])}
    half, whole = (UTILS.process_results(doc, [a]) for a in ("<<Sun>>\nIt shone.", "<<Sun>>\nThen rain."))
    assert half == {"prompt_level_strict_acc": False, "inst_level_strict_acc": [False, True]}
    assert whole == {"prompt_level_strict_acc": True, "inst_level_strict_acc": [True, True]}
    parts = [half["inst_level_strict_acc"], whole["inst_level_strict_acc"], [False]]
    assert UTILS.agg_inst_level_acc(parts) == 0.6
    assert UTILS.feedback(doc, "<<Sun>>\nIt shone.") == "Not kept: words"
    assert UTILS.feedback(doc, "<<Sun>>\nThen rain.") == "Every constraint is kept."


@pytest.mark.parametrize("split", SPLITS)
def test_every_prompt_names_its_constraints_and_one_is_bound_to_its_own_word(split):
    assert len(ROWS[split]) >= SPLITS[split]
    for row in ROWS[split]:
        assert 2 <= len(row["constraints"]) <= 3
        assert all(constraint["text"] in row["prompt"] for constraint in row["constraints"])
        types = {constraint["type"] for constraint in row["constraints"]}
        assert types & CONTENT, row["key"]
        assert types - {"words"}, row["key"]
        assert row["group"] == ("seen" if types <= SEEN else "unseen")


def test_groups_alternate_so_that_every_beginning_of_a_split_is_balanced():
    for rows in ROWS.values():
        assert [row["group"] for row in rows] == [("seen", "unseen")[i % 2] for i in range(len(rows))]


def test_keys_and_prompts_are_unique():
    assert len({row["key"] for row in ALL}) == len({row["prompt"] for row in ALL}) == len(ALL)


def test_no_request_is_near_to_one_of_another_split_or_of_the_recovery_prompts():
    everyday = [row["prompt"] for row in lines(EVERYDAY)]
    requests = {split: [r.replace("*", "") for r in own] for split, own in MAKE.read_requests().items()}
    for split, own in requests.items():
        near = nearest(own, everyday)
        assert {own[i]: float(near[i]) for i in np.flatnonzero(near > 0.6)} == {}
        for other in [o for name, o in requests.items() if name > split]:
            cosine = similarity(own, other)
            assert [(own[i], other[j]) for i, j in np.argwhere(cosine > 0.6)] == []


def test_the_shipped_prompts_are_the_ones_that_the_script_makes():
    requests = MAKE.read_requests()
    assert {split: MAKE.make(split, requests[split]) for split in SPLITS} == ROWS


@pytest.mark.parametrize("suite", RECORD["suites"])
def test_answers_without_skill_score_at_most_a_third_of_base(suite):
    record, task = RECORD["suites"][suite], load_suite(suite).task
    assert record["prompts"] == FLOORS.fingerprint(list(task.test_docs())), "measured on other prompts"
    floors = FLOORS.floors(task)
    assert floors.items() <= record["floors"].items()
    assert max(record["floors"].values()) <= record["base"]["score"] / 3
    assert record["floors"]["shuffled"] < 0.1
    assert record["finished"]["score"] > 0.9
    assert min(group["low"] for group in record["base_by_group"].values()) > 3 * max(floors.values())


def test_the_floor_sees_prompts_that_can_be_passed_without_skill():
    task = load_suite("instructions").task
    doc = {"constraints": json.dumps([{"type": "word_count", "least": 90}])}
    answers = content_free(["Write at least 90 words."])
    scores = {name: FLOORS.passed(task, [doc], texts).tolist() for name, texts in answers.items()}
    assert scores == {
        "empty": [0],
        "constant": [0],
        "long constant": [1],
        "copy": [0],
        "copy and constant": [1],
    }


def test_quick_is_the_beginning_of_the_test():
    quick, whole = (
        list(load_suite(name).task.test_docs()) for name in ("instructions_quick", "instructions")
    )
    assert quick == whole[: len(quick)]
    assert len(quick) == 300


def test_a_model_is_measured_with_intervals_by_group_and_type(backbone):
    record, rows = FLOORS.measure("instructions_validation", backbone, limit=4)
    assert [row["key"] for row in rows] == [row["key"] for row in ROWS["validation"][:4]]
    assert record["base"]["n"] == 4
    assert [record["base_by_group"][group]["n"] for group in ("seen", "unseen")] == [2, 2]
    assert 0 < record["mean_tokens"] <= 192


def test_the_interval_of_a_share_is_wilsons():
    # 8 of 10: (0.8 + 1.96^2 / 20 -+ 1.96 sqrt(0.016 + 1.96^2 / 400)) / (1 + 1.96^2 / 10)
    assert FLOORS.share([1.0] * 8 + [0.0] * 2) == {"n": 10, "score": 0.8, "low": 0.4902, "high": 0.9433}
