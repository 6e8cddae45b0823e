"""The columns of a batch's tokens in the cache, and which of them each token sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from opdcl.model.architecture import architecture
from opdcl.model.forward import for_attention

# Stands for the position of padding: no token comes after it, so none sees it.
PADDING = 2**30


@dataclass(frozen=True)
class Layout:
    """Rows of a batch, column by column: shared prefix, left padding, the row's own tail, completion."""

    prefix: Sequence[int]
    tails: Sequence[Sequence[int]]

    @property
    def width(self) -> int:
        """How many columns the longest tail takes."""
        return max(len(tail) for tail in self.tails)

    @property
    def end(self) -> int:
        """The column at which the completions start."""
        return len(self.prefix) + self.width

    def positions(self, columns: int) -> torch.Tensor:
        """Return the position of each column's token in its sequence, or PADDING, `(B, columns)`."""
        column_C, start = torch.arange(columns), len(self.prefix)
        padding_B1 = torch.tensor([[self.width - len(tail)] for tail in self.tails])
        shifted_BC = column_C - padding_B1
        return torch.where(column_C < start, column_C, torch.where(shifted_BC < start, PADDING, shifted_BC))


def attention_mask(model, query_BQ: torch.Tensor, key_BS: torch.Tensor) -> torch.Tensor | dict:
    """Return which cached tokens each query sees, `(B, 1, Q, S)`; by kind of layer if a model has several.

    Args:
        model: The model whose layers attend fully or in sliding windows.
        query_BQ: The position of each query, or PADDING, which sees everything and so is never NaN.
        key_BS: The position of each column's token, or PADDING.
    """
    query_B1Q1, key_B11S = query_BQ[:, None, :, None], key_BS[:, None, None]
    visible = key_B11S <= query_B1Q1
    shape = architecture(model.config)
    if shape.window is None:
        return for_attention(model, visible)
    near = for_attention(model, visible & (key_B11S > query_B1Q1 - shape.window))
    if shape.kinds == {"sliding_attention"}:
        return near
    return {"full_attention": for_attention(model, visible), "sliding_attention": near}
