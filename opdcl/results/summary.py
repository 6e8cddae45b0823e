"""Summarise a run: run directory -> scores, R, D, tests, cost and the verdict. No model is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from opdcl.errors import UsageError
from opdcl.results import notes, verdict
from opdcl.results.estimates import Summary, Tests, changes_of, groups_of, suite_scores
from opdcl.results.intervals import Estimate
from opdcl.results.measurements import MeasuredSuite, headline_of, load_closeness, load_suites, states_of
from opdcl.results.origins import is_adapter, origins_of, split_seeds
from opdcl.results.ratios import (
    Findings,
    alike,
    closeness_of,
    compared_with_base,
    detectable_difference,
    findings,
)
from opdcl.results.status import ALONE, FAULT, HEADLINE_ROLES, NO_RECOVERY, STATES, Retention
from opdcl.rundir.files import RESTORE
from opdcl.rundir.hashes import Identity
from opdcl.rundir.layout import RunDir
from opdcl.rundir.seals import changes
from opdcl.rundir.stage import read_metrics

# Steps over whose losses a mean is shown: that of one step depends on its rows.
LAST_STEPS = 5


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
            invalid = notes.inert(self.suites)
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
        faults = notes.inert(suites) + notes.faults_of(run, [*suites, near])
        remarks = [note for suite in suites for note in notes.suite_notes(suite)] + notes.recovery_notes(run)
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
