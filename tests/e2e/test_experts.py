"""A mixture of experts through all commands."""

import pytest
import torch
from helpers.command import opdcl
from helpers.synthetic import alter
from helpers.tiny import make_mixture, make_project
from peft import PeftModel
from transformers import AutoModelForCausalLM

from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import RunDir


def logits(model):
    return model.eval()(input_ids=torch.arange(40, 60)[None]).logits.detach()


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def test_a_mixture_is_tuned_recovered_measured_and_exported(family, tiny_model, tmp_path):
    make_mixture(tmp_path / "mixture", tiny_model, family)
    alter(tmp_path / "mixture" / "config.json", output_router_logits=True)  # as TRL saves it
    make_project(tmp_path, tmp_path / "mixture")
    # Random weights may drift.
    opdcl("run", "tiny.yaml", "-o", "out", "--set", "recover.health=false", cwd=tmp_path, code=0)
    run = RunDir(tmp_path / "out")
    base = read_json(run.manifest)["base"]
    assert base["fingerprint_before"] == base["fingerprint_after"]
    steps = read_jsonl(run.stage(2, "recover").metrics)
    assert all(row["mismatch"] == 0 for row in steps if "mismatch" in row)
    for state, folder in run.adapters().items():
        parameters = read_json(folder / "adapter_config.json")["target_parameters"]
        assert "model.layers.1.mlp.experts.down_proj" in parameters, state
    assert opdcl("export", "out", "-o", "merged", cwd=tmp_path).returncode == 0
    adapter = run.adapters()["recovered"]
    reference = PeftModel.from_pretrained(load(tmp_path / "mixture"), str(adapter))
    expected = logits(reference)
    moved = (expected - logits(load(tmp_path / "mixture"))).abs().max()
    assert moved > 0.1
    assert (logits(load(tmp_path / "merged")) - expected).abs().max() < 0.01 * moved
    refused = opdcl("serve", "out", "--vllm", "true", "--dry-run", cwd=tmp_path, code=2)
    assert "vLLM cannot load adapters of stacked experts" in refused.stderr
    server = ("--set", "recover.server.url=http://127.0.0.1:9/v1", "--set", "recover.lmbda=1")
    words = ["run", "tiny.yaml", "-o", "new", "--set", f"start={adapter}", *server, "--dry-run"]
    refused = opdcl(*words, cwd=tmp_path, code=2)
    assert "vLLM cannot load adapters of stacked experts" in refused.stderr
