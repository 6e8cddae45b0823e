"""The numbers of a model's architecture that opdcl needs, read from its transformers config in one place."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig


@dataclass(frozen=True)
class Architecture:
    """The decoder's shape. `heads`, `kv_heads` and `head_dim` are 0 without attention."""

    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    full_attention: bool
    """Whether every layer is full attention, so that a mask of our own is the whole mask."""

    @property
    def key_width(self) -> int:
        """How many numbers one token's keys take in one layer; its values take as many."""
        return self.kv_heads * self.head_dim


def architecture(config: PretrainedConfig) -> Architecture:
    """Return the architecture that a model's config describes."""
    config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding" if getattr(config, "sliding_window", None) else "full_attention"]
    return Architecture(
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0),
        full_attention=set(kinds) == {"full_attention"} and not getattr(config, "is_encoder_decoder", False),
    )
