"""Settings of the optimizer, AdamW, which both training stages share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from opdcl.config.section import Section, Share, Weight

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """AdamW: how its learning rate goes, and how its steps are bounded."""

    weight_decay: Weight = 0.0
    """Each step shrinks the weights of the adapter by this times the learning rate, towards base."""
    schedule: Literal["auto", "linear", "cosine", "constant"] = "auto"
    """How the learning rate goes after the warm-up: down to zero on a line or on a cosine, or not at all.
    `auto`: on a cosine in the fine-tune; in the recovery and in `self-distill` it is held, and falls on a
    line in the last quarter."""
    warmup: Share | None = None
    """Share of the steps, the first ones, in which the learning rate rises. Default: 0.05 in the fine-tune,
    0.1 in the recovery and in `self-distill`."""
    max_grad_norm: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Longest gradient, by its norm; a longer one is scaled down to it. 0: no limit."""
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """How much of the running means of gradient and squared gradient each step keeps."""
