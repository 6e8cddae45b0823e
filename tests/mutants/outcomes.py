"""What the tests found, as a table, and whether it is enough."""

from __future__ import annotations

from dataclasses import dataclass

from mutants.faults import Fault

# Share of the faults that the tests must find.
LEAST = 0.85


@dataclass(frozen=True)
class Outcome:
    """Whether the tests found a fault; `by` is the first test that failed."""

    fault: Fault
    planted: bool
    found: bool
    by: str

    @property
    def place(self) -> str:
        return f"opdcl/{self.fault.module}.py:{self.fault.lines[0]}"


def summarise(outcomes: list[Outcome], excused: dict[str, str]) -> tuple[str, list[str]]:
    """Return the table with all survivors, and why the command fails, if it does."""
    lines, problems = [f"{'module':24}{'faults':>8}{'found':>8}{'share':>8}"], []
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault("planted" if outcome.planted else outcome.fault.module, []).append(outcome)
    kinds = {
        kind: [o for o in outcomes if o.planted == (kind == "planted")] for kind in ("generic", "planted")
    }
    for name, group in {**groups, **{f"all {k}": g for k, g in kinds.items() if g}}.items():
        found = sum(o.found for o in group)
        lines.append(f"{name:24}{len(group):8}{found:8}{found / len(group):8.0%}")
        if name.startswith("all") and found / len(group) < LEAST:
            problems.append(f"fewer than {LEAST:.0%} of {name} faults are found")
    for outcome in outcomes:
        if outcome.found:
            continue
        reason = excused.get(outcome.fault.name, "")
        what = outcome.fault.name + f": {outcome.fault.change}" * outcome.planted
        lines.append(f"lives: {outcome.place}: {what}")
        lines.append(f"       {reason or outcome.by or 'the tests that reach it pass'}")
        if not reason:
            problems.append(f"{outcome.fault.name} lives, and survivors.toml does not say why")
    return "\n".join([*lines, *(f"FAILS: {problem}" for problem in problems)]), problems
