"""A model that was tuned as a whole becomes an adapter: the best one of its rank, or a refusal."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from helpers.adapters import made_by_peft
from helpers.command import opdcl
from helpers.tiny import make_project
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import opdcl as api
from opdcl.model.extract import linear_changes, needed_rank, other_changes, relative_error, write_extract
from opdcl.rundir.files import read_json

TARGETS = ["q_proj", "k_proj", "up_proj"]
RECOVER = "recover.steps=2 recover.rollouts=4 recover.max_new_tokens=6 recover.validation_prompts=2"
FEW = [w for s in f"{RECOVER} recover.health=false model.dtype=float32".split() for w in ("--set", s)]


@pytest.fixture
def project(tiny_model, tmp_path, monkeypatch):
    """A folder with rows, prompts and `base`."""
    monkeypatch.chdir(make_project(tmp_path, tiny_model))
    shutil.copytree(tiny_model, tmp_path / "base")
    return tmp_path


@pytest.fixture
def merged(loaded, project):
    """`merged`: base with an adapter of rank 3, as another program has merged it."""
    adapter = made_by_peft(loaded, project / "theirs", r=3, lora_alpha=6, target_modules=TARGETS)
    whole = PeftModel.from_pretrained(copy.deepcopy(loaded.causal_lm), str(adapter)).merge_and_unload()
    whole.save_pretrained(project / "merged")
    return from_disk("merged")


def from_disk(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(model):
    return model(input_ids=torch.arange(40, 60)[None]).logits.detach()


def changes_of(base, tuned):
    return linear_changes(base, tuned, 48, lambda done, total: None)


def test_the_change_is_cut_as_numpy_cuts_it(loaded, whole_model, tmp_path):
    tuned = from_disk(whole_model)
    changes = changes_of(loaded.causal_lm, tuned)
    write_extract(changes, 5, "base", tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    lost = whole = 0.0
    for change in changes:
        before, after = (m.get_submodule(change.layer).weight for m in (loaded.causal_lm, tuned))
        difference = (after - before).detach().double().numpy()
        left, values, right = np.linalg.svd(difference, full_matrices=False)
        expected = left[:, :5] * values[:5] @ right[:5]
        name = f"base_model.model.{change.layer}"
        found = weights[f"{name}.lora_B.weight"] @ weights[f"{name}.lora_A.weight"]
        assert np.allclose(found.double().numpy(), expected, atol=1e-5 * values[0])
        lost += np.square(difference - expected).sum()
        whole += np.square(difference).sum()
    assert len(changes) == 14, "seven linear layers in each of two blocks"
    assert relative_error(changes, 5) == pytest.approx(np.sqrt(lost / whole), rel=1e-3)


def test_the_rank_is_the_smallest_within_the_bound(loaded, whole_model):
    changes = changes_of(loaded.causal_lm, from_disk(whole_model))
    for bound in (0.8, 0.3, 0.0):
        rank = needed_rank(changes, bound)
        assert relative_error(changes, rank) <= bound
        assert relative_error(changes, rank - 1) > bound


def test_a_change_of_low_rank_comes_back_exactly(loaded, merged, project):
    changes = changes_of(loaded.causal_lm, merged)
    assert {change.kind for change in changes} == set(TARGETS)
    assert other_changes(loaded.causal_lm, merged) == {}
    assert relative_error(changes, 3) < 1e-4 < relative_error(changes, 2)
    made = opdcl("export", "merged", "--base", "base", "--format", "adapter", "--rank", 3, "-o", "mine")
    assert made.returncode == 0, made.stderr
    by_peft = PeftModel.from_pretrained(copy.deepcopy(loaded.causal_lm), "mine").eval()
    assert torch.allclose(logits(by_peft), logits(merged), atol=1e-3)
    assert (logits(loaded.causal_lm) - logits(merged)).abs().max() > 0.1
    assert "the whole model is 0.000 nats per token from base with the adapter" in made.stdout
    assert read_json(project / "mine" / "adapter_config.json")["base_model_name_or_path"] == "base"


def test_a_rank_above_a_layer_s_own_changes_nothing_more(loaded, merged):
    command = ("export", "merged", "--base", "base", "--format", "adapter", "--rank", 40, "-o", "mine")
    made = opdcl(*command)
    assert made.returncode == 0, made.stderr  # the rows of k_proj are 24
    by_peft = PeftModel.from_pretrained(copy.deepcopy(loaded.causal_lm), "mine").eval()
    assert torch.allclose(logits(by_peft), logits(merged), atol=1e-3)


def test_an_extract_is_recovered_on_one_backbone(merged, project):
    offered = opdcl("recover", "merged", "--base", "base", "--prompts", "prompts.jsonl", "--dry-run")
    command = "opdcl export merged --base base --format adapter -o ADAPTER"
    assert command in offered.stderr + offered.stdout
    made = opdcl("export", "merged", "--base", "base", "--format", "adapter", "-o", "mine", "--json")
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert found["rank"] <= 3
    assert found["relative_error"] <= 0.2
    assert set(found["kinds"]) == set(TARGETS)
    assert found["distance"]["adapter"] < found["distance"]["base"] / 2
    words = ("--base", "base", "--prompts", "prompts.jsonl", "--domain", "rows.jsonl", *FEW)
    recovered = opdcl("recover", "mine", *words)
    assert recovered.returncode == 0, recovered.stderr
    assert "beside" not in recovered.stderr, "one model is loaded"
    adapter = read_json(project / "runs/mine/stages/02-recover/adapter/adapter_config.json")
    assert (adapter["r"], set(adapter["target_modules"])) == (found["rank"], set(TARGETS))


def refused(*words):
    done = opdcl("export", *words, "-o", "mine")
    assert done.returncode == 2, done.stderr
    return done.stderr


EXTRACT = ("--base", "base", "--format", "adapter")


def test_what_no_adapter_carries_is_named_and_left_out_only_on_request(whole_model, project):
    problem = refused(whole_model, *EXTRACT)
    assert "is not base with an adapter: it has other embed_tokens.weight (1, by up to " in problem
    assert "input_layernorm.weight (2, by up to " in problem
    assert f"opdcl recover {whole_model} --base base repairs it as it is" in problem
    made = opdcl("export", whole_model, *EXTRACT, "--rank", 12, "-o", "mine")
    assert made.returncode == 0, made.stderr
    assert "warning: left out are other embed_tokens.weight (1, by up to " in made.stderr
    again = api.export(whole_model, "again", format="adapter", base="base", rank=12, quiet=True)
    assert {"model.embed_tokens.weight", "model.norm.weight"} < again.data["left_out"].keys()
    weights = load_file("mine/adapter_model.safetensors")
    assert all("lora_" in name for name in weights)


def test_too_high_a_rank_is_refused_with_what_a_lower_one_loses(merged, project):
    torch.manual_seed(0)
    weight = merged.model.layers[0].mlp.down_proj.weight
    weight.data += torch.randn_like(weight)
    merged.save_pretrained("merged")
    assert "an error of 0.2 takes rank " in (problem := refused("merged", *EXTRACT))
    assert "--rank 12 leaves " in problem
    assert not (project / "mine").exists()


def test_what_is_no_whole_model_or_not_its_own_is_refused(merged, loaded, project):
    assert "does not name its base" in refused("merged", "--format", "adapter")
    assert "merged is a model folder: it holds no adapter" in refused("merged", "--base", "base")
    assert "no linear layer of base differs" in refused("base", *EXTRACT)
    assert "--rank is for the adapter of a model that was fine-tuned as a whole" in refused(
        "theirs", "--rank", 4
    )
    config = copy.deepcopy(loaded.causal_lm.config)
    config.intermediate_size = 40
    AutoModelForCausalLM.from_config(config).save_pretrained("narrow")
    problem = refused("narrow", *EXTRACT)
    assert "narrow has another shape than base: model.layers.0.mlp.down_proj.weight is 48 x 40" in problem
