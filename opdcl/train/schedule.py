"""The schedule: general and domain steps alternate, each stream in seeded order, epoch after epoch.

In the first general steps base writes the answers, in the last ones the student; in domain steps tuned does.
A student near base answers briefly at first, and grading stubs teaches little: base shows the way before the
student meets its own mistakes (arXiv 2604.13016, 2608.06802). The two streams never share a batch, in which
their gradients counteract (CaMOPD, arXiv 2605.27115), but the weights change by both together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from opdcl.config.recover import RecoverConfig
from opdcl.train.loop import endless
from opdcl.words import STREAMS, Step, StreamName

# A batch of this many sequences leaves little of the hardware idle; the student's go stale as it learns.
FULL_BATCH, STUDENT_BATCH = 96, 64


def plan_steps(config: RecoverConfig, general: int, domain: int) -> list[Step]:
    """Return all steps of a recovery, given how many prompts each stream has."""
    sizes: dict[StreamName, int] = {"general": general, "domain": domain}
    draws = {stream: prompt_order(config, stream, size) for stream, size in sizes.items()}
    period = config.general_per_domain + 1
    streams: list[StreamName] = []
    for index in range(config.steps):
        is_domain = domain and index % period == period - 1
        streams.append("domain" if is_domain else "general")
    by_student = {s: iter(on_policy_steps(streams.count(s), config.on_policy_share(s))) for s in STREAMS}
    steps: list[Step] = []
    for index, stream in enumerate(streams):
        size = config.completions(stream)
        reward = config.reward if stream == "general" else None
        group = reward.group if reward else 1
        drawn = [next(draws[stream]) for _ in range(size // group)]
        prompts = tuple(prompt for prompt in drawn for _ in range(group))
        ends_period = not domain or stream == "domain" or index == config.steps - 1
        steps.append(Step(stream, prompts, next(by_student[stream]), ends_period))
    return steps


def prompt_order(config: RecoverConfig, stream: StreamName, count: int) -> Iterator[int]:
    """Yield the numbers of a stream's prompts without end, each epoch in an order of its own."""
    return endless(count, config.seed + STREAMS.index(stream))


def on_policy_steps(steps: int, share: float) -> list[bool]:
    """Return for each of a stream's steps whether the student writes it: the last ones, a share of them.

    Halves are rounded up, and a share above 0 is at least one of two or more steps.
    """
    count = math.floor(share * steps + 0.5)
    if share and steps > 1:
        count = max(count, 1)
    return [step >= steps - count for step in range(steps)]


def sampled_together(config: RecoverConfig, steps: Sequence[Step], index: int, dynamic: bool) -> list[int]:
    """Return the steps whose completions are sampled with those of step `index`: the next of its kind.

    `dynamic` says whether their teacher changes as the student learns.
    """
    step = steps[index]
    is_stale = step.on_policy or dynamic
    ahead = max((STUDENT_BATCH if is_stale else FULL_BATCH) // len(step.prompts), 1)
    if is_stale and config.sample_ahead != "auto":
        ahead = config.sample_ahead
    kind = step.stream, step.on_policy
    return [i for i in range(index, len(steps)) if (steps[i].stream, steps[i].on_policy) == kind][:ahead]
