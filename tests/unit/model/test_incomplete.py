"""Models whose files do not hold all of them: refused by the check before a run, and on loading."""

import json
from pathlib import Path

import pytest
import torch
from helpers.command import opdcl
from helpers.families import SIZES
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from opdcl.config.model import ModelConfig
from opdcl.errors import UsageError
from opdcl.model.load import check_model, load_model

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Families whose files and modules have other names, or whose experts are stacked on loading.
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi3": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_moe": {"num_experts": 4, "head_dim": 16, "mlp_only_layers": [0], **EXPERTS},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}


@pytest.fixture
def broken(tiny_model, tmp_path):
    """Return a function that copies the tiny model with its tensors changed."""

    def make(change):
        for file in tiny_model.iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        tensors = change(load_file(tiny_model / "model.safetensors"))
        save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
        return ModelConfig(id=str(tmp_path), dtype="float32")

    return make


def renamed(old, new):
    return lambda tensors: {name.replace(old, new, 1): value for name, value in tensors.items()}


def without(part):
    return lambda tensors: {name: value for name, value in tensors.items() if part not in name}


def with_bias(tensors):
    return tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}


def shortened(tensors):
    return tensors | {"model.norm.weight": torch.ones(40)}


LOST = r"of \d+ tensors of the model are not in its files, such as "
BROKEN = {
    "one missing": (without("layers.1.mlp.down_proj"), f"1 {LOST}model.layers.1.mlp.down_proj.weight$", ""),
    "no embeddings": (without("embed_tokens"), f"1 {LOST}model.embed_tokens.weight$", ""),
    "PEFT's names": (renamed("model.", "base_model.model.model."), r"the files hold base_model\.", "merge"),
    "torch.compile's names": (renamed("model.", "_orig_mod.model."), r"the files hold _orig_mod\.", "_orig"),
    "PEFT's layers": (
        renamed("down_proj.weight", "down_proj.base_layer.weight"),
        r"the files hold .*down_proj\.base_layer\.weight instead",
        "merge_and_unload",
    ),
    "names of a vision model": (
        renamed("model.", "model.language_model."),
        r"the files hold model\.language_model\.",
        "vision tower",
    ),
    "a bias too many": (with_bias, r"q_proj\.bias, for which its config.json leaves no place", "config.json"),
    "another shape": (shortened, r"model.norm.weight is 40 in its files, and 48 by", "config.json"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_model_that_its_files_do_not_give_whole_is_refused_before_and_on_loading(case, broken):
    change, message, hint = BROKEN[case]
    config = broken(change)
    for check in (check_model, load_model):
        with pytest.raises(UsageError, match=message) as refused:
            check(config)
        assert hint in refused.value.hint


def test_tensors_of_other_parts_are_left_out_with_a_note(broken):
    config = broken(lambda tensors: tensors | {"visual.proj.weight": torch.ones(2)})
    (note,) = check_model(config)
    assert "they are not used" in note
    assert "visual.proj.weight" in note
    load_model(config)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models_of_all_families_are_accepted(family, tied, tmp_path):
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family], tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    config = ModelConfig(id=str(tmp_path), dtype="float32")
    assert check_model(config) == []
    load_model(config)


def test_a_dry_run_refuses_a_missing_tensor_and_pickles(broken, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "Who?", "answer": "Ada."}\n' * 4)
    config = broken(without("layers.1.mlp.down_proj"))
    words = ["finetune", rows, "--base", config.id, "-o", tmp_path / "out", "--dry-run"]
    refused = opdcl(*words, code=2)
    assert "model.layers.1.mlp.down_proj.weight" in refused.stderr
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refused = opdcl(*words, code=2)
    assert "holds its weights as a pickle" in refused.stderr
    assert "safetensors" in refused.stderr


def test_a_file_that_the_index_names_must_be_there(broken):
    config = broken(lambda tensors: tensors)
    folder = config.id
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))
    Path(folder, "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"are missing, such as .*00002-of-00002"):
        check_model(config)
