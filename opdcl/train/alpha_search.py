"""Where the student starts: at a point of the alpha-curve, the tuned adapter scaled down towards base.

From tuned, most steps of a short recovery only leave the place where every answer is a domain answer; from
base, the domain has to be learned anew. Scaling costs a few forward passes (arXiv 2109.01903, 2212.04089).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from opdcl.config.recover import RecoverConfig
from opdcl.train.learner import Learner
from opdcl.types import Prompt, StreamName

# Scales of the adapter that are measured for a start, from tuned, 1, towards base, 0, until less is gained
# than lost; closer together where answers change from the domain's to base's.
BETWEEN = (0.65, 0.5, 0.4, 0.3, 0.2, 0.1)

# Nats per token below which a KL is noise and a share of it says nothing.
KL_NOISE = 1e-3

# Held-out KL of each stream in nats per token.
StreamKl = Mapping[StreamName, float]


class Point(NamedTuple):
    """A point of the curve: the adapter's scale, and the held-out KL of both streams in nats per token."""

    alpha: float
    general_kl: float
    domain_kl: float


def choose_start(
    config: RecoverConfig,
    learner: Learner,
    prompts: Mapping[StreamName, Sequence[Prompt]],
    measure: Callable[[str], StreamKl],
    tuned: StreamKl,
    base: StreamKl,
) -> tuple[float, list[Point]]:
    """Return the scale at which the student starts, and the curve it was chosen from, if one was measured.

    `prompts` are the held-out ones by stream, and `measure` returns the student's held-out KL on them; it
    takes the name of what is measured. `tuned` and `base` are that KL at the ends of the curve.
    """
    wanted = config.start
    if wanted != "auto":
        return wanted, []
    both_streams = all(prompts.values())
    if not both_streams or not (config.method == "interpolate" or lies_between(config, learner)):
        return 1.0, []
    if min(tuned["general"], base["domain"]) < KL_NOISE:  # nothing was forgotten, or learned
        return 1.0, []
    first, last = (Point(alpha, kl["general"], kl["domain"]) for alpha, kl in ((1.0, tuned), (0.0, base)))
    best, curve = first, [first]
    for alpha in BETWEEN:
        with learner.backbone.scaled(alpha):
            kl = measure(f"try start {alpha:g}")
        curve.append(Point(alpha, kl["general"], kl["domain"]))
        # The distance has one valley: general KL falls towards base, ever more slowly, and domain KL rises.
        if distance_left(curve[-1], first, last) > distance_left(best, first, last):
            break
        best = curve[-1]
    return best.alpha, [*curve, last]


def distance_left(point: Point, tuned: Point, base: Point) -> float:
    """Return the share of what was forgotten that is still lost, plus the share of the domain that is.

    Tuned and base have 1 each, unless rows of a stream name the other's teacher. Shares, because a fact is
    lost in one token and costs many nats there, while a habit costs a little in each of a hundred tokens.
    """
    return point.general_kl / tuned.general_kl + point.domain_kl / base.domain_kl


def lies_between(config: RecoverConfig, learner: Learner) -> bool:
    """Return whether a scaled adapter lies between the two teachers, so that a start can be chosen.

    It does if base grades the general stream and tuned the domain, no row names another teacher than these
    two, both streams have steps, there are no contexts and no reward, and the adapter stands on base itself.
    """
    if learner.backbone.base_lm is not None or config.reward or config.method == "general":
        return False
    if not set().union(*learner.teachers.values()) <= {"", "base", "tuned"}:
        return False
    general, domain = config.teacher_of("general"), config.teacher_of("domain")
    bare = general.context is None and domain.context is None
    return bare and general.kind == "base" and domain.kind == "tuned"
