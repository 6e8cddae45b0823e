"""Which prompts come next: general and domain steps alternate, each stream in seeded order, epoch after epoch.

The two streams never share a step: their gradients counteract in one batch (CaMOPD, arXiv 2605.27115).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from opdcl.config.recover import RecoverConfig

Stream = Literal["general", "domain"]


@dataclass(frozen=True)
class Step:
    """One optimizer step: whose teacher grades it, which prompts of that stream it is about, and who answers them.

    Of the answers `keep` are learned from, those with the largest gap between student and teacher.
    """

    stream: Stream
    prompts: tuple[int, ...]
    on_policy: bool
    keep: int


def plan_steps(config: RecoverConfig, general: int, domain: int) -> list[Step]:
    """Lay out all steps beforehand, given how many prompts each stream has."""
    draws = {"general": _endless(general, config.seed), "domain": _endless(domain, config.seed + 1)}
    author = random.Random(config.seed + 2)
    size = {"general": config.rollouts, "domain": config.domain_rollouts or config.rollouts}
    steps: list[Step] = []
    for index in range(config.steps):
        stream: Stream = (
            "domain"
            if domain and index % (config.general_per_domain + 1) == config.general_per_domain
            else "general"
        )
        on_policy = author.random() < config.lmbda
        if stream == "general" and sum(s.stream == "general" for s in steps) < config.teacher_first:
            on_policy = False
        # Of what a teacher wrote there is nothing to choose from: it agrees with itself.
        count = math.ceil(size[stream] * (config.oversample if on_policy else 1))
        alike = config.reward.group if config.reward and stream == "general" else 1
        drawn = [next(draws[stream]) for _ in range(count // alike)]
        prompts = tuple(prompt for prompt in drawn for _ in range(alike))
        steps.append(Step(stream, prompts, on_policy, size[stream]))
    return steps


def _endless(count: int, seed: int):
    """Yield indices below `count`, every one once per epoch, in an order that the seed fixes."""
    shuffle = random.Random(seed)
    while True:
        order = list(range(count))
        shuffle.shuffle(order)
        yield from order
