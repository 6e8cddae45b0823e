"""Take what a fine-tune of a whole model changed as a low-rank adapter for its base.

Of all matrices of rank r, the singular value decomposition of a change, cut after r values, is nearest to it
by the sum of squares (Eckart and Young, 1936).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch.nn.functional import pad
from transformers import PreTrainedModel

from opdcl.model.adapter_files import PREFIX
from opdcl.rundir.hashes import ADAPTER


@dataclass(frozen=True)
class Change:
    """What a fine-tune changed in one linear layer, decomposed; N x M is the shape of its weight."""

    layer: str
    left_NK: torch.Tensor
    """The first K left singular vectors, each times its value."""
    right_KM: torch.Tensor
    """The first K right singular vectors."""
    squares: torch.Tensor
    """The squares of all singular values, the largest first; their sum is that of the change."""

    @property
    def kind(self) -> str:
        """The layer's name within its block, such as `q_proj`."""
        return self.layer.rpartition(".")[2]

    def lost(self, rank: int) -> float:
        """Return the sum of squares of what a matrix of this rank leaves out."""
        return float(self.squares[rank:].sum())


@torch.no_grad()
def linear_changes(
    base: PreTrainedModel, tuned: PreTrainedModel, most: int, progress: Callable[[int, int], None]
) -> list[Change]:
    """Return the change of each linear layer but the head, in kinds of layers of which one has changed.

    Both models have the same layers. `most` is the number of singular vectors that are kept; `progress` gets
    the layers done and their number.
    """
    layers = linear_layers(base)
    found = []
    for i, layer in enumerate(layers):
        before, after = base.get_submodule(layer).weight, tuned.get_submodule(layer).weight
        change_NM = after.float() - before.float()
        left, values, right = torch.linalg.svd(change_NM, full_matrices=False)
        left_NK = (left * values)[:, :most].cpu()
        found.append(Change(layer, left_NK, right[:most].cpu(), values.double().square().cpu()))
        progress(i + 1, len(layers))
    changed_kinds = {change.kind for change in found if change.lost(0) > 0}
    return [change for change in found if change.kind in changed_kinds]


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of all linear layers except the head."""
    head = model.get_output_embeddings()
    modules = model.named_modules()
    return [name for name, m in modules if isinstance(m, torch.nn.Linear) and m is not head]


@torch.no_grad()
def other_changes(base: PreTrainedModel, tuned: PreTrainedModel) -> dict[str, float]:
    """Return name -> relative change of each tensor that has changed and is no weight of a linear layer."""
    carried = {f"{layer}.weight" for layer in linear_layers(base)}
    before = dict(base.named_parameters(remove_duplicate=False))
    found = {}
    for name, weight in tuned.named_parameters(remove_duplicate=False):
        if name not in carried and not torch.equal(weight, before[name]):
            change = (weight.float() - before[name].float()).norm()
            found[name] = float(change / before[name].float().norm().clamp(min=1e-12))
    return found


def relative_error(changes: Sequence[Change], rank: int) -> float:
    """Return the norm of what this rank leaves out of some changes, as a share of their norm."""
    whole = sum(change.lost(0) for change in changes)
    lost = sum(change.lost(rank) for change in changes)
    return math.sqrt(lost / whole)


def needed_rank(changes: Sequence[Change], bound: float) -> int:
    """Return the smallest rank whose relative error over all changes is at most `bound`."""
    full = max(len(change.squares) for change in changes)
    for rank in range(1, full):
        if relative_error(changes, rank) <= bound:
            return rank
    return full


def write_extract(changes: Sequence[Change], rank: int, base: str, folder: Path) -> None:
    """Write changes, cut to a rank, as an adapter in PEFT's format for the base of this name.

    The scale is 1. A layer without a change starts as one of a new adapter does: B is zero, A is not.
    """
    weights = {}
    for change in changes:
        missing = max(rank - len(change.right_KM), 0)  # a layer may have fewer rows than the rank
        name = f"{PREFIX}{change.layer}"
        weights[f"{name}.lora_A.weight"] = pad(change.right_KM[:rank], (0, 0, 0, missing)).contiguous()
        weights[f"{name}.lora_B.weight"] = pad(change.left_NK[:, :rank], (0, missing)).contiguous()
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=sorted({change.kind for change in changes}),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    save_file(weights, folder / ADAPTER, metadata={"format": "pt"})
