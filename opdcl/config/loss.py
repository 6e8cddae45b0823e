"""Settings of the distillation loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from opdcl.config.section import Positive, Section

LossKind = Literal["reverse_kl", "forward_kl", "top_k", "policy_gradient", "cross_entropy"]


class LossSection(Section):
    """What a graded token costs. Only `kind`'s own parameters play a part."""

    kind: LossKind = "reverse_kl"
    """The divergence between student and teacher; `policy_gradient` and `cross_entropy` grade the sampled token alone."""
    k: Positive = 100
    """`top_k`: how many of the teacher's likeliest tokens count one by one."""
    unfinished: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weight of completions that were cut off at their longest length; 0 drops them."""
