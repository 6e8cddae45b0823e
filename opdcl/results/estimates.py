"""What is estimated of a run's suites, as types and from columns; `opdcl.results.render` has their JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from opdcl.results import format
from opdcl.results.intervals import Estimate, clustered_mean, difference, mean
from opdcl.results.measurements import MeasuredSuite, states_of
from opdcl.results.ratios import AS_WRITTEN, Closeness, Findings, ResponseTests, figures_of, findings

COMPARED = (("tuned", "base"), ("recovered", "tuned"), ("recovered", "base"))


@dataclass(frozen=True)
class Scores:
    """The scores of the measured states on one suite."""

    n: int
    """The number of prompts."""
    floor: float | None
    states: dict[str, Estimate]
    """Without those that are not measured."""
    role: str
    metric: str | None
    metrics: dict[str, dict[str, float]]
    """Further metric -> state -> value."""
    writing: dict[str, dict[str, Estimate]]
    """State -> measure -> mean over prompts, of how the answers are written."""
    plain: str
    """What it measures, in words."""
    floor_is: str
    """What reaches the floor, in words."""
    decoding: str
    """Whether the answers are greedy or sampled."""

    @property
    def words(self) -> str:
        """Its metric, as people read it."""
        return format.metric_words(self.metric or "")


@dataclass(frozen=True)
class GroupScores:
    """The scores on one group of the headline's prompts, with an R of their own."""

    n: int
    floor: float | None
    states: dict[str, Estimate]
    recovery: Estimate | None
    recovery_raw: Estimate | None


@dataclass(frozen=True)
class Tests:
    """What is tested of the headline suites."""

    changes: dict[str, Estimate | None]
    """Pair of states, such as `tuned_minus_base` -> paired difference of the retention suite, and behind
    `domain_` of the domain suite; None where a state is not measured."""
    detectable_drop: float | None
    writing: ResponseTests


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
    """The command that follows from the verdict; RUN is the run."""
    severity: str = ""
    """`good` in both halves, `mixed`, `bad` in one, or empty where all is open."""

    @property
    def text(self) -> str:
        return f"{self.heading}: {self.sentence}"

    @property
    def opening(self) -> str:
        """The sentence where it begins a paragraph."""
        return self.sentence[:1].upper() + self.sentence[1:]

    @property
    def lead_on(self) -> str:
        """The next command, and behind it what it is for."""
        return f"{self.next}  # {self.why}" if self.why else self.next


@dataclass(frozen=True)
class Summary:
    """What was measured of a run, what follows from it by statistics, and the verdict.

    Fields are keys of the JSON, in its order (`opdcl.results.render`).
    """

    name: str
    alone: bool
    """Whether the run is of a base alone, so that nothing is compared."""
    headline: dict[str, str | None]
    suites: dict[str, Scores]
    findings: Findings
    closeness: Closeness | None
    groups: dict[str, GroupScores]
    tests: Tests
    cost: dict[str, dict[str, Any]]
    faults: list[str]
    notes: list[str]
    """What to know when reading the results. It begins with the faults."""
    trained: tuple[str, str] | None = None
    """What the last stage did, and its size in words, where that is all that can be said of the run."""
    verdict: Verdict = field(default_factory=lambda: Verdict("", ""))

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
        sampled = self.closeness.writing if self.closeness else {}
        return self.tests.writing | {f"{name} at temperature 1": test for name, test in sampled.items()}


def suite_scores(suite: MeasuredSuite) -> Scores:
    """Return the number of prompts, the floor, and the estimated score of each measured state."""
    metrics: dict[str, dict[str, float]] = {}
    for state, result in suite.results.items():
        for metric, value in result["metrics"].items():
            if metric != suite.metric:
                metrics.setdefault(metric, {})[state] = value
    # Of a suite that is sampled, base answers a second time.
    is_sampled = any("again" in row for row in suite.rows.get("base", []))
    return Scores(
        *_levels(suite),
        role=suite.role,
        metric=suite.metric,
        metrics=metrics,
        writing={state: figures_of([suite], state, AS_WRITTEN) for state in suite.rows},
        plain=suite.plain,
        floor_is=suite.floor_is,
        decoding="sampled" if is_sampled else "greedy",
    )


def _levels(suite: MeasuredSuite) -> tuple[int, float | None, dict[str, Estimate]]:
    """Return the number of prompts, the floor, and the score of each measured state."""
    floor, states = suite.floor_values(), {}
    for state in suite.rows:
        parts = suite.parts(state)
        score = mean(suite.values(state), suite.clusters)
        if any(len(of_prompt) != 1 for of_prompt in parts):
            score = clustered_mean(parts, suite.clusters)
        states[state] = score.rounded()
    return len(suite.measured), suite.floor if floor is None else float(floor.mean()), states


def groups_of(retention: MeasuredSuite | None) -> dict[str, GroupScores]:
    """Return what the headline shows on each group of its prompts; empty unless there are several groups."""
    groups = {}
    for name in retention.groups if retention and len(retention.groups) > 1 else ():
        suite = retention.only(name)
        found = findings(states_of([suite]), None)
        groups[name] = GroupScores(*_levels(suite), found.recovery, found.recovery_raw)
    return groups


def changes_of(suite: MeasuredSuite | None) -> dict[str, Estimate | None]:
    """Return each pair of states, such as `tuned_minus_base`, with the paired difference of their scores."""
    found: dict[str, Estimate | None] = {}
    for later, earlier in COMPARED:
        change = None
        if suite and {later, earlier} <= suite.rows.keys():
            change = difference(suite.values(later), suite.values(earlier), suite.clusters).rounded()
        found[f"{later}_minus_{earlier}"] = change
    return found
