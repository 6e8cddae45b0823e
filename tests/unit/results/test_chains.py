"""The matrix of continual learning on synthetic runs whose every number is known beforehand."""

import shutil

import numpy as np
import pytest
from helpers.synthetic import N, alter, change, compared, held, measure, workflow, write

from opdcl.errors import UsageError
from opdcl.results import intervals
from opdcl.results.chains import build_on_one_another
from opdcl.results.compare import compare_runs, comparison_page
from opdcl.rundir.layout import RunDir


@pytest.fixture
def step(tmp_path):
    """Return a function that makes a run: the domain it learned, the prompts it passes, and its start."""

    def made(name, learned, instructions, handbook, manual, start=None, teachers=None) -> RunDir:
        run = RunDir(tmp_path / name)
        domains = ["handbook", "manual"] if learned == "handbook" else ["manual", "handbook"]
        named = {name: {"adapter": str(teacher.path)} for name, teacher in (teachers or {}).items()}
        settings = workflow(teachers=named) | {"start": start and str(start.path)}
        write(run.config, {"workflow": settings, "origins": {}})
        change(run, "eval", domain=domains)
        change(run, "finetune", data=learned)
        write(run.stage(2, "recover").record, {"status": "done"})
        measure(run, "base", {"instructions": range(32), "handbook": range(4), "manual": range(2)})
        passes = {"instructions": instructions, "handbook": handbook, "manual": manual}
        measure(run, "recovered", {suite: range(k) for suite, k in passes.items()})
        return run

    return made


@pytest.fixture
def chain(step):
    """Two domains in a row."""
    first = step("first", "handbook", 30, 36, 2)
    return [first, step("second", "manual", 28, 34, 30, start=first, teachers={"known": first})]


@pytest.fixture
def two_ways(chain, step):
    """Two domains in a row, once with little forgetting and once with much."""
    first, second = chain
    worse = step("worse", "handbook", 34, 38, 2)
    return [first, worse, second, step("after", "manual", 6, 10, 32, start=worse)]


def test_the_figures_of_a_chain_equal_those_worked_out_by_hand(two_ways):
    comparison = compared(two_ways)
    held("chains", comparison)
    good, bad = comparison["chains"]
    assert (good["name"], bad["name"]) == ("first → second", "worse → after")
    assert good["average"]["value"] == pytest.approx((28 + 34 + 30) / 3 / N)
    # The best earlier retention is base's 32, or the first step's 34; that of handbook is after its own step.
    assert good["forgetting"]["value"] == pytest.approx(((32 - 28) + (36 - 34)) / 2 / N)
    assert good["backward_transfer"]["value"] == pytest.approx((34 - 36) / N)
    assert bad["forgetting"]["value"] == pytest.approx(((34 - 6) + (38 - 10)) / 2 / N)
    (difference,) = comparison["differences"]
    assert difference["average"]["value"] == pytest.approx(good["average"]["value"] - bad["average"]["value"])
    assert difference["forgetting"]["high"] < 0
    assert comparison["kept"] == [
        {"step": "second", "teacher": "known", "suite": "handbook", "kept": comparison["kept"][0]["kept"]}
    ]
    assert comparison["kept"][0]["kept"]["value"] == pytest.approx((34 - 4) / (36 - 4))


def test_steps_are_pooled_over_seeds_although_they_start_from_different_directories(step):
    firsts = [step(f"first-{seed}", "handbook", 30, 36, 2) for seed in (1, 2)]
    seconds = [step(f"second-{i}", "manual", 28, 34, 30, start=first) for i, first in enumerate(firsts, 1)]
    for seed, run in enumerate([*firsts, *seconds]):
        change(run, "finetune", seed=seed % 2)
    comparison = compared([*firsts, *seconds])
    assert [(s["name"], s["seeds"]) for s in comparison["steps"]] == [("first", 2), ("second", 2)]
    (chain,) = comparison["chains"]
    assert chain["average"]["value"] == pytest.approx((28 + 34 + 30) / 3 / N)


def test_a_seed_without_the_last_step_is_left_out_of_the_chain(step):
    firsts = [step(f"first-{i}", "handbook", kept, 36, 2) for i, kept in ((1, 30), (2, 20), (3, 10))]
    for seed, run in enumerate(firsts):
        change(run, "finetune", seed=seed)
    second = step("second-2", "manual", 16, 34, 30, start=firsts[1])
    change(second, "finetune", seed=1)
    comparison = compared([*firsts, second])
    (chain,) = comparison["chains"]
    # The run is compared with the one it started from, not with another seed's.
    assert chain["seeds"] == 1
    assert chain["backward_transfer"]["value"] == pytest.approx((34 - 36) / N)
    assert chain["forgetting"]["value"] == pytest.approx(((32 - 16) + (36 - 34)) / 2 / N)
    assert any("not reached the last step are left out: 2." in note for note in comparison["notes"])


def test_two_experiments_with_equal_names_stay_apart(step):
    one = step("one/first", "handbook", 30, 36, 2)
    runs = [one, step("one/second", "manual", 28, 34, 30, start=one)]
    other = step("two/first", "handbook", 20, 30, 2)
    change(other, "recover", steps=3)
    runs += [other, step("two/second", "manual", 10, 12, 30, start=other)]
    alone, both = compared(runs[:2]), compared(runs)
    assert both["chains"][0]["forgetting"] == alone["chains"][0]["forgetting"]
    assert len({c["name"] for c in both["chains"]}) == 2


def test_answers_to_other_prompts_are_left_out_with_a_note(chain):
    for state, passed in (("base", 32), ("recovered", 28)):
        measure(chain[1], state, {"instructions": range(passed)}, prompt="Another")
    comparison = compared(chain)
    assert "instructions" not in comparison["steps"][1]["scores"]
    assert any("other prompts of instructions" in note for note in comparison["notes"])


def test_a_run_that_builds_on_itself_is_refused(step):
    first = step("first", "handbook", 30, 36, 2)
    alter(first.config, workflow={"start": str(first.path)})
    with pytest.raises(UsageError, match="builds on itself"):
        compared([first, step("second", "manual", 28, 34, 30)])


def test_a_missing_result_is_left_out_with_a_note(chain):
    chain[1].eval_result("recovered", "handbook").unlink()
    comparison = compared(chain)
    (figures,) = comparison["chains"]
    assert figures["average"] is None
    assert figures["forgetting"]["value"] == pytest.approx((32 - 28) / N)
    assert "second is not measured on handbook." in comparison["notes"]


def test_the_mean_over_suites_has_a_narrower_interval_than_one_suite():
    rng = np.random.default_rng(0)
    suites = [(rng.random(n) < 0.5).astype(float) for n in (200, 100, 300)]
    comparison = intervals.mean_over(suites)
    assert comparison.value == pytest.approx(np.mean([s.mean() for s in suites]))
    assert intervals.mean_over([suites[0]]) == intervals.mean(suites[0])
    clusters = np.repeat(np.arange(50), 4)
    assert intervals.mean_over([suites[0]], [clusters]) == intervals.mean(suites[0], clusters)
    # Independent prompts: variances add up, each divided by the number of suites squared.
    width = np.sqrt(sum((s.std() / np.sqrt(len(s)) / 3) ** 2 for s in suites)) * 2 * 1.96
    assert comparison.high - comparison.low == pytest.approx(width, rel=0.1)


def test_one_prompt_of_a_hundred_is_no_forgetting_that_is_shown(chain):
    """Forgetting is a difference on the same prompts, not a pass rate, which excludes 0 after one failure."""
    for run, passed in zip(chain, (99, 98), strict=True):
        change(run, "eval", domain=[])
        shutil.rmtree(run.evals)
        for state, passes in (("base", 99), ("recovered", passed)):
            measure(run, state, {"instructions": range(passes)}, n=100)
    comparison = compare_runs(chain)
    before, after = ((np.arange(100) < passed).astype(float) for passed in (99, 98))
    forgetting = comparison.chains[0].figures["forgetting"]
    assert forgetting == intervals.difference(before, after).rounded()
    assert comparison_page(comparison).verdict.heading.endswith("no forgetting is shown")


def test_a_change_over_suites_is_claimed_seldom_where_there_is_none():
    rng = np.random.default_rng(0)
    claimed = 0
    for _ in range(400):
        changes = []
        for n in (40, 100):
            before = (rng.random(n) < 0.7).astype(float)
            again = np.where(rng.random(n) < 0.03, rng.random(n) < 0.7, before).astype(float)
            changes.append(([before], [again], None))
        found = intervals.change_over(changes)
        claimed += found.low > 0 or found.high < 0
    assert claimed < 0.05 * 400


def test_a_change_over_one_suite_is_the_difference_and_two_that_stood_still_prove_nothing():
    rng = np.random.default_rng(1)
    a, b = (rng.random((3, 60)) < 0.5).astype(float), (rng.random((3, 60)) < 0.7).astype(float)
    one, other = intervals.change_over([([a], [b], None)]), intervals.difference(a, b)
    assert (one.value, one.low, one.high) == pytest.approx((other.value, other.low, other.high))
    same = (np.ones(8),) * 2
    still = intervals.change_over([([same[0]], [same[1]], None)] * 2)
    assert still.low < -0.1 < 0.1 < still.high


@pytest.mark.parametrize("second", [["manual", "handbook"], ["handbook", "manual"]])
def test_what_a_step_learned_does_not_depend_on_the_order_of_its_suites(step, second):
    first = step("first", "handbook", 32, 38, 2)
    last = step("second", "manual", 32, 6, 36, start=first)
    change(last, "eval", domain=second)
    comparison = compare_runs([first, last])
    figures = comparison.chains[0].figures
    assert figures["backward_transfer"].value == pytest.approx((6 - 38) / N)
    assert figures["forgetting"].value == pytest.approx((38 - 6) / 2 / N)


def test_a_domain_that_no_rows_tell_is_left_out_with_a_note_whose_hint_helps(step):
    """That it gained most proves nothing: one domain may help another."""
    first = step("first", "handbook", 32, 38, 2)
    last = step("second", "rows.jsonl", 32, 38, 36, start=first)
    comparison = compare_runs([first, last])
    assert comparison.chains[0].figures["average"].value == pytest.approx((32 + 38) / 2 / N)
    assert any("second: which of its domain suites it learned is unknown" in n for n in comparison.notes)
    left_out = "first → second: no step is known to have learned manual: left out."
    assert left_out in comparison.notes
    change(last, "finetune", data="texts/manual.jsonl")
    named = compare_runs([first, last])
    assert named.chains[0].figures["average"].value == pytest.approx((32 + 38 + 36) / 3 / N)
    assert not any("unknown" in note or "left out" in note for note in named.notes)


def test_a_start_that_is_named_inside_its_run_is_a_link_of_the_chain_if_the_run_ended_with_it(chain):
    first, second = chain
    change(second, "recover", teachers={})
    whole = compared(chain)["chains"]
    for stage in (first.stage(2, "recover"), first.stage(1, "finetune")):
        write(stage.record, {"status": "done"})
        alter(second.config, workflow={"start": str(stage.adapter)})
        is_end = stage == first.last_stage()
        assert build_on_one_another(chain) == is_end
        if is_end:
            assert compared(chain)["chains"] == whole
