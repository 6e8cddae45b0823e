"""The suite `instructions`: what its verifiers accept, and which answers without skill its prompts reject."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.everyday import SAID, TEXTS
from helpers.scripts import load_script
from helpers.wording import nearest

from opdcl.config.model import ModelConfig
from opdcl.config.shipped import package_folder
from opdcl.data.own_words import similarity
from opdcl.data.suites import PER_CONSTRAINT, constraints_of, load_suite
from opdcl.measure import relevance
from opdcl.model.load_backbone import load_backbone
from opdcl.rundir.files import read_jsonl

ROOT = Path(__file__).parents[3]
SUITE = package_folder("evals") / "instructions"
SPLITS = {"test": 600, "validation": 150, "train": 200}
SEEN = {"words", "word_count", "sentence_count", "title", "postscript"}
UNSEEN = {"first", "numbered", "forbidden"}  # tests/unit/data/test_everyday.py looks for them in vain
NUMBERS = "single one two three four five six seven eight nine ten".split()  # noqa: SIM905


UTILS = load_script(SUITE / "utils.py")
FLOORS = load_script(ROOT / "benchmarks" / "floors.py")
CHEATS = load_script(ROOT / "benchmarks" / "cheats.py")
MAKE = load_script(ROOT / "evals" / "instructions" / "make.py")
ROWS = {split: read_jsonl(SUITE / f"{split}.jsonl") for split in SPLITS}
ALL = [row for rows in ROWS.values() for row in rows]
RECORD = json.loads(FLOORS.RECORD.read_text())

# fmt: off
CASES = [
    ({"type": "words", "words": ["tin"]}, ["A tin can.", "TIN."], ["A tint.", "Satin", ""]),
    ({"type": "word_count", "least": 2, "most": 3}, ["One two.", "It's one-eyed."], ["One.", "a b c d"]),
    ({"type": "sentence_count", "least": 1, "most": 2},
     ["Rain.", 'He said "no." Mr. Hill left at 5 p.m. on 3.5 legs!', "no stop at all"],
     ["One. Two. Three.", "Is it? Yes! No.", "...", ""]),
    ({"type": "sentence_count", "least": 2, "most": 2}, ["One. Two."], ["One.", "One. Two. Three."]),
    ({"type": "title"}, ["<<Rain>>\nIt fell.", "\n<<Rain>>\n\nIt fell."],
     ["It fell.\n<<Rain>>", "<<Rain>> It fell.", "<<Rain>>", "<<title>>\nIt fell.", "<< >>\nIt fell.",
      "Rain\nIt fell."]),
    ({"type": "postscript", "marker": "P.S."}, ["Dear you.\n\nP.S. Bring a coat."],
     ["P.S. Bring a coat.", "Dear you.\n\nP.S.", "Hi.\n\nP.S. Go.\n\nYours", "Dear you. P.S. Bring it."]),
    ({"type": "numbered", "count": 3}, ["1. Oak\n2. Elm\n3. Ash", "Trees:\n1) Oak\n2) Elm\n3) Ash"],
     ["1. Oak\n2. Elm", "1. Oak\n3. Elm\n2. Ash", "1. a\n2. b\n3. c\n4. d", "1. 2. 3.", "- a\n- b\n- c"]),
    ({"type": "first", "phrase": "The tin"}, ["The tin is empty.", "The tin, then."],
     ["A tin. The tin.", "The tint", "the tin"]),
    ({"type": "forbidden", "words": ["time"]}, ["Sometimes."], ["It was time.", "Time", ""]),
]
# fmt: on


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
    doc["prompt"] = "How does rain begin? Begin with a title."
    answers = ("<<Sun>>\nIt shone all day.", "<<Sun>>\nThen rain.", "<<Clouds>>\nCold drops become rain.")
    half, few, whole = (UTILS.process_results(doc, [answer]) for answer in answers)
    failed = {"passed": False, "prompt_level_strict_acc": False}
    assert half == failed | {"own_words": True, "inst_level_strict_acc": [False, True]}
    kept = {"prompt_level_strict_acc": True, "inst_level_strict_acc": [True, True]}
    assert few == kept | {"passed": False, "own_words": False}
    assert whole == kept | {"passed": True, "own_words": True}
    parts = [half["inst_level_strict_acc"], whole["inst_level_strict_acc"], [False]]
    assert UTILS.agg_inst_level_acc(parts) == 0.6
    assert UTILS.feedback(doc, "<<Sun>>\nIt shone.") == "Not kept: words"
    assert UTILS.feedback(doc, "<<Sun>>\nThen rain.") == "Every constraint is kept."


@pytest.mark.parametrize("split", SPLITS)
def test_every_prompt_is_a_request_with_its_demands_and_unseen_ones_have_no_seen_type(split):
    assert len(ROWS[split]) >= SPLITS[split]
    for row in ROWS[split]:
        assert 1 <= len(row["constraints"]) <= 2
        assert all(p in row["prompt"] for p in (row["request"], *(c["text"] for c in row["constraints"])))
        types = {constraint["type"] for constraint in row["constraints"]}
        assert types <= {"seen": SEEN, "unseen": UNSEEN}[row["group"]], row["key"]
        rest = row["prompt"].replace(row["request"], "")
        for constraint in row["constraints"]:
            rest = rest.replace(constraint["text"], "")
        assert not rest.strip()


def masked(text: str) -> str:
    """Return a text without case, its numbers and what it quotes, so that a phrasing can be recognised."""
    text = re.sub(r'"[^"]*"|<<[^>]*>>', "quoted", text.lower())
    return re.sub(rf"\b(\d+|{'|'.join(NUMBERS)})\b", "number", text).strip(" .")


def test_the_phrasings_of_the_test_are_in_no_other_split_and_in_no_recovery_prompt():
    said = {s: {masked(c["text"]) for r in rows for c in r["constraints"]} for s, rows in ROWS.items()}
    assert not said["test"] & (said["validation"] | said["train"])
    everyday = [*map(masked, TEXTS)]
    assert [text for text in said["test"] if any(text in prompt for prompt in everyday)] == []


def test_groups_alternate_so_that_every_beginning_of_a_split_is_balanced():
    for rows in ROWS.values():
        assert [row["group"] for row in rows] == [("seen", "unseen")[i % 2] for i in range(len(rows))]


def test_keys_and_prompts_are_unique():
    assert len({row["key"] for row in ALL}) == len({row["prompt"] for row in ALL}) == len(ALL)


def test_no_request_is_near_to_one_of_another_split_or_of_the_recovery_prompts():
    requests = {split: [r.replace("*", "") for r in own] for split, own in MAKE.read_requests().items()}
    for split, own in requests.items():
        near = nearest(own, SAID)
        assert {own[i]: float(near[i]) for i in np.flatnonzero(near > 0.6)} == {}
        for other in [o for name, o in requests.items() if name > split]:
            cosine = similarity(own, other)
            assert [(own[i], other[j]) for i, j in np.argwhere(cosine > 0.6)] == []


def test_the_shipped_prompts_are_the_ones_that_the_script_makes():
    requests = MAKE.read_requests()
    assert {split: MAKE.make(split, requests[split]) for split in SPLITS} == ROWS


# Half of it is what base says.
NO_CHEATS = {"half of own answer, half of another"}


@pytest.mark.parametrize("suite", RECORD["suites"])
def test_no_cheat_scores_a_third_of_what_base_does(suite):
    record = RECORD["suites"][suite]
    assert record["own"]["score"] >= 0.35
    assert len(record["cheats"]) >= 25
    shares = {name: found["score"] / record["own"]["score"] for name, found in record["cheats"].items()}
    assert {n: share for n, share in shares.items() if share > 1 / 3 and n not in NO_CHEATS} == {}


@pytest.mark.nightly
@pytest.mark.parametrize("suite", RECORD["suites"])
def test_the_cheats_of_the_record_are_those_of_the_script_and_keep_the_constraints(suite):
    record, loaded = RECORD["suites"][suite], load_suite(suite)
    docs = loaded.documents(record["n"])
    played = FLOORS.all_answers(loaded, docs, record["answers"])
    for name, texts in played.items():
        recorded, scores = record["cheats"].get(name, record["own"]), loaded.scores(docs, texts)
        assert recorded["score"] <= recorded["rules"] == FLOORS.mean(scores, loaded.metrics[0]), name
        if loaded.content and name != "own":
            assert FLOORS.mean(scores, FLOORS.KEPT) >= 0.85, name  # constraints alone are no hindrance


@pytest.mark.nightly
def test_the_embedded_model_knows_its_answers_from_other_ones_and_from_heaps_of_words():
    loaded, record = load_suite("instructions_quick"), RECORD["suites"]["instructions_quick"]
    docs, answers = loaded.documents(8), record["answers"][:8]
    requests = [doc["request"] for doc in loaded.documents(None)]
    played = FLOORS.all_answers(loaded, docs, answers)
    backbone = relevance.Reader(load_backbone(ModelConfig()))
    prompts = {i: doc["prompt"] for i, doc in enumerate(docs)}
    own, heaps = (
        relevance.coherence_of(backbone, prompts, dict(enumerate(played[name])))
        for name in ("own", "own answer, words shuffled")
    )
    # One of the eight answers is "1. 1. 1.1.1: 1.1.1.1: ...", in which no order can be seen.
    assert sorted(own.values())[1] > relevance.LEAST_COHERENCE > np.median([*heaps.values()])
    texts = {i: answers[i] for i in range(8)}
    gains = relevance.relevance_of(backbone, docs, requests, texts)
    moved = relevance.relevance_of(backbone, docs, requests, dict(enumerate(answers[4:] + answers[:4])))
    assert np.median([*gains.values()]) > relevance.LEAST_RELEVANCE > np.median([*moved.values()])


def test_a_typing_error_an_accent_or_a_hyphen_makes_no_word_of_ones_own():
    docs = [{"prompt": row["prompt"], "request": row["request"]} for row in ROWS["test"][:60]]
    requests = [doc["request"] for doc in docs]
    played = CHEATS.cheats([doc["prompt"] for doc in docs], requests, requests)
    disguises = {"last letters doubled", "all letters doubled", "with accents", "with hyphens", "in capitals"}
    disguises |= {"letters apart", "invisible marks", "digits for letters", "in another order"}
    for disguise in disguises:
        (name,) = [name for name in played if name.endswith(disguise)]
        own = [UTILS.has_own_words(doc, text) for doc, text in zip(docs, played[name], strict=True)]
        assert sum(own) == 0, (name, [t for t, o in zip(played[name], own, strict=True) if o][:3])


def test_quick_is_the_beginning_of_the_test():
    quick, whole = (list(load_suite(n).task.test_docs()) for n in ("instructions_quick", "instructions"))
    assert quick == whole[: len(quick)]
    assert len(quick) == 300


def test_base_and_every_cheat_are_scored_by_rules_and_by_base(backbone):
    for suite, asked in (("instructions_validation", True), ("handbook_quick", False)):
        record = FLOORS.measure(load_suite(suite), backbone, ["It is a long way to the old mill."] * 3)
        assert record["n"] == 3
        for found in [record["own"], *record["cheats"].values()]:
            assert found["score"] <= found["rules"]
            assert asked or found["score"] == found["rules"]


def test_a_sample_keeps_the_constraints_that_its_scores_are_of():
    suite = load_suite("instructions_quick")
    for doc in suite.documents(20):
        stored = suite.record(doc, ["An answer."])
        assert all(text in stored["prompt"] for text in stored["constraints"])
        assert len(stored["constraints"]) == len(UTILS.process_results(doc, ["An answer."])[PER_CONSTRAINT])


def test_the_constraints_of_ifeval_are_named_by_their_kinds():
    doc = {"instruction_id_list": ["keywords:forbidden_words", "punctuation:no_comma"], "kwargs": [{}, {}]}
    assert constraints_of(doc) == ["forbidden words", "no comma"]
