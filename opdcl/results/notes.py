"""Say what speaks against a run's results (faults), and what to know when reading them (notes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from opdcl.config.recover import NO_WORSE
from opdcl.errors import UsageError
from opdcl.results.format import percent
from opdcl.results.intervals import difference, mean
from opdcl.results.measurements import MeasuredSuite, states_of
from opdcl.results.ratios import headroom_fault
from opdcl.results.status import HEADLINE_ROLES, NoRatio
from opdcl.rundir.layout import RunDir
from opdcl.rundir.seals import changes
from opdcl.rundir.stage import read_metrics

# Share of the domain, by held-out KL, below which a recovery from a scaled start did not bring it back.
DOMAIN_BACK = 0.85

# From this score of base on, a suite has no room above base.
CEILING = 0.95

Rows = list[dict[str, Any]]


def inert(suites: Sequence[MeasuredSuite]) -> list[str]:
    """Return a fault if tuned answers every prompt of every suite as base does."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for suite in suites:
        pairs += zip(suite.rows.get("base", []), suite.rows.get("tuned", []), strict=False)
    for row, other in pairs:
        # A suite of likelihoods has no answers.
        if row.get("response") is None or row["response"] != other.get("response"):
            return []
    what = f"base and tuned give the same answer to all {len(pairs)} prompts, as if tuned had no adapter"
    return [what] if pairs else []


def faults_of(run: RunDir, suites: Sequence[MeasuredSuite]) -> list[str]:
    """Return the reasons not to believe the results: changed files, other base weights, other adapters."""
    damage = [*run.adapter_damage().values()]
    hint = "the results here are those of the adapter that the run recorded, not of this file"
    faults = [f"{problem}: {hint}." for problem in damage]
    said = " ".join(damage)
    try:
        changed = changes(run)
    except UsageError as fault:
        changed = {}
        faults += [] if fault.message in said else [f"{fault.message}."]
    lists = f"opdcl verify {run.path} lists all; what is shown here may be wrong"
    for name, problem in changed.items():
        if str(run.path / name) not in said:
            faults.append(f"{run.path / name} {problem} since opdcl wrote it: {lists}.")
    again = f"the state counts as not measured there; repeat it with opdcl eval {run.path} --force"
    for suite in suites:
        faults += [f"{fault}; {again}." for fault in suite.faults]
    manifest = run.read_manifest()
    base, adapters = manifest.get("base") or {}, manifest.get("adapters") or {}
    before, after = base.get("fingerprint_before"), base.get("fingerprint_after")
    if before and after and before != after:
        faults.append(
            "The base weights changed during the run: base is no longer a valid teacher or reference."
        )
    for suite in suites:
        for state, result in suite.results.items():
            measured = (result.get("model") or {}).get("adapter_sha256")
            present = (adapters.get(state) or {}).get("sha256")
            if measured and present and measured != present:
                problem = f"{state} was measured with another adapter than the one in this run"
                faults.append(f"{suite.name}: {problem}.")
    return faults


def suite_notes(suite: MeasuredSuite) -> list[str]:
    """Return the caveats about missing answers, and about what a suite cannot show of this base."""
    notes = []
    if suite.unpaired:
        reason = "because not every measured state answered them; the further metrics still include them"
        notes.append(f"{suite.name}: {suite.unpaired} prompts are left out {reason}.")
    notes += filter(None, [learned_note(suite.name, suite.learned, len(suite.measured))])
    if "base" not in suite.rows:
        return notes
    rows, values = suite.rows["base"], suite.values("base")
    if all("again" in row for row in rows):  # its answers were drawn twice
        again = replace(suite, rows={"base": [{"scores": {suite.metric: row["again"]}} for row in rows]})
        apart = difference(again.values("base"), values, suite.clusters)
        noise = 100 * (apart.high - apart.low) / 2
        notes.append(f"{suite.name}: base against itself, with other draws: ±{noise:.1f} points.")
    if suite.role in HEADLINE_ROLES and CEILING <= values.mean() <= 1:
        seen = "a loss can be seen, a gain cannot"
        if suite.role == "domain":
            seen = "there is hardly anything in it for the fine-tune to learn, so it can show a loss only"
        notes.append(f"{suite.name}: base scores {percent(values.mean())}: {seen}.")
    notes += _filter_notes(suite)
    if suite.role != "retention" or suite.floor is None:
        return notes
    base, states = mean(values, suite.clusters), states_of([suite])
    floor = f"{percent(suite.floor)}, the score of {suite.floor_is}"
    if states and headroom_fault(states) is NoRatio.FLOOR_TOO_HIGH:
        unfit = f"unfit for this model: base scores {percent(base.value)}, and the floor is {floor}"
        notes.append(f"{suite.name}: {unfit}. It can show neither a loss nor a recovery.")
    elif base.low <= suite.floor:
        reason = f"base is not measurably above the floor of {floor}"
        notes.append(f"{suite.name}: {reason}, so this suite can hardly show forgetting.")
    return notes


def learned_note(suite: str, learned: int, prompts: int) -> str:
    """Say how many prompts of a suite were learned; "" if none was."""
    if not learned:
        return ""
    what = f"{suite}: {learned} of {prompts} prompts are in rows that were learned"
    return f"{what}. They show what is remembered, and not what carries over to new questions."


def _filter_notes(suite: MeasuredSuite) -> list[str]:
    """Say where base scores nothing by one filter of answers, and something by another."""
    metric, _, used = (suite.metric or "").partition(",")
    scores = suite.results.get("base", {}).get("metrics", {})
    by_filter = {n.partition(",")[2]: scores[n] for n in scores if used and n.startswith(f"{metric},")}
    if all(by_filter.values()) or not any(by_filter.values()):
        return []
    found = " and ".join(f"{percent(score)} by the filter {name}" for name, score in by_filter.items())
    hint = "what one filter does not find in answers is not what a model cannot do"
    return [f"{suite.name}: base scores {found}: {hint}. {used} is used, the first of filter_list."]


def recovery_notes(run: RunDir) -> list[str]:
    """Return the caveats that follow from the metrics of a finished recovery."""
    stage = run.find_stage("recover")
    if stage is None or not stage.is_done():
        return []
    rows, notes = read_metrics(stage.metrics), []
    for row in rows:
        if health := row.get("health"):
            limit = f"{health['sign']} was {health['value']:.3g}, beyond its limit of {health['bound']:.3g}"
            notes.append(f"Recovery, step {row['step']}: {limit}; {health['action']}.")
    return notes + start_notes(rows)


class Validations(NamedTuple):
    """The held-out measurements in the metrics of a recovery."""

    by_step: dict[int, dict[str, Any]]
    """Step -> the student's numbers."""
    kept: int | None
    """The step whose adapter was kept; None without one."""
    tuned: dict[str, Any]
    """Tuned's numbers; empty if the student started as tuned."""


def validations_of(rows: Rows) -> Validations:
    """Return the validations in the rows of a recovery's metrics."""
    held_out = [row for row in rows if row.get("validation")]
    by_step = {row["step"]: of_the_student(row) for row in held_out}
    kept = [step for step, found in by_step.items() if found.get("best")]
    tuned: dict[str, Any] = next((row["validation"] for row in held_out if started_elsewhere(row)), {})
    return Validations(by_step, max(kept, default=None), tuned)


def of_the_student(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a validation measured of the student; at step 0, where tuned comes first, of its start."""
    measured: dict[str, Any] = row["validation"] | row.get("start", {}).get("validation", {})
    return measured


def started_elsewhere(row: dict[str, Any]) -> bool:
    """Return whether a row says that the student did not start as tuned."""
    start = row.get("start", {})
    return start.get("alpha", 1) != 1 or start.get("mu") is not None


def start_notes(rows: Rows) -> list[str]:
    """Say where a recovery started, and what that start did for it, from the rows of its metrics."""
    chosen = next((row["start"] for row in rows if "start" in row), None)
    validations, kept, _ = validations_of(rows)
    elsewhere = any(map(started_elsewhere, rows))
    place = "the tuned adapter"
    if elsewhere:  # earlier versions could only scale, and did not name the place
        place = chosen.get("place") or f"the tuned adapter times {chosen['alpha']:g}"
    if kept == 0:
        return [f"Recovered is {place}: no training step came nearer to the teachers on held-out prompts."]
    if chosen is None or kept is None:
        return []
    if not any("loss" in row for row in rows):
        return [f"Recovered is {place}: no training was done."]
    if not elsewhere:
        return []
    # Earlier versions called this share `domain_kept`.
    share = validations[kept].get("domain_gap_closed", validations[kept].get("domain_kept", 1.0))
    if share < DOMAIN_BACK:
        closed = f"{100 * max(share, 0):.0f} % of the gap in KL between base and tuned is closed"
        advice = "take more recover.steps, or start nearer to tuned: a number near 1 as recover.start"
        return [f"The domain did not come back: on held-out questions only {closed}; {advice}."]
    if chosen["score"] <= NO_WORSE * validations[kept]["score"]:
        said = f"On held-out prompts the start alone, {place}, is about as near to the teachers"
        return [f"{said}: --set recover.steps=0 gives it without training."]
    return []
