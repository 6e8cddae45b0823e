"""Models whose logits are more than states times head: refused by name, with and without their weights."""

import pytest
import torch
from helpers.command import opdcl
from transformers import AutoConfig, AutoModelForCausalLM

from opdcl.errors import UsageError
from opdcl.model.head import refuse_unsupported, refuse_unsupported_kind

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
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
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(config_of(family))
    checked(refuse_unsupported_kind, bare, HEADS[family][1])
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


@pytest.mark.parametrize("command", ["finetune", "eval"])
@pytest.mark.parametrize("family", ["granite", "mamba"])
def test_the_dry_run_of_a_fine_tune_and_of_an_evaluation_refuses_them(family, command, tiny_model, tmp_path):
    small = SIZES | {"vocab_size": 49152} | ({"logits_scaling": 8.0} if family == "granite" else {})
    if family == "mamba":
        small = {"vocab_size": 49152, "hidden_size": 64, "num_hidden_layers": 2}
    for folder in ("base", "tuned"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **small)).save_pretrained(
            tmp_path / folder
        )
        for file in tiny_model.iterdir():
            if "token" in file.name or "template" in file.name:
                (tmp_path / folder / file.name).write_bytes(file.read_bytes())
    (tmp_path / "rows.jsonl").write_text('{"question": "Who?", "answer": "Ada."}\n' * 4)
    words = {
        "finetune": ["finetune", "--data", "rows.jsonl", "--model", "base"],
        "eval": ["eval", "tuned", "--base", "base", "--retention", "instructions"],
    }
    refused = opdcl(*words[command], "-o", "out", "--dry-run", cwd=tmp_path)
    assert refused.returncode == 2
    assert f"models of type {family}" in refused.stderr
