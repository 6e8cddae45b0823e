"""Arms of small synthetic runs, whose numbers are known: pooling, refusals, scores, settings that differ."""

import re
import shutil

import numpy as np
import pytest
from helpers.synthetic import TUNED, N, alter, change, compared, measure, write

from opdcl.errors import UsageError
from opdcl.results import intervals
from opdcl.results.compare import compare_runs, comparison_page, write_comparison
from opdcl.results.render import summarise
from opdcl.results.status import STATES
from opdcl.rundir.files import read_json
from opdcl.rundir.layout import ADAPTER, RunDir


@pytest.fixture
def seeds(make) -> list[RunDir]:
    """Two runs that differ in their seed alone."""
    return [make("a-s0", 28, 32), make("a-s1", 28, 32, seed=1)]


def pooled(runs: list[RunDir]) -> list[int]:
    return [row["seeds"] for row in compared(runs)["arms"]]


def test_names_gates_and_checkpoints_do_not_make_another_arm(seeds):
    change(seeds[1], "recover", save_steps=2)
    alter(seeds[1].config, workflow={"name": "b", "description": "c", "gates": {"recovery": 0.5}})
    assert pooled(seeds) == [2]


def test_different_rows_under_the_same_path_make_different_arms(seeds):
    for run, content in zip(seeds, ("1" * 64, "2" * 64), strict=True):
        inputs = {"content of data": content, "seed": 0}
        write(run.stage(1, "finetune").record, {"status": "done", "inputs": inputs})
    rows = {name: f"handbook ({digit * 12})" for name, digit in (("a-s0", "1"), ("a-s1", "2"))}
    assert compared(seeds)["differences"] == {"finetune.data": rows}


def test_the_same_seeds_twice_are_not_two_seeds(make):
    runs = [make("here", 28, 32), make("there", 30, 32), make("third", 30, 32, seed=1)]
    comparison = compared(runs)
    assert {row["name"]: row["seeds"] for row in comparison["arms"]} == {"here": 1, "there": 1, "third": 1}
    assert any(note.startswith("here, there, third: the settings are equal") for note in comparison["notes"])


def test_directories_with_equal_names_are_named_by_their_paths(make):
    runs = [make("x/run", 28, 32), make("y/run", 28, 32, steps=9)]
    assert [row["name"] for row in compared(runs)["arms"]] == [str(run.path) for run in runs]


def test_an_unfinished_seed_is_left_out_of_the_mean_with_a_note(make):
    runs = [make("a-s0", 28, 32), make("a-s1", 20, None, seed=1), make("a-s2", 30, 32, seed=2)]
    comparison = compared(runs)
    (row,) = comparison["arms"]
    assert (row["seeds"], len(row["runs"])) == (2, 3)
    assert row["retention"]["value"] == pytest.approx(29 / 40)
    assert any("a-s1 is not finished" in note and "left out of a." in note for note in comparison["notes"])


def test_of_unfinished_seeds_a_score_is_shown_where_all_have_it(make):
    """It is headed by their number, so it must not be that of one of them."""
    runs = [make("a-s0", 28, None), make("a-s1", None, None, seed=1), make("b", 28, 32, steps=9)]
    assert [(row["seeds"], bool(row["retention"])) for row in compared(runs)["arms"]] == [
        (2, False),
        (1, True),
    ]


def refused(runs: list[RunDir]) -> str:
    with pytest.raises(UsageError) as fault:
        compared(runs)
    assert fault.value.hint
    return f"{fault.value.message} -> {fault.value.hint}"


def test_a_run_without_results_is_refused(three):
    shutil.rmtree(three[1].evals)
    assert re.search(r"general has no results yet -> opdcl eval .*general$", refused(three))


def test_different_suites_are_refused_with_the_command_that_fixes_it(three):
    for state in STATES:
        three[1].eval_result(state, "handbook").unlink()
        measure(three[1], state, {"manual": range(9)})
    change(three[1], "eval", domain=["manual"])
    change(three[0], "eval", data={"handbook": "/data/my rows.jsonl"}, limit=40)
    message = refused(three)
    assert "their domain suites are manual and handbook" in message
    assert (
        "general --retention instructions --domain handbook --data 'handbook=/data/my rows.jsonl' --limit 40"
        in message
    )


def test_without_domain_suites_only_retention_is_compared(three, tmp_path):
    for run in three:
        for state in STATES:
            run.eval_result(state, "handbook").unlink()
        change(run, "eval", domain=[])
        if run is three[0]:
            assert "their domain suites are none and handbook" in refused(three)
    comparison = compared(three)
    assert comparison["headline"] == {"retention": "instructions", "domain": None}
    assert [row["domain"] for row in comparison["arms"]] == [{}, {}, {}]
    write_comparison(compare_runs(three), tmp_path / "out")
    assert "<svg" not in (tmp_path / "out" / "compare.html").read_text()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"n": 30}, "instructions was answered on 30 and on 40 prompts"),
        ({"prompt": "Another"}, "instructions has other prompts, or answers to them, in the two runs"),
        ({"metric": "f1"}, "instructions is scored by f1 and by accuracy"),
    ],
)
def test_different_prompts_or_metrics_are_refused(three, other, message):
    for state in STATES:
        measure(three[2], state, {"instructions": range(8)}, **other)
    assert message in refused(three)


def start_from(run: RunDir, place, content: str) -> None:
    """Let a run start from an adapter with this content."""
    settings = read_json(run.config)["workflow"]
    write(run.config, {"workflow": settings | {"finetune": None, "start": str(place)}, "origins": {}})
    write(run.stage(1, "finetune").record, {"status": "done", "inputs": {"start": content}})


def test_two_adapters_whose_folders_have_one_name_are_no_seeds_of_one_arm(seeds, tmp_path):
    for run, owner in zip(seeds, ("mine", "yours"), strict=True):
        start_from(run, tmp_path / owner / "checkpoint-500", content=owner)
    assert pooled(seeds) == [1, 1]
    shown = compared(seeds)["differences"]["start"]
    assert all(name.startswith("checkpoint-500 (") for name in shown.values())
    for run in seeds:
        start_from(run, tmp_path / run.path.name / "checkpoint-500", content="the same")
    assert pooled(seeds) == [2]


def test_seeds_may_start_from_runs_that_differ_in_their_seed_and_in_nothing_else(make, seeds):
    firsts = [make("first-0", 28, 32), make("first-1", 28, 32, seed=1)]
    for first, run in zip(firsts, seeds, strict=True):
        start_from(run, first.path, content=first.path.name)
    assert pooled(seeds) == [2]
    alter(firsts[1].config, workflow={"recover": {"steps": 9}})
    assert pooled(seeds) == [1, 1]


def test_seeds_of_which_one_start_was_trained_again_since_are_no_seeds_of_one_arm(make, seeds):
    for seed, run in enumerate(seeds):
        first = make(f"first-{seed}", 28, 32, seed=seed)
        write(first.stage(2, "recover").record, {"status": "done"})
        start_from(run, first.path, content="what it was")
    assert pooled(seeds) == [2]
    for name in (ADAPTER, "adapter_config.json"):
        write(first.stage(2, "recover").adapter / name, {})
    assert pooled(seeds) == [1, 1]


def test_runs_on_other_weights_of_one_name_are_no_seeds_of_one_arm(seeds):
    for run, weights in zip(seeds, ("1" * 64, "2" * 64), strict=True):
        write(run.manifest, {"base": {"fingerprint_before": weights}})
    assert pooled(seeds) == [1, 1]


def test_an_arm_of_one_run_has_the_numbers_of_its_report(three):
    same = ("recovery", "domain_retention", "status")
    for row, run in zip(compared(three)["arms"], three, strict=True):
        alone = summarise(run)
        assert row["retention"] == alone["suites"]["instructions"]["recovered"]
        assert row["domain"] == alone["suites"]["handbook"]["recovered"]
        assert [row[key] for key in same] == [alone[key] for key in same]


def test_different_tuned_models_have_a_row_each_and_a_note(make):
    runs = [make("a", 28, 32), make("b", 28, 32, tuned=TUNED | {"instructions": range(9)}, steps=9)]
    comparison = compared(runs)
    assert [r["name"] for r in comparison["references"]] == ["base", "tuned of a", "tuned of b"]
    assert any("2 different results of tuned" in note for note in comparison["notes"])


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
    # R of the seeds is 20/24 and 18/22; the arm's R divides the means.
    assert comparison["arms"][0]["recovery"]["value"] == pytest.approx(19 / 23, abs=1e-5)


def test_a_run_without_a_recovery_ends_with_tuned(make):
    alone = make("mix", None, None, tuned={"instructions": range(30), "handbook": range(38)})
    alter(alone.config, workflow={"recover": None})
    runs = [alone, make("ours", 28, 32)]
    for run in runs:
        measure(run, "base", {"neighbours": range(20)})
        measure(run, "tuned", {"neighbours": range(10)})
    measure(runs[1], "recovered", {"neighbours": range(16)})
    comparison = compared(runs)
    assert [arm["runs"][0]["state"] for arm in comparison["arms"]] == ["tuned", "recovered"]
    assert comparison["against_first"][0]["retention"]["value"] == pytest.approx(2 / 40, abs=1e-6)
    # Its end is its own row; tuned of the other run is a reference.
    assert [r["name"] for r in comparison["references"]] == ["base", "tuned of ours"]
    (further,) = comparison["further"]
    assert further["arms"][0]["recovered"] == {}
    assert [row["tuned"]["value"] for row in further["arms"]] == [0.25, 0.25]
    for state in STATES:
        measure(runs[1], state, {"neighbours": range(10)}, prompt="Another")
    assert compared(runs)["further"] == []


def test_a_tuned_model_measured_on_fewer_suites_is_the_same_model(make):
    runs = [make("a", 28, 32), make("b", 28, 32, steps=9)]
    runs[0].eval_result("tuned", "handbook").unlink()
    base, tuned = compared(runs)["references"]
    assert (base["name"], tuned["name"], tuned["domain"]["value"]) == ("base", "tuned", 0.9)
