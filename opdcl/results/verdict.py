"""The verdict in words."""

from __future__ import annotations

from opdcl.results.format import interval, percent
from opdcl.results.scores import STATES, Suite

# Below this share of the domain gain a verdict says "but only": recovery was paid for with the domain.
MOST_OF_THE_GAIN = 0.9


def verdict(summary: dict, retention: Suite | None, domain: Suite | None) -> str:
    """Say the outcome in one plain sentence."""
    if retention is None or not retention.rows:
        missing = f"suite {retention.name} has no results" if retention else "there is no retention suite"
        return f"Not measured yet: {missing}."
    scores = {s: percent(summary["suites"][retention.name][s]["value"]) for s in retention.rows}
    what = retention.plain
    if not retention.complete:
        missing = " and ".join(s for s in STATES if s not in scores)
        known = ", ".join(f"{s} {score}" for s, score in scores.items())
        return f"Not measured yet: {what} has no result for {missing} (so far: {known})."
    base, tuned, recovered = (scores[s] for s in STATES)
    tail = _domain_clause(summary["domain_retention"], domain)
    if summary["status"] == "no measurable forgetting":
        return (
            f"No measurable forgetting: {what} is {base} for base, {tuned} for tuned and {recovered} for recovered, "
            f"{why_no_recovery(summary)}, so no R is computed{tail}."
        )
    ratio = f"R = {interval(summary['recovery'])}"
    match summary["status"]:
        case "recovered":
            return f"Recovered: {what} is back to {recovered} (base {base}, tuned {tuned}), {ratio}{tail}."
        case "partly recovered":
            return (
                f"Partly recovered: {what} rose to {recovered} (base {base}, tuned {tuned}), {ratio}, "
                f"which is measurably above tuned but not shown to be as good as base{tail}."
            )
    return (
        f"Recovery is not shown: {what} is {recovered} (base {base}, tuned {tuned}), {ratio}, "
        f"which is not measurably above tuned{tail}."
    )


def _domain_clause(kept: dict | None, domain: Suite | None) -> str:
    if domain is None or not domain.complete:
        return "; what is left of the domain gain is not measured"
    if kept is None:
        return f"; the fine-tune's gain on {domain.plain} is not measurable, so no D is computed"
    word = "but only" if kept["value"] < MOST_OF_THE_GAIN else "and"
    span = f"[{100 * kept['low']:.0f}, {100 * kept['high']:.0f}]"
    return f", {word} {100 * kept['value']:.0f} % {span} of the domain gain is kept"


def why_no_recovery(summary: dict) -> str:
    """Say why no R is printed: the drop is too small, or it is not distinguishable from none."""
    from opdcl.results import stats

    change = summary["tests"]["tuned_minus_base"]
    if change is None:
        return "base and tuned are not both measured"
    if summary["status"] == "not measured":
        return "recovered is not measured"
    value, low, high = (
        round(-100 * change[k], 1) + 0.0 for k in ("value", "high", "low")
    )  # + 0.0: never "-0.0"
    drop = f"a drop from base to tuned of {value} points [{low}, {high}]"
    if -change["value"] < stats.SMALLEST_DROP:
        return f"{drop}, less than the {100 * stats.SMALLEST_DROP:.0f} that a ratio needs"
    return f"{drop}, whose interval or McNemar test does not exclude zero"


def why_no_domain_retention(domain: Suite | None) -> str:
    """Say why no D is printed, where none is."""
    if domain is None:
        return "there is no domain suite"
    if not domain.complete:
        return f"{domain.name} is not measured on {', '.join(s for s in STATES if s not in domain.rows)}"
    return "the fine-tune's gain on the domain is not measurably above zero"
