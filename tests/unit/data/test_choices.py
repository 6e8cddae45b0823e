"""The suite `choices`: its questions, and its scores against slow references."""

import numpy as np
import pytest
from helpers.recovering import Silent
from helpers.scripts import load_script
from helpers.wording import nearest

from opdcl.config.evaluate import EvalConfig
from opdcl.config.shipped import package_folder
from opdcl.data.rows import load_rows
from opdcl.data.similarity import words
from opdcl.data.suites import load_suite
from opdcl.results.format import score
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir
from opdcl.stages.evaluate import evaluate

EVALS = package_folder("evals")
UTILS = load_script(EVALS / "choices" / "utils.py")
SUITE = load_suite("choices")
DOCS = SUITE.documents(None)


def scored(likelihoods, answer):
    return UTILS.process_results({"answer": answer}, [(value, False) for value in likelihoods])


def test_there_are_enough_questions_with_four_different_options():
    assert 150 <= len(DOCS) <= 200
    assert len({" ".join(words(doc["question"])) for doc in DOCS}) == len(DOCS)
    for doc in DOCS:
        assert len({option.lower() for option in doc["options"]}) == 4, doc
        assert 0 <= doc["answer"] < 4
        assert doc["question"].endswith("?")


def test_the_right_option_is_known_by_neither_length_nor_place():
    sizes = np.array([[len(option) for option in doc["options"]] for doc in DOCS])
    right = np.array([doc["answer"] for doc in DOCS])
    assert (sizes.max(1) - sizes.min(1)).max() <= 8
    for choice in (sizes.argmax(1), sizes.argmin(1), *map(np.full_like, [right] * 4, range(4))):
        assert np.mean(choice == right) < 0.35


def test_no_question_is_one_of_neighbours():
    rows, facts = (read_jsonl(EVALS / "handbook" / f"{name}.jsonl") for name in ("neighbours", "facts"))
    others = {row["question"] for row in rows} | {fact["neighbour"]["question"] for fact in facts}
    assert not others & {doc["question"] for doc in DOCS}


@pytest.mark.parametrize("source", ["everyday", "requests"])
def test_no_prompt_of_the_recovery_or_of_closeness_is_near_to_a_question(source):
    prompts = ["\n".join(message["content"] for message in row.prompt) for row in load_rows(source)]
    near = nearest(prompts, [doc["question"] for doc in DOCS])
    assert {prompts[i]: float(near[i]) for i in np.flatnonzero(near > 0.6)} == {}


def test_the_scores_are_those_of_a_slow_reference():
    generator = np.random.default_rng(0)
    for _ in range(50):
        likelihoods, answer = generator.normal(-20, 5, size=4), int(generator.integers(4))
        probabilities = np.exp(likelihoods) / np.exp(likelihoods).sum()
        truth = np.eye(4)[answer]
        found = scored(likelihoods.tolist(), answer)
        right = probabilities.argmax() == answer
        assert found["acc"] == right
        assert found["brier"] == pytest.approx(np.square(probabilities - truth).sum(), rel=1e-9)
        assert found["overconfidence"] == pytest.approx(probabilities.max() - right, rel=1e-9)


def test_the_brier_score_is_proper_and_its_ends_are_known():
    assert scored([0, -1e4, -1e4, -1e4], 0) == {"acc": 1, "brier": 0, "overconfidence": 0}
    assert scored([0, -1e4, -1e4, -1e4], 1) == {"acc": 0, "brier": 2, "overconfidence": 1}
    assert scored([-1e4] * 4, 0) == {"acc": 1, "brier": 0.75, "overconfidence": -0.75}
    truth = np.array([0.6, 0.2, 0.1, 0.1])
    given = [truth, np.array([0.9, 0.05, 0.03, 0.02]), np.array([0.25] * 4)]
    expected = [
        sum(share * scored(np.log(said).tolist(), i)["brier"] for i, share in enumerate(truth))
        for said in given
    ]
    assert expected[0] == min(expected)


def test_a_model_that_is_as_sure_as_it_is_right_is_not_overconfident():
    likelihoods = np.log([0.7, 0.1, 0.1, 0.1]).tolist()
    answers = [0] * 7 + [1, 2, 3]
    assert np.mean([scored(likelihoods, answer)["overconfidence"] for answer in answers]) == pytest.approx(0)


def test_accuracy_is_the_headline_and_its_floor_is_chance():
    assert SUITE.metrics == ["acc", "brier", "overconfidence"]
    means = SUITE.means(SUITE.floors(None, [])["chance"])
    # Each option is taken for certain in turn.
    assert means == {"acc": 0.25, "brier": 1.5, "overconfidence": 0.75}


def test_the_scores_follow_from_the_stored_likelihoods(backbone, tmp_path):
    run, config = RunDir(tmp_path), EvalConfig(limit=6, batch_size=8)
    result = evaluate(config, SUITE, backbone, "base", run, {}, Silent())
    rows = read_jsonl(run.eval_samples("base", "choices"))
    assert (result["metric"], result["n"], [*result["metrics"]]) == ("acc", 6, SUITE.metrics)
    for row, doc in zip(rows, DOCS, strict=False):
        assert row["prompt"] == f"Question: {doc['question']}\nAnswer:"
        assert row["target"] == doc["options"][doc["answer"]]
        assert row["scores"] == pytest.approx(scored(row["likelihoods"], doc["answer"]))
        assert row["scores"]["acc"] == (row["response"] == row["target"])
        assert row["floor"] == 0.25


def test_a_report_shows_a_negative_gap_as_a_percentage():
    assert (score(-0.053), score(0.25), score(41.5)) == ("-5.3 %", "25.0 %", "41.5")
