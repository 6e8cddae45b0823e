"""What a run has shown: run directory -> scores, R, D, tests, cost and the verdict. It loads no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opdcl.results.format import interval, percent, span
from opdcl.results.scores import STATES, Suite, load_suites, read_record, section
from opdcl.results.verdict import verdict
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir

# Whose results are the most that distillation can give.
TEACHER_OF = {"retention": "base", "domain": "tuned", "control": "base"}


def summarise(run: RunDir) -> dict[str, Any]:
    """Return the results of a run, whole or partial, with the stable keys of `opdcl report RUN --json`."""
    return summarise_suites(run, load_suites(run))


def summarise_suites(run: RunDir, suites: list[Suite]) -> dict[str, Any]:
    from opdcl.results import stats

    seed = int(section(run, "eval").get("seed") or 0)
    retention = next((s for s in suites if s.role == "retention"), None)
    domain = next((s for s in suites if s.role == "domain"), None)
    estimates = {s.name: _summarise_suite(s, seed) for s in suites}
    summary: dict[str, Any] = {
        "verdict": "",
        "status": "not measured",
        "name": read_record(run.config).get("workflow", {}).get("name") or run.path.name,
        "headline": {
            "retention": retention.name if retention else None,
            "domain": domain.name if domain else None,
        },
        "suites": estimates,
        "recovery": None,
        "domain_retention": None,
        "tests": {
            "detectable_difference": None,
            "mcnemar": _pairwise(retention, lambda a, b: stats.mcnemar(a, b), only_pass_or_fail=True),
            **{
                f"{prefix}{pair}": interval
                for prefix, suite in (("", retention), ("domain_", domain))
                for pair, interval in _pairwise(
                    suite, lambda a, b: stats.difference(a, b, seed).as_dict()
                ).items()
            },
        },
        "ceiling": _ceiling(suites, section(run, "recover"), seed),
        "cost": _cost(run, suites),
        "notes": _notes(run, suites, estimates),
    }
    if retention and retention.complete:
        three = [retention.values(state) for state in STATES]
        summary["status"] = stats.status_of(*three, seed=seed)
        estimate = stats.recovery(*three, seed=seed)
        summary["recovery"] = estimate and estimate.as_dict()
        summary["tests"]["detectable_difference"] = stats.detectable_difference(three[2], three[0])
    if domain and domain.complete:
        estimate = stats.domain_retention(*(domain.values(state) for state in STATES), seed=seed)
        summary["domain_retention"] = estimate and estimate.as_dict()
    if retention and summary["status"] in ("partly recovered", "not shown"):
        summary["notes"].append(on_detectable(retention, [summary["tests"]["detectable_difference"]]))
    summary["verdict"] = verdict(summary, retention, domain)
    return summary


def on_detectable(suite: Suite, smallest: list[float]) -> str:
    """Say which true differences between recovered and base the suite's prompts can show, given that of each run."""
    least, most = (f"{100 * difference:.1f}" for difference in (min(smallest), max(smallest)))
    return (
        f"{suite.name}: on {len(suite.prompts)} prompts a true difference of {least if least == most else f'{least} to {most}'} points "
        "between recovered and base is found four times in five; a smaller one may go unseen."
    )


def table_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Return the score table for a terminal: suite and metric, n, floor, and each state with its interval."""
    rows = []
    for name, suite in summary["suites"].items():
        if suite["n"]:
            floor = "" if suite["floor"] is None else percent(suite["floor"])
            scores = [f"{percent(suite[s]['value'])}\n{span(suite[s])}" if suite[s] else "" for s in STATES]
            rows.append([f"{name}\n{suite['metric']}", str(suite["n"]), floor, *scores])
    for label, key in (("R", "recovery"), ("D", "domain_retention")):
        if summary[key]:
            rows.append([label, "", "", "", "", interval(summary[key]).replace(" [", "\n[", 1)])
    return rows


def _summarise_suite(suite: Suite, seed: int) -> dict[str, Any]:
    from opdcl.results import stats

    def estimate(state: str) -> dict[str, float]:
        parts = suite.parts(state)
        if any(len(p) != 1 for p in parts):
            return stats.clustered_mean(parts, seed).as_dict()
        return stats.mean(suite.values(state), seed).as_dict()

    further = dict.fromkeys(
        m for result in suite.results.values() for m in result["metrics"] if m != suite.metric
    )
    return {
        "role": suite.role,
        "metric": suite.metric,
        "n": len(next(iter(suite.rows.values()), [])),
        "floor": suite.floor,
        **{state: estimate(state) if state in suite.rows else {} for state in STATES},
        "metrics": {
            m: {s: r["metrics"][m] for s, r in suite.results.items() if m in r["metrics"]} for m in further
        },
    }


def _pairwise(suite: Suite | None, compare: Callable, only_pass_or_fail: bool = False) -> dict[str, Any]:
    """Apply `compare` to each pair of states, later minus earlier; None where it is not measured or not allowed."""
    found: dict[str, Any] = {}
    for later, earlier in (("tuned", "base"), ("recovered", "tuned"), ("recovered", "base")):
        found[f"{later}_minus_{earlier}"] = None
        if suite and later in suite.rows and earlier in suite.rows:
            a, b = suite.values(later), suite.values(earlier)
            if not only_pass_or_fail or {*a, *b} <= {0.0, 1.0}:
                found[f"{later}_minus_{earlier}"] = compare(a, b)
    return found


def _ceiling(suites: list[Suite], recover: dict[str, Any], seed: int) -> dict[str, dict]:
    """Return student minus teacher per suite: near zero, distillation has given what it can, and only a reward goes further.

    Other teachers than base on general and tuned on domain prompts are not measured, so of these nothing can be said.
    """
    from opdcl.results import stats

    found = {}
    for suite in suites:
        teacher = TEACHER_OF[suite.role]
        stream = "domain" if teacher == "tuned" else "general"
        kind = (recover.get(f"{stream}_teacher") or {}).get("kind", teacher)
        if kind != teacher or (stream == "domain" and recover.get("teachers")):
            continue
        if {teacher, "recovered"} <= set(suite.rows):
            gap = stats.difference(suite.values("recovered"), suite.values(teacher), seed).as_dict()
            place = "above" if gap["low"] > 0 else "below" if gap["high"] < 0 else "level"
            found[suite.name] = {"teacher": teacher, **gap, "place": place}
    return found


def _cost(run: RunDir, suites: list[Suite]) -> dict[str, dict]:
    """Return seconds, tokens and peak memory per stage; empty where a stage has not ended."""
    keys = ("seconds", "tokens", "peak_memory_bytes")
    cost: dict[str, dict] = {}
    for name in ("finetune", "recover"):
        stage = run.find_stage(name)
        spent = stage.state().get("cost") if stage else None
        cost[name] = {k: spent.get(k, 0) for k in keys} if spent else {}
    spent_each = [r["cost"] for s in suites for r in s.results.values() if r.get("cost")]
    cost["eval"] = {
        k: (max if k == "peak_memory_bytes" else sum)(c.get(k) or 0 for c in spent_each)
        for k in keys
        if spent_each
    }
    return cost


def _notes(run: RunDir, suites: list[Suite], estimates: dict[str, dict]) -> list[str]:
    """Return what a careful reader must know before believing the numbers."""
    notes = []
    manifest = read_record(run.manifest)
    base = manifest.get("base") or {}
    before, after = base.get("fingerprint_before"), base.get("fingerprint_after")
    if before and after and before != after:
        notes.append(
            "The base weights changed during the run: base is no longer a valid teacher or yardstick."
        )
    for suite in suites:
        for state, result in suite.results.items():
            measured = (result.get("model") or {}).get("adapter_sha256")
            present = ((manifest.get("adapters") or {}).get(state) or {}).get("sha256")
            if measured and present and measured != present:
                notes.append(
                    f"{suite.name}: {state} was measured with another adapter than the one in this run."
                )
        if suite.unpaired:
            notes.append(
                f"{suite.name}: {suite.unpaired} prompts are left out because not every measured state answered them; "
                "the further metrics still include them."
            )
        base_low = estimates[suite.name]["base"].get("low")
        if suite.role == "retention" and None not in (suite.floor, base_low) and base_low <= suite.floor:
            notes.append(
                f"{suite.name}: base is not measurably above the floor of {percent(suite.floor)} that an answer "
                "without content reaches, so this suite can hardly show forgetting."
            )
    return notes + _recovery_notes(run)


def _recovery_notes(run: RunDir) -> list[str]:
    """Return what the recovery's own metrics say against it."""
    stage = run.find_stage("recover")
    rows = read_jsonl(stage.metrics) if stage else []
    if stage is None or stage.state().get("status") != "done":
        return []
    notes = []
    for row in rows:
        if health := row.get("health"):
            notes.append(
                f"Recovery, step {row['step']}: {health['sign']} was {health['value']:.3g}, beyond {health['bound']:.3g}; "
                f"{health['action']}."
            )
    if rewards := [r["reward"] for r in rows if "reward" in r]:
        fifth = max(1, len(rewards) // 5)
        suite = section(run, "recover")["reward"]["suite"]
        notes.append(
            f"Beside its teachers, recovery was rewarded by {suite}: mean reward {sum(rewards[:fifth]) / fifth:.3f} over its first "
            f"{fifth} steps on it, {sum(rewards[-fifth:]) / fifth:.3f} over its last."
        )
    notes += [f"Recovery stopped after step {r['step']}: {r['stopped']}." for r in rows if "stopped" in r]
    measured = {r["step"]: r["validation"] for r in rows if "validation" in r}
    best = max((step for step, kl in measured.items() if kl.get("best")), default=None)
    for key in sorted({key for kl in measured.values() for key in kl if "_kl/" in key}):
        stream, _, teacher = key.partition("_kl/")
        notes.append(
            f"Held-out KL to {teacher} on its {stream} prompts: from {measured[min(measured)][key]:.3f} to {measured[best][key]:.3f} nats per token."
        )
    scale = next((r[key] for r in rows for key in ("warm_start", "interpolation") if key in r), {"alpha": 1})
    if best == 0 or any("interpolation" in r for r in rows):
        notes.append(
            f"Recovered is the tuned adapter times {scale['alpha']:g}"
            + (f" on average, {scale['tilt']:+.0%} at the last layer: " if scale.get("tilt") else ": ")
            + (
                "no step of training came nearer to the teachers on held-out prompts."
                if best == 0
                else "no training was done."
            )
        )
    seen = [(r["mismatch"] * r["tokens"], r["tokens"]) for r in rows if "mismatch" in r]
    share = sum(m for m, _ in seen) / max(1, sum(n for _, n in seen))
    if share > 0.001:
        notes.append(
            f"Sampler and trainer disagreed by more than a factor of two about {share:.2%} of the fresh tokens."
        )
    return notes
