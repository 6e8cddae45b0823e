"""A written model folder states its positions, experts and tokenizer in the words of transformers 4 too."""

import json

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer

from opdcl.model.load import embedded_folder
from opdcl.model.transformers4 import make_portable

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}

# Family, its positions in transformers 5, further settings, and what transformers 4 reads instead.
MODELS = {
    "plain": ("llama", {"rope_theta": 7.0}, {}, {"rope_theta": 7.0}),
    "scaled": ("llama", {"rope_theta": 7.0, **YARN}, {}, {"rope_theta": 7.0, "rope_scaling": YARN}),
    "part of a head": (
        "stablelm",
        {"rope_theta": 7.0, "partial_rotary_factor": 0.5},
        {},
        {"rope_theta": 7.0, "partial_rotary_factor": 0.5},
    ),
    "two kinds of layers": (
        "gemma3_text",
        {"full_attention": {"rope_theta": 7.0, **YARN}, "sliding_attention": {"rope_theta": 9.0}},
        {},
        {"rope_theta": 7.0, "rope_local_base_freq": 9.0, "rope_scaling": YARN},
    ),
    "factors alone": (
        "phi3",
        {"rope_type": "longrope", "rope_theta": 7.0, **FACTORS},
        {"original_max_position_embeddings": 32},
        {"rope_theta": 7.0, "rope_scaling": {"type": "longrope", **FACTORS}},
    ),
    "GPT-NeoX": (
        "gpt_neox",
        {"rope_theta": 7.0, "partial_rotary_factor": 0.25},
        {},
        {"rotary_emb_base": 7.0, "rotary_pct": 0.25},
    ),
    "experts": ("qwen3_moe", {"rope_theta": 7.0}, {"num_experts": 4}, {"rope_theta": 7.0, "num_experts": 4}),
}


@pytest.mark.parametrize("name", MODELS)
def test_positions_are_stated_for_both_versions(tmp_path, name):
    family, rope, further, expected = MODELS[name]
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
    config = AutoConfig.for_model(family, **sizes, **further, rope_parameters=rope)
    config.save_pretrained(tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    assert not expected.keys() <= before.keys()
    make_portable(tmp_path)
    after = json.loads((tmp_path / "config.json").read_text())
    assert {key: after[key] for key in expected} == expected
    assert {key: after[key] for key in before} == before
    read_again = AutoConfig.from_pretrained(tmp_path).rope_parameters
    for settings in (read_again, config.rope_parameters):
        settings.pop("type", None)
    assert read_again == config.rope_parameters


# Newer than the old names, and read wrongly by them; and families of all kinds that keep them.
NEWER = (
    *("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_assistant", "gemma4_unified_text"),
    *("diffusion_gemma", "diffusion_gemma_text", "lfm3", "lfm3_vl"),
)
OLDER = ("llama", "gemma3_text", "phi3", "gpt_neox", "falcon_h1")


def assert_read_alike(family, folder):
    """Compare what transformers reads of a family before and after; return whether it has positions."""
    config = CONFIG_MAPPING[family]()
    if not getattr(config.get_text_config(decoder=True), "rope_parameters", None):
        return False
    config.save_pretrained(folder)
    before = AutoConfig.from_pretrained(folder).get_text_config(decoder=True).to_dict()
    make_portable(folder)
    after = AutoConfig.from_pretrained(folder).get_text_config(decoder=True).to_dict()
    assert {key: after.get(key) for key in before} == before, family
    return True


@pytest.mark.parametrize("family", [*NEWER, *OLDER])
def test_transformers_reads_the_same_positions_from_what_was_written(family, tmp_path):
    assert assert_read_alike(family, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    sections = [written, written.get("text_config", {})]
    old_names = {"rope_theta", "rotary_emb_base"}
    assert any(old_names & section.keys() for section in sections) == (family in OLDER)


@pytest.mark.nightly
def test_transformers_reads_the_same_positions_in_every_family(tmp_path):
    count = 0
    for family in sorted(CONFIG_MAPPING):
        try:
            CONFIG_MAPPING[family]().save_pretrained(tmp_path / "trial")
            AutoConfig.from_pretrained(tmp_path / "trial")
        except Exception:  # it has no settings of its own, or lacks a package: nothing of ours
            continue
        count += assert_read_alike(family, tmp_path / family)
    assert count > 300


def test_a_model_that_its_own_code_reads_has_both_names(tmp_path):
    own = {"model_type": "unheard_of", "rope_parameters": {"rope_theta": 7.0, **YARN}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    make_portable(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {**own, "rope_theta": 7.0, "rope_scaling": YARN}


def test_the_text_model_of_a_vision_model_is_not_forgotten(tmp_path):
    text = {"hidden_size": 64, "rope_parameters": {"full_attention": {"rope_theta": 7.0}}}
    AutoConfig.for_model("gemma3", text_config=text).save_pretrained(tmp_path)
    make_portable(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["rope_theta"] == 7.0


def test_a_tokenizer_has_a_class_that_both_versions_know(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    tokenizer.save_pretrained(tmp_path)
    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    make_portable(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    # A list under its new name is an error in transformers 4.
    assert settings["additional_special_tokens"] == ["<|tool|>"]
    assert "extra_special_tokens" not in settings
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "<|im_start|>user\nCall <|tool|> now.<|im_end|>"
    assert again(text) == tokenizer(text)
    assert again.all_special_tokens == tokenizer.all_special_tokens
