"""Where the student starts: at a point of the alpha-curve, the tuned adapter scaled down towards base.

From tuned, most steps of a short recovery only leave the place where every answer is a domain answer; from
base, the domain has to be learned anew. Scaling costs a few forward passes (arXiv 2109.01903, 2212.04089).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opdcl.distill.schedule import Stream

if TYPE_CHECKING:
    from opdcl.distill.validation import Validation

# Scales that are measured between tuned, 1, and base, 0; closer together where answers change from the
# domain's to base's.
BETWEEN = (0.8, 0.65, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)

# Nats per token below which a KL is noise and a share of it says nothing.
KL_NOISE = 1e-3

# A point of the curve: its `alpha`, and the held-out KL of both streams in nats per token.
Point = dict[str, float]


def choose_start(validation: Validation, tuned: Point, base: Point) -> tuple[float, list[Point]]:
    """Return the scale at which the student starts, and the curve it was chosen from, if one was measured.

    `tuned` and `base` are the held-out KL at the ends of the curve.
    """
    wanted = validation.config.start_wanted
    if wanted != "auto":
        return wanted, []
    if not lies_between(validation) or min(tuned["general_kl"], base["domain_kl"]) < KL_NOISE:
        return 1.0, []
    curve = alpha_curve(validation, tuned, base)
    best = min(curve[:-1], key=lambda point: distance_left(point, tuned, base))
    return best["alpha"], curve


def distance_left(point: Point, tuned: Point, base: Point) -> float:
    """Return the share of what was forgotten that is still lost, plus the share of the domain that is.

    Tuned and base have 1 each. Shares, because a fact is lost in one token and costs many nats there, while a
    habit costs a little in each of a hundred tokens.
    """
    return point["general_kl"] / tuned["general_kl"] + point["domain_kl"] / base["domain_kl"]


def lies_between(validation: Validation) -> bool:
    """Return whether a scaled adapter lies between the two teachers, so that a start can be chosen.

    It does if base alone grades the general stream and tuned alone the domain, both have steps, there are no
    contexts and no reward, and the adapter stands on base itself.
    """
    config = validation.config
    if validation.grader.backbone.base_lm is not None or config.reward or config.method == "general":
        return False
    wanted: dict[Stream, str] = {"general": "base", "domain": "tuned"}
    for stream, kind in wanted.items():
        own = config.teacher_of(stream)
        alone = len(validation.grader.teachers[stream].members) == 1
        if not (validation.prompts[stream] and alone and own.kind == kind and own.context is None):
            return False
    return True


def alpha_curve(validation: Validation, tuned: Point, base: Point) -> list[Point]:
    """Return the held-out KL of the scaled adapter, from tuned to base."""
    curve = [_point(1.0, tuned)]
    for alpha in BETWEEN:
        with validation.grader.backbone.scaled(alpha):
            curve.append(_point(alpha, validation.held_out_kl()))
    return [*curve, _point(0.0, base)]


def _point(alpha: float, kl: dict[str, float]) -> Point:
    return {"alpha": alpha, "general_kl": kl["general_kl"], "domain_kl": kl["domain_kl"]}
