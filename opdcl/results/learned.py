"""Which domain a run learned, among those that it was measured on: the order of its suites does not say it.

The rows of its fine-tune decide, if they are those of one suite, by file or by name. Otherwise the suite that
gained most does, if a gain is shown. If neither does, nothing is taken for learned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opdcl.results import stats
from opdcl.results.board import Column
from opdcl.results.summary import Results


def domain_suite(step: Column, start: Results | None = None) -> tuple[str | None, str]:
    """Return the suite of the domain that a step learned, and a note where its rows do not decide.

    `start` is the run that the step started from; without one, its gain counts from base.
    """
    workflow = step.members[0].run.settings()
    finetune, evaluation = workflow.get("finetune"), workflow.get("eval") or {}
    domains = evaluation.get("domain") or []
    if not finetune or not domains:
        return None, ""
    if len(domains) == 1:
        return domains[0], ""
    named = [name for name in domains if _holds_rows_of(name, evaluation.get("data") or {}, finetune)]
    if len(named) == 1:
        return named[0], ""
    gains = {name: gain for name in domains if (gain := _gain(step, start, name)) is not None}
    most = max(gains, key=lambda name: gains[name].value, default=None)
    if most is None or gains[most].low <= 0:
        reason = "its rows are named like none of them, and none gained measurably"
        return None, f"{step.name}: which of its domain suites it learned is unknown: {reason}."
    return most, f"{step.name} counts as having learned {most}, the domain suite that gained most."


def _holds_rows_of(suite: str, data: dict[str, str], finetune: dict[str, Any]) -> bool:
    """Return whether a suite asks about the rows of a fine-tune: it has their file, or their name."""
    rows = str(finetune["data"])
    names = {Path(rows).stem, rows.replace("/", "_")}  # `handbook/staff` is the suite handbook_staff
    return data.get(suite) == rows or suite in names


def _gain(step: Column, start: Results | None, suite: str) -> stats.Estimate | None:
    """Estimate how much a step has gained on a suite; None if it is not measured."""
    first = step.members[0]
    origin = start or first
    after, before = first.named.get(suite), origin.named.get(suite)
    state = start.end if start else "base"
    if not (after and before and first.end in after.rows and state in before.rows):
        return None
    return stats.difference(after.values(first.end), before.values(state), after.clusters)
