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


def test_a_hash_depends_on_results_and_not_on_times_or_the_order_of_a_set(tmp_path):
    for folder in ("run", "said"):
        (tmp_path / folder).mkdir()

    def lines_of(loss=1.0, seconds=2.5, layers=("k_proj", "v_proj")):
        (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"loss": loss, "seconds": seconds}) + "\n")
        (tmp_path / "run" / "adapter_config.json").write_text(json.dumps({"target_modules": layers}))
        cost = {"recover": {"tokens": 3, "seconds": seconds}}
        (tmp_path / "said" / "run.json").write_text(json.dumps({"cost": cost}))
        return [*golden.hashes(tmp_path, "run")]

    found = lines_of()
    assert len(found) == 3
    assert found == lines_of(seconds=9.5) == lines_of(layers=("v_proj", "k_proj"))
    assert found != lines_of(loss=1.1)
    assert found != lines_of(layers=("v_proj",))
