"""The summary of small synthetic runs whose every number is known beforehand."""

import json
import shutil

import pytest
from helpers.synthetic import (
    STRICT,
    N,
    alter,
    change,
    measure,
    measure_fully,
    measure_states,
    pages,
    rewrite_samples,
    workflow,
    write,
)

from opdcl.errors import UsageError
from opdcl.results import intervals
from opdcl.results.render import summarise
from opdcl.results.status import STATES
from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import RunDir


def test_scores_ratios_and_cost_equal_those_worked_out_by_hand(run):
    summary = summarise(run)
    suite = summary["suites"]["instructions"]
    assert [suite[s]["value"] for s in ("base", "tuned", "recovered")] == pytest.approx([0.8, 0.2, 0.7])
    assert suite["base"]["low"] < 0.8 < suite["base"]["high"]
    assert (suite["n"], suite["floor"], suite["metric"], suite["role"]) == (N, 0.05, STRICT, "retention")
    assert summary["recovery"]["value"] == pytest.approx((28 - 8) / (32 - 8), abs=1e-5)
    assert summary["domain_retention"]["value"] == pytest.approx((32 - 4) / (36 - 4))
    assert summary["tests"]["recovered_minus_base"]["value"] == pytest.approx(-0.1)
    assert summary["cost"]["finetune"] == {"seconds": 451.0, "tokens": 123456, "peak_memory_bytes": 3 * 2**30}
    assert summary["cost"]["eval"] == {"seconds": 60.0, "tokens": 6000, "peak_memory_bytes": 2 * 2**30}


def test_the_other_ifeval_metrics_are_there_for_every_state(run):
    metrics = summarise(run)["suites"]["instructions"]["metrics"]
    assert set(metrics) == {"inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc"}
    assert metrics["inst_level_strict_acc"] == pytest.approx({"base": 0.9, "tuned": 0.6, "recovered": 0.85})


def test_the_summary_is_json_and_keeps_its_keys_on_an_empty_run(run, empty, tmp_path):
    whole = summarise(run)
    json.dumps(whole, allow_nan=False)
    shutil.rmtree(run.evals)
    shutil.rmtree(run.path / "stages")
    run.manifest.unlink()
    nothing = summarise(run)
    assert set(nothing) == set(whole)
    assert set(nothing["tests"]) == set(whole["tests"])
    assert set(nothing["suites"]["instructions"]) == set(whole["suites"]["instructions"])
    assert nothing["cost"] == {"finetune": {}, "recover": {}, "eval": {}}
    assert nothing["status"] == "not measured"
    assert nothing["verdict"].startswith("Not measured yet")


def test_an_instruction_level_headline_counts_instructions(run):
    for state in ("base", "tuned", "recovered"):
        alter(run.eval_result(state, "instructions"), metric="inst_level_strict_acc")
    summary = summarise(run)
    assert summary["suites"]["instructions"]["tuned"]["value"] == pytest.approx(0.6)
    assert summary["recovery"]["value"] == pytest.approx(20 / 24, abs=1e-5)


def test_a_fractional_score_is_averaged(run):
    for state, value in (("base", 0.2), ("tuned", 0.75), ("recovered", 0.7)):
        rows = read_jsonl(run.eval_samples(state, "handbook"))
        rows = [r | {"scores": {STRICT: value + (r["doc_id"] % 2) / 10}} for r in rows]
        rewrite_samples(run, state, "handbook", rows)
    assert summarise(run)["suites"]["handbook"]["tuned"]["value"] == pytest.approx(0.8)
    assert "85 %" in pages(run)["report.html"]


def test_only_prompts_that_every_state_answered_are_compared(run):
    measure_fully(run, "tuned", "instructions", 8, n=30)
    summary = summarise(run)
    assert summary["suites"]["instructions"]["n"] == 30
    assert summary["suites"]["instructions"]["base"]["value"] == 1.0
    assert any("10 prompts are left out" in note for note in summary["notes"])


def test_states_measured_on_different_prompts_are_refused(run):
    measure_fully(run, "tuned", "instructions", set(), prompt="something else")
    with pytest.raises(UsageError, match="no prompt in common"):
        summarise(run)


def test_a_group_is_that_of_the_prompt_whatever_rows_of_other_states_say(run):
    rows = read_jsonl(run.eval_samples("base", "instructions"))
    rewrite_samples(run, "base", "instructions", [r | {"group": f"{r['doc_id'] % 2}"} for r in rows])
    groups = summarise(run)["groups"]
    assert {name: found["n"] for name, found in groups.items()} == {"0": N // 2, "1": N // 2}


def test_tasks_of_a_group_that_all_count_from_zero_are_kept_apart(run):
    for state, passes in (("base", 40), ("tuned", 0), ("recovered", 40)):
        row = {"response": "", "target": None, "scores": {STRICT: passes == 40}, "tokens": 1}
        rows = [row | {"doc_id": i, "prompt": f"task {n}, {i}"} for n in ("one", "two") for i in range(20)]
        rewrite_samples(run, state, "instructions", rows)
    assert summarise(run)["suites"]["instructions"]["n"] == 40


def test_the_first_retention_suite_of_the_config_is_the_headline(run):
    change(run, "eval", retention=["instructions", "arithmetic"])
    measure_states(run, "arithmetic", (20, 20, 20))
    measure_states(run, "neighbours", (20, 20, 20))
    summary = summarise(run)
    assert list(summary["suites"]) == ["instructions", "arithmetic", "handbook", "neighbours"]
    assert summary["headline"] == {"retention": "instructions", "domain": "handbook"}
    assert summary["retention_status"] == "partly recovered"


def test_a_base_at_the_floor_gets_a_note(run):
    measure_fully(run, "base", "instructions", {0, 1})
    reason = "base is not measurably above the floor of 5.0 %, the score of"
    assert any(f"{reason} a content-free answer, so" in note for note in summarise(run)["notes"])
    for state in STATES:
        file = run.eval_result(state, "instructions")
        result = read_json(file)
        write(file, result | {"floor": {"chance": max(result["floor"].values(), key=lambda x: x[STRICT])}})
    assert any(f"{reason} a guess, so" in note for note in summarise(run)["notes"])


def began(alpha, score=None):
    start = {"alpha": alpha} | ({"score": score} if score else {})
    return {"step": 0, "validation": {"best": True}, "start": start}


def checked(step, best=True, **found):
    return {"step": step, "loss": 1.0, "validation": {"best": best, **found}}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [{"step": 0, "validation": {"best": True}}, checked(8, best=False)],
            "Recovered is the tuned adapter: no training step came nearer",
        ),
        (
            [began(0.3), {"step": 1, "loss": 1.0}],
            "Recovered is the tuned adapter times 0.3: no training step came nearer",
        ),
        (
            [began(0.3, 1.2), checked(1, score=1.0), checked(2, best=False, score=9.0)],
            "the start alone, the tuned adapter times 0.3, is about as near",
        ),
        (
            [began(0.3, 4.0), checked(1, score=1.0, domain_kept=0.61)],
            "only 61 % of the gap in KL",
        ),  # an earlier version's name
        (
            [began(0.55) | {"validation": {}}, {"step": 1, "validation": {"best": True}}],
            "the tuned adapter times 0.55: no training was done",
        ),
    ],
)
def test_the_recoverys_metrics_give_notes(run, rows, expected):
    write(run.stage(2, "recover").metrics, rows)
    assert any(expected in note for note in summarise(run)["notes"])


def test_a_recovery_without_trouble_has_no_notes(run):
    write(
        run.stage(2, "recover").metrics,
        [
            {"step": 0, "validation": {"best": True}},
            {"step": 1, "mismatch": 0.0, "tokens": 500},
            {"step": 4, "validation": {"best": False, "missed_ends": 0.7}},
            {"step": 8, "validation": {"best": True, "missed_ends": 0.3}},
        ],
    )
    assert not [note for note in summarise(run)["notes"] if note.startswith("Recovery")]


def test_a_prompt_with_more_parts_weighs_more_and_its_parts_stay_together(tmp_path):
    run, metric = RunDir(tmp_path), "inst_level_strict_acc"
    write(run.config, {"workflow": workflow(), "origins": {}})
    measure(run, "base", {"instructions": range(8)}, n=12, metric=metric)
    parts = [[True, True, True] if i % 2 else [i % 3 > 0] for i in range(12)]
    rows = read_jsonl(run.eval_samples("base", "instructions"))
    for row, scores in zip(rows, parts, strict=True):
        row["scores"][metric] = scores
    rewrite_samples(run, "base", "instructions", rows)
    base = summarise(run)["suites"]["instructions"]["base"]
    assert base == vars(intervals.clustered_mean(parts).rounded())
    assert base["value"] == round((18 + 4) / (18 + 6), 6)
    assert base["value"] > sum(map(all, parts)) / 12
