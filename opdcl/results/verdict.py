"""The verdict in words."""

from __future__ import annotations

from opdcl.results.format import interval, percent
from opdcl.results.scores import STATES, Suite

# If a smaller share of the domain gain is kept, the verdict says "but only".
MOST_OF_THE_GAIN = 0.9


def verdict(summary: dict, retention: Suite | None, domain: Suite | None) -> str:
    """Return the outcome as one plain sentence."""
    if retention is None or not retention.rows:
        missing = f"suite {retention.name} has no results" if retention else "there is no retention suite"
        return f"Not measured yet: {missing}."
    scores = {s: percent(summary["suites"][retention.name][s]["value"]) for s in retention.rows}
    name = retention.plain
    if not retention.complete:
        missing = " and ".join(s for s in STATES if s not in scores)
        known = ", ".join(f"{s} {score}" for s, score in scores.items())
        return f"Not measured yet: {name} has no result for {missing} (so far: {known})."
    base, tuned, recovered = (scores[s] for s in STATES)
    tail = _domain_clause(summary["domain_retention"], domain)
    if summary["status"] == "no measurable forgetting":
        levels = f"{name} is {base} for base, {tuned} for tuned and {recovered} for recovered"
        return f"No measurable forgetting: {levels}, {why_no_recovery(summary)}, so no R is computed{tail}."
    numbers = f"(base {base}, tuned {tuned}), R = {interval(summary['recovery'])}"
    if summary["status"] == "recovered":
        return f"Recovered: {name} is back to {recovered} {numbers}{tail}."
    if summary["status"] == "partly recovered":
        limit = "measurably above tuned but not demonstrably as good as base"
        return f"Partly recovered: {name} rose to {recovered} {numbers}, which is {limit}{tail}."
    return f"No recovery found: {name} is {recovered} {numbers}, which is not measurably above tuned{tail}."


def _domain_clause(estimate: dict | None, domain: Suite | None) -> str:
    if domain is None or not domain.complete:
        return "; the share of the domain gain that was kept is not measured"
    if estimate is None:
        return f"; the fine-tune's gain on {domain.plain} is not measurable, so no D is computed"
    word = "but only" if estimate["value"] < MOST_OF_THE_GAIN else "and"
    value, low, high = (f"{100 * estimate[k]:.0f}" for k in ("value", "low", "high"))
    return f", {word} {value} % [{low}, {high}] of the domain gain is kept"


def why_no_recovery(summary: dict) -> str:
    """Say why there is no R: a state is missing, the drop is too small, or it may be chance."""
    from opdcl.results import stats

    change = summary["tests"]["tuned_minus_base"]
    if change is None:
        return "base and tuned are not both measured"
    if summary["status"] == "not measured":
        return "recovered is not measured"
    # + 0.0 turns -0.0 into 0.0.
    value, low, high = (round(-100 * change[k], 1) + 0.0 for k in ("value", "high", "low"))
    drop = f"a drop from base to tuned of {value} points [{low}, {high}]"
    if -change["value"] < stats.SMALLEST_DROP:
        return f"{drop}, less than the {100 * stats.SMALLEST_DROP:.0f} that a ratio needs"
    return f"{drop}, whose interval or McNemar test does not exclude zero"


def why_no_domain_retention(domain: Suite | None) -> str:
    """Say why there is no D."""
    if domain is None:
        return "there is no domain suite"
    if not domain.complete:
        return f"{domain.name} is not measured on {', '.join(s for s in STATES if s not in domain.rows)}"
    return "the fine-tune's gain on the domain is not measurably above zero"
