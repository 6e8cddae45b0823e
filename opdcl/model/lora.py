"""The arithmetic of one adapted layer, plain LoRA or DoRA: its weights, their scale, and the merged sum.

A layer is a linear one, or PEFT's `ParamWrapper` around the stacked weights of experts.

DoRA (arXiv 2402.09353) also learns the norm of each output row: W' = m (W + s B A) / ||W + s B A||.
"""

from __future__ import annotations

import torch
from peft.tuners.lora.layer import Linear, ParamWrapper
from peft.utils.integrations import dequantize_module_weight


def base_weight(layer: Linear | ParamWrapper) -> torch.nn.Parameter:
    """Return the frozen weight that a layer's adapters change."""
    return layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight


def parts(layer: Linear | ParamWrapper, name: str) -> list[torch.nn.Parameter]:
    """Return an adapter's weights in a layer: A, B, and the row norms m of DoRA."""
    holders = (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)
    return [holder[name].weight for holder in holders if name in holder]


@torch.no_grad()
def scale(layer: Linear | ParamWrapper, name: str, alpha: float) -> None:
    """Scale an adapter's contribution to a layer by `alpha`: at 0 nothing of it is left.

    The row norms of DoRA move to those of the base in the same proportion.
    """
    _, b_NR, *norms = parts(layer, name)
    b_NR.mul_(alpha)
    for norm_N in norms:
        weight = dequantize_module_weight(layer.get_base_layer()).float()
        norm_N.lerp_(_row_norms(layer, weight).to(norm_N.dtype), 1 - alpha)


@torch.no_grad()
def merged_weight(layer: Linear | ParamWrapper, name: str) -> torch.Tensor:
    """Return a layer's base weight plus an adapter, computed in fp32, in the precision of the base."""
    weight = base_weight(layer)
    if isinstance(layer, ParamWrapper) and layer.num_experts > 1:
        # As PEFT does without merging: any difference in rounding can send a token to other experts.
        left, right, scaling = layer.get_delta_factors(name)
        return torch.baddbmm(weight, left, right, alpha=scaling)
    merged = weight.float() + layer.get_delta_weight(name).float()
    for norm_N in parts(layer, name)[2:]:
        factor_N = norm_N.float() / _row_norms(layer, merged)
        merged *= factor_N if layer.fan_in_fan_out else factor_N[:, None]
    return merged.to(weight.dtype)


def _row_norms(layer: Linear, weight: torch.Tensor) -> torch.Tensor:
    return weight.norm(dim=0 if layer.fan_in_fan_out else 1)
