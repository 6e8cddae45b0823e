"""The golden runs of tests/golden.py: equal where results are, and different where one is."""

import json

import golden


def test_a_run_interrupted_in_each_stage_has_the_files_of_one_that_was_not(finished, project):
    golden.make_resumed(project, ["run", "tiny.yaml", "-o", "resumed"])
    whole, resumed = (
        # Of its checkpoints a run keeps the last ones, and an interrupt makes one of its own.
        {line.partition("/")[2] for line in golden.hashes(project, name) if "/trainer/" not in line}
        for name in (finished.name, "resumed")
    )
    assert len(whole) == len(resumed) > 20
    # The commands that it took.
    assert {line.split("\t")[0] for line in whole ^ resumed} == {"manifest.json"}


def test_a_hash_does_not_depend_on_the_order_in_which_peft_writes_a_set(tmp_path):
    found = []
    for layers in (["k_proj", "v_proj"], ["v_proj", "k_proj"], ["v_proj"]):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "adapter_config.json").write_text(json.dumps({"r": 4, "target_modules": layers}))
        found.append([*golden.hashes(tmp_path, "run")])
    assert found[0] == found[1] != found[2]


def test_a_hash_depends_on_results_and_not_on_times(tmp_path):
    def lines_of(loss, seconds):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "said").mkdir(exist_ok=True)
        (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"loss": loss, "seconds": seconds}) + "\n")
        cost = {"recover": {"tokens": 3, "seconds": seconds}}
        (tmp_path / "said" / "run.json").write_text(json.dumps({"cost": cost}))
        return [*golden.hashes(tmp_path, "run")]

    assert len(lines_of(1.0, 2.5)) == 2
    assert lines_of(1.0, 2.5) == lines_of(1.0, 9.5)
    assert lines_of(1.0, 2.5) != lines_of(1.1, 2.5)
