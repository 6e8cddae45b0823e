"""C and the distances: known numbers, seeds, what is missing, and where they are shown."""

import json

import numpy as np
import pytest
from helpers.synthetic import alter, change, compared, held, measure_states, pages, workflow, write

from opdcl.results.compare import compare_runs, comparison_page, list_runs
from opdcl.results.gates import judge_gates
from opdcl.results.origins import split_seeds
from opdcl.results.render import summarise
from opdcl.results.sections import main_tables
from opdcl.results.summary import Results
from opdcl.rundir.layout import RunDir

N = 40


def store(run, state, distances, prompt="Prompt", **fields):
    """Write a state's distances as a measurement of closeness would."""
    rows = [
        {
            "doc_id": i,
            "prompt": f"{prompt} {i}",
            "response": "one two three four",
            "tokens": 20,
            "ended": True,
            "scores": {"distance": d, "forward": 2 * d, "reverse": 0.0},
        }
        | {key: value(i) for key, value in fields.items()}
        for i, d in enumerate(distances)
    ]
    result = {"role": "closeness", "metric": "distance", "metrics": {}, "floor": {}, "n": len(rows)}
    result["cost"] = {"seconds": 5.0, "tokens": 8, "peak_memory_bytes": 1}
    write(run.eval_result(state, "closeness"), result)
    write(run.eval_samples(state, "closeness"), rows)


def spread(centre, seed=0):
    return (centre * np.random.default_rng(seed).uniform(0.5, 1.5, N)).tolist()


def make(folder, tuned=0.8, recovered=0.2, noise=0.0, seed=0, **recover):
    """Write a run with both suites and closeness; return it."""
    run = RunDir(folder)
    write(run.config, {"workflow": workflow(seed=seed, **recover), "origins": {}})
    measure_states(run, "instructions", (32, 8, 30))
    measure_states(run, "handbook", (4, 36, 36))
    store(run, "base", [noise] * N)
    for number, (state, centre) in enumerate((("tuned", tuned), ("recovered", recovered))):
        if centre is not None:
            store(run, state, spread(centre, 10 * seed + number))
    return run


def test_c_is_the_share_of_the_distance_that_is_gone(tmp_path):
    run = make(tmp_path / "run")
    summary = summarise(run)
    held("run", summary)
    json.dumps(summary, allow_nan=False)
    assert list(summary["suites"]) == ["instructions", "handbook"]
    assert summary["cost"]["eval"]["seconds"] == 75
    found = summary["closeness"]
    tuned, recovered = (np.mean(spread(d, i)) for i, d in enumerate((0.8, 0.2)))
    assert found["n"] == N
    assert found["value"] == pytest.approx(1 - recovered / tuned, abs=1e-5)
    assert found["low"] < found["value"] < found["high"] < 1
    assert found["tuned"]["distance"]["value"] == pytest.approx(tuned, abs=1e-5)
    assert found["tuned"]["forward"]["value"] == pytest.approx(2 * tuned, abs=1e-5)
    assert found["base"]["length"]["value"] == 20
    assert (found["base"]["ended"]["value"], found["base"]["repetition"]["value"]) == (1, 0)
    assert found["seconds"] == 15
    assert found["why"] is None


def test_length_and_ends_at_temperature_1_are_tested_as_an_equivalence(tmp_path):
    run = make(tmp_path / "run")
    same = summarise(run)["closeness"]["writing"]
    assert not same["ended"]["different"]
    assert same["tokens"]["shown"]
    distances = spread(0.2, 1)
    store(run, "recovered", distances, tokens=lambda i: 12 + i % 3, ended=lambda i: i % 2 == 0)
    other = summarise(run)["closeness"]["writing"]
    assert other["tokens"]["value"] == pytest.approx(-0.35, abs=0.01)
    assert other["tokens"]["different"]
    assert other["ended"]["value"] == -0.5


def test_a_model_that_answers_all_prompts_alike_is_seen_beside_base(tmp_path):
    run = make(tmp_path / "run")
    store(run, "base", [0.0] * N, response=lambda i: f"{i} is one and {i} is two")
    store(run, "recovered", spread(0.2, 1), response=lambda i: "It is fine." if i else "No 1")
    found = summarise(run)["closeness"]
    assert found["recovered"]["distinct"]["value"] == pytest.approx(1 / N)
    assert found["base"]["distinct"]["value"] == pytest.approx(3 / 7, abs=1e-5)


@pytest.mark.parametrize(("distance", "c"), [(0.8, 0.0), (0.0, 1.0), (1.6, -1.0)])
def test_tuned_itself_has_c_0_base_1_and_a_model_further_away_less_than_0(tmp_path, distance, c):
    run = make(tmp_path / "run")
    store(run, "recovered", [d * distance / 0.8 for d in spread(0.8)])
    assert summarise(run)["closeness"]["value"] == pytest.approx(c, abs=1e-5)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"recovered": None}, "recovered not measured"),
        ({"tuned": 0.005, "noise": 0.02}, "tuned is not measurably away from base"),
        ({"tuned": 0.2, "noise": 0.2}, "tuned is not measurably away from base"),
    ],
)
def test_there_is_no_c_without_recovered_or_where_tuned_is_base(tmp_path, changed, why):
    run = make(tmp_path / "run", **changed)
    summary = summarise(run)
    found = summary["closeness"]
    assert (found["value"], found["low"], found["high"], found["why"]) == (None, None, None, why)
    assert found["tuned"]["distance"]["value"] >= 0
    assert f"There is no C: {why}." in pages(run)["report.md"]


def test_a_chain_has_the_distance_after_each_step(tmp_path):
    runs = [make(tmp_path / "first", recovered=0.2), make(tmp_path / "second", recovered=0.5)]
    alter(runs[1].config, workflow={"start": str(runs[0].path)})
    distances = [summarise(run)["closeness"]["recovered"]["distance"] for run in runs]
    assert [step["distance"] for step in compared(runs)["steps"]] == distances


def test_c_counts_from_the_floor_where_that_is_nearer_than_tuned(tmp_path):
    run = make(tmp_path / "run", tuned=4.0, recovered=0.2)
    store(run, "base", [0.0] * N, floor=lambda i: 1.0 + 0.01 * (i % 5))
    found = summarise(run)["closeness"]
    tuned, recovered = (np.mean(spread(d, i)) for i, d in enumerate((4.0, 0.2)))
    assert found["floor"] == pytest.approx(1.02)
    assert found["value"] == pytest.approx(1 - recovered / 1.02, abs=1e-5)
    assert found["raw"]["value"] == pytest.approx(1 - recovered / tuned, abs=1e-5)
    store(run, "recovered", [1.02] * N)
    assert summarise(run)["closeness"]["value"] == pytest.approx(0.0, abs=1e-6)
    assert "C (compared with base's answers to unrelated prompts, 1.02 nats)" in pages(run)["report.md"]
    near = make(tmp_path / "near", tuned=0.8)
    store(near, "base", [0.0] * N, floor=lambda i: 1.0)
    found = summarise(near)["closeness"]
    assert found["value"] == found["raw"]["value"]
    assert found["floor"] == 1


def test_the_share_in_the_domains_manner_is_that_of_answers_over_one_nat(tmp_path):
    run = make(tmp_path / "run")
    store(run, "tuned", [1.5] * (N - 4) + [1.0] * 4)
    store(run, "recovered", [1.01] * 2 + [0.1] * (N - 2))
    summary = summarise(run)
    shares = {state: summary["closeness"][state]["domain_manner"] for state in ("base", "tuned", "recovered")}
    found = {state: share["value"] for state, share in shares.items()}
    assert found == {"base": 0.0, "tuned": 0.9, "recovered": 0.05}
    assert shares["recovered"]["low"] < 0.05 < shares["recovered"]["high"]
    assert summary["further"][0].endswith(
        f"nats a token; answered in domain style: 90 % -> 5 % of {N} requests."
    )
    assert "| answered in domain style (above 1 nat per token) | 0 %" in pages(run)["report.md"]


def test_a_distance_is_told_by_its_mean_and_its_median_everywhere(tmp_path):
    """A few answers in domain style make most of a mean, and none of a median."""
    run = make(tmp_path / "run")
    store(run, "recovered", [4.0] * 4 + [0.1] * (N - 4))
    found = summarise(run)["closeness"]["recovered"]
    assert found["distance"]["value"] == pytest.approx(0.49)
    assert found["median"]["value"] == found["median"]["low"] == found["median"]["high"] == 0.1
    shown = {row[0]: row[-1] for row in main_tables(Results(run).summary)[1].rows}
    assert shown["distance to base, mean\nnats per token"].startswith("0.490")
    assert shown["distance to base, median\nnats per token"] == "0.100"
    assert "| distance to base, median (nats per token) |" in pages(run)["report.md"]
    other = make(tmp_path / "other", steps=9)
    arm = compared([run, other])["arms"][0]
    assert arm["closeness"]["recovered"]["median"] == found["median"]
    table = next(
        t for t in comparison_page(compare_runs([run, other])).sections if t.title == "Closeness to base"
    )
    assert [c.split("\n")[0] for c in table.columns[4:]] == ["median", "answered in domain style", "C"]
    assert table.rows[0][4].startswith("0.100")
    assert table.rows[0][5].startswith("10 %")


def test_prompts_on_one_text_count_as_one(tmp_path):
    run = make(tmp_path / "run")
    widths = []
    for texts in (N, N // 4):
        stored = {"base": [0.0] * N, "tuned": [0.8] * N, "recovered": sorted(spread(0.2))}
        for state, distances in stored.items():
            store(run, state, distances, cluster=lambda i, texts=texts: f"text {i * texts // N}")
        found = summarise(run)["closeness"]
        widths.append(found["high"] - found["low"])
    assert widths[1] > 1.7 * widths[0]


def test_a_limit_of_the_distance_is_judged_by_the_whole_interval(tmp_path):
    results = Results(make(tmp_path / "run"))
    found = results.summary.closeness.states["recovered"]["distance"]
    limits = {found.high + 0.01: "passed", found.value: "inconclusive", found.low - 0.01: "missed"}
    for limit, outcome in limits.items():
        (record,) = judge_gates({"max_drop": {"closeness": limit}}, results)
        assert record["outcome"] == outcome


def test_runs_are_listed_with_the_distance_of_their_last_model(tmp_path):
    ends = {make(tmp_path / "whole"): "recovered", make(tmp_path / "tuned", recovered=None): "tuned"}
    listed = {line["run"]: line["distance"] for line in list_runs(tmp_path)[1]}
    for run, state in ends.items():
        assert listed[str(run.path)] == summarise(run)["closeness"][state]["distance"]["value"]


def test_seeds_are_pooled_and_widen_the_interval_as_for_r(tmp_path):
    runs = [make(tmp_path / f"mine-{seed}", recovered=r, seed=seed) for seed, r in enumerate((0.1, 0.2, 0.3))]
    other = make(tmp_path / "other", steps=9)
    comparison = compared([*runs, other])
    rows = {row["name"]: row["closeness"] for row in comparison["arms"]}
    assert set(rows) == {"mine", "other"}
    single = [summarise(run)["closeness"] for run in runs]
    pooled = rows["mine"]
    assert pooled["value"] == pytest.approx(np.mean([c["value"] for c in single]), abs=0.02)
    width = max(c["high"] - c["low"] for c in single)
    assert pooled["high"] - pooled["low"] > 2 * width
    assert pooled["seconds"] == 45


def test_arms_measured_on_other_prompts_are_told_and_not_compared(tmp_path):
    runs = [make(tmp_path / "one"), make(tmp_path / "two", steps=9), make(tmp_path / "three", steps=8)]
    for state in ("base", "tuned", "recovered"):
        store(runs[1], state, spread(0.5), prompt="Another")
        runs[2].eval_result(state, "closeness").unlink()
    comparison = compared(runs)
    found = {row["name"]: row["closeness"] for row in comparison["arms"]}
    assert [name for name, near in found.items() if near] == ["one"]
    assert "two: its closeness to base was measured on other prompts." in comparison["notes"]
    assert not any("three: its closeness" in note for note in comparison["notes"])


def test_its_prompts_do_not_keep_seeds_apart(tmp_path):
    runs = [make(tmp_path / f"mine-{seed}", seed=seed) for seed in (0, 1)]
    change(runs[0], "eval", closeness="requests")
    assert "eval.closeness" not in split_seeds(runs[0])[0]
    assert len(compared(runs)["arms"]) == 1
