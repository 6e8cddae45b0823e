"""The kinds of prompt that a recovery practised: what the summary and the report say of each."""

import json

import pytest
from helpers.synthetic import measure_states, pages, workflow, write

from opdcl.results.summary import summarise
from opdcl.rundir.layout import RunDir

ENTRIES = {
    "fact": {"name": "short facts", "share": 0.86, "added": False, "lacking": False},
    "open": {"name": "explanations", "share": 0.09, "added": True, "lacking": False},
    "code": {"name": "code", "share": 0.01, "added": False, "lacking": True},
    "long": {"name": "long answers", "share": 0.0, "added": False, "lacking": True},
}
# Kind of each prompt -> its distances in tuned and recovered.
DISTANCES = {"fact": (0.8, 0.2), "code": (0.5, 0.5)}


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    write(run.config, {"workflow": workflow(), "origins": {}})
    measure_states(run, "instructions", (32, 8, 30))
    measure_states(run, "handbook", (4, 36, 36))
    for number, state in enumerate(("base", "tuned", "recovered")):
        rows = [
            {
                **{"doc_id": i, "prompt": f"Prompt {i}", "kind": kind, "response": "a b c d", "tokens": 9},
                "ended": True,
                "scores": {"distance": (0, *DISTANCES[kind])[number] * (1 + i % (4 + number) / 10)},
            }
            for i in range(40)
            for kind in [[*DISTANCES][i % 2]]
        ]
        for row in rows:
            row["scores"] |= {"forward": row["scores"]["distance"], "reverse": 0.0}
        write(run.eval_samples(state, "closeness"), rows)
        result = {"role": "closeness", "metric": "distance", "metrics": {}, "floor": {}, "n": 40}
        write(run.eval_result(state, "closeness"), result)
    return run


def recorded(run, kinds):
    write(run.stage(2, "recover").record, {"stage": "recover", "status": "done", "kinds": kinds})
    return summarise(run)["kinds"]


def test_each_kind_has_its_share_and_its_distances(run):
    found = recorded(run, ENTRIES)
    assert [*found] == [*ENTRIES]
    fact = found["fact"]
    assert fact.items() >= ENTRIES["fact"].items()
    assert fact["n"] == 20
    tuned, recovered = (
        sum(d * (1 + i % period / 10) for i in range(0, 40, 2)) / 20
        for d, period in zip(DISTANCES["fact"], (5, 6), strict=True)
    )
    assert fact["tuned"]["value"] == pytest.approx(tuned)
    assert fact["recovered"]["value"] == pytest.approx(recovered)
    assert fact["c"]["value"] == pytest.approx(1 - recovered / tuned)
    assert (found["open"]["n"], found["open"]["c"]) == (0, None)
    code = found["code"]
    assert code["c"]["value"] == pytest.approx(0, abs=0.1)


def test_the_report_names_the_kinds_that_no_prompt_practised(run):
    recorded(run, ENTRIES)
    text, html = (pages(run)[f"report.{kind}"] for kind in ("md", "html"))
    for page in (text, html):
        assert "What the recovery practised" in page
        assert "Hardly any recovery prompts: code, long answers." in page
    row = next(line for line in text.splitlines() if line.startswith("| short facts"))
    assert "86%" in row
    assert "9%, shipped" in next(line for line in text.splitlines() if line.startswith("| explanations"))


def test_a_recovery_that_recorded_no_kinds_has_no_such_table(run):
    assert summarise(run)["kinds"] == {}
    assert "What the recovery practised" not in pages(run)["report.md"]
    assert json.dumps(summarise(run))
