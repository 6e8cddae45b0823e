"""What the verdict says where a headline of two scores would mislead; `pytest -s` prints the words."""

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.synthetic import STRICT, compared, measure_fully, pages, write

from opdcl.results import ratios
from opdcl.results.document import run_document, summarise
from opdcl.results.intervals import Estimate
from opdcl.results.measurements import States
from opdcl.results.ratios import Closeness, ResponseTest
from opdcl.results.report_tables import terminal_rows
from opdcl.results.status import STATES
from opdcl.results.summary import Results
from opdcl.results.verdict import conclude
from opdcl.rundir.files import read_jsonl


def heading(verdict):
    return verdict.partition(": ")[0]


@pytest.fixture
def told(run):
    """Return a function that measures both suites, as passed prompts of the three models, and summarises.

    `floors` has the number of prompts that a content-free answer passes, per suite.
    """

    def measure(retention, domain=(0, 250, 248), n=600, domain_n=300, floors=(0, 0), **fields):
        for suite, passed, size, floor in (
            ("instructions", retention, n, floors[0]),
            ("handbook", domain, domain_n, floors[1]),
        ):
            for state, count in zip(STATES, passed, strict=True):
                more = fields.get(state, lambda i: {})
                each = {"fields": lambda i, more=more, floor=floor: {"floor": i < floor} | more(i)}
                measure_fully(run, state, suite, count, n=size, **each)
        summary = summarise(run)
        print(f"\n{summary['status']}: {summary['verdict']}")
        assert summary["verdict"] in pages(run)["report.md"].replace("\\", "")
        return summary

    return measure


@pytest.mark.parametrize(
    ("retention", "domain", "floors", "words"),
    [
        ((340, 5, 340), (0, 250, 248), (0, 0), "Recovered and kept"),
        ((340, 5, 5), (0, 250, 248), (0, 0), "Kept, recovery not shown"),
        ((340, 5, 340), (0, 250, 150), (0, 0), "Recovered, domain partly kept"),
        ((340, 5, 340), (0, 250, 0), (0, 0), "Recovered, domain lost"),  # as if the adapter were deleted
        ((340, 5, 340), (57, 90, 88), (0, 120), "Recovered, domain gain not shown"),  # tuned is at the floor
        ((400, 50, 120), (0, 250, 248), (180, 0), "Kept, recovery not shown"),  # counted from the floor
        ((400, 50, 320), (0, 250, 248), (180, 0), "Partly recovered, domain kept"),
    ],
)
def test_both_halves_are_in_the_first_words(told, retention, domain, floors, words):
    summary = told(retention, domain, floors=floors)
    assert heading(summary["verdict"]) == words
    assert (summary["domain_retention"] is None) == ("gain not shown" in words)


def test_an_adapter_that_was_zeroed_has_lost_it_from_the_floor_too(told):
    # Base's whole sentences share few words with the expected names: a content-free answer scores higher.
    summary = told((340, 5, 340), domain=(57, 162, 57), floors=(0, 83))
    assert heading(summary["verdict"]) == "Recovered, domain lost"
    assert summary["domain_retention"]["value"] == pytest.approx((57 - 83) / (162 - 83), abs=1e-6)
    assert summary["domain_retention_raw"]["value"] == 0


@pytest.mark.parametrize(
    ("score", "fault"),
    [
        (math.nan, "nan, not a number"),
        (math.inf, "inf, not a number"),
        (None, "missing"),
        ("none", "none, not a number"),
        ([True, math.nan], "nan, not a number"),
    ],
)
@pytest.mark.parametrize("suite", ["instructions", "handbook"])
def test_a_score_that_is_not_a_number_is_a_fault(run, told, suite, score, fault):
    told((340, 5, 340))
    rows = read_jsonl(run.eval_samples("recovered", suite))
    rows[17]["scores"][STRICT] = rows[20]["scores"][STRICT] = score
    write(run.eval_samples("recovered", suite), rows)
    summary = summarise(run)
    assert summary["status"] == "fault"
    problem = f"{suite}, recovered: the score of prompt 17 is {fault} (and those of 1 more prompts)"
    assert summary["verdict"].startswith(f"Fault: {problem}. ")
    assert summary["recovery" if suite == "instructions" else "domain_retention"] is None
    assert any(text.startswith(problem) for text in summary["faults"])
    assert "nan" not in str([row[1:] for row in terminal_rows(Results(run).summary)])
    assert "nan, not a number" in pages(run)["report.html"] or "nan" not in fault


def test_a_missing_metric_and_a_floor_that_is_no_number_are_faults_too(run, told):
    told((340, 5, 340))
    rows = read_jsonl(run.eval_samples("tuned", "instructions"))
    del rows[3]["scores"][STRICT]
    write(run.eval_samples("tuned", "instructions"), rows)
    rows = read_jsonl(run.eval_samples("base", "handbook"))
    rows[4]["floor"] = math.nan
    write(run.eval_samples("base", "handbook"), rows)
    verdict = summarise(run)["verdict"]
    assert verdict.startswith(
        "Fault: instructions, tuned: the score of prompt 3 is missing; 1 more of this kind. "
    )


def test_a_fault_of_one_run_does_not_stop_a_comparison(three):
    rows = read_jsonl(three[0].eval_samples("recovered", "instructions"))
    rows[2]["scores"]["accuracy"] = math.nan
    write(three[0].eval_samples("recovered", "instructions"), rows)
    comparison = compared(three)
    assert "the score of prompt 2 is nan" in comparison["faults"][0]
    assert comparison["arms"][0]["recovery"] is None
    assert comparison["arms"][0]["runs"][0]["status"] == "fault"
    assert comparison["arms"][1]["recovery"] is not None


def test_a_base_below_the_floor_is_not_the_recovery_s_fault(told):
    summary = told((103, 30, 95), floors=(137, 0))
    assert heading(summary["verdict"]) == "Recovery not measured, domain kept"
    assert "not well above" not in summary["verdict"]
    (note,) = [note for note in summary["notes"] if "unfit" in note]
    assert note.startswith("instructions: unfit for this model: base scores 17.2 %, and the floor is ")


def closeness(value, half=0.04, **tests):
    return Closeness(
        n=300,
        c=None if value is None else Estimate(value, value - half, value + half),
        raw=None,
        why=None,
        floor=None,
        noise=0.02,
        states={"tuned": dict.fromkeys(("distance", "domain_manner"), Estimate(0.9, 0.8, 1.0))},
        writing=tests,
        seconds=0.0,
    )


def concluded(run, near):
    """Return the summary with the verdict that follows from its numbers and this closeness."""
    results = Results(run)
    measured = replace(results.measured, closeness=near)
    headline = results.headline
    return run_document(conclude(measured, headline["retention"], headline["domain"], run.settings()))


@pytest.mark.parametrize(
    ("block", "first_words", "status"),
    [
        (closeness(0.87), "Partly recovered, domain kept", "partly recovered"),
        (closeness(0.99), "Recovered and kept", "recovered"),
        (closeness(0.02), "Kept, recovery not shown", "not shown"),
        (closeness(None), "Recovery not measured, domain kept", "no headroom"),
    ],
)
def test_where_the_suite_is_unfit_closeness_carries_the_verdict(run, told, block, first_words, status):
    told((103, 30, 95), floors=(137, 0))
    summary = concluded(run, block)
    assert heading(summary["verdict"]) == first_words
    assert summary["retention_status"] == status
    assert summary["recovery"] is None
    told_share = (
        "of the distance to base is gone, counted from tuned, 0.90 nats, on 300" in summary["verdict"]
    )
    assert told_share == (block.c is not None)


def test_closeness_does_not_replace_a_suite_that_has_headroom(run, told):
    told((340, 5, 340))
    assert concluded(run, closeness(0.02))["status"] == "recovered and kept"


def test_sampled_answers_that_are_shorter_are_told_as_such(run, told):
    test = ResponseTest(
        -0.24, -0.29, -0.19, base=80.0, recovered=60.8, margin=0.1, shown=False, different=True
    )
    told((103, 30, 95), floors=(137, 0))
    summary = concluded(run, closeness(0.99, tokens=test))
    assert summary["retention_status"] == "partly recovered"
    assert (
        "Its answers still differ from base's: at temperature 1, they are 24 % shorter." in summary["further"]
    )


def test_a_tuned_model_above_base_has_forgotten_nothing(told):
    summary = told((300, 360, 350))
    assert heading(summary["verdict"]) == "No measurable forgetting, domain kept"
    assert "recovered, tuned is 10.0 points above base; " in summary["verdict"]
    few = told((30, 36, 35), n=60)
    assert few["retention_status"] == "no measurable forgetting"


def test_a_recovery_that_does_harm_is_told_although_nothing_was_forgotten(told):
    summary = told((340, 340, 200))
    assert heading(summary["verdict"]) == "Kept, recovery not shown"
    assert "measurably below tuned" in summary["verdict"]
    summary = told((set(range(340)), {*range(330), *range(340, 347)}, {*range(12, 340)}))
    assert heading(summary["verdict"]) == "Kept, recovery not shown"
    assert summary["tests"]["tuned_minus_base"]["high"] > 0 > summary["tests"]["recovered_minus_base"]["high"]
    assert "measurably below base" in summary["verdict"]


def test_a_recovered_model_that_answers_a_quarter_shorter_is_told(told):
    def long(i):
        return {"tokens": 60 + i % 41}

    summary = told((340, 5, 340), base=long, recovered=lambda i: {"tokens": round(0.76 * (60 + i % 41))})
    assert heading(summary["verdict"]) == "Score recovered, writing differs, domain kept"
    assert "Its answers still differ from base's: they are 24 % shorter." in summary["further"]


def test_d_counts_from_the_floor_and_the_raw_ratio_stays_beside_it(run, told):
    # The handbook: base 0 %, floor 0.5 %, tuned 83.3 %, recovered 82.1 %. The floor changes nothing in print.
    handbook = told((340, 5, 340), domain=(0, 420, 414), domain_n=504, floors=(0, 2))
    assert handbook["domain_retention"]["value"] == pytest.approx((414 - 2) / (420 - 2), abs=1e-6)
    # Questions about people: base 18.9 %, floor 27.8 %, tuned 54.1 %, recovered 52.3 %.
    people = told((340, 5, 340), domain=(189, 541, 523), domain_n=1000, floors=(0, 278))
    assert people["domain_retention"]["value"] == pytest.approx(0.9316, abs=1e-4)
    assert people["domain_retention_raw"]["value"] == pytest.approx(0.9489, abs=1e-4)
    # 0.8992 rounds to the 0.90 that "kept" needs, and is less.
    assert 0.895 < people["domain_retention"]["low"] < 0.9
    assert heading(people["verdict"]) == "Recovered, domain probably kept"


def answers(passed, n=300):
    return (np.arange(n) < passed).astype(float)


@pytest.mark.parametrize(
    ("recovered", "status"),
    [(250, "kept"), (240, "kept"), (225, "partly kept"), (60, "partly kept"), (0, "lost")],
)
def test_kept_means_nine_tenths_are_shown_and_lost_that_nothing_is(recovered, status):
    assert ratios.domain_status_of(States(answers(0), answers(250), answers(recovered))) == status


def test_a_wide_interval_shows_neither_that_the_domain_is_kept_nor_that_it_is_lost():
    base, tuned, recovered = answers(2, 12), answers(10, 12), answers(4, 12)
    assert ratios.domain_status_of(States(base, tuned, recovered)) == "not shown"
