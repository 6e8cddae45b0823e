"""The results of a run as types; `opdcl.results.document` has their JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opdcl.results.closeness import Closeness
from opdcl.results.intervals import Estimate
from opdcl.results.stats import Findings
from opdcl.results.writing import WritingTests


@dataclass(frozen=True)
class Scores:
    """The scores of the measured states on one suite, or on a group of its prompts."""

    n: int
    floor: float | None
    states: dict[str, Estimate]
    """Without those that are not measured."""


@dataclass(frozen=True)
class SuiteScores(Scores):
    role: str
    metric: str | None
    metrics: dict[str, dict[str, float]]
    """Further metric -> state -> value."""
    writing: dict[str, dict[str, Estimate]]
    """State -> measure -> mean over prompts, of how the answers are written."""


@dataclass(frozen=True)
class Group(Scores):
    """A group of the headline's prompts, with an R of its own."""

    recovery: Estimate | None
    recovery_raw: Estimate | None


@dataclass(frozen=True)
class Changes:
    """The paired differences of retention; None where a state is not measured."""

    tuned_minus_base: Estimate | None
    recovered_minus_tuned: Estimate | None
    recovered_minus_base: Estimate | None
    domain_tuned_minus_base: Estimate | None
    domain_recovered_minus_tuned: Estimate | None
    domain_recovered_minus_base: Estimate | None


@dataclass(frozen=True)
class Tests:
    """The paired tests of the headline suites; None where a pair is not measured."""

    changes: Changes
    detectable_drop: float | None
    writing: WritingTests


@dataclass(frozen=True)
class Figures:
    """What was measured of a run, and what follows from it by statistics."""

    name: str
    alone: bool
    """Whether the run is of a base alone, so that nothing is compared."""
    headline: dict[str, str | None]
    suites: dict[str, SuiteScores]
    findings: Findings
    closeness: Closeness | None
    groups: dict[str, Group]
    tests: Tests
    cost: dict[str, dict[str, Any]]
    faults: list[str]
    notes: list[str]
    """What to know when reading the results. It begins with the faults."""

    def headline_suite(self, role: str) -> SuiteScores | None:
        name = self.headline[role]
        return self.suites[name] if name else None

    def prompts_of(self, role: str) -> int:
        """Return the number of prompts of a headline suite; 0 without one."""
        suite = self.headline_suite(role)
        return suite.n if suite else 0

    @property
    def writing_tests(self) -> WritingTests:
        """How recovered writes beside base: greedily on the suite, and sampled for the closeness."""
        tests = dict(self.tests.writing)
        if self.closeness:
            for measure, test in self.closeness.writing.items():
                tests[f"{measure} at temperature 1"] = test
        return tests


@dataclass(frozen=True)
class Summary(Figures):
    """The results of a run: its figures with the verdict."""

    verdict: str
    further: list[str]
    """The sentences after the verdict: distance to base, how the answers differ, what to do."""
    to_do: str
    """What to do next, which is also the last of `further`; empty where nothing is missing."""
