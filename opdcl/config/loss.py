"""Settings of the distillation loss."""

from __future__ import annotations

from typing import Literal

from opdcl.config.section import Positive, Section, Share

LossKind = Literal["reverse_kl", "forward_kl", "top_k", "policy_gradient", "cross_entropy"]


class LossSection(Section):
    """What a graded token costs."""

    unused = (("k", lambda s: s.kind != "top_k", "unless kind is top_k"),)

    kind: LossKind = "reverse_kl"
    """Divergence between student and teacher. `reverse_kl` and `forward_kl` compare whole distributions,
    `top_k` the teacher's likeliest tokens; `policy_gradient` and `cross_entropy` use only the sampled
    token."""
    k: Positive = 100
    """`top_k`: number of the teacher's likeliest tokens that are compared one by one."""
    unfinished: Share = 1.0
    """Loss weight of truncated completions; 0 drops them."""
