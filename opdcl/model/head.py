"""Read a few tokens to see whether a model's logits are its last hidden states times its head."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from opdcl.errors import UsageError
from opdcl.model.rules import HEAD, LOGITS, OTHER_MODEL, Probe, refuse_broken

# Tokens that are read, and the largest logit that their states are scaled to: soft caps lie below it.
TOKENS, LARGE = 8, 200.0


@torch.no_grad()
def refuse_unsupported(model: PreTrainedModel) -> None:
    """Refuse a model whose logits are not its last hidden states times its head.

    Raises:
        UsageError: The logits are something else, or the states are no numbers.
    """
    subject = f"models of type {model.config.model_type} cannot be used: "
    refuse_broken(HEAD, model, subject)
    try:
        probe = read_probe(model)
    except AttributeError as fault:
        raise UsageError(f"{subject}{fault}", OTHER_MODEL) from fault
    refuse_broken(LOGITS, probe, subject)


def read_probe(model: PreTrainedModel) -> Probe:
    """Let a model read a few tokens; their states are scaled before the head sees them, to show soft caps."""
    head_VH: torch.Tensor = model.get_output_embeddings().weight
    seen: list[torch.Tensor] = []

    def replace(_module: Any, _inputs: Any, output: Any) -> Any:
        states_1TH = _scaled(output.last_hidden_state, head_VH, model.config.model_type)
        seen.append(states_1TH)
        output.last_hidden_state = states_1TH
        return output

    hook = model.base_model.register_forward_hook(replace)
    try:
        ids_1T = torch.arange(TOKENS, device=model.device)[None] % len(head_VH)
        logits_1TV = model(input_ids=ids_1T, use_cache=False).logits.float()
    finally:
        hook.remove()
    # Some models call a part of their decoder only, past the hook.
    states_1TH = seen[0] if seen else model.base_model(input_ids=ids_1T, use_cache=False).last_hidden_state
    product_1TV = (states_1TH.to(head_VH.dtype) @ head_VH.T).float()
    width = min(logits_1TV.shape[-1], product_1TV.shape[-1])  # some models leave padding rows out
    return Probe(*(x[..., :width] - x[..., :1] for x in (logits_1TV, product_1TV)))


def _scaled(states_1TH: torch.Tensor, head_VH: torch.Tensor, name: str) -> torch.Tensor:
    """Return states: the first are zero, the others give large logits."""
    if not states_1TH.isfinite().all():
        hint = "copy its files again, or --set model.dtype=float32"
        raise UsageError(f"this model of type {name} computes NaN or infinity", hint)
    states_1TH = states_1TH.to(head_VH.dtype)
    largest = (states_1TH @ head_VH.T).float().abs().max().clamp(min=1e-6)
    states_1TH = states_1TH * (LARGE / largest).to(states_1TH.dtype)
    states_1TH[:, 0] = 0
    return states_1TH
