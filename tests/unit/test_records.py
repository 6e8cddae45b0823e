"""Every measured number in the pages comes from a record: benchmarks/records.py and benchmarks/proof.py."""

import json
import sys

import pytest
from helpers.command import ROOT
from helpers.scripts import load_script
from helpers.synthetic import measure_fully, workflow, write

from opdcl.rundir.layout import RunDir

# The pages that a person writes; docs/reliability.md is written as a whole.
NUMBERS = ["ablation", "people", "defaults", "throughput", "scaling", "engines", "teachers", "sabotage"]


def script(name: str):
    return load_script(ROOT / "benchmarks" / f"{name}.py")


@pytest.fixture(scope="module")
def records():
    return script("records")


@pytest.mark.parametrize("page", script("records").PAGES)
def test_every_measured_number_of_a_page_is_in_its_record(records, page):
    assert records.find_faults((ROOT / page).read_text(encoding="utf-8")) == []


def test_the_page_of_faults_is_the_one_that_its_script_writes(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "reliability"))
    reliability = script("reliability/__main__")
    record = json.loads((ROOT / "benchmarks" / "reliability.json").read_text(encoding="utf-8"))
    reliability.write_page(record, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs" / "reliability.md").read_text()


@pytest.mark.parametrize("name", NUMBERS)
def test_each_record_is_used(records, name):
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in records.PAGES)
    marks = records.TABLE.findall(text), records.MARK.findall(text)
    used = {"throughput": "throughput", "growth-rows": "scaling"}
    tables = {used.get(table, table) for table in marks[0]}
    assert name in tables or any(f"benchmarks/{name}.json" in rest for _, rest in marks[1])


@pytest.mark.parametrize(
    "sentence",
    [
        "It scored 41.2 % [35.9, 46.8].",
        "R = 0.91 came back.",
        "A step took 20.0 s.",
        "KL fell to 3 nats.",
        "It writes 164 tokens/s.",
        "| arm | 0.25 |",
        "This takes **0.45** times the time.",
    ],
)
def test_a_measured_number_without_a_record_is_a_fault(records, sentence):
    assert len(records.find_faults(f"First words.\n\n{sentence}\n\nLast words.")) == 1
    assert records.find_faults(f"<!-- no record: definitions -->\n\n{sentence}") == []


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [
        ("`slab` wrote 164 tokens/s on 100 prompts.", []),
        ("`slab` wrote 165 tokens/s on 100 prompts.", ["165 is not in record.json"]),
        ("It passes 41.2 %, 8,863 tokens, in 2.97 GB.", []),
        ("It passes 41.3 %, 8,864 tokens, in 2.98 GB.", ["41.3", "8,864", "2.98"]),
        ("The rest is 1.2e-5 and -0.5.", []),
        ("The rest is 1.3e-5 and -0.6.", ["1.3e-5", "-0.6"]),
    ],
)
def test_a_number_that_differs_from_its_record_is_a_fault(records, tmp_path, sentence, wrong):
    values = {
        "rate": 164.396,
        "pass": 0.41234,
        "tokens": 8863,
        "bytes": 2971869184,
        "gap": 1.23e-5,
        "low": -0.5,
    }
    write(tmp_path / "record.json", {"a": [values], "b": 165})
    text = f"<!-- record: record.json a/0; given 100 -->\n\n{sentence}"
    faults = records.find_faults(text, tmp_path)
    assert [fault.startswith(start) for fault, start in zip(faults, wrong, strict=True)] == [True] * len(
        wrong
    )


def test_a_table_that_was_changed_by_hand_is_a_fault(records):
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    changed = text.replace("| opdcl | 20.0 |", "| opdcl | 10.0 |")
    assert changed != text
    assert records.find_faults(changed) == ["table throughput is out of date: make records"]
    assert records.with_tables(changed) == text


# -- the proof


@pytest.fixture
def runs(tmp_path) -> list[RunDir]:
    """Three seeds: base passes 32 of 40 prompts, tuned 8, recovered 26, 28 and 30, the best floor 12."""
    made = []
    for seed, passed in enumerate((26, 28, 30)):
        run = RunDir(tmp_path / f"s{seed}")
        content = workflow(seed=seed)
        write(
            run.config,
            {"workflow": content | {"finetune": content["finetune"] | {"seed": seed}}, "origins": {}},
        )
        device = {"name": "two cores", "cores": 2, "dtype": "bfloat16"}
        write(run.manifest, {"command": "opdcl run", "device": device, "seconds": 600 + 60 * seed})
        cost = {"cost": {"peak_memory_bytes": (2 + seed) * 2**30}}
        write(run.stage(2, "recover").record, cost)
        passes = {"base": (range(32), range(4)), "tuned": (range(8), range(36))}
        passes["recovered"] = (range(passed), range(34))
        for state, (retention, domain) in passes.items():
            measure_fully(run, state, "instructions", "retention", set(retention))
            measure_fully(run, state, "handbook", "domain", set(domain))
            samples = run.eval_samples(state, "instructions")
            rows = [json.loads(line) for line in samples.read_text().splitlines()]
            for i, row in enumerate(rows):
                row |= {"group": "seen" if i % 2 else "unseen", "ended": state == "base" or i < 10}
                row["floor"] = float(i < 12)
            write(samples, rows)
        made.append(run)
    return made


def test_the_proof_pools_the_seeds(runs, tmp_path, monkeypatch, records):
    proof = script("proof")
    words = ["proof.py", "quickstart", "cured", *(str(run.path) for run in runs)]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path / "proof.json")])
    proof.main()
    record = json.loads((tmp_path / "proof.json").read_text())
    cell = record["quickstart"]["cured"]
    assert [seeds["recover.seed"] for seeds in cell["seeds"]] == [0, 1, 2]
    assert cell["minutes"] == [10, 11, 12]
    assert cell["peak_memory_gib"] == [2, 3, 4]
    suite = cell["suites"]["instructions"]
    assert (suite["n"], suite["floor"], suite["base"]["value"]) == (40, 0.3, 0.8)
    assert suite["recovered"]["value"] == pytest.approx(28 / 40, abs=1e-6)
    assert suite["recovery"]["value"] == pytest.approx((28 - 12) / (32 - 12), abs=1e-6)
    assert suite["recovery_raw"]["value"] == pytest.approx((28 - 8) / (32 - 8), abs=1e-6)
    assert suite["recovery"]["low"] < suite["recovery"]["value"] < suite["recovery"]["high"]
    assert {name: group["n"] for name, group in suite["groups"].items()} == {"seen": 20, "unseen": 20}
    assert suite["groups"]["unseen"]["recovery"]["value"] == pytest.approx((14 - 6) / (16 - 6), abs=1e-6)
    assert suite["writing"]["base"]["ended"]["value"] == 1
    assert suite["writing"]["recovered"]["ended"]["value"] == 0.25
    assert suite["writing_tests"]["cut"]["worse"]
    kept = cell["suites"]["handbook"]["domain_retention"]
    assert kept["value"] == pytest.approx((34 - 4) / (36 - 4), abs=1e-6)

    monkeypatch.setattr(records, "HERE", tmp_path)
    scores, recovery = records.proof_scores(), records.proof_recovery()
    assert "| quickstart, cured | `instructions` | 40 | 30.0 % | 80.0 % [" in scores
    assert "| quickstart, cured | `instructions` | partly recovered | 0.80 [" in recovery
    assert "| 0.83 [" in recovery
    assert "25.0 % [" in recovery
    assert "(base 100.0 %)" in recovery
    conditions = records.proof_conditions()
    assert conditions.startswith("quickstart, cured: 3 seeds, two cores, 2 cores, bfloat16")
    assert conditions.endswith("10 to 12 minutes each, at most 4.0 GiB.")


def test_the_proof_keeps_other_methods_and_shows_the_last(runs, tmp_path, monkeypatch, records):
    proof, out = script("proof"), tmp_path / "proof.json"
    write(out, {"quickstart": {"present": proof.measure(runs)}})
    monkeypatch.setattr(
        sys, "argv", ["proof.py", "quickstart", "cured", str(runs[0].path), "--out", str(out)]
    )
    proof.main()
    monkeypatch.setattr(records, "HERE", tmp_path)
    assert list(json.loads(out.read_text())["quickstart"]) == ["present", "cured"]
    assert "quickstart, present" not in records.proof_scores()
    assert "quickstart, present" in records.proof_scores(slice(None))


def test_runs_that_are_not_one_arm_are_refused(runs):
    config = json.loads(runs[1].config.read_text())
    config["workflow"]["recover"]["steps"] = 99
    write(runs[1].config, config)
    with pytest.raises(SystemExit, match="seeds only"):
        script("proof").measure(runs)


def test_a_method_without_R_says_why(records):
    suite = {
        "recovery": None,
        "recovery_raw": None,
        "no_recovery_because": "no significant drop",
        "groups": {},
    }
    suite["writing"] = {"base": {}, "recovered": {}}
    suite["status"] = "no measurable forgetting"
    assert records.recovery_cells(suite)[:2] == ["no measurable forgetting", "none: no significant drop"]


def test_without_runs_the_page_says_so(records, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "HERE", tmp_path)
    found = {records.proof_scores(), records.proof_recovery(), records.proof_conditions()}
    assert found == {records.NOT_MEASURED}
