"""Check that a model's logits are its last hidden states times its head.

Losses, teachers and the closeness to base are computed from the states and the head alone. A bias, a scale or
a soft cap that the model applies besides would be missing from them without a sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from opdcl.errors import UsageError

# Tokens that are read, and the largest logit that their states are scaled to: soft caps lie below it.
TOKENS, LARGE = 8, 200.0
# By how much of the largest logit two products may differ: bfloat16 rounds to 1/256.
ROUNDING = 0.02
# Rows of a small head that stands for the real one where the model has no weights.
ROWS = 64

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


@torch.no_grad()
def refuse_unsupported_kind(bare: PreTrainedModel) -> None:
    """Refuse, as `refuse_unsupported`, a model without weights; it gets another head.

    Its decoder is not run: given states take the place of what it returns. A model that needs more than those
    is left to the check on loading.

    Raises:
        UsageError: The logits are not the last hidden states times the head.
    """
    width = _weight(bare).shape[1]
    chance = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(width, ROWS, bias=False, dtype=torch.float32)
    head.weight.copy_(torch.randn(ROWS, width, generator=chance))
    states_1TH = torch.randn(1, TOKENS, width, generator=chance)
    states_1TH = _to_probe(states_1TH, head.weight, bare.config.model_type)
    bare.set_output_embeddings(head)
    body: Any = bare.base_model
    body.forward = _returns(states_1TH)
    try:
        logits_1TV = bare(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False).logits
    except Exception:  # whatever else its forward pass needs
        return
    if logits_1TV.device.type == "meta":  # it called a part of its decoder only
        return
    _refuse_difference(bare.config.model_type, logits_1TV, states_1TH @ head.weight.T)


class _Output(dict):
    """What a decoder returns: the last hidden states; all else is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return [*self.values()][key] if isinstance(key, int | slice) else self.get(key)


def _returns(states_1TH: torch.Tensor) -> Callable[..., _Output]:
    return lambda *_, **__: _Output(last_hidden_state=states_1TH)


def _weight(model: PreTrainedModel) -> torch.Tensor:
    """Return the weight of a model's head; refuse a model without one, and a head with a bias."""
    name, head = model.config.model_type, model.get_output_embeddings()
    if head is None or model.base_model is model:
        raise UsageError(f"models of type {name} cannot be used: they have no output head", HINT)
    if getattr(head, "bias", None) is not None:
        raise UsageError(f"models of type {name} cannot be used: their output head has a bias", HINT)
    return head.weight


def _to_probe(states_1TH: torch.Tensor, head_VH: torch.Tensor, name: str) -> torch.Tensor:
    """Return states of which the first are zero, and the others give large logits."""
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
