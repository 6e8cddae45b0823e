"""The finding of a comparison in one sentence: a difference is named only where its interval shows one."""

from __future__ import annotations

from typing import Any

from opdcl.results.format import interval, points
from opdcl.results.scores import HEADLINE_ROLES

RATIOS = {"R": "recovery", "D": "domain_retention"}
WHERE = {"retention": "in retention", "domain": "on the domain"}


def of_arms(comparison: dict[str, Any]) -> str:
    """Compare the first arm with every other one, in retention and on the domain."""
    first, rivals = comparison["arms"][0]["name"], comparison["against_first"]
    if not rivals:
        return _alone(comparison["arms"][0])
    clauses = []
    for role in HEADLINE_ROLES:
        if changes := {rival["name"]: rival[role] for rival in rivals if rival[role]}:
            clause = _to_one(first, *changes.popitem()) if len(rivals) == 1 else _to_many(first, changes)
            clauses.append(f"{clause} {WHERE[role]}")
    return "; ".join(clauses) or "Not measured yet"


def _alone(arm: dict[str, Any]) -> str:
    """Sum up the only arm: the same run with several seeds."""
    ratios = [f"{name} = {interval(arm[key])}" for name, key in RATIOS.items() if arm[key]]
    return ", ".join([f"{arm['seeds']} seeds: {arm['status']}", *ratios])


def _to_one(first: str, rival: str, change: dict[str, float]) -> str:
    size = f"{abs(100 * change['value']):.1f} points"
    if change["low"] > 0:
        return f"{first} is {size} above {rival}"
    if change["high"] < 0:
        return f"{first} is {size} below {rival}"
    return f"no difference between {first} and {rival} is shown"


def _to_many(first: str, changes: dict[str, dict[str, float]]) -> str:
    above = sum(change["low"] > 0 for change in changes.values())
    below = sum(change["high"] < 0 for change in changes.values())
    return f"{first} is above {above} and below {below} of {len(changes)} other arms"


def of_chains(comparison: dict[str, Any]) -> str:
    """Name the difference of the first two chains at the end, or what one chain has forgotten."""
    for change in comparison["differences"]:
        if average := change["average"]:
            return f"{_to_one(change['of'], change['against'], average)} at the end, on average over all suites"
    for chain in comparison["chains"]:
        if forgotten := chain["forgetting"]:
            steps = f"after {len(chain['steps'])} steps"
            shown = forgotten["low"] > 0
            amount = f"{points(forgotten['value']).lstrip('+')} points are forgotten"
            return f"{chain['name']}: {amount} {steps}" if shown else f"No forgetting is shown {steps}"
    return "Steps that build on one another"
