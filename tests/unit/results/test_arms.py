"""Pooling runs into arms, and refusing runs that cannot be compared."""

import re
import shutil

import pytest
from helpers.synthetic import alter, change, compared, measure, write

from opdcl.errors import UsageError
from opdcl.results.compare import compare_runs, write_comparison
from opdcl.rundir.files import read_json
from opdcl.rundir.layout import RunDir


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


def refused(runs: list[RunDir]) -> str:
    with pytest.raises(UsageError) as fault:
        compared(runs)
    assert fault.value.hint
    return f"{fault.value.message} -> {fault.value.hint}"


def test_a_run_without_results_is_refused(three):
    shutil.rmtree(three[1].evals)
    assert re.search(r"general has no results yet -> opdcl eval .*general$", refused(three))


def test_a_single_run_and_a_repeated_run_are_refused(three):
    assert "at least two" in refused(three[:1])
    assert "general is named twice" in refused([*three, RunDir(three[0].path / ".." / "general")])


def test_different_suites_are_refused_with_the_command_that_fixes_it(three):
    for state in ("base", "tuned", "recovered"):
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


def test_a_run_without_a_domain_suite_does_not_match_one_that_has_it(three):
    shutil.rmtree(three[0].evals)
    for state, k in (("base", 32), ("tuned", 8), ("recovered", 28)):
        measure(three[0], state, {"instructions": range(k)})
    change(three[0], "eval", domain=[])
    assert "their domain suites are none and handbook" in refused(three)


def test_without_domain_suites_only_retention_is_compared(three, tmp_path):
    for run in three:
        for state in ("base", "tuned", "recovered"):
            run.eval_result(state, "handbook").unlink()
        change(run, "eval", domain=[])
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
    for state in ("base", "tuned", "recovered"):
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


def test_runs_on_other_weights_of_one_name_are_no_seeds_of_one_arm(seeds):
    for run, weights in zip(seeds, ("1" * 64, "2" * 64), strict=True):
        write(run.manifest, {"base": {"fingerprint_before": weights}})
    assert pooled(seeds) == [1, 1]
