"""The kinds of prompt that a recovery practised, and the distance from base on each."""

from __future__ import annotations

from typing import Any

from opdcl.results import closeness
from opdcl.results.format import cell
from opdcl.results.intervals import mean, ratio
from opdcl.results.scores import Suite
from opdcl.results.status import STATES
from opdcl.results.tables import Table
from opdcl.rundir.layout import RunDir


def summarise(run: RunDir, near: Suite) -> dict[str, dict[str, Any]]:
    """Return what the recovery recorded of each kind, and the states' distances from base on its prompts.

    `c` is the share of tuned's distance that is gone.
    """
    recorded = run.stage_record("recover").get("kinds") or {}
    return {kind: {**entry, **_distances(near, kind)} for kind, entry in recorded.items()}


def _distances(near: Suite, kind: str) -> dict[str, Any]:
    part = near.only(kind, "kind")
    count, clusters = len(part.measured), part.clusters
    found: dict[str, Any] = {"n": count, **{state: {} for state in STATES}, "c": None}
    if count < 2:  # no interval
        return found
    values = {state: closeness.values([part], state) for state in part.rows}
    found |= {state: mean(distances, clusters).as_dict() for state, distances in values.items()}
    if part.complete:
        gone = ratio(values["tuned"] - values["recovered"], values["tuned"], clusters, of_scores=False)
        found["c"] = gone.as_dict() if gone else None
    return found


def table(found: dict[str, dict[str, Any]]) -> Table:
    """Return the kinds as a table with one row per kind."""
    rows = []
    for kind in found.values():
        share = f"{kind['share']:.0%}" + (", shipped" if kind["added"] else "")
        near = [f"{kind[state]['value']:.2f}" if kind[state] else "" for state in ("tuned", "recovered")]
        practised = "none" if kind["lacking"] else share
        rows.append([kind["name"], practised, str(kind["n"] or ""), *near, cell(kind["c"])])
    caption = (
        "The kinds of general prompt that the recovery practised, and on other prompts of each kind "
        "the distance from base in nats per token, and the share of tuned's that is gone."
    )
    if missing := [kind["name"] for kind in found.values() if kind["lacking"]]:
        caption += f" Hardly any recovery prompts: {', '.join(missing)}. There, less may have come back."
    columns = ["kind of prompt", "recovery prompts", "measured on", "tuned", "recovered", "gone"]
    return Table("What the recovery practised", columns, rows, caption)
