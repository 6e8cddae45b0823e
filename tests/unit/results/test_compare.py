"""The comparison of small synthetic runs whose every number is known beforehand."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.synthetic import BASE, TUNED, N, change, measure, write

from opdcl.errors import UsageError
from opdcl.results import compare, plots, report, stats
from opdcl.results.compare import view
from opdcl.results.compare import write as write_page
from opdcl.rundir.layout import RunDir

pytestmark = pytest.mark.usefixtures("few_resamples")


# The statistics of several seeds.


def test_a_seed_that_is_drawn_twice_half_or_not_at_all_gives_the_interval():
    # Two seeds, each with the same score on all prompts: the mean of a resample is 0.2, 0.4 or 0.6, at 1 : 2 : 1.
    found = stats.mean(np.array([np.full(30, 0.2), np.full(30, 0.6)]))
    assert (found.value, found.low, found.high) == pytest.approx((0.4, 0.2, 0.6))


def test_the_interval_over_four_seeds_follows_the_binomial():
    # One seed of four is better by 0.4. It is drawn more than three times with p = 1/256, more than twice with 13/256,
    # and not at all with 81/256: the 97.5th percentile is three quarters of the way, the 2.5th none of it.
    found = stats.mean(np.array([[0.2] * 30] * 3 + [[0.6] * 30]))
    assert (found.value, found.low, found.high) == pytest.approx((0.3, 0.2, 0.5))


@pytest.mark.parametrize("copies", [1, 2, 5])
def test_seeds_that_agree_add_no_certainty(copies):
    # A prompt that is hard is hard for every seed: the same answers five times are still n prompts.
    base, tuned, recovered = (np.random.default_rng(i).random(N) < p for i, p in enumerate((0.9, 0.2, 0.7)))
    several = [np.tile(x.astype(float), (copies, 1)) for x in (base, tuned, recovered)]
    one = [x.astype(float) for x in (base, tuned, recovered)]

    def near(a, b):
        return vars(a) == pytest.approx(vars(b))

    assert near(stats.mean(several[0]), stats.mean(one[0]))
    assert near(stats.difference(*several[1:]), stats.difference(*one[1:]))
    assert near(stats.recovery(*several), stats.recovery(*one))
    assert stats.status_of(*several) == stats.status_of(*one)


def test_all_failures_over_seeds_exclude_what_their_prompts_can_exclude():
    assert stats.mean(np.zeros((3, 20))) == stats.mean(np.zeros(20))
    assert stats.mean(np.ones((3, 20))) == stats.mean(np.ones(20))


def test_a_ratio_over_seeds_divides_the_means():
    # R of the seeds: 0.5 and 1.0, over the same loss.
    whole = np.full((2, 30), 0.4)
    found = stats.ratio(np.array([np.full(30, 0.2), np.full(30, 0.4)]), whole)
    assert (found.value, found.low, found.high) == pytest.approx((0.75, 0.5, 1.0))


def test_as_many_seeds_are_paired_and_otherwise_drawn_apart():
    low, high = np.full(30, 0.2), np.full(30, 0.6)
    paired = stats.difference(np.array([low, high]), np.array([low, high]))
    assert (paired.value, paired.low, paired.high) == pytest.approx((0, 0, 0))
    # Against one seed at 0.4 the two seeds draw -0.2, 0 or 0.2.
    apart = stats.difference(np.array([low, high]), np.full((1, 30), 0.4))
    assert (apart.value, apart.low, apart.high) == pytest.approx((0, -0.2, 0.2))
    # Three seeds at 0.2, 0.2 and 0.6 reach 0.2 to 0.6 themselves, so the difference reaches from -0.4 to 0.4.
    wide = stats.difference(np.array([low, high]), np.array([low, low, high]))
    assert (wide.value, wide.low, wide.high) == pytest.approx((0.4 - 1 / 3, -4 / 15, 0.4))


def test_one_seed_whose_loss_may_be_chance_stops_the_ratio():
    # 5 of 40 prompts lost are 12.5 points, but p = 2 / 2^5 in McNemar's test.
    base, lost, little = ((np.arange(N) < k).astype(float) for k in (32, 8, 27))
    assert stats.difference(np.array([base, base]), np.array([lost, little])).low > 0
    assert stats.recovery(np.array([base, base]), np.array([lost, little]), np.array([base, base])) is None
    assert stats.recovery(np.array([base, base]), np.array([lost, lost]), np.array([base, base])) is not None


# One arm per run.


def test_an_arm_of_one_run_has_the_numbers_of_its_report(three):
    found = compare.compare(three)
    for row, run in zip(found["arms"], three, strict=True):
        alone = report.summarise(run)
        assert row["retention"] == alone["suites"]["instructions"]["recovered"]
        assert row["domain"] == alone["suites"]["handbook"]["recovered"]
        assert [row[k] for k in ("recovery", "domain_retention", "status")] == [
            alone[k] for k in ("recovery", "domain_retention", "status")
        ]
    assert [row["name"] for row in found["arms"]] == ["ours", "general", "scaled"]
    assert [row["recovery"]["value"] for row in found["arms"]] == pytest.approx(
        [20 / 24, 20 / 24, 12 / 24], abs=1e-5
    )
    assert [row["domain_retention"]["value"] for row in found["arms"]] == pytest.approx(
        [28 / 32, 8 / 32, 16 / 32]
    )


def test_a_second_domain_suite_is_shown_apart_where_all_runs_have_it(three):
    passed = {"ours": 28, "general": 4, "scaled": 20}
    for run in three:
        change(run, "eval", domain=["handbook", "manual"])
        for state, k in (("base", 4), ("tuned", 36), ("recovered", passed[run.path.name])):
            measure(run, state, {"manual": range(k)})
    (apart,) = compare.compare(three)["further"]
    assert {k: v for k, v in apart.items() if k != "arms"} == {
        "name": "manual",
        "role": "domain",
        "metric": "accuracy",
        "n": N,
    }
    assert [(a["name"], a["recovered"]["value"], a["domain_retention"]["value"]) for a in apart["arms"]] == [
        ("ours", pytest.approx(28 / N), pytest.approx(24 / 32)),
        ("general", pytest.approx(4 / N), pytest.approx(0)),
        ("scaled", pytest.approx(20 / N), pytest.approx(16 / 32)),
    ]
    tables = {table.title: table.rows for table in view(compare.compare(three)).tables}
    assert [cell.split("\n")[0] for cell in tables["manual, domain"][0]] == [
        "ours",
        "10.0 %",
        "90.0 %",
        "70.0 %",
        "0.75",
    ]
    for state in ("base", "tuned", "recovered"):
        measure(three[1], state, {"manual": range(36)}, prompt="Other prompt")
    assert compare.compare(three)["further"] == []


def test_base_and_tuned_that_all_share_come_first_and_once(three):
    found = compare.compare(three)
    assert [(r["name"], r["retention"]["value"], r["domain"]["value"]) for r in found["references"]] == [
        ("base", 0.8, 0.1),
        ("tuned", 0.2, 0.9),
    ]
    assert [row[0].split("\n")[0] for row in view(found).tables[0].rows] == [
        "base",
        "tuned",
        "ours",
        "general",
        "scaled",
    ]
    assert not [note for note in found["notes"] if "different results" in note]


def test_tuned_models_that_differ_have_a_row_each_and_a_note(make):
    runs = [make("a", 28, 32), make("b", 28, 32, tuned=TUNED | {"instructions": range(9)}, steps=9)]
    found = compare.compare(runs)
    assert [r["name"] for r in found["references"]] == ["base", "tuned of a", "tuned of b"]
    assert [r["retention"]["value"] for r in found["references"]] == pytest.approx([0.8, 0.2, 9 / 40])
    assert any("2 different results of tuned" in note for note in found["notes"])


def test_the_distance_to_the_alpha_curve_is_paired_and_the_curve_has_none(three):
    ours, general, scaled = (row["above_alpha_curve"] for row in compare.compare(three)["arms"])
    assert scaled is None
    assert ours["arm"] == general["arm"] == "scaled"
    assert ours["retention"]["value"] == pytest.approx(8 / 40)
    assert [ours["domain"]["value"], general["domain"]["value"]] == pytest.approx([12 / 40, -8 / 40])
    passed = {k: (np.arange(N) < k).astype(float) for k in (20, 28)}
    assert ours["retention"] == stats.difference(passed[28], passed[20]).as_dict()
    assert general["domain"]["high"] < 0 < ours["domain"]["low"]


def test_the_curve_leads_from_base_over_the_scaled_adapter_to_tuned(three):
    ours = compare.compare(three)["arms"][0]
    passed = {k: (np.arange(N) < k).astype(float) for k in range(N + 1)}
    points = [
        tuple(passed[len(scores[suite])] for suite in ("handbook", "instructions"))
        for scores in (BASE, TUNED)
    ]
    above = stats.above_mixtures((passed[32], passed[28]), [*points, (passed[20], passed[20])]).as_dict()
    assert ours["above_alpha_curve"]["at_its_domain"] == above
    drawn = compare.compare(three)["alpha_curve"]
    assert [p["domain"] * N for p in drawn] == pytest.approx([4, 20, 36])
    assert [p["retention"] * N for p in drawn] == pytest.approx([32, 20, 8])
    assert [p["edge"] for p in drawn] == [True, True, True]
    assert (
        "retention\nat its domain"
        in next(t for t in view(compare.compare(three)).tables if "alpha" in t.title).columns
    )


def test_without_a_curve_there_is_no_distance_to_it(three):
    found = compare.compare(three[:2])
    assert [row["above_alpha_curve"] for row in found["arms"]] == [None, None]
    assert found["alpha_curve"] == []
    assert [table.title for table in view(found).tables] == ["Scores", "Settings that differ"]


def test_of_two_curves_the_one_of_the_same_tuned_model_counts(make):
    other = TUNED | {"instructions": range(9)}
    runs = [
        make("a", 28, 32),
        make("b", 30, 32, tuned=other, steps=9),
        make("scaled-a", 20, 20, method="interpolate"),
        make("scaled-b", 21, 21, tuned=other, method="interpolate", steps=9),
    ]
    found = compare.compare(runs)["arms"]
    assert [row["above_alpha_curve"] and row["above_alpha_curve"]["arm"] for row in found] == [
        "scaled-a",
        "scaled-b",
        None,
        None,
    ]
    assert found[1]["above_alpha_curve"]["retention"]["value"] == pytest.approx(9 / 40)


def test_settings_that_differ_have_a_row_and_all_else_has_none(three):
    change(three[0], "recover", steps=60, seed=7, save_steps=1)
    assert compare.compare(three)["differences"] == {
        "recover.method": {"ours": "alternating", "general": "general", "scaled": "interpolate"},
        "recover.steps": {"ours": 60, "general": 48, "scaled": 48},
    }


def test_a_setting_that_only_one_arm_has_and_a_section_left_out_are_differences(three):
    change(three[0], "recover", trainer={"weight_decay": 0.1})
    config = json.loads(three[2].config.read_text())
    config["workflow"]["recover"] = None
    write(three[2].config, config)
    found = compare.compare(three)
    assert found["differences"] == {
        "recover.method": {"ours": "alternating", "general": "general"},
        "recover.trainer.weight_decay": {"ours": 0.1},
        "recover": {"ours": "given", "general": "given", "scaled": "left out"},
    }
    rows = view(found).tables[-1].rows
    assert ["recover.trainer.weight_decay", "0.1", "–", "–"] in rows  # noqa: RUF001


def test_settings_of_the_measurement_that_differ_are_pointed_out(three):
    change(three[1], "eval", max_new_tokens=20)
    assert any(
        "measured with different settings (eval.max_new_tokens)" in n for n in compare.compare(three)["notes"]
    )


# Several seeds.


def test_runs_that_differ_in_their_seeds_are_one_arm_with_their_mean(make):
    runs = [make(f"ours-s{seed}", k, 32, seed=seed) for seed, k in ((2, 30), (0, 20), (1, 28))]
    (row,) = compare.compare(runs)["arms"]
    assert (row["name"], row["seeds"]) == ("ours", 3)
    assert row["retention"]["value"] == pytest.approx((30 + 20 + 28) / 120)
    assert row["recovery"]["value"] == pytest.approx(((30 + 20 + 28) / 3 - 8) / 24, abs=1e-5)
    assert [(run["seeds"]["recover.seed"], run["retention"]["value"]) for run in row["runs"]] == [
        (0, 0.5),
        (1, 0.7),
        (2, 0.75),
    ]
    passed = [(np.arange(N) < k).astype(float) for k in (20, 28, 30)]
    assert row["retention"] == stats.mean(np.stack(passed)).as_dict()
    alone = stats.mean(passed[1]).as_dict()
    assert row["retention"]["high"] - row["retention"]["low"] > alone["high"] - alone["low"]


def test_names_gates_and_checkpoints_do_not_make_another_arm(make):
    runs = [make("a-s0", 28, 32), make("a-s1", 28, 32, seed=1, save_steps=2)]
    config = json.loads(runs[1].config.read_text())
    config["workflow"] |= {"name": "b", "description": "c", "gates": {"recovery": 0.5}}
    write(runs[1].config, config)
    assert [row["seeds"] for row in compare.compare(runs)["arms"]] == [2]


def test_other_rows_under_the_same_path_make_another_arm(make):
    runs = [make("a-s0", 28, 32), make("a-s1", 28, 32, seed=1)]
    for run, content in zip(runs, ("1" * 64, "2" * 64), strict=True):
        write(
            run.stage(1, "finetune").record,
            {"status": "done", "inputs": {"content of data": content, "seed": 0}},
        )
    found = compare.compare(runs)
    assert found["differences"] == {"finetune.content of data": {"a-s0": "1" * 12, "a-s1": "2" * 12}}


def test_the_same_seeds_twice_are_not_two_seeds(make):
    runs = [make("here", 28, 32), make("there", 30, 32), make("third", 30, 32, seed=1)]
    found = compare.compare(runs)
    assert [(row["name"], row["seeds"]) for row in found["arms"]] == [("here", 1), ("there", 1), ("third", 1)]
    assert any(note.startswith("here, there, third: the settings are equal") for note in found["notes"])


def test_another_seed_of_the_intervals_is_not_another_seed_of_training(make):
    runs = [make("a", 28, 32), make("b", 28, 32)]
    change(runs[1], "eval", seed=5)
    assert [row["seeds"] for row in compare.compare(runs)["arms"]] == [1, 1]


def test_arms_over_the_same_fine_tunes_share_the_mean_of_tuned(make):
    runs = []
    for seed, lost in ((0, 8), (1, 10)):
        for name, method, kept in (("ours", "alternating", 28), ("scaled", "interpolate", 20 + seed)):
            run = make(
                f"{name}-s{seed}",
                kept,
                32,
                tuned=TUNED | {"instructions": range(lost)},
                method=method,
                seed=seed,
            )
            change(run, "finetune", seed=seed)
            runs.append(run)
    found = compare.compare(runs)
    assert [(r["name"], r["results"], r["retention"]["value"]) for r in found["references"]] == [
        ("base", 1, 0.8),
        ("tuned", 2, pytest.approx(9 / 40)),
    ]
    ours, scaled = found["arms"]
    assert (ours["seeds"], scaled["seeds"]) == (2, 2)
    assert ours["above_alpha_curve"]["retention"]["value"] == pytest.approx(7.5 / 40)
    # Seed by seed R is 20/24 and 18/22; together the means are divided.
    assert ours["recovery"]["value"] == pytest.approx(19 / 23, abs=1e-5)
    assert any("Intervals over 2 seeds are too narrow" in note for note in found["notes"])


def test_directories_of_one_name_are_told_apart_by_their_paths(make, tmp_path):
    runs = [make("x/run", 28, 32), make("y/run", 28, 32, steps=9)]
    assert [row["name"] for row in compare.compare(runs)["arms"]] == [
        str(tmp_path / "x/run"),
        str(tmp_path / "y/run"),
    ]


def test_how_fine_the_tests_of_the_runs_are_is_said_once(make):
    runs = [make("ours", 28, 32), make("half", 20, 32, steps=9)]
    fine = [report.summarise(run)["tests"]["detectable_difference"] for run in runs]
    (note,) = (note for note in compare.compare(runs)["notes"] if "four times in five" in note)
    assert f"of {100 * min(fine):.1f} to {100 * max(fine):.1f} points" in note


# Runs that are not finished, or not alike.


def test_a_run_that_is_not_finished_is_listed_with_what_it_has(make):
    runs = [make("ours", 28, 32), make("half", 20, None, steps=9), make("none", None, None, steps=10)]
    ours, half, none = compare.compare(runs)["arms"]
    assert ours["status"] == "partly recovered"
    assert (half["retention"]["value"], half["domain"], half["domain_retention"]) == (0.5, {}, None)
    assert half["recovery"]["value"] == pytest.approx(0.5)
    assert (none["retention"], none["recovery"], none["status"]) == ({}, None, "not measured")
    found = compare.compare(runs)
    assert any(
        note.endswith("half is not finished: no result of recovered on handbook.") for note in found["notes"]
    )
    assert [r["name"] for r in found["references"]] == ["base", "tuned"]


def test_an_unfinished_seed_is_left_out_of_the_mean_by_name(make):
    runs = [make("a-s0", 28, 32), make("a-s1", 20, None, seed=1), make("a-s2", 30, 32, seed=2)]
    found = compare.compare(runs)
    (row,) = found["arms"]
    assert (row["seeds"], len(row["runs"])) == (2, 3)
    assert row["retention"]["value"] == pytest.approx(29 / 40)
    assert any("a-s1 is not finished" in note and "left out of a." in note for note in found["notes"])


def test_a_tuned_measured_on_one_suite_is_the_same_tuned(make):
    runs = [make("a", 28, 32), make("b", 28, 32, steps=9)]
    runs[0].eval_result("tuned", "handbook").unlink()
    assert [r["name"] for r in compare.compare(runs)["references"]] == ["base", "tuned"]


def refused(runs: list[RunDir]) -> str:
    with pytest.raises(UsageError) as fault:
        compare.compare(runs)
    assert fault.value.hint
    return f"{fault.value.message} -> {fault.value.hint}"


def test_a_run_without_results_is_refused(three):
    shutil.rmtree(three[1].evals)
    assert re.search(r"general has no results yet -> opdcl eval .*general$", refused(three))


def test_one_run_or_one_run_twice_is_no_comparison(three):
    assert "at least two" in refused(three[:1])
    assert "general is named twice" in refused([*three, RunDir(three[0].path / ".." / "general")])


def test_other_suites_are_refused_with_the_command_that_makes_them_alike(three):
    for state in ("base", "tuned", "recovered"):
        three[1].eval_result(state, "handbook").unlink()
        measure(three[1], state, {"manual": range(9)})
    change(three[1], "eval", domain=["manual"])
    change(three[0], "eval", data={"handbook": "/data/my rows.jsonl"}, limit=40)
    said = refused(three)
    assert "their domain suites are manual and handbook" in said
    assert (
        "general --retention instructions --domain handbook --data 'handbook=/data/my rows.jsonl' --limit 40"
        in said
    )


def test_a_run_without_a_domain_suite_does_not_match_one_that_has_it(three):
    shutil.rmtree(three[0].evals)
    for state, k in (("base", 32), ("tuned", 8), ("recovered", 28)):
        measure(three[0], state, {"instructions": range(k)})
    change(three[0], "eval", domain=[])
    assert "their domain suites are none and handbook" in refused(three)


def test_without_any_domain_suite_retention_alone_is_compared(three, tmp_path):
    for run in three:
        for state in ("base", "tuned", "recovered"):
            run.eval_result(state, "handbook").unlink()
        change(run, "eval", domain=[])
    found = compare.compare(three)
    assert found["headline"] == {"retention": "instructions", "domain": None}
    assert [row["domain"] for row in found["arms"]] == [{}, {}, {}]
    write_page(found, tmp_path / "out")
    assert plots.frontier(found) is None


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"n": 30}, "instructions was answered on 30 and on 40 prompts"),
        ({"prompt": "Another"}, "instructions has different prompts in the two runs"),
        ({"metric": "f1"}, "instructions is scored by f1 and by accuracy"),
    ],
)
def test_another_number_of_prompts_other_prompts_or_another_metric_are_refused(three, other, said):
    for state in ("base", "tuned", "recovered"):
        measure(three[2], state, {"instructions": range(8)}, **other)
    assert said in refused(three)


def test_importing_the_comparison_loads_neither_a_model_library_nor_a_plotting_one():
    heavy = [
        "torch",
        "transformers",
        "trl",
        "peft",
        "datasets",
        "lm_eval",
        "matplotlib",
        "jinja2",
        "scipy",
        "numpy",
    ]
    code = f"import sys, opdcl.results.compare; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.strip() == "[]"
