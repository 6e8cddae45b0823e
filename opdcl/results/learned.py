"""Which domain a run learned, among those that it was measured on: the order of its suites does not say it.

The rows of its fine-tune decide, if they are those of one suite, by content, file or name. Otherwise nothing
is taken for learned.
"""

from __future__ import annotations

from pathlib import Path

from opdcl.results.board import Column
from opdcl.results.origins import count_learned, learned_by, rows_set_aside
from opdcl.results.scores import section
from opdcl.results.summary import Results


def domain_suite(step: Column) -> tuple[str | None, str]:
    """Return the suite of the domain that a step learned, and a note where its rows do not decide."""
    first = step.members[0]
    domains = [name for name, suite in first.named.items() if suite.role == "domain"]
    if not section(first.run, "finetune") or not domains:
        return None, ""
    named = [name for name in domains if len(domains) == 1 or _asks_rows_of(first, name)]
    if len(named) == 1:
        return named[0], ""
    reason = "its rows are those of none of them, or of several"
    remedy = "give one suite the name of the file of rows, without its ending"
    return None, f"{step.name}: which of its domain suites it learned is unknown: {reason}; {remedy}."


def _asks_rows_of(made: Results, shared: str) -> bool:
    """Return whether a suite asks what a run's own fine-tune learned, or what it has set aside."""
    suite, rows = made.named[shared], str(section(made.run, "finetune")["data"])
    learned, file = learned_by(made.run), (section(made.run, "eval").get("data") or {}).get(suite.name)
    # `handbook/staff` is the suite handbook_staff.
    is_named = suite.name in (Path(rows).stem, rows.replace("/", "_"))
    is_theirs = is_named or file in (rows, str(rows_set_aside(made.run)))
    groups = {f"cluster {row.get('cluster')}" for row in suite.measured}
    return is_theirs or bool(groups & learned) or count_learned(suite.measured, learned) > 0
