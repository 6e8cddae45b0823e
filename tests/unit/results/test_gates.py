"""Gates: the outcome of every kind of run, and how often chance decides."""

import numpy as np
import pytest
from helpers.synthetic import measure_states

from opdcl.config.evaluate import Gates
from opdcl.config.load import validate
from opdcl.errors import GateError, InconclusiveError, UsageError
from opdcl.results.gates import judge_again, judge_drop, judge_gates, refuse
from opdcl.results.measurements import MeasuredSuite
from opdcl.results.summary import Results


@pytest.fixture
def judged(empty):
    """Return a function that measures both headline suites and judges them: gate -> outcome and sentence."""

    def judge_run(gates, retention=(340, 5, 335), domain=(0, 250, 248), n=600, domain_n=300, **fields):
        measure_states(empty, "instructions", retention, n, **fields)
        measure_states(empty, "handbook", domain, domain_n, **fields)
        records = judge_gates(Gates(**gates).model_dump(), Results(empty))
        return {record["gate"]: (record["outcome"], record["sentence"]) for record in records}

    return judge_run


@pytest.mark.parametrize(
    ("gate", "retention", "n", "outcome"),
    [
        ({"recovery": 0.9}, (340, 5, 340), 600, "passed"),
        ({"recovery": 0.9}, (340, 5, 330), 600, "passed"),
        ({"recovery": 0.99}, (340, 5, 335), 600, "inconclusive"),
        ({"recovery": 0.9}, (340, 5, 100), 600, "missed"),
        ({"recovery": 0.9}, (300, 320, 310), 600, "passed"),  # no measurable forgetting
        ({"recovery": 0.9}, (4, 1, 4), 5, "inconclusive"),  # too few prompts
        ({"recovery": 0.9}, (340, 5), 600, "inconclusive"),  # not recovered yet
        ({"max_drop": 5}, (340, 5, 340), 600, "passed"),
        ({"max_drop": 5}, (340, 340), 600, "passed"),  # of the fine-tune alone
        ({"max_drop": 5}, (340, 5), 600, "missed"),
        ({"max_drop": 5}, (60, 55), 100, "inconclusive"),
        ({"max_drop": {"instructions": 50}}, (340, 300, 310), 600, "passed"),
    ],
)
def test_each_kind_of_run_has_its_outcome(judged, gate, retention, n, outcome):
    ((found, _),) = judged(gate, retention, n=n).values()
    assert found == outcome


def test_a_recovered_model_below_base_misses_the_gate_although_tuned_forgot_nothing_measurable(judged):
    """500 prompts: base 60 %, tuned 2 points lower, which may be chance, and recovered 3.4 points lower."""
    base = set(range(300))
    tuned = base - set(range(20)) | set(range(300, 310))
    recovered = base - set(range(5, 30)) | set(range(300, 308))
    outcome, sentence = judged({"recovery": 0.8}, (base, tuned, recovered), n=500)["recovery"]
    assert outcome == "missed"
    assert sentence.startswith("recovery (R) is not known, but recovered - base is -3.4 points [-5.")


def test_d_and_c_are_judged_by_their_lower_ends(judged):
    found = judged({"domain_retention": 0.9, "closeness": 0.8})
    assert found["domain_retention"][0] == "passed"
    assert found["closeness"] == ("inconclusive", "closeness (C) is not known: it is not measured")


def test_the_sentence_says_how_many_prompts_would_decide(judged):
    ((outcome, sentence),) = judged({"max_drop": 5}, (60, 58), n=100).values()
    assert outcome == "inconclusive"
    assert sentence.startswith("instructions: tuned - base is -2.0 points [")
    assert "n = 100, allowed -5; about " in sentence
    ((_, sentence),) = judged({"max_drop": 2}, (60, 58), n=100).values()
    assert sentence.endswith("it lies at the limit, and no number of prompts would decide")


def test_a_suite_that_the_run_does_not_have_is_an_error(judged):
    with pytest.raises(UsageError, match="names no retention suite of this run: ifeval"):
        judged({"max_drop": {"ifeval": 3}})


def test_a_gate_on_a_suite_that_is_not_measured_is_found_before_the_run():
    validate({"eval": {"retention": ["ifeval"]}, "gates": {"max_drop": {"ifeval": 3, "closeness": 1}}})
    with pytest.raises(UsageError, match=r"^gates\.max_drop names arc_easy; eval\.retention has ifeval$"):
        validate({"eval": {"retention": ["ifeval"]}, "gates": {"max_drop": {"arc_easy": 3}}})


def test_a_file_of_gates_that_is_missing_or_empty_is_refused(run, tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.yaml is no file"):
        judge_again(run, tmp_path / "nowhere.yaml")
    (tmp_path / "none.yaml").write_text("gates: {}\n")
    with pytest.raises(UsageError, match=r"none\.yaml sets no gate"):
        judge_again(run, tmp_path / "none.yaml")


def test_the_same_answers_everywhere_are_a_fault_and_pass_no_gate(judged):
    ((outcome, sentence),) = judged({"recovery": 0.9}, (300, 300, 300), response="Yes.").values()
    assert outcome == "inconclusive"
    assert "base and tuned give the same answer to all 900 prompts, as if tuned had no adapter" in sentence


def test_a_missed_gate_comes_before_an_undecided_one():
    records = [{"gate": g, "outcome": o, "sentence": g} for g, o in (("a", "inconclusive"), ("b", "missed"))]
    with pytest.raises(GateError, match="gate missed: b"):
        refuse(records, "")
    with pytest.raises(InconclusiveError, match="gate inconclusive: a"):
        refuse(records[:1], "")
    refuse([{"gate": "c", "outcome": "passed", "sentence": "c"}], "")


def rates(prompts, drop, limit=0.0, repetitions=400, flips=0.1, seed=0):
    """Return how often each outcome is found on simulated scores.

    Base passes half of the prompts. In tuned, `flips` of the answers change their outcome by chance, as many
    up as down, and `drop` points more of them fail.
    """
    rng = np.random.default_rng(seed)
    counts = dict.fromkeys(("passed", "missed", "inconclusive"), 0)
    for _ in range(repetitions):
        base = rng.random(prompts) < 0.5
        down = flips / 2 + drop / 100
        flip = rng.random(prompts) < np.where(base, 2 * down, flips)
        rows = {
            state: [
                {"doc_id": i, "prompt": str(i), "scores": {"m": bool(x)}, "response": str(x)}
                for i, x in enumerate(scores)
            ]
            for state, scores in (("base", base), ("tuned", base ^ flip))
        }
        suite = MeasuredSuite("s", "retention", "m", {}, rows, 0)
        counts[judge_drop(suite, limit)["outcome"]] += 1
    return {outcome: count / repetitions for outcome, count in counts.items()}


@pytest.mark.parametrize("prompts", [100, 300])
def test_chance_rejects_a_harmless_fine_tune_in_at_most_one_case_of_forty(prompts):
    # No true drop, and none allowed: the hardest case. 400 repetitions know a rate of 2.5 % to 1.6 points.
    assert rates(prompts, drop=0)["missed"] <= 0.025 + 0.016


def test_a_drop_of_ten_points_is_found_and_one_within_the_limit_is_passed():
    assert rates(300, drop=10, repetitions=100)["missed"] > 0.9
    assert rates(300, drop=0, limit=10, repetitions=100)["passed"] > 0.9
