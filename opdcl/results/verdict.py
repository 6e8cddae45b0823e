"""The verdict in words: no word claims more than the numbers show."""

from __future__ import annotations

import math

from opdcl.results.format import interval, percent, points
from opdcl.results.scores import STATES, Suite

# If a smaller share of the domain gain is kept, the verdict says "only".
MOST_OF_THE_GAIN = 0.9

# What the groups of a suite's prompts are called in a sentence.
GROUPS = {"seen": "constraint types that occur in the recovery prompts", "unseen": "others"}

# How an answer can be written badly: what is counted, and the fault.
FAULTS = {"cut": ("answers", "run into the token limit"), "repetition": ("4-grams", "are repetitions")}


def verdict(summary: dict, retention: Suite | None, domain: Suite | None) -> str:
    """Return the outcome in one plain sentence, and in a second one R by group of prompts."""
    if retention is None or not retention.rows:
        missing = f"suite {retention.name} has no results" if retention else "there is no retention suite"
        return f"Not measured yet: {missing}."
    scores = {s: percent(summary["suites"][retention.name][s]["value"]) for s in retention.rows}
    if summary["tests"]["tuned_minus_base"] and not retention.complete:
        return _cost_of_the_fine_tune(summary, retention, scores)
    if not retention.complete:
        missing = " and ".join(s for s in STATES if s not in scores)
        known = ", ".join(f"{s} {score}" for s, score in scores.items())
        return f"Not measured yet: {retention.plain} has no result for {missing} (so far: {known})."
    parts = [
        _retention_clause(summary, retention, scores),
        *writing_clauses(summary["tests"]["writing"], summary["status"]),
    ]
    first = ", but ".join([parts[0], " and ".join(parts[1:])] if parts[1:] else parts)
    domain_clause = _domain_clause(summary["domain_retention"], domain)
    return " ".join([f"{first}; {domain_clause}.", *_group_sentence(summary)])


def _cost_of_the_fine_tune(summary: dict, retention: Suite, scores: dict[str, str]) -> str:
    """Say how base and tuned differ, where nothing is recovered yet."""
    change = summary["tests"]["tuned_minus_base"]
    value, low, high = (points(change[key]) for key in ("value", "low", "high"))
    return (
        f"Not recovered yet: the fine-tune changed {retention.plain} by {value} points [{low}, {high}], "
        f"from {scores['base']} to {scores['tuned']}."
    )


def _retention_clause(summary: dict, retention: Suite, scores: dict[str, str]) -> str:
    name, status = retention.plain, summary["status"]
    levels = f"{name} is {scores['base']} for base, {scores['tuned']} for tuned and "
    levels += f"{scores['recovered']} for recovered"
    if status == "no headroom":
        floor = summary["suites"][retention.name]["floor"]
        reason = (
            f"{retention.floor_is} scores {percent(floor)}, so neither a loss nor a recovery can be shown"
        )
        return f"Base is not well above the floor: {levels}, {reason}"
    if status == "too few prompts":
        return f"Too few prompts to tell: {levels}, {why_no_recovery(summary)}"
    if status == "no measurable forgetting":
        return f"No measurable forgetting: {levels}, {why_no_recovery(summary)}"
    numbers = f"(base {scores['base']}, tuned {scores['tuned']})"
    ratio = (
        f"R = {interval(summary['recovery'])}" if summary["recovery"] else f"no R, {why_no_recovery(summary)}"
    )
    recovered = scores["recovered"]
    if status == "recovered":
        return f"Recovered: {name} is back to {recovered} {numbers}, {_bound(summary)}, {ratio}"
    if status == "partly recovered":
        return f"Partly recovered: {name} rose to {recovered} {numbers}, {_bound(summary)}, {ratio}"
    return f"No recovery found: {name} is {recovered} {numbers}, not measurably above tuned, {ratio}"


def _bound(summary: dict) -> str:
    """Say how far recovered lies below base at most, with 95 % confidence."""
    most = 100 * summary["non_inferiority"]["at_most"]
    return f"at most {most:.1f} points below base" if most > 0 else "measurably above base"


def writing_clauses(tests: dict, status: str) -> list[str]:
    """Say what is wrong with how recovered writes: what is measurably worse, or not shown to be as good."""
    clauses = []
    for name, (noun, fault) in FAULTS.items():
        test = tests[name]
        if not test or test["shown"]:
            continue
        if test["worse"]:
            base, recovered = percent(test["base"]), percent(test["recovered"])
            clauses.append(f"{recovered} of its {noun} {fault} (base {base})")
        elif status == "partly recovered":
            most = f"up to {100 * test['at_most']:.0f} % more of its {noun} than base's"
            clauses.append(f"{most} may {fault.replace('are', 'be', 1)}")
    return clauses


def _group_sentence(summary: dict) -> list[str]:
    """Tell R apart by group of prompts, where it is computed for each of them."""
    ratios = {name: group["recovery"] for name, group in summary["groups"].items()}
    if not ratios or None in ratios.values() or summary["recovery"] is None:
        return []
    first, *rest = (f"{interval(r)} on {GROUPS.get(name, name)}" for name, r in ratios.items())
    return [f"R = {', '.join([first, *rest])}."]


def _domain_clause(estimate: dict | None, domain: Suite | None) -> str:
    if domain is None or not domain.complete:
        return "the share of the domain gain that was kept is not measured"
    if estimate is None:
        return f"the fine-tune's gain on {domain.plain} is not measurable, so no D is computed"
    value, low, high = (f"{100 * estimate[k]:.0f}" for k in ("value", "low", "high"))
    only = "only " if estimate["value"] < MOST_OF_THE_GAIN else ""
    return f"{only}{value} % [{low}, {high}] of the domain gain is kept"


def why_no_recovery(summary: dict) -> str:
    """Say why there is no R: no result, no significant drop, a small one, or a floor that is too near."""
    from opdcl.results import stats

    change, detectable = summary["tests"]["tuned_minus_base"], summary["tests"]["detectable_drop"]
    if change is None:
        return "base and tuned are not both measured"
    if summary["status"] == "not measured":
        return "recovered is not measured"
    if summary["no_recovery_because"] in stats.FLOOR_REASONS.values():
        return summary["no_recovery_because"]
    needed = 100 * stats.SMALLEST_DROP
    # + 0.0 turns -0.0 into 0.0.
    value, low, high = (round(-100 * change[k], 1) + 0.0 for k in ("value", "high", "low"))
    drop = f"a drop from base to tuned of {value} points [{low}, {high}]"
    prompts = summary["suites"][summary["headline"]["retention"]]["n"]
    if summary["status"] == "too few prompts":
        enough = _rounded_up(prompts * (detectable / stats.SMALLEST_DROP) ** 2)
        seen = f"{prompts} prompts show a drop from {100 * detectable:.0f} points on"
        return f"{drop}: {seen}, one of {needed:.0f} points takes about {enough}"
    if summary["status"] == "no measurable forgetting":
        return f"{drop}, where {prompts} prompts would show one of {100 * detectable:.1f}"
    if -change["value"] < stats.SMALLEST_DROP:
        return f"because {drop} is too small for a ratio, which needs {needed:.0f}"
    return f"because base is less than {needed:.0f} points above the floor"


def _rounded_up(number: float) -> int:
    """Round up to two significant digits: an estimate is not more exact."""
    unit = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


def why_no_domain_retention(domain: Suite | None) -> str:
    """Say why there is no D."""
    if domain is None:
        return "there is no domain suite"
    if not domain.complete:
        return f"{domain.name} is not measured on {', '.join(s for s in STATES if s not in domain.rows)}"
    return "the fine-tune's gain on the domain is not measurably above zero"


def split(text: str) -> tuple[str, str]:
    """Split a verdict into its first words and the sentence after them."""
    heading, _, rest = text.partition(": ")
    return (heading, rest[:1].upper() + rest[1:]) if rest else ("Verdict", text)
