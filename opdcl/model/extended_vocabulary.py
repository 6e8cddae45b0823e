"""A tuned model with tokens that its base lacks: base uses its embeddings for them, and never predicts them.

The vocabularies are the same up to base's last token, so all divergences from base are over base's tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from opdcl.config.model import ModelConfig
from opdcl.model.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable


def shared_tokenizer(
    base: ModelConfig,
    tuned: ModelConfig | None,
    load: Callable[[ModelConfig], PreTrainedTokenizerBase] = load_tokenizer,
) -> PreTrainedTokenizerBase:
    """Return base's tokenizer, or that of a model tuned from it which has more tokens."""
    tokenizer = load(base)
    if tuned is None or not has_tokenizer(tuned):
        return tokenizer
    own = load(tuned)
    return own if len(own) > len(tokenizer) else tokenizer


def has_tokenizer(tuned: ModelConfig) -> bool:
    """Return whether a tuned model was saved with its tokenizer; a merged one is often saved without."""
    from opdcl.model.adapters import start_files

    place = f"{tuned.id}@{tuned.revision}" if tuned.revision else tuned.id
    folder = start_files(place)[0].parent
    return any(folder.glob("tokenizer*"))


@torch.no_grad()
def read_more_tokens(base_lm: PreTrainedModel, tuned_lm: PreTrainedModel) -> None:
    """Give base's input embeddings the rows that only the tuned model has; base's head is not changed."""
    embeddings = base_lm.get_input_embeddings()
    before_VH, after_VH = embeddings.weight, tuned_lm.get_input_embeddings().weight
    if len(after_VH) > len(before_VH):
        added_NH = after_VH[len(before_VH) :].to(before_VH)
        # Where base ties both, its head keeps the parameter that was shared.
        embeddings.weight = torch.nn.Parameter(torch.cat([before_VH, added_NH]))
        embeddings.num_embeddings = len(after_VH)
