"""The scores of a suite."""

from opdcl.results.measurements import MeasuredSuite, states_of
from opdcl.results.status import STATES


def suite(rows_of: dict[str, list[dict]]) -> MeasuredSuite:
    for rows in rows_of.values():
        for i, row in enumerate(rows):
            row |= {"prompt": row.get("prompt", f"Prompt {i}"), "scores": {"passed": row.pop("passed", 0)}}
    return MeasuredSuite("instructions", "retention", "passed", {}, rows_of, 0)


def test_rows_of_one_cluster_and_equal_prompts_stay_together():
    rows = [{"cluster": "ada"}, {"prompt": "Why?"}, {"cluster": "ada"}, {"prompt": "Why?"}, {"cluster": "bo"}]
    clusters = suite({"base": rows}).clusters
    assert clusters is not None
    assert clusters.tolist() == [0, 1, 0, 1, 2]
    assert suite({"base": [{"cluster": "ada"}, {"cluster": "bob"}, {}]}).clusters is None
    assert suite({}).clusters is None


def test_the_floor_is_the_best_content_free_answer_of_all_states():
    floors = {"base": [0, 1, 0], "tuned": [0, 0, 0], "recovered": [1, 0, 1]}
    found = suite({state: [{"floor": x} for x in scores] for state, scores in floors.items()}).floor_values()
    assert found is not None
    assert found.tolist() == [1, 0, 1]
    assert suite({"base": [{}, {"floor": 1}]}).floor_values() is None


def test_the_states_carry_the_floor_and_the_clusters():
    rows = {state: [{"passed": 1, "floor": 0, "cluster": "c"} for _ in range(4)] for state in STATES}
    states = states_of([suite(rows)])
    assert states is not None
    assert states.floor is not None
    assert states.clusters is not None
    assert (states.floor.tolist(), states.clusters.tolist()) == ([0] * 4, [0] * 4)


def test_a_group_is_a_suite_of_its_own():
    rows = {s: [{"group": g, "passed": s == "base"} for g in ("seen", "unseen", "seen")] for s in STATES}
    whole = suite(rows)
    assert whole.groups == ["seen", "unseen"]
    seen = whole.only("seen")
    assert [len(seen.rows[state]) for state in STATES] == [2, 2, 2]
    assert (seen.values("base").tolist(), seen.values("tuned").tolist()) == ([1, 1], [0, 0])
    assert suite({"base": [{}]}).groups == []
