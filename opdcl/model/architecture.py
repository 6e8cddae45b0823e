"""The numbers of a model's architecture that opdcl needs, read from its transformers config in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Architecture:
    """The decoder's shape. `heads`, `kv_heads` and `head_dim` are 0 without attention."""

    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    kinds: frozenset[str]
    """The kinds of layers: full_attention, sliding_attention and others."""
    window: int | None
    """How many tokens a layer with a sliding window sees, itself included; None without such layers."""
    experts: int
    """Experts per layer of a mixture, otherwise 1."""
    active_experts: int
    """Experts per token."""
    moving_positions: bool
    """Whether the frequencies of its positions change with the length of the text."""

    @property
    def full_attention(self) -> bool:
        """Whether every layer is full attention."""
        return self.kinds == {"full_attention"}

    @property
    def attention_only(self) -> bool:
        """Whether every layer attends, fully or in a window, so that a mask of ours is the whole mask."""
        return self.kinds <= {"full_attention", "sliding_attention"}

    @property
    def key_width(self) -> int:
        """How many numbers one token's keys take in one layer; its values take as many."""
        return self.kv_heads * self.head_dim


def architecture(config: PretrainedConfig) -> Architecture:
    """Return the architecture that a model's config describes."""
    config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None) or 0
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    if getattr(config, "is_encoder_decoder", False):
        kinds = ["encoder_decoder"]
    return Architecture(
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0),
        kinds=frozenset(kinds),
        window=window if "sliding_attention" in kinds else None,
        experts=_first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        moving_positions=_moving(getattr(config, "rope_parameters", None) or {}),
        active_experts=_first(config, "num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"),
    )


def eos_ids(generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that ends a turn: the tokenizer's, and those in the generation config."""
    declared = generation.eos_token_id
    declared = declared if isinstance(declared, list) else [declared]
    return sorted({i for i in [tokenizer.eos_token_id, *declared] if i is not None})


def _moving(rope: dict[str, Any]) -> bool:
    """Return whether rotary positions are of a kind that transformers computes anew as a text grows."""
    per_layer = [part for part in rope.values() if isinstance(part, dict)]
    return any(_moving(part) for part in per_layer) or rope.get("rope_type") in ("dynamic", "longrope")


def _first(config: PretrainedConfig, *names: str) -> int:
    """Return the first of these fields that is a number above 0; 1 without any."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value), 1)
