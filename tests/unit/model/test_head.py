"""Models whose logits are more than states times head: refused by name."""

import json
import shutil

import pytest
import torch
from helpers.command import opdcl
from helpers.families import SIZES
from helpers.synthetic import alter
from transformers import AutoConfig, AutoModelForCausalLM

from opdcl.config.model import ModelConfig
from opdcl.errors import UsageError
from opdcl.model.check_model import refuse_unsupported
from opdcl.model.load import check_model

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Family -> its settings, and what its logits have besides; "" for families that opdcl can use.
HEADS = {
    "llama": ({}, ""),
    "qwen3": ({"head_dim": 16}, ""),
    "gemma3_text": ({"head_dim": 16}, ""),
    "mixtral": (EXPERTS, ""),
    "gpt2": ({}, ""),
    "opt": ({"ffn_dim": 96, "word_embed_proj_dim": 64}, ""),
    "granite": ({"logits_scaling": 8.0}, "scaled by 0.125"),
    "cohere": ({}, "scaled by 0.0625"),
    "gemma2": ({"head_dim": 16}, "capped"),
    "recurrent_gemma": ({"num_hidden_layers": 3, "lru_width": 64}, "capped"),
    "phi": ({}, "bias"),
    "phimoe": ({"lm_head_bias": True, **EXPERTS}, "bias"),
    "gptj": ({"rotary_dim": 8}, "bias"),
}


def config_of(family):
    return AutoConfig.for_model(family, **(SIZES | HEADS[family][0]))


def checked(check, model, reason):
    if not reason:
        check(model)
        return
    with pytest.raises(UsageError, match=reason) as refused:
        check(model)
    assert model.config.model_type in refused.value.message


@pytest.mark.parametrize("family", HEADS)
def test_logits_other_than_states_times_head_are_refused_by_name(family):
    model = AutoModelForCausalLM.from_config(config_of(family)).eval()
    chance, weights = torch.get_rng_state(), [weight.clone() for weight in model.parameters()]
    for dtype in (torch.float32, torch.bfloat16):
        checked(refuse_unsupported, model.to(dtype), HEADS[family][1])
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(weights, model.parameters(), strict=True))


def test_a_cap_that_no_config_names_is_found(loaded, backbone):
    model, plain = backbone.causal_lm, backbone.causal_lm.lm_head.forward
    refuse_unsupported(model)
    model.lm_head.forward = lambda states: 30 * torch.tanh(plain(states) / 30)
    with pytest.raises(UsageError, match="capped"):
        refuse_unsupported(model)


def test_weights_that_are_no_numbers_are_refused(backbone):
    backbone.causal_lm.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(UsageError, match="NaN"):
        refuse_unsupported(backbone.causal_lm)


@pytest.mark.parametrize(("family", "dry"), [("mamba", ["--dry-run"]), ("granite", [])])
def test_a_fine_tune_refuses_them_before_it_starts(family, dry, tiny_model, tmp_path):
    """State-space models already in the dry run, others when the model is loaded."""
    words = AutoConfig.from_pretrained(tiny_model).vocab_size
    small = SIZES | {"vocab_size": words} | ({"logits_scaling": 8.0} if family == "granite" else {})
    if family == "mamba":
        small = {"vocab_size": words, "hidden_size": 64, "num_hidden_layers": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **small)).save_pretrained(tmp_path / "base")
    for file in tiny_model.iterdir():
        if "token" in file.name or "template" in file.name:
            (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "rows.jsonl").write_text('{"question": "Who?", "answer": "Ada."}\n' * 4)
    refused = opdcl("finetune", "rows.jsonl", "--base", "base", "-o", "out", *dry, cwd=tmp_path, code=2)
    assert f"models of type {family}" in refused.stderr


def test_a_model_with_a_vision_tower_is_refused_before_the_fine_tune(tmp_path):
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = SIZES | {"head_dim": 16}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="models of type gemma3 have a vision tower"):
        check_model(ModelConfig(id=str(tmp_path)))


# Field -> a value that is not possible.
IMPOSSIBLE = {
    "hidden_size": "x",
    "num_hidden_layers": 10**12,
    "vocab_size": -1,
    "head_dim": 10**12,
    "num_key_value_heads": 3.5,
    "hidden_act": "nosuch",
    "rope_parameters": 7,
    "text_config": [1],
    "layer_types": 7,
    "quantization_config": "x",
    "model_type": None,
    "dtype": 7,
}


@pytest.mark.parametrize("field", [*IMPOSSIBLE, "no object"])
def test_a_malformed_model_configuration_is_refused_in_a_sentence(field, tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text()) | {field: IMPOSSIBLE.get(field)}
    file.write_text("[1]" if field == "no object" else json.dumps(settings))
    (tmp_path / "rows.jsonl").write_text('{"question": "Who?", "answer": "Ada."}\n' * 4)
    words = ["finetune", "rows.jsonl", "--base", tmp_path, "-o", "out", "--dry-run"]
    refused = opdcl(*words, cwd=tmp_path, code=2)
    assert f"model '{tmp_path}'" in refused.stderr
    assert "OPDCL_DEBUG" not in refused.stderr


def test_a_fine_tune_on_a_template_without_an_end_is_refused_before_it_starts(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        end = {"eos_token": "<|endoftext|>"} if name == "tokenizer_config.json" else {"eos_token_id": 0}
        alter(tmp_path / name, **end)
    (tmp_path / "rows.jsonl").write_text('{"question": "Who?", "answer": "Ada."}\n' * 4)
    words = ["finetune", "rows.jsonl", "--base", tmp_path, "-o", "out"]
    for more in (["--dry-run"], []):
        refused = opdcl(*words, *more, cwd=tmp_path, code=2)
        assert "ends an answer with" in refused.stderr
    assert not (tmp_path / "out").exists()
