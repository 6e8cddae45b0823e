"""One layer with a LoRA or DoRA adapter: its weights, the merged sum, and its pass as one autograd node.

A layer is a linear one, or PEFT's `ParamWrapper` around the stacked weights of experts, which transformers
keeps in 3-D parameters.

LoRA (arXiv 2106.09685, eq. 3): y = x W^T + s (x A^T) B^T. PEFT computes the two terms separately, then
scales and adds them: two more passes over the output and about eight nodes per layer, which is a large part
of a step on small batches. Here the matrix product itself adds the second term, forward and backward. The
result is PEFT's up to rounding.

For experts, PEFT materialises weight + adapter and keeps it for the backward pass: over all layers, a copy of
the model. Here the backward pass computes it again, layer by layer.

DoRA (arXiv 2402.09353) also learns the norm of each output row: W' = m (W + s B A) / ||W + s B A||."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import Linear, ParamWrapper
from peft.utils.integrations import dequantize_module_weight
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from opdcl.config.model import LoraSection
from opdcl.model.architecture import architecture


def base_weight(layer: Linear | ParamWrapper) -> torch.nn.Parameter:
    """Return the frozen weight that a layer's adapters change."""
    return layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight


def describe_adapter(model: PeftModel) -> str:
    """Say how large the student's adapter is."""
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return f"an adapter of rank {model.peft_config['student'].r}, {trained:,} weights to train"


def adapter_weights(layer: Linear | ParamWrapper, name: str) -> list[torch.nn.Parameter]:
    """Return an adapter's weights in a layer: A, B, and the row norms m of DoRA."""
    holders = (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)
    return [holder[name].weight for holder in holders if name in holder]


@torch.no_grad()
def scale(layer: Linear | ParamWrapper, name: str, alpha: float) -> None:
    """Scale an adapter's contribution to a layer by `alpha`: at 0 nothing of it is left.

    The row norms of DoRA move to those of the base in the same proportion.
    """
    _, b_NR, *norms = adapter_weights(layer, name)
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
    for norm_N in adapter_weights(layer, name)[2:]:
        factor_N = norm_N.float() / _row_norms(layer, merged)
        merged *= factor_N if layer.fan_in_fan_out else factor_N[:, None]
    return merged.to(weight.dtype)


def _row_norms(layer: Linear, weight: torch.Tensor) -> torch.Tensor:
    return weight.norm(dim=0 if layer.fan_in_fan_out else 1)


class _LoraLinear(torch.autograd.Function):
    """A layer's pass. The base weight is frozen, so only x, A and B have gradients."""

    @staticmethod
    def forward(ctx, x, scaling, weight_NK, bias_N, a_RK, b_NR):
        ctx.scaling, ctx.shape, ctx.adapter_dtype = scaling, x.shape, a_RK.dtype
        x_MK = x.reshape(-1, x.shape[-1])
        # The adapter is stored in fp32 and multiplied in the base's precision, as autocast does.
        a_RK, b_NR = a_RK.to(x.dtype), b_NR.to(x.dtype)
        low_MR = x_MK @ a_RK.T
        out_MN = torch.nn.functional.linear(x_MK, weight_NK, bias_N)
        ctx.save_for_backward(x_MK, low_MR, weight_NK, a_RK, b_NR)
        return out_MN.addmm_(low_MR, b_NR.T, alpha=scaling).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        x_MK, low_MR, weight_NK, a_RK, b_NR = ctx.saved_tensors
        grad_MN = grad.reshape(-1, grad.shape[-1])
        grad_low_MR = (grad_MN @ b_NR).mul_(ctx.scaling)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_MN @ weight_NK).addmm_(grad_low_MR, a_RK).view(ctx.shape)
        grad_a = (grad_low_MR.T @ x_MK).to(ctx.adapter_dtype)
        grad_b = (grad_MN.T @ low_MR).to(ctx.adapter_dtype).mul_(ctx.scaling)
        return grad_x, None, None, None, grad_a, grad_b


def fuse(model: torch.nn.Module) -> None:
    """Make every plain LoRA layer of `model` run as one node wherever the result is the same."""
    # PEFT nests the wrappers of a module's parameters; the outermost runs them all.
    nested = {id(layer.base_layer) for layer in model.modules() if isinstance(layer, ParamWrapper)}
    for layer in model.modules():
        if isinstance(layer, Linear) and "forward" not in vars(layer):
            layer.forward = _fused_forward(layer, layer.forward)
        if isinstance(layer, ParamWrapper) and "forward" not in vars(layer) and id(layer) not in nested:
            layer.forward = _repeated_forward(layer.forward)


def _fused_forward(layer: Linear, peft_forward):
    def forward(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if args or kwargs or not _is_plain(layer, x):
            return peft_forward(x, *args, **kwargs)
        base, (name,) = layer.get_base_layer(), layer.active_adapters
        a_RK, b_NR = adapter_weights(layer, name)
        out: torch.Tensor = _LoraLinear.apply(x, layer.scaling[name], base.weight, base.bias, a_RK, b_NR)
        return out

    return forward


def _repeated_forward(peft_forward):
    def forward(*args, **kwargs) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return peft_forward(*args, **kwargs)
        return checkpoint(peft_forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return forward


def _is_plain(layer: Linear, x: torch.Tensor) -> bool:
    """Return whether one simple adapter is active, without dropout, and `x` has the base's precision."""
    names = layer.active_adapters
    if layer.disable_adapters or layer.merged or len(names) != 1 or names[0] not in layer.lora_A:
        return False
    name, device = names[0], x.device.type
    return (
        not getattr(layer, "lora_variant", {}).get(name)
        and (isinstance(layer.lora_dropout[name], torch.nn.Identity) or not layer.training)
        and layer.lora_B[name].bias is None
        and not layer.fan_in_fan_out
        and x.dtype == layer.get_base_layer().weight.dtype
        and layer.lora_A[name].weight.dtype in (x.dtype, torch.float32)
        and (not torch.is_autocast_enabled(device) or x.dtype == torch.get_autocast_dtype(device))
    )


# In models with experts, PEFT takes a layer of such a name for the experts themselves and leaves the layer
# out (`peft.utils.transformers_weight_conversion`). Named as the parameter `NAME.weight`, it is kept.
MISTAKEN = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def stacks(model: PreTrainedModel) -> list[str]:
    """Return the names of the experts' parameters, each `(experts, ., .)`; none without a mixture."""
    experts = architecture(model.config).experts
    return [name for name, p in model.named_parameters() if p.ndim == 3 and p.shape[0] == experts]


def adaptable(model: PreTrainedModel) -> list[str]:
    """Return the names of all linear layers except the head, and of the experts' parameters."""
    head, linear = model.get_output_embeddings(), torch.nn.Linear | Conv1D
    layers = [name for name, m in model.named_modules() if isinstance(m, linear) and m is not head]
    return layers + stacks(model)


def is_target(name: str, targets: str | list[str]) -> bool:
    """Return whether `target_modules` means a layer: as in PEFT, a list holds names or endings of names,
    and a string other than `all-linear` is a regular expression."""
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def lora_config(lora: LoraSection, model: PreTrainedModel) -> LoraConfig:
    """Return PEFT's configuration of a new adapter on a model without adapters.

    An expert's rank is r / (experts per token), so a token meets rank r in every layer, as in Schulman et al.
    ("LoRA Without Regret", 2025); the scale alpha / r stays. Routers get no adapter.
    """
    config = LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM"
    )
    if not (experts := set(stacks(model))):
        return config
    names = [name for name in adaptable(model) if is_target(name, lora.target_modules)]
    layers = {n for n in names if n not in experts and n.rpartition(".")[2] not in MISTAKEN}
    parameters = [n if n in experts else f"{n}.weight" for n in names if n not in layers]
    rank = max(1, lora.r // architecture(model.config).active_experts)
    endings = sorted({re.escape(".".join(n.split(".")[-2:])) for n in names if n in experts})
    config.target_modules, config.target_parameters = layers, parameters or None
    config.rank_pattern = dict.fromkeys(endings, rank)
    config.alpha_pattern = dict.fromkeys(endings, lora.alpha * rank / lora.r)
    return config


def stored_config(folder: Path) -> LoraConfig:
    """Return PEFT's configuration of the adapter in a folder, without dropout, which opdcl never uses.

    PEFT has no dropout for the stacked weights of experts, and refuses such an adapter.
    """
    config = LoraConfig.from_pretrained(str(folder))
    config.lora_dropout = 0.0
    return config
