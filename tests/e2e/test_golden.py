"""The golden runs of tests/golden.py: equal where results are, and different where one is."""

import json

import golden


def test_runs_that_are_made_twice_have_the_same_hashes(tiny_model, tmp_path):
    first, second = (golden.golden(tmp_path / "work", ["self-distill", "bfloat16"], tiny_model) for _ in "ab")
    assert second == first
    files = {line.split("\t")[0] for line in first}
    for name, stages in (("self-distill", ["01-finetune"]), ("bfloat16", ["01-finetune", "02-recover"])):
        assert {f"said/{name}.json", f"{name}/config.json"} <= files
        for stage in stages:
            folder = f"{name}/stages/{stage}"
            assert {f"{folder}/adapter/adapter_model.safetensors", f"{folder}/metrics.jsonl"} <= files


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
