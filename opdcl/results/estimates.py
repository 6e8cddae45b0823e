"""What is estimated of a run's suites, as types and from columns; `opdcl.results.render` has their JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from opdcl.results.format import percent
from opdcl.results.intervals import Estimate, clustered_mean, difference, mean
from opdcl.results.measurements import MeasuredSuite, response_values, states_of
from opdcl.results.ratios import Closeness, Findings, ResponseTests, findings
from opdcl.results.status import STATES

COMPARED = (("tuned", "base"), ("recovered", "tuned"), ("recovered", "base"))


@dataclass(frozen=True)
class Scores:
    """The scores of the measured states on one suite, or on a group of its prompts."""

    plain: str
    """What it measures, in words."""
    n: int
    floor: float | None
    states: dict[str, Estimate]
    """Without those that are not measured."""
    role: str
    metric: str | None
    metrics: dict[str, dict[str, float]]
    """Further metric -> state -> value."""
    writing: dict[str, dict[str, Estimate]]
    """State -> measure -> mean over prompts, of how the answers are written."""
    decoding: str
    """Whether the answers are greedy or sampled."""

    @property
    def size(self) -> str:
        floor = "" if self.floor is None else f", floor {percent(self.floor)}"
        return f"{self.n} prompts{floor}"


@dataclass(frozen=True)
class Verdict:
    """What the results say, in words."""

    heading: str
    sentence: str
    further: list[str] = field(default_factory=list)
    """The sentences after it: distance to base, how else the answers differ."""
    why: str = ""
    """What the next command is for; empty where nothing is missing, or it goes without saying."""
    next: str = ""
    """The command that follows from the verdict."""

    @property
    def text(self) -> str:
        return f"{self.heading}: {self.sentence}"

    @property
    def lead_on(self) -> str:
        """The next command, and behind it what it is for."""
        return f"{self.next}  # {self.why}" if self.why else self.next


@dataclass(frozen=True)
class Summary:
    """What was measured of a run, what follows from it by statistics, and the verdict."""

    name: str
    alone: bool
    """Whether the run is of a base alone, so that nothing is compared."""
    headline: dict[str, str | None]
    suites: dict[str, Scores]
    findings: Findings
    closeness: Closeness | None
    groups: dict[str, tuple[Scores, Findings]]
    """The groups of the headline's prompts, with an R of their own."""
    changes: dict[str, Estimate | None]
    """Pair of states, such as `tuned_minus_base` -> paired difference of the retention suite, and behind
    `domain_` of the domain suite; None where a state is not measured."""
    detectable_drop: float | None
    writing: ResponseTests
    cost: dict[str, dict[str, Any]]
    faults: list[str]
    notes: list[str]
    """What to know when reading the results. It begins with the faults."""
    verdict: Verdict = Verdict("", "")
    trained: tuple[str, str] | None = None
    """What the last stage did, and its size in words, where that is all that can be said of the run."""

    def headline_suite(self, role: str) -> Scores | None:
        name = self.headline[role]
        return self.suites[name] if name else None

    def prompts_of(self, role: str) -> int:
        """Return the number of prompts of a headline suite; 0 without one."""
        suite = self.headline_suite(role)
        return suite.n if suite else 0

    @property
    def writing_tests(self) -> ResponseTests:
        """How recovered writes beside base: greedily on the suite, and sampled for the closeness."""
        tests = dict(self.writing)
        if self.closeness:
            for measure, test in self.closeness.writing.items():
                tests[f"{measure} at temperature 1"] = test
        return tests


def suite_scores(suite: MeasuredSuite) -> Scores:
    """Return the number of prompts, the floor, and the estimated score of each measured state."""
    floor = suite.floor_values()
    metrics: dict[str, dict[str, float]] = {}
    for state, result in suite.results.items():
        for metric, value in result["metrics"].items():
            if metric != suite.metric:
                metrics.setdefault(metric, {})[state] = value
    return Scores(
        plain=suite.plain,
        n=len(suite.measured),
        floor=suite.floor if floor is None else float(floor.mean()),
        states={state: _score(suite, state).rounded() for state in STATES if state in suite.rows},
        role=suite.role,
        metric=suite.metric,
        metrics=metrics,
        writing=writing_of(suite),
        # Of a suite that is sampled, base answers a second time.
        decoding="sampled" if any("again" in row for row in suite.rows.get("base", [])) else "greedy",
    )


def _score(suite: MeasuredSuite, state: str) -> Estimate:
    parts = suite.parts(state)
    if any(len(of_prompt) != 1 for of_prompt in parts):
        return clustered_mean(parts, suite.clusters)
    return mean(suite.values(state), suite.clusters)


def writing_of(suite: MeasuredSuite) -> dict[str, dict[str, Estimate]]:
    """Return state -> measure -> mean over prompts, of how the answers are written."""
    found = {}
    for state in suite.rows:
        columns = response_values(suite, state).items()
        found[state] = {name: mean(column, suite.clusters).rounded() for name, column in columns}
    return found


def groups_of(retention: MeasuredSuite | None) -> dict[str, tuple[Scores, Findings]]:
    """Return what the headline shows on each group of its prompts; empty unless there are several groups."""
    if retention is None or len(retention.groups) < 2:
        return {}
    groups = {}
    for name in retention.groups:
        suite = retention.only(name)
        groups[name] = suite_scores(suite), findings(states_of([suite]), None)
    return groups


def changes_of(suite: MeasuredSuite | None) -> dict[str, Estimate | None]:
    """Return each pair of states, such as `tuned_minus_base`, with the paired difference of their scores."""
    changes: dict[str, Estimate | None] = {}
    for later, earlier in COMPARED:
        change = None
        if suite and {later, earlier} <= suite.rows.keys():
            change = difference(suite.values(later), suite.values(earlier), suite.clusters).rounded()
        changes[f"{later}_minus_{earlier}"] = change
    return changes
