"""Summarise a run: run directory -> scores, R, D, tests, cost and the verdict. No model is loaded.

Faults say what speaks against the results, notes what to know when reading them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from opdcl.config.recover import NO_WORSE
from opdcl.errors import UsageError
from opdcl.results import verdict
from opdcl.results.estimates import Summary, Tests, changes_of, groups_of, suite_scores
from opdcl.results.format import percent
from opdcl.results.intervals import Estimate, difference, mean
from opdcl.results.measurements import MeasuredSuite, headline_of, load_closeness, load_suites, states_of
from opdcl.results.origins import is_adapter, origins_of, split_seeds
from opdcl.results.ratios import (
    Findings,
    alike,
    closeness_of,
    compared_with_base,
    detectable_difference,
    findings,
    headroom_fault,
)
from opdcl.results.status import ALONE, FAULT, HEADLINE_ROLES, NO_RECOVERY, STATES, NoRatio, Retention
from opdcl.rundir.files import RESTORE
from opdcl.rundir.hashes import Identity
from opdcl.rundir.layout import RunDir
from opdcl.rundir.seals import changes
from opdcl.rundir.stage import read_metrics

# Steps over whose losses a mean is shown: that of one step depends on its rows.
LAST_STEPS = 5

# Share of the domain, by held-out KL, below which a recovery from a scaled start did not bring it back.
DOMAIN_BACK = 0.85

# From this score of base on, a suite has no room above base.
CEILING = 0.95


class Results:
    """The results that a run left on disk, read once."""

    def __init__(self, run: RunDir):
        with _damage_is_named(run):
            self.run = run
            self.suites = load_suites(run)
            self.near = load_closeness(run)
        self.headline = headline_of(self.suites)
        self.named = {suite.name: suite for suite in self.suites}
        planned = any(run.settings().get(key) for key in ("start", "finetune", "recover"))
        self.alone = not planned and not run.adapters()
        """Whether the run measures base alone: it has no fine-tune, and is not to have one."""
        self.path, self.place = str(run.path), run.path.resolve()

    @cached_property
    def summary(self) -> Summary:
        with _damage_is_named(self.run):
            invalid = inert(self.suites)
            invalid += [fault for suite in self.headline.values() for fault in suite.faults]
            return verdict.conclude(self.measured, self.run, invalid)

    @cached_property
    def measured(self) -> Summary:
        """What was measured, and what follows by statistics: a summary without a verdict."""
        run, suites, near = self.run, self.suites, self.near
        retention, domain = (self.headline.get(role) for role in HEADLINE_ROLES)
        of_retention, of_domain = ([suite] if suite else [] for suite in (retention, domain))
        changes, written = changes_of(retention), compared_with_base(of_retention)
        detectable = None
        if retention and changes["tuned_minus_base"]:
            base, tuned = retention.values("base"), retention.values("tuned")
            detectable = detectable_difference(tuned, base, retention.clusters)
        changes |= {f"domain_{pair}": change for pair, change in changes_of(domain).items()}
        faults = inert(suites) + faults_of(run, [*suites, near])
        remarks = [note for suite in suites for note in suite_notes(suite)] + recovery_notes(run)
        return Summary(
            name=run.settings().get("name") or run.path.name,
            alone=self.alone,
            headline=dict.fromkeys(HEADLINE_ROLES) | {role: s.name for role, s in self.headline.items()},
            suites={suite.name: suite_scores(suite) for suite in suites},
            findings=findings(states_of(of_retention), states_of(of_domain), alike(written)),
            closeness=closeness_of([near]),
            groups=groups_of(retention),
            tests=Tests(changes, detectable, written),
            cost=_cost(run, [*suites, near]),
            faults=faults,
            notes=faults + remarks,
            trained=None if suites else _trained(run),
        )

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that can change a score, by flat keys."""
        return split_seeds(self.run)[0]

    @cached_property
    def seeds(self) -> dict[str, Any]:
        return split_seeds(self.run)[1]

    @cached_property
    def origins(self) -> dict[str, str]:
        """What made each adapter that the run builds on, by its key."""
        return origins_of(self.run)

    @property
    def identity(self) -> str:
        """All that the seeds of one arm have in common, as a hash."""
        settings = {key: value for key, value in self.settings.items() if not is_adapter(key)}
        return Identity([settings, self.origins]).key

    @property
    def end(self) -> str:
        """The last state of the run: recovered, tuned without a recovery, base if it is measured alone."""
        if self.alone:
            return "base"
        return "recovered" if self.run.settings().get("recover") else "tuned"

    @property
    def missing(self) -> list[str]:
        """Describe the headline results that are not measured yet."""
        found = []
        for suite in self.headline.values():
            for state in STATES[: STATES.index(self.end) + 1]:
                if state not in suite.rows:
                    found.append(f"{state} on {suite.name}")
        return found

    @property
    def ends(self) -> dict[str, Estimate]:
        """Role -> score of the last state on the headline suite, where it is measured."""
        found = {}
        for role, suite in self.headline.items():
            if self.end in suite.rows:
                found[role] = self.summary.suites[suite.name].states[self.end]
        return found

    def status(self, findings: Findings) -> str:
        """Return a status, or why there can be none: the run has no recovery, or not even a fine-tune."""
        if findings.status == FAULT or findings.non_inferiority:
            return findings.status
        return {"base": ALONE, "tuned": NO_RECOVERY}.get(self.end, Retention.NOT_MEASURED.value)


@contextlib.contextmanager
def _damage_is_named(run: RunDir) -> Iterator[None]:
    """Name the file that has changed where the results cannot be computed from what it holds now."""
    try:
        yield
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as fault:
        for name, problem in changes(run).items():
            message = f"{run.path / name} {problem} since opdcl wrote it, and no report can be made from it"
            raise UsageError(message, RESTORE) from fault
        raise


def _trained(run: RunDir) -> tuple[str, str] | None:
    """Return what the last training stage did, and its steps and loss; None if none has trained here.

    The loss is the mean of the last steps of one kind. Other kinds have another loss, such as replayed rows.
    """
    stage = run.last_stage()
    rows = [row for row in read_metrics(stage.metrics) if "loss" in row] if stage else []
    if not stage or not rows:
        return None
    did, stream, of = "Recovery trained", "general", "general prompts"
    if stage.path.name.endswith("finetune"):
        did, stream, of = "Fine-tuned", "domain", "your rows"
    losses = [row["loss"] for row in rows if row.get("stream", stream) == stream][-LAST_STEPS:]
    loss = f", loss on {of} {sum(losses) / len(losses):.2g}" if losses else ""
    return did, f"{len(rows)} step{'s' * (len(rows) > 1)}{loss}"


def _cost(run: RunDir, suites: list[MeasuredSuite]) -> dict[str, dict[str, Any]]:
    """Return seconds, tokens and peak memory per stage; empty if a stage is not finished.

    A training also has its dose, unless an earlier version has recorded it: answers and tokens that were
    graded, by stream and author, and the seconds of its parts.
    """
    costs: dict[str, dict[str, Any]] = {}
    for stage in ("finetune", "recover"):
        spent = run.stage_record(stage).get("cost") or {}
        costs[stage] = _total([spent]) | {key: spent[key] for key in ("graded", "parts") if spent.get(key)}
    results = [result for suite in suites for result in suite.results.values()]
    return costs | {"eval": _total([result.get("cost") for result in results])}


def _total(found: list[dict[str, float] | None]) -> dict[str, float]:
    costs = [cost for cost in found if cost]
    if not costs:
        return {}
    return {
        "seconds": sum(cost["seconds"] for cost in costs),
        "tokens": sum(cost["tokens"] for cost in costs),
        "peak_memory_bytes": max(cost["peak_memory_bytes"] for cost in costs),
    }


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
