"""Summarise a run: run directory -> scores, R, D, tests, cost and the verdict. No model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opdcl.results import closeness, power, writing
from opdcl.results.format import percent
from opdcl.results.scores import STATES, Suite, headline_of, load_suites, section
from opdcl.results.tables import (
    closeness_cell,
    different_raw,
    distance_cell,
    ratio_cell,
    score_cell,
    writing_rows,
)
from opdcl.results.verdict import conclude
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir

if TYPE_CHECKING:
    import numpy as np

# A quickstart whose answers ran on lacked 0.57 to 0.65 of base's probability to end; one whose did not, 0.26.
MISSED_ENDS = 0.4

# The teacher whose results are the ceiling of distillation, per role of a suite.
TEACHER_OF = {"retention": "base", "domain": "tuned", "control": "base"}

PAIRS = (("tuned", "base"), ("recovered", "tuned"), ("recovered", "base"))


def summarise(run: RunDir, suites: list[Suite] | None = None) -> dict[str, Any]:
    """Return the results of a finished or unfinished run, with the stable keys of `opdcl report RUN --json`.

    `suites` are those to summarise, by default all.
    """
    from opdcl.results import stats

    suites = load_suites(run) if suites is None else suites
    headline = headline_of(suites)
    retention, domain = headline.get("retention"), headline.get("domain")
    estimates = {s.name: _summarise_suite(s) for s in suites}
    near = closeness.load(run)
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
        "notes": [*faults, *_suite_notes(suites, estimates), *_recovery_notes(run)],
    }
    conclude(summary, retention, domain, inert)
    if retention and summary["non_inferiority"]:
        summary["notes"] += power.notes(retention.name, len(retention.prompts), summary)
    return summary


def table_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Return the score table for a terminal: suite and metric, n, floor, and each state with its interval."""
    rows = []
    for name, suite in summary["suites"].items():
        if suite["n"]:
            floor = "" if suite["floor"] is None else percent(suite["floor"])
            scores = [score_cell(suite[state]) for state in STATES]
            rows.append([f"{name}\n{suite['metric']}", str(suite["n"]), floor, *scores])
            if suite["role"] == "retention":
                rows += [[label, "", "", *cells] for label, *cells in writing_rows(suite["writing"])]
    near = summary["closeness"]
    if near:
        distances = [distance_cell(near[state].get("distance")) for state in STATES]
        floor = "" if near["floor"] is None else f"{near['floor']:.3f}"
        rows.append(["distance to base\nnats per token", str(near["n"]), floor, *distances])
        if c := closeness_cell(near):
            rows.append(["C", "", "", "", "", c])
    for label, key, start in (("R", "recovery", "tuned"), ("D", "domain_retention", "base")):
        if summary[key]:
            rows.append([label, "", "", "", "", ratio_cell(summary[key])])
        if different_raw(summary, key):
            rows.append([f"{label} from {start}", "", "", "", "", ratio_cell(summary[f"{key}_raw"])])
    return rows


def _summarise_suite(suite: Suite) -> dict[str, Any]:
    metrics: dict[str, dict[str, float]] = {}
    for state, result in suite.results.items():
        for metric, value in result["metrics"].items():
            if metric != suite.metric:
                metrics.setdefault(metric, {})[state] = value
    return {
        "role": suite.role,
        "metric": suite.metric,
        **_scores(suite),
        "metrics": metrics,
        "writing": writing.estimates(suite),
    }


def _scores(suite: Suite) -> dict[str, Any]:
    """Return the number of prompts, the floor, and the estimated score of each state; empty without one."""
    from opdcl.results import stats

    def estimate(state: str) -> dict[str, float]:
        parts = suite.parts(state)
        if any(len(p) != 1 for p in parts):
            return stats.clustered_mean(parts, suite.clusters).as_dict()
        return stats.mean(suite.values(state), suite.clusters).as_dict()

    floor = suite.floor_values()
    return {
        "n": len(next(iter(suite.rows.values()), [])),
        "floor": suite.floor if floor is None else float(floor.mean()),
        **{state: estimate(state) if state in suite.rows else {} for state in STATES},
    }


def _groups(retention: Suite | None) -> dict[str, Any]:
    """Return the headline's scores and R for each group of prompts; empty unless there are several groups."""
    from opdcl.results import stats

    groups: dict[str, Any] = {}
    for name in retention.groups if retention and len(retention.groups) > 1 else ():
        suite = retention.only(name)
        outcome = stats.outcome(suite.states(), None)
        ratios = {key: outcome[key] for key in ("recovery", "recovery_raw", "non_inferiority")}
        groups[name] = {**_scores(replace(suite, results={})), **ratios}
    return groups


def _tests(retention: Suite | None, domain: Suite | None) -> dict[str, Any]:
    """Return the paired tests of the headline suites; None for pairs that are not measured."""
    from opdcl.results import stats

    def pairwise(suite: Suite | None, test: Callable) -> dict[str, Any]:
        return {
            f"{later}_minus_{earlier}": test(suite.values(later), suite.values(earlier), suite.clusters)
            if suite and {later, earlier} <= suite.rows.keys()
            else None
            for later, earlier in PAIRS
        }

    def difference(a: np.ndarray, b: np.ndarray, clusters: stats.Clusters) -> dict[str, float]:
        return stats.difference(a, b, clusters).as_dict()

    def mcnemar(a: np.ndarray, b: np.ndarray, clusters: stats.Clusters) -> float | None:
        return stats.mcnemar(a, b, clusters) if {*a, *b} <= {0.0, 1.0} else None

    detectable = pairwise(retention, stats.detectable_difference)
    return {
        "detectable_difference": detectable["recovered_minus_base"],
        "detectable_drop": detectable["tuned_minus_base"],
        "writing": writing.compared_with_base([retention] if retention else []),
        "mcnemar": pairwise(retention, mcnemar),
        **pairwise(retention, difference),
        **{f"domain_{pair}": change for pair, change in pairwise(domain, difference).items()},
    }


def further_teachers(recover: dict[str, Any]) -> list[str]:
    """Return the names of teachers that grade a part of the domain prompts, by the settings of a recovery."""
    of_streams = recover.get("general_teacher"), recover.get("domain_teacher")
    teachers = (recover.get("teachers") or {}).items()
    return [name for name, teacher in teachers if name not in of_streams or teacher.get("prompts")]


def _ceiling(suites: list[Suite], recover: dict[str, Any]) -> dict[str, dict]:
    """Return student minus teacher per suite; near zero, only another teacher or a reward can improve it.

    A suite is left out unless its teacher is base (general) or tuned (domain): others are not measured.
    """
    from opdcl.results import stats

    ceiling = {}
    for suite in suites:
        teacher = TEACHER_OF[suite.role]
        stream = "domain" if teacher == "tuned" else "general"
        own = recover.get(f"{stream}_teacher", teacher)
        if own != teacher or (stream == "domain" and further_teachers(recover)):
            continue
        if {teacher, "recovered"} <= set(suite.rows):
            pair = suite.values("recovered"), suite.values(teacher), suite.clusters
            gap = stats.difference(*pair).as_dict()
            place = {"place": stats.place(*pair), "detectable": stats.detectable_difference(*pair)}
            ceiling[suite.name] = {"teacher": teacher, "n": len(suite.prompts), **gap, **place}
    return ceiling


def _cost(run: RunDir, suites: list[Suite]) -> dict[str, dict]:
    """Return seconds, tokens and peak memory per stage; empty if a stage is not finished."""
    keys = ("seconds", "tokens", "peak_memory_bytes")
    cost: dict[str, dict] = {}
    for name in ("finetune", "recover"):
        spent = run.stage_record(name).get("cost")
        cost[name] = {k: spent[k] for k in keys} if spent else {}
    evals = [result["cost"] for s in suites for result in s.results.values() if result.get("cost")]
    totals: list[Callable] = [sum, sum, max]
    cost["eval"] = {k: of(c[k] for c in evals) for k, of in zip(keys, totals, strict=True) if evals}
    return cost


def _inert(suites: list[Suite]) -> list[str]:
    """Return a fault if tuned answers every prompt of every suite as base does."""
    measured = [suite for suite in suites if {"base", "tuned"} <= suite.rows.keys()]
    answers = {
        state: [[row.get("response") for row in suite.rows[state]] for suite in measured]
        for state in ("base", "tuned")
    }
    count = sum(map(len, answers["base"]))
    # A suite of likelihoods has no answers.
    if not count or answers["base"] != answers["tuned"] or any(None in texts for texts in answers["base"]):
        return []
    return [f"base and tuned give the same answer to all {count} prompts, as if tuned had no adapter"]


def _faults(run: RunDir, suites: list[Suite]) -> list[str]:
    """Return the reasons not to believe the results: other base weights, or other adapters."""
    hint = "the results here are those of the adapter that the run recorded, not of this file"
    faults = [f"{problem}: {hint}." for problem in run.adapter_damage().values()]
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


def _suite_notes(suites: list[Suite], estimates: dict[str, dict]) -> list[str]:
    """Return the caveats about missing answers and floors."""
    from opdcl.results import stats

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
    rows = read_jsonl(stage.metrics)
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
    notes += [f"Recovery stopped after step {r['step']}: {r['stopped']}." for r in rows if "stopped" in r]
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
    for key in sorted({key for validation in validations.values() for key in validation if "_kl/" in key}):
        stream, _, teacher = key.partition("_kl/")
        start, end = validations[min(validations)][key], validations[best][key]
        notes.append(
            f"Held-out KL to {teacher} on its {stream} prompts: from {start:.3f} to {end:.3f} nats per token."
        )
    missed = validations.get(best, {}).get("missed_ends", 0)
    if missed > MISSED_ENDS:
        notes.append(
            f"Recovery: where base ends its answers, recovered lacks {missed:.0%} of the probability to end; "
            "its answers run on."
        )
    for row in rows:
        if "interpolation" in row:
            alpha = row["interpolation"]["alpha"]
            notes.append(f"Recovered is the tuned adapter times {alpha:g}: no training was done.")
    if best == 0:
        reason = "no training step came nearer to the teachers on held-out prompts"
        notes.append(f"Recovered is the tuned adapter: {reason}.")
    return notes
