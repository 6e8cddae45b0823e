"""Summarise a run: run directory -> scores, R, D, tests, cost and the verdict. No model is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from opdcl.config.recover import NO_WORSE
from opdcl.errors import UsageError
from opdcl.results import closeness, stats, writing
from opdcl.results.format import percent
from opdcl.results.scores import Suite, headline_of, load_suites, section
from opdcl.results.stats import Clusters
from opdcl.results.status import STATES
from opdcl.results.verdict import conclude
from opdcl.rundir.files import RESTORE
from opdcl.rundir.layout import RunDir
from opdcl.rundir.records import read_metrics
from opdcl.rundir.seals import changes

# A quickstart whose answers ran on lacked 0.57 to 0.65 of base's probability to end; one whose did not, 0.26.
MISSED_ENDS = 0.4

# Share of the domain, by held-out KL, below which a recovery from a scaled start did not bring it back.
DOMAIN_BACK = 0.85

# The teacher whose results are the ceiling of distillation, per role of a suite.
TEACHER_OF = {"retention": "base", "domain": "tuned", "control": "base"}

PAIRS = (("tuned", "base"), ("recovered", "tuned"), ("recovered", "base"))


class Results:
    """The results that a run left on disk, read once."""

    def __init__(self, run: RunDir):
        with _damage_is_named(run):
            self.run, self.suites, self.near = run, load_suites(run), closeness.load(run)
            self.headline = headline_of(self.suites)

    @property
    def faults(self) -> list[str]:
        """The reasons not to believe the results, of any suite."""
        return [*_inert(self.suites), *_faults(self.run, [*self.suites, self.near])]

    @property
    def remarks(self) -> list[str]:
        """What to know of any suite and of the recovery when the results are read."""
        estimates = {suite.name: _summarise_suite(suite) for suite in self.suites}
        return [*_suite_notes(self.suites, estimates), *_recovery_notes(self.run)]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The results with the stable keys of `opdcl report RUN --json`."""
        with _damage_is_named(self.run):
            summary = summary_of(self, self.suites)
        return summary | {"notes": [*summary["faults"], *summary["notes"]]}


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


def summarise(run: RunDir) -> dict[str, Any]:
    """Return the summary of a finished or unfinished run."""
    return Results(run).summary


def summary_of(results: Results, suites: list[Suite]) -> dict[str, Any]:
    """Return the summary of some of a run's suites; its notes lack the faults."""
    run, near = results.run, results.near
    retention, domain = results.headline.get("retention"), results.headline.get("domain")
    estimates = {s.name: _summarise_suite(s) for s in suites}
    inert = _inert(suites)
    faults = [*inert, *_faults(run, [*suites, near])]
    tests = _tests(retention, domain)
    summary: dict[str, Any] = {
        "verdict": "",
        "name": run.settings().get("name") or run.path.name,
        "headline": {"retention": retention and retention.name, "domain": domain and domain.name},
        "suites": estimates,
        **stats.outcome(
            retention.states() if retention else None,
            domain.states() if domain else None,
            writing.alike(tests["writing"]),
        ),
        "closeness": closeness.summarise([near]),
        "groups": _groups(retention),
        "tests": tests,
        "ceiling": _ceiling(suites, section(run, "recover")),
        "cost": _cost(run, [*suites, near]),
        "faults": faults,
        "notes": [*_suite_notes(suites, estimates), *_recovery_notes(run)],
    }
    conclude(summary, retention, domain, inert)
    return summary


def _summarise_suite(suite: Suite) -> dict[str, Any]:
    metrics: dict[str, dict[str, float]] = {}
    for state, result in suite.results.items():
        for metric, value in result["metrics"].items():
            if metric != suite.metric:
                metrics.setdefault(metric, {})[state] = value
    names = {"role": suite.role, "metric": suite.metric}
    return {**names, **_scores(suite), "metrics": metrics, "writing": writing.estimates(suite)}


def _scores(suite: Suite) -> dict[str, Any]:
    """Return the number of prompts, the floor, and the estimated score of each state; empty without one."""
    floor = suite.floor_values()
    return {
        "n": len(suite.measured),
        "floor": suite.floor if floor is None else float(floor.mean()),
        **{state: _estimate(suite, state) if state in suite.rows else {} for state in STATES},
    }


def _estimate(suite: Suite, state: str) -> dict[str, float]:
    parts = suite.parts(state)
    if any(len(p) != 1 for p in parts):
        return stats.clustered_mean(parts, suite.clusters).as_dict()
    return stats.mean(suite.values(state), suite.clusters).as_dict()


def _groups(retention: Suite | None) -> dict[str, Any]:
    """Return the headline's scores and R for each group of prompts; empty unless there are several groups."""
    groups: dict[str, Any] = {}
    for name in retention.groups if retention and len(retention.groups) > 1 else ():
        suite = retention.only(name)
        outcome = stats.outcome(suite.states(), None)
        ratios = {key: outcome[key] for key in ("recovery", "recovery_raw", "non_inferiority")}
        groups[name] = {**_scores(replace(suite, results={})), **ratios}
    return groups


def _tests(retention: Suite | None, domain: Suite | None) -> dict[str, Any]:
    """Return the paired tests of the headline suites; None for pairs that are not measured."""
    found: dict[str, Any] = {
        "detectable_drop": None,
        "writing": writing.compared_with_base([retention] if retention else []),
        "mcnemar": {},
    }
    for later, earlier in PAIRS:
        pair = _pair(retention, later, earlier)
        name = f"{later}_minus_{earlier}"
        found[name] = pair and stats.difference(*pair).as_dict()
        binary = pair and {*pair[0], *pair[1]} <= {0.0, 1.0}
        found["mcnemar"][name] = stats.mcnemar(*pair) if pair and binary else None
        if pair and name == "tuned_minus_base":
            found["detectable_drop"] = stats.detectable_difference(*pair)
    for later, earlier in PAIRS:
        pair = _pair(domain, later, earlier)
        found[f"domain_{later}_minus_{earlier}"] = pair and stats.difference(*pair).as_dict()
    return found


def _pair(suite: Suite | None, later: str, earlier: str) -> tuple[np.ndarray, np.ndarray, Clusters] | None:
    """Return the scores of two states and the clusters of their prompts, or None if one is not measured."""
    if suite is None or not {later, earlier} <= suite.rows.keys():
        return None
    return suite.values(later), suite.values(earlier), suite.clusters


def further_teachers(recover: dict[str, Any]) -> list[str]:
    """Return the names of teachers that grade a part of the domain prompts, by the settings of a recovery."""
    of_streams = recover.get("general_teacher"), recover.get("domain_teacher")
    teachers = (recover.get("teachers") or {}).items()
    return [name for name, teacher in teachers if name not in of_streams or teacher.get("prompts")]


def _ceiling(suites: list[Suite], recover: dict[str, Any]) -> dict[str, dict]:
    """Return student minus teacher per suite; near zero, only another teacher or a reward can improve it.

    A suite is left out unless its teacher is base (general) or tuned (domain): others are not measured.
    """
    ceiling = {}
    for suite in suites:
        teacher = TEACHER_OF[suite.role]
        stream = "domain" if teacher == "tuned" else "general"
        own = recover.get(f"{stream}_teacher", teacher)
        if own != teacher or (stream == "domain" and further_teachers(recover)):
            continue
        if pair := _pair(suite, "recovered", teacher):
            gap = stats.difference(*pair).as_dict()
            place = {"place": stats.place(*pair), "detectable": stats.detectable_difference(*pair)}
            ceiling[suite.name] = {"teacher": teacher, "n": len(suite.prompts), **gap, **place}
    return ceiling


def _cost(run: RunDir, suites: list[Suite]) -> dict[str, dict]:
    """Return seconds, tokens and peak memory per stage; empty if a stage is not finished."""
    evals = [cost for suite in suites for result in suite.results.values() if (cost := result.get("cost"))]
    spent = {name: run.stage_record(name).get("cost") for name in ("finetune", "recover")}
    costs = {name: [cost] if cost else [] for name, cost in spent.items()} | {"eval": evals}
    return {name: _total(parts) if parts else {} for name, parts in costs.items()}


def _total(costs: list[dict]) -> dict[str, float]:
    return {
        "seconds": sum(cost["seconds"] for cost in costs),
        "tokens": sum(cost["tokens"] for cost in costs),
        "peak_memory_bytes": max(cost["peak_memory_bytes"] for cost in costs),
    }


def _inert(suites: list[Suite]) -> list[str]:
    """Return a fault if tuned answers every prompt of every suite as base does."""
    count = 0
    for suite in suites:
        base, tuned = (suite.rows.get(state) for state in ("base", "tuned"))
        if base and tuned:
            count += len(base)
            for row, other in zip(base, tuned, strict=True):
                # A suite of likelihoods has no answers.
                if row.get("response") is None or row["response"] != other.get("response"):
                    return []
    what = f"base and tuned give the same answer to all {count} prompts, as if tuned had no adapter"
    return [what] if count else []


def _faults(run: RunDir, suites: list[Suite]) -> list[str]:
    """Return the reasons not to believe the results: other base weights, or other adapters."""
    hint = "the results here are those of the adapter that the run recorded, not of this file"
    adapters_damage = run.adapter_damage().values()
    faults = [f"{problem}: {hint}." for problem in adapters_damage]
    faults += _changed_files(run, " ".join(adapters_damage))
    again = "the state counts as not measured there; repeat it with opdcl eval RUN --force"
    faults += [f"{fault}; {again}." for suite in suites for fault in suite.faults]
    manifest = run.read_manifest()
    base, adapters = (manifest.get(key) or {} for key in ("base", "adapters"))
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


def _changed_files(run: RunDir, said: str) -> list[str]:
    """Return which of the files that a run has sealed have changed, besides those already `said`."""
    try:
        changed = changes(run)
    except UsageError as fault:
        return [] if fault.message in said else [f"{fault.message}."]
    places = {run.path / name: problem for name, problem in changed.items()}
    hint = "opdcl verify RUN lists all; what is shown here may be wrong"
    return [
        f"{place} {problem} since opdcl wrote it: {hint}."
        for place, problem in places.items()
        if str(place) not in said
    ]


def _suite_notes(suites: list[Suite], estimates: dict[str, dict]) -> list[str]:
    """Return the caveats about missing answers and floors."""
    notes = []
    for suite in suites:
        if suite.unpaired:
            reason = "because not every measured state answered them; the further metrics still include them"
            notes.append(f"{suite.name}: {suite.unpaired} prompts are left out {reason}.")
        if suite.role != "retention" or suite.floor is None or "base" not in suite.rows:
            continue
        base, states = estimates[suite.name]["base"], suite.states()
        floor = f"{percent(suite.floor)}, the score of {suite.floor_is}"
        if states and stats.headroom_fault(states) == "no headroom":
            unfit = f"unfit for this model: base scores {percent(base['value'])}, and the floor is {floor}"
            notes.append(f"{suite.name}: {unfit}. It can show neither a loss nor a recovery.")
        elif base["low"] <= suite.floor:
            reason = f"base is not measurably above the floor of {floor}"
            notes.append(f"{suite.name}: {reason}, so this suite can hardly show forgetting.")
    return notes


def _recovery_notes(run: RunDir) -> list[str]:
    """Return the caveats that follow from the metrics of a finished recovery."""
    stage = run.find_stage("recover")
    if stage is None or not stage.is_done():
        return []
    rows = read_metrics(stage.metrics)
    notes = [
        f"Recovery, step {row['step']}: {health['sign']} was {health['value']:.3g}, beyond its limit of "
        f"{health['bound']:.3g}; {health['action']}."
        for row in rows
        if (health := row.get("health"))
    ]
    if rewards := [row["reward"] for row in rows if "reward" in row]:
        fifth = max(1, len(rewards) // 5)
        notes.append(
            f"Recovery also used the reward of {section(run, 'recover')['reward']['suite']}: its mean was "
            f"{sum(rewards[:fifth]) / fifth:.3f} over the first {fifth} steps with a reward and "
            f"{sum(rewards[-fifth:]) / fifth:.3f} over the last {fifth}."
        )
    notes += _validation_notes(rows)
    fresh = [row for row in rows if "mismatch" in row]
    mismatched = sum(row["mismatch"] * row["tokens"] for row in fresh)
    share = mismatched / max(1, sum(row["tokens"] for row in fresh))
    if share > 0.001:
        gap = "sampler's and trainer's probabilities differed by more than a factor of two"
        notes.append(f"For {share:.2%} of the fresh tokens, {gap}.")
    return notes


def _validation_notes(rows: list[dict]) -> list[str]:
    """Describe the held-out KL to further teachers, and a recovered adapter that is the scaled tuned one."""
    notes = []
    validations = {row["step"]: row["validation"] for row in rows if "validation" in row}
    best = max((step for step, validation in validations.items() if validation.get("best")), default=None)
    for key in sorted(set().union(*validations.values())):
        stream, _, teacher = key.partition("_kl/")
        if teacher:
            start, end = validations[min(validations)][key], validations[best][key]
            kl = f"from {start:.3f} to {end:.3f} nats per token"
            notes.append(f"Held-out KL to {teacher} on its {stream} prompts: {kl}.")
    missed = validations.get(best, {}).get("missed_ends", 0)
    if missed > MISSED_ENDS:
        notes.append(
            f"Recovery: where base ends its answers, recovered lacks {missed:.0%} of the probability to end; "
            "its answers run on."
        )
    return notes + start_notes(rows)


def start_notes(rows: list[dict]) -> list[str]:
    """Say where a recovery started, and what that start did for it, from the rows of its metrics."""
    chosen = next((row["start"] for row in rows if "start" in row), None)
    is_scaled = chosen is not None and chosen["alpha"] != 1
    scaled = f"the tuned adapter times {chosen['alpha']:g}" if is_scaled else "the tuned adapter"
    validations = {row["step"]: row["validation"] for row in rows if "validation" in row}
    kept = max((step for step, validation in validations.items() if validation.get("best")), default=None)
    if kept == 0:
        return [f"Recovered is {scaled}: no training step came nearer to the teachers on held-out prompts."]
    if chosen is None or kept is None:
        return []
    if not any("loss" in row for row in rows):
        return [f"Recovered is {scaled}: no training was done."]
    if not is_scaled:
        return []
    notes = [f"The recovery started from {scaled}."]
    if chosen["score"] <= NO_WORSE * validations[kept]["score"]:
        notes.append(
            f"On held-out prompts the start alone, {scaled}, is about as near to the teachers: "
            "`--set recover.method=interpolate` gives it without training."
        )
    share = validations[kept].get("domain_kept", 1.0)
    if share < DOMAIN_BACK:
        notes.append(
            f"The domain did not come back from the start: on held-out questions {share:.0%} of it is kept. "
            "Start nearer to tuned with `recover.start`, or take more `recover.steps`."
        )
    return notes
