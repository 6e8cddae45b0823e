"""Settings of the distillation loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from opdcl.config.section import Positive, Section

LossKind = Literal[
    "reverse_kl", "forward_kl", "jsd", "entropy_switched", "top_k", "policy_gradient", "cross_entropy"
]


class LossSection(Section):
    """What a graded token costs. Only `kind`'s own parameters play a part."""

    kind: LossKind = "reverse_kl"
    """The divergence between student and teacher; `policy_gradient` and `cross_entropy` grade the sampled token alone."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    """`jsd`: 0 is forward KL, 1 reverse KL. Scaled so that one learning rate suits every value."""
    rescaled: bool = True
    """`jsd`: divide by beta (1 - beta). Without it, as in GKD, loss and gradient are a quarter at 0.5 and vanish near the ends."""
    unsure_above: Annotated[float, Field(ge=0)] = 2.0
    """`entropy_switched`: teacher entropy in nats above which forward KL is used."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.0
    """`policy_gradient`: how much of the next token's advantage each token answers for; 0 leaves each to itself."""
    k: Positive = 100
    """`top_k`: how many of the teacher's likeliest tokens count one by one."""
    cap: Annotated[float, Field(gt=0)] | None = None
    """Largest loss of a token in nats; what lies above has no gradient."""
    unfinished: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weight of completions that were cut off at their longest length; 0 drops them."""
