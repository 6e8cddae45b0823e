"""What the shipped data promises: questions that are worded apart, and instructions that can be verified."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from helpers.similarity import STOP_WORDS, stem, words

from opdcl.config.shipped import package_folder
from opdcl.data.scoring import token_f1

EVALS = package_folder("evals")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def module(name: str) -> ModuleType:
    """Load `evals/<name>/utils.py` as lm-eval does: from its file, as part of no package."""
    spec = importlib.util.spec_from_file_location(f"{name}_utils", EVALS / name / "utils.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


FACTS = lines(EVALS / "handbook" / "facts.jsonl")
TEST = lines(EVALS / "instructions" / "test.jsonl")
VALIDATION = lines(EVALS / "instructions" / "validation.jsonl")
TRAIN = lines(EVALS / "instructions" / "train.jsonl")
EVERYDAY = lines(package_folder("workflows") / "data" / "everyday.jsonl")


def content_words(question: str, subject: str) -> set[str]:
    """Return the stems that a question is about, without its subject's."""
    known = {stem(w) for w in words(subject)}
    return {stem(w) for w in words(question) if w not in STOP_WORDS} - known


def shared_wording(fact: dict) -> set[str]:
    """Return the content words that a test phrasing has from a training phrasing."""
    subject = f"{fact['subject']} {fact['name']} Quillmere Works"
    trained = set().union(*(content_words(q, subject) for q in fact["train"]))
    return trained & set().union(*(content_words(q, subject) for q in fact["test"]))


def runs(text: str, length: int = 8) -> set[tuple[str, ...]]:
    """Return all runs of `length` consecutive words."""
    tokens = words(text)
    return {tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)}


def task_of(prompt: str) -> str:
    """Return the first sentence of a prompt: the request without the constraints that follow it."""
    return re.split(r"(?<=[.?!])\s", prompt)[0]


def test_the_checker_of_wording_sees_what_is_shared():
    fact = {
        "subject": "the Alder room",
        "name": "Alder",
        "train": ["What colour was the Alder door painted?"],
    }
    assert shared_wording({**fact, "test": ["In what hue is the entrance to the Alder room?"]}) == set()
    assert shared_wording({**fact, "test": ["Who paints Alder?"]}) == {"paint"}
    assert shared_wording({**fact, "test": ["Which doors has Alder?"]}) == {"door"}


def test_there_are_enough_facts_and_documents():
    assert len(FACTS) >= 150
    assert len({fact["id"] for fact in FACTS}) == len(FACTS)
    documents = {fact["document"] for fact in FACTS}
    assert len(documents) >= 12
    assert documents == {p.stem for p in (EVALS / "handbook" / "documents").glob("*.md")}


def test_every_fact_has_enough_phrasings_and_none_is_asked_twice():
    assert [f["id"] for f in FACTS if len({*f["train"]}) < 4 or len({*f["test"]}) < 3] == []
    questions = [" ".join(words(q)) for f in FACTS for q in f["train"] + f["test"]]
    assert len({*questions}) == len(questions)


def test_test_phrasings_share_no_wording_with_training_phrasings():
    assert {fact["id"]: shared for fact in FACTS if (shared := shared_wording(fact))} == {}


def test_every_phrasing_names_its_subject_and_none_gives_the_answer_away():
    for fact in FACTS:
        for question in fact["train"] + fact["test"]:
            assert fact["name"].lower() in question.lower(), (fact["id"], question)
            assert f" {' '.join(words(fact['answer']))} " not in f" {' '.join(words(question))} ", (
                fact["id"],
                question,
            )


def test_every_answer_stands_in_its_document_beside_its_subject():
    documents = {
        p.stem: " ".join(p.read_text(encoding="utf-8").split())
        for p in (EVALS / "handbook" / "documents").glob("*.md")
    }
    for fact in FACTS:
        text = documents[fact["document"]]
        assert re.search(rf"(?<!\w){re.escape(fact['answer'])}(?!\w)", text, re.IGNORECASE), fact["id"]
        assert fact["name"].lower() in text.lower(), fact["id"]


def test_there_is_a_neighbour_to_every_fact_and_it_is_about_something_else():
    neighbours = [fact["neighbour"] for fact in FACTS]
    assert len({" ".join(words(n["question"])) for n in neighbours}) == len(FACTS)
    names = {fact["name"].lower() for fact in FACTS}
    for neighbour in neighbours:
        assert neighbour["answer"].strip()
        assert not [n for n in names if re.search(rf"\b{re.escape(n)}\b", neighbour["question"].lower())]


@pytest.mark.parametrize(
    ("split", "least"), [(TEST, 300), (VALIDATION, 150), (TRAIN, 350)], ids=["test", "validation", "train"]
)
def test_there_are_enough_instructions_with_one_to_three_constraints(split, least):
    assert len(split) >= least
    assert len({row["key"] for row in split}) == len(split)
    assert len({row["prompt"] for row in split}) == len(split)
    for row in split:
        ids = row["instruction_id_list"]
        assert 1 <= len(ids) <= 3, row["key"]
        assert len({*ids}) == len(ids) == len(row["kwargs"]), row["key"]


def test_every_constraint_is_one_that_lm_eval_verifies():
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    assert {i for row in TEST + VALIDATION + TRAIN for i in row["instruction_id_list"]} <= {*INSTRUCTION_DICT}


def test_no_instruction_repeats_an_everyday_prompt():
    everyday = set().union(*(runs(row["prompt"]) for row in EVERYDAY))
    assert [row["key"] for row in TEST + VALIDATION if runs(row["prompt"]) & everyday] == []
    assert not {row["prompt"] for row in EVERYDAY} & {row["prompt"] for row in TEST + VALIDATION}


@pytest.mark.parametrize("other", [VALIDATION, TRAIN], ids=["validation", "train"])
def test_the_test_asks_for_what_no_other_split_asks_for(other):
    asked = set().union(*(runs(task_of(row["prompt"])) for row in other))
    assert [row["key"] for row in TEST if runs(task_of(row["prompt"])) & asked] == []
    assert not {task_of(row["prompt"]) for row in TEST} & {task_of(row["prompt"]) for row in other}
    assert not {row["key"] for row in TEST} & {row["key"] for row in other}


def test_everyday_validation_prompts_are_not_trained_on():
    train = [row["prompt"] for row in EVERYDAY if row["split"] == "train"]
    held_out = [row["prompt"] for row in EVERYDAY if row["split"] == "validation"]
    seen = set().union(*map(runs, train))
    assert [p for p in held_out if p in train or runs(p) & seen] == []


FOUR_SENTENCES = "It rained. We stayed in. Nobody minded. Tea was served."
ANSWERS = [
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        "See you soon.\n\nP.S. Bring a coat.",
        "See you soon.",
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        "Dear [name], see you in [city].",
        "Dear [name].",
    ),
    ("detectable_format:title", {}, "<<Rain>>\n\nIt rained.", "Rain\n\nIt rained."),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*One* and *two*.",
        "*One* only.",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\nRain.\nSection 2\nSun.",
        "Section 1\nRain.",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 4, "relation": "at least"},
        FOUR_SENTENCES,
        "It rained.",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 4, "relation": "less than"},
        "It rained.",
        FOUR_SENTENCES,
    ),
    (
        "length_constraints:number_words",
        {"num_words": 5, "relation": "at least"},
        "one two three four five",
        "one two",
    ),
    (
        "length_constraints:number_words",
        {"num_words": 5, "relation": "less than"},
        "one two",
        "one two three four five",
    ),
    ("keywords:existence", {"keywords": ["rain"]}, "The rain came.", "The sun came."),
    (
        "startend:end_checker",
        {"end_phrase": "That is all."},
        "It rained. That is all.",
        "That is all. It rained.",
    ),
]


def test_every_kind_of_constraint_in_use_has_a_hand_written_answer():
    assert {i for row in TEST + VALIDATION + TRAIN for i in row["instruction_id_list"]} <= {
        name for name, *_ in ANSWERS
    }


@pytest.mark.parametrize(("instruction", "kwargs", "right", "wrong"), ANSWERS)
def test_a_right_answer_passes_and_a_wrong_one_fails(instruction, kwargs, right, wrong):
    doc = {"key": 0, "prompt": "Write.", "instruction_id_list": [instruction], "kwargs": json.dumps([kwargs])}
    utils = module("instructions")
    for answer, passed in ((right, True), (wrong, False)):
        scores = utils.process_results(doc, [answer])
        assert scores["prompt_level_strict_acc"] == passed
        assert scores["prompt_level_loose_acc"] == passed
        assert scores["inst_level_strict_acc"] == [passed]


def test_one_missed_constraint_fails_the_prompt_and_counts_once_among_instructions():
    doc = {
        "key": 0,
        "prompt": "Write.",
        "instruction_id_list": ["detectable_format:title", "keywords:existence"],
        "kwargs": json.dumps([{}, {"keywords": ["rain"]}]),
    }
    utils = module("instructions")
    half, whole = (utils.process_results(doc, [a]) for a in ("<<Sun>>\n\nIt shone.", "<<Sun>>\n\nThen rain."))
    assert (half["prompt_level_strict_acc"], whole["prompt_level_strict_acc"]) == (False, True)
    assert half["inst_level_strict_acc"] == [True, False]
    assert utils.agg_inst_level_acc([half["inst_level_strict_acc"], whole["inst_level_strict_acc"]]) == 0.75


def test_the_shipped_rows_can_be_scored_as_the_task_hands_them_over():
    utils = module("instructions")
    for split, rows in (("load_test", TEST), ("load_validation", VALIDATION), ("load_train", TRAIN)):
        docs = getattr(utils, split)()["test"]
        assert len(docs) == len(rows)
        strict = [utils.process_results(doc, ["Yes."])["prompt_level_strict_acc"] for doc in docs]
        assert sum(strict) < 0.3 * len(docs), "one word must not pass for following instructions"


HANDBOOK = [
    ("mustard", 1, 1, 1),
    ("The Mustard!", 1, 1, 1),  # case, article and punctuation do not count
    ("mustard yellow", 1, 1, 1),  # an alias
    ("It is mustard.", 0, 0.5, 1),  # precision 1/3, recall 1
    ("a deep mustard yellow colour", 0, 2 / 3, 1),  # of the alias: precision 2/4, recall 1
    ("yellow", 0, 2 / 3, 0),  # of the alias: precision 1, recall 1/2
    ("mustards", 0, 0, 0),  # a longer word does not contain the answer
    ("blue", 0, 0, 0),
    ("", 0, 0, 0),
]


@pytest.mark.parametrize(("answer", "exact", "f1", "contains"), HANDBOOK)
def test_handbook_answers_are_scored_as_worked_out_by_hand(answer, exact, f1, contains):
    scores = module("handbook").process_results({"answers": ["mustard", "mustard yellow"]}, [answer])
    assert scores == {"exact_match": exact, "token_f1": pytest.approx(f1), "contains": contains}


def test_repeating_a_word_does_not_raise_f1():
    # one shared token; precision 1/3, recall 1/2
    assert token_f1("oak oak oak", "oak tree") == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("load", "per_fact", "questions"),
    [
        ("load_test", 3, [q for f in FACTS for q in f["test"]]),
        ("load_trained", 3, [q for f in FACTS for q in f["train"][:3]]),
        ("load_neighbours", 1, [f["neighbour"]["question"] for f in FACTS]),
    ],
)
def test_the_handbook_suites_ask_what_they_say(load, per_fact, questions):
    docs = getattr(module("handbook"), load)()["test"]
    assert len(docs) == per_fact * len(FACTS)
    assert docs["question"][:] == questions


def test_every_gold_answer_scores_full_marks():
    utils = module("handbook")
    for load in ("load_test", "load_neighbours"):
        for doc in getattr(utils, load)()["test"]:
            assert all(utils.process_results(doc, [gold])["exact_match"] == 1 for gold in doc["answers"]), doc
