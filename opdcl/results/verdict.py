"""The verdict in words: no word claims more than the numbers show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from opdcl.results import writing
from opdcl.results.format import POINTS, SHARE, interval, percent, points
from opdcl.results.scores import Suite
from opdcl.results.status import (
    FAULT,
    FLOOR_REASONS,
    MOST_OF_THE_GAIN,
    NO_DROP,
    SMALLEST_DROP,
    STATES,
    both_halves,
    by_closeness,
)

# What the groups of a suite's prompts are called in a sentence.
GROUPS = {"seen": "constraint types that occur in the recovery prompts", "unseen": "others"}

# The first words, by the status of each half.
RETENTION = {
    "recovered": "Recovered",
    "partly recovered": "Partly recovered",
    "not shown": "Recovery not shown",
    "no measurable forgetting": "No measurable forgetting",
    "too few prompts": "Too few prompts to tell",
    "no headroom": "Recovery not measured",
}
DOMAIN = {
    "kept": "domain kept",
    "partly kept": "{} of the domain kept",
    "lost": "domain lost",
    "not shown": "domain not shown to be kept",
    "gain not shown": "domain gain not shown",
    "not measured": "domain not measured",
}

# How far from base's the answers are, in words; `{}` is recovered's share, then base's.
FAULTS = {
    "ended": "{} end before the token limit (base {})",
    "repetition": "{} of their 4-grams are repetitions (base {})",
}
MEASURES = {"ended": "endings", "repetition": "repetition", "tokens": "length"}


def conclude(
    summary: dict[str, Any], retention: Suite | None, domain: Suite | None, faults: Sequence[str] = ()
) -> None:
    """Set the statuses and the verdict of a summary, in which all else is computed.

    `faults` are those of the run; a headline suite has its own.
    """
    closeness = summary.get("closeness")
    if summary["retention_status"] == "no headroom" and closeness:
        found = by_closeness(closeness) or "no headroom"
        if found == "recovered" and not writing.alike(all_writing_tests(summary)):
            found = "partly recovered"
        summary["retention_status"] = found
        summary["status"] = both_halves(found, summary["domain_status"])
    faults = [*faults, *(fault for suite in (retention, domain) if suite for fault in suite.faults)]
    if faults:
        summary["status"] = FAULT
    summary["verdict"] = _fault(faults) if faults else verdict(summary, retention, domain)


def all_writing_tests(summary: dict[str, Any]) -> dict[str, dict | None]:
    """Return how recovered writes beside base: greedily on the suite, and sampled for the closeness."""
    sampled = (summary.get("closeness") or {}).get("writing") or {}
    return summary["tests"]["writing"] | {f"{name} at temperature 1": test for name, test in sampled.items()}


def verdict(summary: dict, retention: Suite | None, domain: Suite | None) -> str:
    """Return the first words with the outcome, then how recovered writes, and R by group of prompts."""
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
    outcome = _retention_clause(summary, retention, scores)
    domain_clause = _domain_clause(summary["domain_retention"], domain)
    sentences = [
        f"{_heading(summary)}: {outcome}; {domain_clause}.",
        *writing_sentences(all_writing_tests(summary), summary["retention_status"]),
        *_group_sentence(summary),
    ]
    return " ".join(sentences)


def _fault(faults: list[str]) -> str:
    more = f"; {len(faults) - 1} more of this kind" if faults[1:] else ""
    return f"Fault: {faults[0]}{more}. So there is no R, no D and no verdict."


def _heading(summary: dict[str, Any]) -> str:
    """Return the first words: what is shown of the recovery, and of the domain."""
    found, kept = summary["retention_status"], summary["domain_status"]
    if kept == "kept" and found in ("recovered", "not shown"):
        return "Recovered and kept" if found == "recovered" else "Kept, recovery not shown"
    bound = f" ({_partly(summary)})" if found == "partly recovered" and _partly(summary) else ""
    share = summary["domain_retention"] or {"low": 0.0}
    return f"{RETENTION[found]}{bound}, {DOMAIN[kept].format(_at_least(share))}"


def _at_least(share: dict[str, Any]) -> str:
    """Format the lower end of a share, rounded down: the first words claim no more than is shown."""
    return f"at least {math.floor(100 * share['low'])} %"


def _partly(summary: dict[str, Any]) -> str:
    """Say what of base is shown to be back; empty where no share is."""
    if closeness := _deciding_closeness(summary):
        return _at_least(closeness)
    if summary["non_inferiority"]["shown"]:
        tests = [test for test in all_writing_tests(summary).values() if test and not test["shown"]]
        differs = any(test["different"] for test in tests)
        return "the score is back, the writing is not" + ("" if differs else " shown to be")
    share = summary["recovery"]
    return _at_least(share) if share and share["low"] > 0 else ""


def _deciding_closeness(summary: dict[str, Any]) -> dict[str, Any] | None:
    """Return the closeness if the verdict rests on it, because the suite has no headroom."""
    closeness = summary.get("closeness")
    unfit = summary["no_recovery_because"] == FLOOR_REASONS["no headroom"]
    return closeness if unfit and closeness and closeness["value"] is not None else None


def _cost_of_the_fine_tune(summary: dict, retention: Suite, scores: dict[str, str]) -> str:
    """Say how base and tuned differ, where nothing is recovered yet."""
    change = summary["tests"]["tuned_minus_base"]
    head = "Not recovered yet" if change["high"] < 0 else "No forgetting measured, nothing recovered yet"
    return (
        f"{head}: the fine-tune changed {retention.plain} by {interval(change, POINTS)}, "
        f"from {scores['base']} to {scores['tuned']}."
    )


def _retention_clause(summary: dict, retention: Suite, scores: dict[str, str]) -> str:
    name, status = retention.plain, summary["retention_status"]
    levels = f"{name} is {scores['base']} for base, {scores['tuned']} for tuned and "
    levels += f"{scores['recovered']} for recovered"
    if closeness := _deciding_closeness(summary):
        share = interval(closeness, SHARE)
        gone = f"{share} of tuned's distance to base is gone, on {closeness['n']} prompts"
        return f"{gone} ({levels}: no measure here, see the note)"
    if status == "no headroom":
        floor = percent(summary["suites"][retention.name]["floor"])
        return f"{levels}, where {retention.floor_is} scores {floor}"
    if status in ("too few prompts", "no measurable forgetting"):
        return f"{levels}, {why_no_recovery(summary)}"
    numbers = f"(base {scores['base']}, tuned {scores['tuned']})"
    ratio = (
        f"R = {interval(summary['recovery'])}" if summary["recovery"] else f"no R, {why_no_recovery(summary)}"
    )
    recovered = scores["recovered"]
    if status == "not shown":
        return f"{name} is {recovered} {numbers}, {_beside_the_start(summary, retention)}, {ratio}"
    verb = "is back to" if status == "recovered" else "rose to"
    return f"{name} {verb} {recovered} {numbers}, {_bound(summary)}, {ratio}"


def _bound(summary: dict) -> str:
    """Say how far recovered lies below base at most, with 95 % confidence."""
    most = 100 * summary["non_inferiority"]["at_most"]
    return f"at most {most:.1f} points below base" if most > 0 else "measurably above base"


def _beside_the_start(summary: dict, retention: Suite) -> str:
    """Say where a model that is not shown to have recovered lies: beside tuned, or a higher floor."""
    if summary["tests"]["recovered_minus_tuned"]["high"] < 0:
        return "measurably below tuned"
    if summary["no_recovery_because"] == NO_DROP:
        return "measurably below base, as tuned is not"
    suite = summary["suites"][retention.name]
    floor = suite["floor"] or 0.0
    start = f"the floor of {percent(floor)}" if floor > suite["tuned"]["value"] else "tuned"
    return f"not measurably above {start}"


def writing_sentences(tests: dict[str, dict | None], status: str) -> list[str]:
    """Say how recovered writes unlike base, and of a partly recovered one, what is not shown to be alike."""
    faults, unknown = [], []
    for key, test in tests.items():
        if not test or test["shown"]:
            continue
        name, _, where = key.partition(" ")
        if test["different"]:
            faults.append(f"{where}, {_writing_fault(name, test)}".removeprefix(", "))
        else:
            unit = "%" if name == "tokens" else "points"
            low, high = (f"{100 * test[end]:+.0f}" for end in ("low", "high"))
            unknown.append(f"{MEASURES[name]}{f' {where}' if where else ''} ({low} to {high} {unit})")
    found = [f"Recovered's answers are unlike base's: {'; '.join(faults)}."] if faults else []
    if unknown and status == "partly recovered":
        subject = "They" if faults else "Answers of recovered"
        found.append(f"{subject} are not shown to be like base's in {' and '.join(unknown)}.")
    return found


def _writing_fault(name: str, test: dict[str, Any]) -> str:
    if name == "tokens":
        return f"they are {100 * abs(test['value']):.0f} % {'shorter' if test['value'] < 0 else 'longer'}"
    return FAULTS[name].format(percent(test["recovered"]), percent(test["base"]))


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
    only = "only " if estimate["value"] < MOST_OF_THE_GAIN else ""
    return f"{only}{interval(estimate, SHARE)} of the domain gain is kept"


def why_no_recovery(summary: dict) -> str:
    """Say why there is no R: no result, no significant drop, a small one, or a floor that is too near."""
    change, detectable = summary["tests"]["tuned_minus_base"], summary["tests"]["detectable_drop"]
    if summary["status"] == FAULT:
        return "a score is not a number"
    if change is None:
        return "base and tuned are not both measured"
    if summary["retention_status"] == "not measured":
        return "recovered is not measured"
    if summary["no_recovery_because"] in FLOOR_REASONS.values():
        return summary["no_recovery_because"]
    needed = 100 * SMALLEST_DROP
    # + 0.0 turns -0.0 into 0.0.
    value, low, high = (round(-100 * change[k], 1) + 0.0 for k in ("value", "high", "low"))
    drop = f"a drop from base to tuned of {value} points [{low}, {high}]"
    prompts = summary["suites"][summary["headline"]["retention"]]["n"]
    if change["low"] > 0:
        return f"tuned is {points(change['value']).lstrip('+')} points above base"
    if summary["retention_status"] == "too few prompts":
        enough = _rounded_up(prompts * (detectable / SMALLEST_DROP) ** 2)
        seen = f"{prompts} prompts show a drop from {100 * detectable:.0f} points on"
        return f"{drop}: {seen}, one of {needed:.0f} points takes about {enough}"
    if summary["retention_status"] == "no measurable forgetting":
        return f"{drop}, where {prompts} prompts would show one of {100 * detectable:.1f}"
    if -change["value"] < SMALLEST_DROP:
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
    if domain.faults:
        return "a score is not a number"
    if not domain.complete:
        return f"{domain.name} is not measured on {', '.join(s for s in STATES if s not in domain.rows)}"
    return "tuned's score on the domain is not measurably above base's and the floor"


def tone(summary: dict[str, Any]) -> str:
    """Return whether the outcome is `good` in both halves, `mixed`, `bad` in one, or open: an empty text."""
    found, kept = summary["retention_status"], summary["domain_status"]
    if summary["status"] == FAULT or kept == "lost" or found == "not shown":
        return "bad"
    if found in ("recovered", "partly recovered"):
        return "good" if (found, kept) == ("recovered", "kept") else "mixed"
    return ""


def split(text: str) -> tuple[str, str]:
    """Split a verdict into its first words and the sentence after them."""
    heading, _, rest = text.partition(": ")
    return (heading, rest[:1].upper() + rest[1:]) if rest else ("Verdict", text)
