"""A checkpoint's generation_config.json, whatever is in it, does not change what any engine samples."""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from opdcl.deploy.export import answer
from opdcl.sampling.sample import pick_engine, sample
from opdcl.words import Prompt

PROMPT, VOCABULARY, DRAWS = [5, 9, 11, 7], 24, 4000

# The chi-square statistic with 23 degrees of freedom is larger in one of 10,000 repetitions.
LARGEST_CHI_SQUARE = 58.6

# Settings that checkpoints ship, and that transformers would apply to the logits or to the length.
SHIPPED = json.loads(Path(__file__).with_name("generation_config.json").read_text())


class Untouchable:
    """A value that no code may use: comparing it, calculating with it or asking whether it is true fails."""

    def _refuse(self, *_: object) -> None:
        raise AssertionError("a field of the checkpoint's generation config was used")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __len__ = __iter__ = __int__ = _refuse
    __float__ = __index__ = __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __hash__ = object.__hash__


def tiny(family: str, **shape):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **shape,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def hybrid():
    """A model with layers that are not attention, for which `generate` is the engine."""
    return tiny("lfm2", layer_types=["conv", "full_attention", "conv"])


@pytest.fixture(scope="module")
def attention():
    return tiny("llama")


def with_settings(model, settings: dict):
    """Return a copy of a model whose checkpoint ships these generation settings."""
    model = copy.deepcopy(model)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def chi_square(model, engine: str) -> float:
    """Return how far the first tokens of many completions are from the model's own distribution."""
    with torch.no_grad():
        expected_V = model(torch.tensor([PROMPT])).logits[0, -1].softmax(-1) * DRAWS
    rollouts = sample(model, [Prompt(PROMPT)] * DRAWS, max_new_tokens=1, eos_ids=[2], seed=1, engine=engine)
    drawn = torch.tensor([rollout.completion_ids[0] for rollout in rollouts])
    counts_V = torch.bincount(drawn, minlength=VOCABULARY)
    own_N = (expected_V / DRAWS).log()[drawn]
    torch.testing.assert_close(torch.tensor([r.logprobs[0] for r in rollouts]), own_N, atol=1e-4, rtol=0)
    return float(((counts_V - expected_V) ** 2 / expected_V).sum())


@pytest.mark.parametrize("engine", ["slab", "generate"])
def test_every_engine_draws_from_the_models_own_distribution(attention, engine):
    assert chi_square(with_settings(attention, SHIPPED), engine) < LARGEST_CHI_SQUARE


def test_a_hybrid_model_draws_from_its_own_distribution(hybrid):
    model = with_settings(hybrid, SHIPPED)
    assert pick_engine(model) == "generate"
    assert chi_square(model, "auto") < LARGEST_CHI_SQUARE


@pytest.mark.parametrize("setting", SHIPPED)
def test_no_shipped_setting_changes_a_completion(hybrid, setting):
    """Drawn and greedy completions are those of the model without any setting."""
    changed = with_settings(hybrid, {setting: SHIPPED[setting]})
    before = changed.generation_config.to_dict()
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": 8, "eos_ids": [2], "temperature": temperature, "seed": 3}
        plain, other = (sample(model, [Prompt(PROMPT)] * 4, **options) for model in (hybrid, changed))
        assert [r.completion_ids for r in plain] == [r.completion_ids for r in other]
    assert changed.generation_config.to_dict() == before


def test_no_field_of_the_generation_config_is_read(hybrid):
    """All fields that this version of transformers has, those that a later one adds included."""
    fields = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    assert len(fields) > 50
    changed = with_settings(hybrid, dict.fromkeys([*fields, "of_a_custom_sampler"], Untouchable()))
    options = {"max_new_tokens": 8, "eos_ids": [2], "seed": 3}
    plain, other = (sample(model, [Prompt(PROMPT)] * 4, **options) for model in (hybrid, changed))
    assert [r.completion_ids for r in plain] == [r.completion_ids for r in other]


def test_an_export_is_checked_on_plain_greedy_text(attention):
    changed = with_settings(attention, SHIPPED | {"eos_token_id": attention.generation_config.eos_token_id})
    assert answer(changed, PROMPT, 8) == answer(attention, PROMPT, 8)
