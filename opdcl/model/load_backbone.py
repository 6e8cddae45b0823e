"""Load models and adapters from anywhere onto a backbone, and refuse with the reason what does not fit.

Where a tuned model has tokens that its base lacks, base uses its embeddings for them and never predicts
them: all divergences from base are over base's tokens.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from opdcl.config.model import ModelConfig
from opdcl.model.backbone import Backbone, State
from opdcl.model.check_adapter import (
    PREFIX,
    checked_settings,
    copied_weights,
    peft_faults,
    refuse_misfit,
    refuse_other_copies,
)
from opdcl.model.load import load_base, load_model, load_tokenizer

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


def load_backbone(
    config: ModelConfig, tuned: ModelConfig | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> Backbone:
    """Load the base model without an adapter, and beside it the model that was tuned as a whole."""
    # cuBLAS reads this when it is first used.
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    base, tokenizer = load_base(config, tokenizer or shared_tokenizer(config, tuned))
    if tuned is None:
        return Backbone(base, tokenizer)
    model = load_model(tuned)
    read_more_tokens(base, model)
    return Backbone(model, tokenizer, base.requires_grad_(False))


def accept_adapter(backbone: Backbone, folder: Path, state: State) -> None:
    """Attach an adapter from anywhere as `state`.

    Raises:
        UsageError: The adapter does not fit the base model.
    """
    checked_settings(folder)
    refuse_changed_copies(folder, backbone.causal_lm)
    with peft_faults(folder):
        found = backbone.attach(folder, state)
    refuse_misfit(folder, backbone.peft, state, found.missing_keys, found.unexpected_keys)


def refuse_changed_copies(folder: Path, model: PreTrainedModel) -> None:
    """Refuse an adapter whose embeddings or head are not those of the loaded model.

    PEFT would write them over the base's; written over their equals, they change nothing.
    """
    weights = model.named_parameters(remove_duplicate=False)
    named = {PREFIX + name.removeprefix(PREFIX): weight for name, weight in weights}
    refuse_other_copies(folder, {name: named[name].detach().cpu() for name in copied_weights(named)})
