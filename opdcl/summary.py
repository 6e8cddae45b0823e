"""What a run has shown: run directory -> scores, R, D, tests, cost and the verdict. It loads no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.errors import UsageError
from opdcl.rundir import RunDir, read_json, read_jsonl
from opdcl.text import interval, percent, span

if TYPE_CHECKING:
    import numpy as np

STATES = ("base", "tuned", "recovered")
ROLES = ("retention", "domain", "control")
# What a suite measures, where its name alone does not say it in a sentence.
PLAIN_WORDS = {"instructions": "instruction following", "ifeval": "instruction following"}
# Whose results are the most that distillation can give.
TEACHER_OF = {"retention": "base", "domain": "tuned", "control": "base"}
# Below this share of the domain gain a verdict says "but only": recovery was paid for with the domain.
MOST_OF_THE_GAIN = 0.9


@dataclass(frozen=True)
class Suite:
    """One suite's results on the prompts that every measured state answered, in one order."""

    name: str
    role: str
    metric: str | None
    results: dict[str, dict]
    """State -> what `evals/<state>/<suite>.json` says."""
    rows: dict[str, list[dict]]
    """State -> the sample rows; row i is the same prompt in every state."""
    unpaired: int
    """Prompts left out because not every measured state answered them."""

    @property
    def complete(self) -> bool:
        return set(self.rows) == set(STATES)

    @property
    def floor(self) -> float | None:
        """Return the best headline score of the answers without content, or None where it is not known."""
        kinds = [kind for result in self.results.values() for kind in (result.get("floor") or {}).values()]
        return max((kind[self.metric] for kind in kinds if self.metric in kind), default=None)

    @property
    def prompts(self) -> list[tuple]:
        """Return what tells prompts apart, in the order of the rows."""
        return [(row["doc_id"], row["prompt"]) for row in next(iter(self.rows.values()))]

    @property
    def plain(self) -> str:
        return PLAIN_WORDS.get(self.name, self.name)

    def parts(self, state: str) -> list[list[float]]:
        """Return the headline scores of each prompt; most metrics have one per prompt, instruction level several."""
        assert self.metric
        scores = [row["scores"][self.metric] for row in self.rows[state]]
        return [[float(x) for x in s] if isinstance(s, list) else [float(s)] for s in scores]

    def values(self, state: str) -> np.ndarray:
        """Return one number per prompt whose mean is the metric: prompts with more parts weigh more."""
        import numpy as np

        parts = self.parts(state)
        return np.array([sum(p) for p in parts]) * len(parts) / sum(len(p) for p in parts)


def load_suites(run: RunDir) -> list[Suite]:
    """Load every suite that the config names or that was measured, in the order of the config."""
    evaluation = section(run, "eval")
    roles = {suite: role for role in ROLES for suite in evaluation.get(role) or []}
    for path in sorted(run.evals.glob("*/*.json")):
        if path.parent.name in STATES:
            roles.setdefault(path.stem, str(read_json(path).get("role", "control")))
    return [_load_suite(run, name, role) for name, role in roles.items()]


def _load_suite(run: RunDir, name: str, role: str) -> Suite:
    results: dict[str, dict] = {}
    answers: dict[str, dict[tuple, dict]] = {}
    for state in STATES:
        if not run.eval_result(state, name).exists():
            continue
        result = read_json(run.eval_result(state, name))
        rows = [r for r in read_jsonl(run.eval_samples(state, name)) if result["metric"] in r.get("scores", {})]
        if rows:
            results[state] = result
            # The prompt is part of the key because each task of a group counts its documents from 0.
            answers[state] = {(row["doc_id"], row["prompt"]): row for row in rows}
    if not results:
        return Suite(name, role, None, {}, {}, 0)
    shared = set.intersection(*(set(found) for found in answers.values()))
    if not shared:
        raise UsageError(
            f"suite {name}: {' and '.join(results)} have no prompt in common, so they cannot be compared",
            f"opdcl eval {run.path} --force",
        )
    order = sorted(shared, key=lambda key: (str(type(key[0])), *key))
    first = next(iter(results.values()))
    return Suite(
        name,
        str(first.get("role", role)),
        first["metric"],
        results,
        {state: [found[key] for key in order] for state, found in answers.items()},
        len(set.union(*(set(found) for found in answers.values()))) - len(shared),
    )


def summarise(run: RunDir) -> dict[str, Any]:
    """Return the results of a run, whole or partial, with the stable keys of `opdcl report RUN --json`."""
    return summarise_suites(run, load_suites(run))


def summarise_suites(run: RunDir, suites: list[Suite]) -> dict[str, Any]:
    from opdcl import stats  # scipy takes a second to import

    seed = int(section(run, "eval").get("seed") or 0)
    retention = next((s for s in suites if s.role == "retention"), None)
    domain = next((s for s in suites if s.role == "domain"), None)
    estimates = {s.name: _summarise_suite(s, seed) for s in suites}
    summary: dict[str, Any] = {
        "verdict": "",
        "status": "not measured",
        "name": read_record(run.config).get("workflow", {}).get("name") or run.path.name,
        "headline": {"retention": retention.name if retention else None, "domain": domain.name if domain else None},
        "suites": estimates,
        "recovery": None,
        "domain_retention": None,
        "tests": {
            "detectable_difference": None,
            "mcnemar": _pairwise(retention, lambda a, b: stats.mcnemar(a, b), only_pass_or_fail=True),
            **{
                f"{prefix}{pair}": interval
                for prefix, suite in (("", retention), ("domain_", domain))
                for pair, interval in _pairwise(suite, lambda a, b: stats.difference(a, b, seed).as_dict()).items()
            },
        },
        "ceiling": _ceiling(suites, section(run, "recover"), seed),
        "cost": _cost(run, suites),
        "notes": _notes(run, suites, estimates),
    }
    if retention and retention.complete:
        three = [retention.values(state) for state in STATES]
        summary["status"] = stats.judge(*three, seed=seed)
        estimate = stats.recovery(*three, seed=seed)
        summary["recovery"] = estimate and estimate.as_dict()
        summary["tests"]["detectable_difference"] = stats.detectable_difference(three[2], three[0])
    if domain and domain.complete:
        estimate = stats.domain_retention(*(domain.values(state) for state in STATES), seed=seed)
        summary["domain_retention"] = estimate and estimate.as_dict()
    if retention and summary["status"] in ("partly recovered", "not shown"):
        summary["notes"].append(on_detectable(retention, [summary["tests"]["detectable_difference"]]))
    summary["verdict"] = _verdict(summary, retention, domain)
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
    from opdcl import stats

    def estimate(state: str) -> dict[str, float]:
        parts = suite.parts(state)
        if any(len(p) != 1 for p in parts):
            return stats.clustered_mean(parts, seed).as_dict()
        return stats.mean(suite.values(state), seed).as_dict()

    further = dict.fromkeys(m for result in suite.results.values() for m in result["metrics"] if m != suite.metric)
    return {
        "role": suite.role,
        "metric": suite.metric,
        "n": len(next(iter(suite.rows.values()), [])),
        "floor": suite.floor,
        **{state: estimate(state) if state in suite.rows else {} for state in STATES},
        "metrics": {m: {s: r["metrics"][m] for s, r in suite.results.items() if m in r["metrics"]} for m in further},
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
    from opdcl import stats

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
        k: (max if k == "peak_memory_bytes" else sum)(c.get(k) or 0 for c in spent_each) for k in keys if spent_each
    }
    return cost


def _notes(run: RunDir, suites: list[Suite], estimates: dict[str, dict]) -> list[str]:
    """Return what a careful reader must know before believing the numbers."""
    notes = []
    manifest = read_record(run.manifest)
    base = manifest.get("base") or {}
    before, after = base.get("fingerprint_before"), base.get("fingerprint_after")
    if before and after and before != after:
        notes.append("The base weights changed during the run: base is no longer a valid teacher or yardstick.")
    for suite in suites:
        for state, result in suite.results.items():
            measured = (result.get("model") or {}).get("adapter_sha256")
            present = ((manifest.get("adapters") or {}).get(state) or {}).get("sha256")
            if measured and present and measured != present:
                notes.append(f"{suite.name}: {state} was measured with another adapter than the one in this run.")
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
        notes.append(f"Beside its teachers, recovery was rewarded by {suite}: mean reward {sum(rewards[:fifth]) / fifth:.3f} over its first "
                     f"{fifth} steps on it, {sum(rewards[-fifth:]) / fifth:.3f} over its last.")  # fmt: skip
    notes += [f"Recovery stopped after step {r['step']}: {r['stopped']}." for r in rows if "stopped" in r]
    measured = {r["step"]: r["validation"] for r in rows if "validation" in r}
    best = max((step for step, kl in measured.items() if kl.get("best")), default=None)
    for key in sorted({key for kl in measured.values() for key in kl if "_kl/" in key}):
        stream, _, teacher = key.partition("_kl/")
        notes.append(f"Held-out KL to {teacher} on its {stream} prompts: from {measured[min(measured)][key]:.3f} to {measured[best][key]:.3f} nats per token.")
    scale = next((r[key] for r in rows for key in ("warm_start", "interpolation") if key in r), {"alpha": 1})
    if best == 0 or any("interpolation" in r for r in rows):
        notes.append(
            f"Recovered is the tuned adapter times {scale['alpha']:g}"
            + (f" on average, {scale['tilt']:+.0%} at the last layer: " if scale.get("tilt") else ": ")
            + ("no step of training came nearer to the teachers on held-out prompts." if best == 0 else "no training was done.")
        )
    seen = [(r["mismatch"] * r["tokens"], r["tokens"]) for r in rows if "mismatch" in r]
    share = sum(m for m, _ in seen) / max(1, sum(n for _, n in seen))
    if share > 0.001:
        notes.append(f"Sampler and trainer disagreed by more than a factor of two about {share:.2%} of the fresh tokens.")
    return notes


def _verdict(summary: dict, retention: Suite | None, domain: Suite | None) -> str:
    """Say the outcome in one plain sentence."""
    if retention is None or not retention.rows:
        missing = f"suite {retention.name} has no results" if retention else "there is no retention suite"
        return f"Not measured yet: {missing}."
    scores = {s: percent(summary["suites"][retention.name][s]["value"]) for s in retention.rows}
    what = retention.plain
    if not retention.complete:
        missing = " and ".join(s for s in STATES if s not in scores)
        known = ", ".join(f"{s} {score}" for s, score in scores.items())
        return f"Not measured yet: {what} has no result for {missing} (so far: {known})."
    base, tuned, recovered = (scores[s] for s in STATES)
    tail = _domain_clause(summary["domain_retention"], domain)
    if summary["status"] == "no measurable forgetting":
        return (
            f"No measurable forgetting: {what} is {base} for base, {tuned} for tuned and {recovered} for recovered, "
            f"{why_no_recovery(summary)}, so no R is computed{tail}."
        )
    ratio = f"R = {interval(summary['recovery'])}"
    match summary["status"]:
        case "recovered":
            return f"Recovered: {what} is back to {recovered} (base {base}, tuned {tuned}), {ratio}{tail}."
        case "partly recovered":
            return (
                f"Partly recovered: {what} rose to {recovered} (base {base}, tuned {tuned}), {ratio}, "
                f"which is measurably above tuned but not shown to be as good as base{tail}."
            )
    return (
        f"Recovery is not shown: {what} is {recovered} (base {base}, tuned {tuned}), {ratio}, "
        f"which is not measurably above tuned{tail}."
    )


def _domain_clause(kept: dict | None, domain: Suite | None) -> str:
    if domain is None or not domain.complete:
        return "; what is left of the domain gain is not measured"
    if kept is None:
        return f"; the fine-tune's gain on {domain.plain} is not measurable, so no D is computed"
    word = "but only" if kept["value"] < MOST_OF_THE_GAIN else "and"
    span = f"[{100 * kept['low']:.0f}, {100 * kept['high']:.0f}]"
    return f", {word} {100 * kept['value']:.0f} % {span} of the domain gain is kept"


def why_no_recovery(summary: dict) -> str:
    """Say why no R is printed: the drop is too small, or it is not distinguishable from none."""
    from opdcl import stats

    change = summary["tests"]["tuned_minus_base"]
    if change is None:
        return "base and tuned are not both measured"
    if summary["status"] == "not measured":
        return "recovered is not measured"
    value, low, high = (round(-100 * change[k], 1) + 0.0 for k in ("value", "high", "low"))  # + 0.0: never "-0.0"
    drop = f"a drop from base to tuned of {value} points [{low}, {high}]"
    if -change["value"] < stats.SMALLEST_DROP:
        return f"{drop}, less than the {100 * stats.SMALLEST_DROP:.0f} that a ratio needs"
    return f"{drop}, whose interval or McNemar test does not exclude zero"


def why_no_domain_retention(domain: Suite | None) -> str:
    """Say why no D is printed, where none is."""
    if domain is None:
        return "there is no domain suite"
    if not domain.complete:
        return f"{domain.name} is not measured on {', '.join(s for s in STATES if s not in domain.rows)}"
    return "the fine-tune's gain on the domain is not measurably above zero"


def read_record(path: Path) -> dict:
    """Read a JSON record of the run, empty where it is not written yet."""
    return read_json(path) if path.exists() else {}


def section(run: RunDir, name: str) -> dict:
    """Return one section of the run's workflow, empty where the workflow leaves it out."""
    return (read_record(run.config).get("workflow") or {}).get(name) or {}
