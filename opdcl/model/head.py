"""Check that a model's logits are its last hidden states times its head.

Losses, teachers and the closeness to base are computed from the states and the head alone. A bias, a scale or
a soft cap that the model applies besides would be missing from them without a sign.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from opdcl.errors import UsageError

# Tokens that are read, and the largest logit that their states are scaled to: soft caps lie below it.
TOKENS, LARGE = 8, 200.0
# By how much of the largest logit two products may differ: bfloat16 rounds to 1/256.
ROUNDING = 0.02

HINT = "choose another model: docs/questions.md says which families work"


@torch.no_grad()
def refuse_unsupported(model: PreTrainedModel) -> None:
    """Refuse a model whose logits are not its last hidden states times its head.

    A few tokens are read, and their states are scaled before the head sees them, which shows soft caps too.

    Raises:
        UsageError: The logits are something else, or the states are no numbers.
    """
    name = model.config.model_type
    head_VH = _weight(model)
    seen: list[torch.Tensor] = []

    def replace(_module: Any, _inputs: Any, output: Any) -> Any:
        states_1TH = _to_probe(output.last_hidden_state, head_VH, name)
        seen.append(states_1TH)
        output.last_hidden_state = states_1TH
        return output

    hook = model.base_model.register_forward_hook(replace)
    try:
        ids_1T = torch.arange(TOKENS, device=model.device)[None] % len(head_VH)
        logits_1TV = model(input_ids=ids_1T, use_cache=False).logits
    except AttributeError as fault:
        raise UsageError(f"models of type {name} cannot be used: {fault}", HINT) from fault
    finally:
        hook.remove()
    # Some models call a part of their decoder only, past the hook.
    states_1TH = seen[0] if seen else model.base_model(input_ids=ids_1T, use_cache=False).last_hidden_state
    _refuse_difference(name, logits_1TV, states_1TH.to(head_VH.dtype) @ head_VH.T)


def _weight(model: PreTrainedModel) -> torch.Tensor:
    """Return the weight of a model's head; refuse a model without one, and a head with a bias."""
    name, head = model.config.model_type, model.get_output_embeddings()
    if head is None or model.base_model is model:
        raise UsageError(f"models of type {name} cannot be used: they have no output head", HINT)
    if getattr(head, "bias", None) is not None:
        raise UsageError(f"models of type {name} cannot be used: their output head has a bias", HINT)
    return head.weight


def _to_probe(states_1TH: torch.Tensor, head_VH: torch.Tensor, name: str) -> torch.Tensor:
    """Return states: the first are zero, the others give large logits."""
    if not states_1TH.isfinite().all():
        raise UsageError(
            f"this model of type {name} computes NaN or infinity",
            "copy its files again, or --set model.dtype=float32",
        )
    states_1TH = states_1TH.to(head_VH.dtype)
    largest = (states_1TH @ head_VH.T).float().abs().max().clamp(min=1e-6)
    states_1TH = states_1TH * (LARGE / largest).to(states_1TH.dtype)
    states_1TH[:, 0] = 0
    return states_1TH


def _refuse_difference(name: str, logits_1TV: torch.Tensor, product_1TV: torch.Tensor) -> None:
    """Refuse logits that are not, up to a constant per position, the product of states and head."""
    logits, product = logits_1TV.float(), product_1TV.float()
    width = min(logits.shape[-1], product.shape[-1])  # some models leave padding rows out
    logits, product = (x[..., :width] - x[..., :1] for x in (logits, product))
    allowed = ROUNDING * product.abs().max()
    if (logits - product).abs().max() <= allowed:
        return
    factor = float((logits * product).sum() / product.square().sum())
    if logits[:, 0].abs().max() > 0:
        what = "have a bias"
    elif (logits - factor * product).abs().max() <= ROUNDING * logits.abs().max():
        what = f"are scaled by {factor:.3g}"
    else:
        what = "are capped, or changed in another way"
    raise UsageError(
        f"models of type {name} cannot be used: their logits {what}, which the losses would miss", HINT
    )
