"""States, roles and outcomes in fixed words, which scripts may rely on, and the margins behind them."""

from __future__ import annotations

from enum import StrEnum

STATES = ("base", "tuned", "recovered")
ROLES = ("retention", "domain", "control")
HEADLINE_ROLES = ("retention", "domain")

# Over fewer prompts than this, no text has an interval: it would show a certainty that is not there.
FEWEST_PROMPTS = 10

# Below this drop a ratio of differences is mostly noise, so R is not computed. A suite that finds a drop of
# this size four times in five, and finds none, shows that nothing measurable was forgotten.
SMALLEST_DROP = 0.10

# How far below base "recovered" may lie and still count as non-inferior.
NON_INFERIORITY_MARGIN = 0.035

# The share of base's score that a content-free answer may reach: beyond it, most of the score is no skill.
LARGEST_FLOOR = 0.5

# Of the domain's gain: what is shown to be left if it is "kept", and what cannot be left if it is "lost". The
# first is also the share of the distance to base that is shown to be gone if closeness says "recovered".
MOST_OF_THE_GAIN, HALF_OF_THE_GAIN = 0.9, 0.5

# A request whose answer is further from base than this, in nats per token, is answered in domain style.
DOMAIN_STYLE = 1.0


class Retention(StrEnum):
    """What is shown of the recovery; before it, of the loss."""

    RECOVERED = "recovered"
    PARTLY = "partly recovered"
    NOT_SHOWN = "not shown"
    LOST = "lost"
    NO_FORGETTING = "no measurable forgetting"
    TOO_FEW = "too few prompts"
    NO_HEADROOM = "no headroom"
    NOT_MEASURED = "not measured"


class Domain(StrEnum):
    """What is shown of the domain's gain."""

    KEPT = "kept"
    PARTLY = "partly kept"
    LOST = "lost"
    NOT_SHOWN = "not shown"
    LEARNED = "learned"
    GAIN_NOT_SHOWN = "gain not shown"
    NOT_MEASURED = "not measured"


class NoRatio(StrEnum):
    """Why there is no R; the text is that of the JSON."""

    FLOOR_TOO_HIGH = "base is not well above the floor"
    FLOOR_TOO_NEAR = "base is not shown to be above the floor"
    TOO_FEW = "too few prompts"
    NO_DROP = "no significant drop"
    SMALL_DROP = "the drop is too small for a ratio"
    NOT_MEASURED = "not measured"


# Why a suite shows neither a loss nor a recovery -> the outcome. The floor is too near by its value, or only
# by its interval, which more prompts make narrower.
UNFIT = {
    NoRatio.FLOOR_TOO_HIGH: Retention.NO_HEADROOM,
    NoRatio.FLOOR_TOO_NEAR: Retention.TOO_FEW,
    NoRatio.TOO_FEW: Retention.TOO_FEW,
}

# The status of full success. Instead of one: a score of a headline suite is no number; base is measured
# alone; in a comparison, a run has no recovery, so that it ends with tuned.
BOTH = "recovered and kept"
FAULT = "fault"
ALONE = "base alone"
NO_RECOVERY = "no recovery"


def both_halves(retention: Retention, domain: Domain) -> str:
    """Return the status of a run, from those of its halves."""
    if (retention, domain) == (Retention.RECOVERED, Domain.KEPT):
        return BOTH
    is_open = (retention, domain) == (Retention.NOT_MEASURED, Domain.NOT_MEASURED)
    return retention.value if is_open else f"{retention}, domain {domain}"
