"""The finding of a comparison in one sentence: a difference is named only where its interval shows one."""

from __future__ import annotations

from typing import Any

from opdcl.results.format import interval, points
from opdcl.results.status import HEADLINE_ROLES

RATIOS = {"R": "recovery", "D": "domain_retention"}
WHERE = {"retention": " in retention", "domain": " on the domain"}


def of_arms(comparison: dict[str, Any]) -> str:
    """Compare the first arm with every other one, in retention and on the domain."""
    first, rivals = comparison["arms"][0]["name"], comparison["against_first"]
    if not rivals:
        return _alone(comparison["arms"][0])
    clauses: list[str] = []
    for role in HEADLINE_ROLES:
        if changes := {rival["name"]: rival[role] for rival in rivals if rival[role]}:
            clause = _size(*changes.values()) if len(rivals) == 1 else _count(changes)
            clauses.append(clause.format(rivals[0]["name"] if not clauses else "it") + WHERE[role])
    if not clauses:
        return "Not measured yet"
    if all(clause.startswith("not shown") for clause in clauses):
        others = rivals[0]["name"] if len(rivals) == 1 else f"the {len(rivals)} other arms"
        return f"No difference between {first} and {others} is shown"
    return f"{first} is " + "; ".join(clauses)


def _alone(arm: dict[str, Any]) -> str:
    """Sum up the only arm: the same run with several seeds."""
    ratios = [f"{name} = {interval(arm[key])}" for name, key in RATIOS.items() if arm[key]]
    return ", ".join([f"{arm['seeds']} seeds: {arm['status']}", *ratios])


def _size(change: dict[str, float]) -> str:
    """Say how far apart two arms are; `{}` stands for the second one."""
    size = f"{abs(100 * change['value']):.1f} points"
    if change["low"] > 0:
        return f"{size} above {{}}"
    return f"{size} below {{}}" if change["high"] < 0 else "not shown to differ from {}"


def _count(changes: dict[str, dict[str, float]]) -> str:
    above = sum(change["low"] > 0 for change in changes.values())
    below = sum(change["high"] < 0 for change in changes.values())
    if not above and not below:
        return f"not shown to differ from any of {len(changes)} other arms"
    return f"above {above or 'none'} and below {below or 'none'} of {len(changes)} other arms"


def of_chains(comparison: dict[str, Any]) -> str:
    """Name the difference of the first two chains at the end, or what one chain has forgotten."""
    for change in comparison["differences"]:
        if average := change["average"]:
            size = _size(average).format(change["against"])
            return f"{change['of']} is {size} at the end, on average over all suites"
    for chain in comparison["chains"]:
        if forgotten := chain["forgetting"]:
            steps = f"after {len(chain['steps'])} steps"
            shown = forgotten["low"] > 0
            amount = f"{points(forgotten['value']).lstrip('+')} points are forgotten"
            return f"{chain['name']}: {amount} {steps}" if shown else f"No forgetting is shown {steps}"
    return "Steps that build on one another"
