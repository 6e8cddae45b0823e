"""A model's architecture is read from its config, whichever fields the family uses."""

import pytest
from transformers import GemmaConfig, LlamaConfig, MambaConfig, MistralConfig, Qwen3Config

from opdcl.model.architecture import architecture

SIZES = {"num_hidden_layers": 3, "vocab_size": 600, "hidden_size": 64}


@pytest.mark.parametrize(
    ("config", "key_width"),
    [
        (LlamaConfig(**SIZES, num_attention_heads=4), 64),
        (LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2), 32),
        (Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=24), 48),
        (GemmaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=1, head_dim=32), 32),
        (MambaConfig(**SIZES), 0),
    ],
    ids=["all heads", "shared keys", "odd heads", "one key head", "no attention"],
)
def test_sizes(config, key_width):
    shape = architecture(config)
    assert (shape.layers, shape.vocabulary, shape.key_width) == (3, 600, key_width)


def test_a_sliding_window_in_any_layer_is_not_full_attention():
    assert architecture(LlamaConfig(**SIZES)).full_attention
    assert not architecture(MistralConfig(**SIZES, sliding_window=3)).full_attention
    mixed = Qwen3Config(**SIZES, layer_types=["full_attention", "full_attention", "sliding_attention"])
    assert not architecture(mixed).full_attention
