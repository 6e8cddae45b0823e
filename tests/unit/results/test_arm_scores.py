"""The comparison of small synthetic runs whose every number is known beforehand."""

import numpy as np
import pytest
from helpers.synthetic import TUNED, N, alter, change, compared, measure

from opdcl.results import intervals
from opdcl.results.compare import compare_runs, comparison_page
from opdcl.results.render import summarise


def test_an_arm_of_one_run_has_the_numbers_of_its_report(three):
    comparison = compared(three)
    same = ("recovery", "domain_retention", "status")
    for row, run in zip(comparison["arms"], three, strict=True):
        alone = summarise(run)
        assert row["retention"] == alone["suites"]["instructions"]["recovered"]
        assert row["domain"] == alone["suites"]["handbook"]["recovered"]
        assert [row[key] for key in same] == [alone[key] for key in same]
    assert [row["name"] for row in comparison["arms"]] == ["ours", "general", "scaled"]
    assert [row["recovery"]["value"] for row in comparison["arms"]] == pytest.approx(
        [20 / 24, 20 / 24, 12 / 24], abs=1e-5
    )
    assert [row["domain_retention"]["value"] for row in comparison["arms"]] == pytest.approx(
        [28 / 32, 8 / 32, 16 / 32]
    )


def test_different_tuned_models_have_a_row_each_and_a_note(make):
    runs = [make("a", 28, 32), make("b", 28, 32, tuned=TUNED | {"instructions": range(9)}, steps=9)]
    comparison = compared(runs)
    assert [r["name"] for r in comparison["references"]] == ["base", "tuned of a", "tuned of b"]
    assert [r["retention"]["value"] for r in comparison["references"]] == pytest.approx([0.8, 0.2, 9 / 40])
    assert any("2 different results of tuned" in note for note in comparison["notes"])


def test_only_settings_that_differ_have_a_row(three):
    change(three[0], "recover", steps=60, seed=7, save_steps=1)
    assert compared(three)["differences"] == {
        "recover.method": {"ours": "alternating", "general": "general", "scaled": "interpolate"},
        "recover.steps": {"ours": 60, "general": 48, "scaled": 48},
    }


def test_missing_settings_and_missing_sections_are_differences(three):
    change(three[0], "recover", optimizer={"weight_decay": 0.1})
    alter(three[2].config, workflow={"recover": None})
    comparison = compared(three)
    assert comparison["differences"] == {
        "recover.method": {"ours": "alternating", "general": "general"},
        "recover.optimizer.weight_decay": {"ours": 0.1},
        "recover": {"ours": "given", "general": "given", "scaled": "left out"},
    }
    rows = comparison_page(compare_runs(three)).sections[-1].rows
    assert ["recover.optimizer.weight_decay", "0.1", "–", "–"] in rows  # noqa: RUF001


def test_different_evaluation_settings_get_a_note(three):
    change(three[1], "eval", max_new_tokens=20)
    said = "measured with different settings (eval.max_new_tokens)"
    assert any(said in note for note in compared(three)["notes"])


def test_runs_that_differ_only_in_seeds_form_one_arm_with_their_mean(make):
    runs = [make(f"ours-s{seed}", k, 32, seed=seed) for seed, k in ((2, 30), (0, 20), (1, 28))]
    (row,) = compared(runs)["arms"]
    assert (row["name"], row["seeds"]) == ("ours", 3)
    assert row["retention"]["value"] == pytest.approx((30 + 20 + 28) / 120)
    assert row["recovery"]["value"] == pytest.approx(((30 + 20 + 28) / 3 - 8) / 24, abs=1e-5)
    of_runs = {run["seeds"]["recover.seed"]: run["retention"]["value"] for run in row["runs"]}
    assert of_runs == {0: 0.5, 1: 0.7, 2: 0.75}
    passed = [(np.arange(N) < k).astype(float) for k in (20, 28, 30)]
    assert row["retention"] == vars(intervals.mean(np.stack(passed)).rounded())
    alone = vars(intervals.mean(passed[1]).rounded())
    assert row["retention"]["high"] - row["retention"]["low"] > alone["high"] - alone["low"]


def test_arms_over_the_same_fine_tunes_share_the_mean_of_tuned(make):
    runs = []
    for seed, lost in ((0, 8), (1, 10)):
        for name, method, kept in (("ours", "alternating", 28), ("scaled", "interpolate", 20 + seed)):
            tuned = TUNED | {"instructions": range(lost)}
            run = make(f"{name}-s{seed}", kept, 32, tuned=tuned, method=method, seed=seed)
            change(run, "finetune", seed=seed)
            runs.append(run)
    comparison = compared(runs)
    assert [(r["name"], r["results"], r["retention"]["value"]) for r in comparison["references"]] == [
        ("base", 1, 0.8),
        ("tuned", 2, pytest.approx(9 / 40)),
    ]
    ours, scaled = comparison["arms"]
    assert (ours["seeds"], scaled["seeds"]) == (2, 2)
    # R of the seeds is 20/24 and 18/22; the arm's R divides the means.
    assert ours["recovery"]["value"] == pytest.approx(19 / 23, abs=1e-5)
    assert any("Intervals over two seeds" in note for note in comparison["notes"])


def test_a_run_without_a_recovery_ends_with_tuned(make):
    alone = make("mix", None, None, tuned={"instructions": range(30), "handbook": range(38)})
    alter(alone.config, workflow={"recover": None})
    runs = [alone, make("ours", 28, 32)]
    for run in runs:
        measure(run, "base", {"neighbours": range(20)})
        measure(run, "tuned", {"neighbours": range(10)})
    measure(runs[1], "recovered", {"neighbours": range(16)})
    comparison = compared(runs)
    mix, ours = comparison["arms"]
    assert (mix["retention"]["value"], mix["domain"]["value"]) == (0.75, 0.95)
    assert (mix["status"], mix["runs"][0]["status"], mix["recovery"]) == ("no recovery", "no recovery", None)
    assert [arm["runs"][0]["state"] for arm in (mix, ours)] == ["tuned", "recovered"]
    assert comparison["against_first"][0]["retention"]["value"] == pytest.approx(2 / 40, abs=1e-6)
    # Its end is its own row; tuned of the other run is a reference.
    assert [r["name"] for r in comparison["references"]] == ["base", "tuned of ours"]
    (further,) = comparison["further"]
    assert further["arms"][0]["recovered"] == {}
    assert [row["tuned"]["value"] for row in further["arms"]] == [0.25, 0.25]
    assert not any("is not finished" in note for note in comparison["notes"])


def test_a_tuned_model_measured_on_fewer_suites_is_the_same_model(make):
    runs = [make("a", 28, 32), make("b", 28, 32, steps=9)]
    runs[0].eval_result("tuned", "handbook").unlink()
    assert [r["name"] for r in compared(runs)["references"]] == ["base", "tuned"]
