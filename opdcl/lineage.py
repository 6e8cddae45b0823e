"""Runs that build on one another, one domain after the other or several specialists into one: what each step left.

    opdcl run continual-two-domains

A step is a run; what it ends with is its recovered adapter, or its tuned one where it does not recover. Scores after each
step make the matrix of continual learning. From it follow the average score at the end, forgetting, which is how far the
end lies below the best that a suite had reached before the last step (Chaudhry et al., arXiv 1801.10112), and backward
transfer, which is how far earlier domains have moved since they were learned (Lopez-Paz and Ranzato, arXiv 1706.08840).
Retention suites count among what was known from the start.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.load import flatten
from opdcl.rundir import RunDir
from opdcl.summary import Suite, load_suites, read_record
from opdcl.text import Table, interval, percent, span

if TYPE_CHECKING:
    import numpy as np


def build_on_one_another(runs: list[RunDir]) -> bool:
    """Say whether one of the runs starts from another, or is taught by it."""
    places = {run.path.resolve() for run in runs}
    return any(places & _parents(run) for run in runs)


def _parents(run: RunDir) -> set[Path]:
    start, teachers = _start(run), _teachers(run)
    return {start, *teachers.values()} if start else set(teachers.values())


def _start(run: RunDir) -> Path | None:
    start = (read_record(run.config).get("workflow") or {}).get("start")
    return Path(start).resolve() if start else None


def _teachers(run: RunDir) -> dict[str, Path]:
    """Return the places of the adapters that teach a run, by their names."""
    recover = (read_record(run.config).get("workflow") or {}).get("recover") or {}
    sections = {f"{s} teacher": recover.get(f"{s}_teacher") or {} for s in ("general", "domain")} | (recover.get("teachers") or {})
    return {name: Path(section["adapter"]).resolve() for name, section in sections.items() if section.get("adapter")}


@dataclass(frozen=True, eq=False)
class Step:
    """Runs that differ in nothing but their seeds, as one step of a chain."""

    name: str
    runs: list[RunDir]

    @cached_property
    def suites(self) -> list[dict[str, Suite]]:
        """Per run its suites by name, without those that have no results."""
        return [{s.name: s for s in load_suites(run) if s.rows} for run in self.runs]

    @cached_property
    def learned(self) -> str | None:
        """The suite of the domain that this step learned: the first of its domain suites."""
        if not (read_record(self.runs[0].config).get("workflow") or {}).get("finetune"):
            return None
        return next((name for name, s in self.suites[0].items() if s.role == "domain"), None)

    def scores(self, suite: str, base: bool = False) -> np.ndarray | None:
        """Return `(seeds, N)` scores of what the step ended with, or of base; None unless every run has them."""
        import numpy as np

        found = []
        for run, suites in zip(self.runs, self.suites, strict=True):
            state = "base" if base else "recovered" if run.find_stage("recover") else "tuned"
            if suite not in suites or state not in suites[suite].rows:
                return None
            found.append(suites[suite].values(state))
        return np.stack(found) if len({len(row) for row in found}) == 1 else None


def compare(runs: list[RunDir]) -> dict[str, Any]:
    """Return scores after every step, what each chain of steps comes to, and how much of each teacher is kept."""
    from opdcl import stats

    steps = _steps(runs)
    of_run = {run.path.resolve(): step for step in steps for run in step.runs}
    suites = {name: s for step in steps for found in step.suites for name, s in found.items()}
    seed = 0
    chains = [_summarise(chain, list(suites.values()), seed) for chain in _chains(steps, of_run)]
    return {
        "suites": {n: {"role": s.role, "metric": s.metric, "n": len(next(iter(s.rows.values())))} for n, s in suites.items()},
        "base": {n: stats.mean(x, seed).as_dict() for n in suites if (x := next(_known(steps, n), None)) is not None},
        "steps": [
            {"name": step.name, "seeds": len(step.runs), "runs": [str(run.path) for run in step.runs],
             "scores": {n: stats.mean(x, seed).as_dict() for n in suites if (x := step.scores(n)) is not None}}
            for step in steps
        ],
        "chains": [{k: v.as_dict() if isinstance(v, stats.Estimate) else v for k, v in c.items() if k != "parts"} for c in chains],
        "differences": [d for a, b in itertools.combinations(chains, 2) if (d := _difference(a, b, seed))],
        "kept": [kept for step in steps for kept in _kept(step, of_run, seed)],
        "notes": _notes(steps, suites),
    }  # fmt: skip


def _known(steps: list[Step], suite: str):
    return (x for step in steps if (x := step.scores(suite, base=True)) is not None)


def _steps(runs: list[RunDir]) -> list[Step]:
    """Group runs by their settings and by what they build on."""
    from opdcl.compare import IGNORED, SEEDS, common_name
    from opdcl.plan import WITHOUT_MEANING

    by_path = {run.path.resolve(): run for run in runs}

    def key(run: RunDir) -> str:
        workflow = read_record(run.config).get("workflow") or {}
        settings = flatten({k: v for k, v in workflow.items() if k not in {*IGNORED, "start"}})
        kept = {k: v for k, v in settings.items() if k.rsplit(".", 1)[-1] not in {*SEEDS, *WITHOUT_MEANING, "adapter"}}
        places = {"start": _start(run), **_teachers(run)}
        return json.dumps([kept, {n: key(by_path[p]) if p in by_path else str(p) for n, p in places.items() if p}], sort_keys=True)

    def seeds(run: RunDir) -> str:
        settings = flatten(read_record(run.config).get("workflow") or {})
        return json.dumps({k: v for k, v in settings.items() if k.rsplit(".", 1)[-1] in SEEDS and not k.startswith("eval.")})

    alike: dict[str, list[RunDir]] = {}
    for run in runs:
        alike.setdefault(key(run), []).append(run)
    groups: list[list[RunDir]] = []
    for group in alike.values():
        # The same seed twice is one result seen twice.
        groups += [sorted(group, key=seeds)] if len({seeds(run) for run in group}) == len(group) else [[run] for run in group]
    names = [common_name(group) for group in groups]
    return [
        Step(name if name and names.count(name) == 1 else group[0].path.name, group)
        for name, group in zip(names, groups, strict=True)
    ]


def _chains(steps: list[Step], of_run: dict[Path, Step]) -> list[list[Step]]:
    """Return every line of steps from a first one to one that no other starts from, of two steps at least."""
    before = {step.name: of_run.get(_start(step.runs[0])) for step in steps}
    chains = []
    for last in steps:
        if last not in before.values():
            chain = [last]
            while earlier := before[chain[0].name]:
                chain.insert(0, earlier)
            chains += [chain] if len(chain) > 1 else []
    return chains


def _summarise(chain: list[Step], suites: list[Suite], seed: int) -> dict[str, Any]:
    """Return a chain's average score at its end, its forgetting and its backward transfer, each None where not measured."""
    from opdcl import stats

    *earlier, last = chain
    learned = {step.learned: i for i, step in enumerate(chain) if step.learned}
    counted = [s.name for s in suites if s.role == "retention" or s.name in learned]
    ends = {name: last.scores(name) for name in counted}
    falls, moves = {}, {}
    for name in counted:
        first = learned.get(name, 0)
        reached = [step.scores(name) for step in earlier[first:]] + [last.scores(name, base=True)] * (name not in learned)
        if ends[name] is None or any(x is None for x in reached) or not reached:
            continue
        falls[name] = max(reached, key=lambda x: x.mean()) - ends[name]
        if name in learned:
            moves[name] = ends[name] - reached[0]
    whole = all(x is not None for x in ends.values())
    return {
        "name": " \N{RIGHTWARDS ARROW} ".join(step.name for step in chain),
        "steps": [step.name for step in chain],
        "learned": [step.learned for step in chain],
        "average": stats.mean_over(list(ends.values()), seed) if whole and ends else None,
        "forgetting": stats.mean_over(list(falls.values()), seed) if falls else None,
        "backward_transfer": stats.mean_over(list(moves.values()), seed) if moves else None,
        "parts": {"average": ends if whole else {}, "forgetting": falls},
    }


def _difference(one: dict[str, Any], other: dict[str, Any], seed: int) -> dict[str, Any] | None:
    """Return how two chains that learned the same differ, paired by prompt and seed."""
    from opdcl import stats

    if one["learned"] != other["learned"]:
        return None
    found: dict[str, Any] = {"of": one["name"], "against": other["name"]}
    for figure, parts in one["parts"].items():
        others = other["parts"][figure]
        alike = parts.keys() == others.keys() and all(parts[n].shape == others[n].shape for n in parts)
        found[figure] = stats.mean_over([parts[n] - others[n] for n in parts], seed).as_dict() if parts and alike else None
    return found


def _kept(step: Step, of_run: dict[Path, Step], seed: int) -> list[dict[str, Any]]:
    """Return, for each adapter that taught a step, how much of its gain over base the step has."""
    from opdcl import stats

    found = []
    for name, place in _teachers(step.runs[0]).items():
        teacher = of_run.get(place)
        suite = teacher and teacher.learned
        if suite is None:
            continue
        three = step.scores(suite, base=True), teacher.scores(suite), step.scores(suite)
        if all(x is not None for x in three) and len({x.shape for x in three}) == 1:
            kept = stats.domain_retention(*three, seed=seed)
            found.append({"step": step.name, "teacher": name, "suite": suite, "kept": kept and kept.as_dict()})
    return found


def _notes(steps: list[Step], suites: dict[str, Suite]) -> list[str]:
    notes = [
        f"{step.name} is not measured on {', '.join(missing)}."
        for step in steps
        if (missing := [name for name in suites if step.scores(name) is None])
    ]
    if any(len(step.runs) == 1 for step in steps):
        notes.append("With one seed an interval covers the choice of prompts, not the training seed.")
    elif few := sorted({len(step.runs) for step in steps if len(step.runs) < 5}):
        notes.append(f"Over {' or '.join(map(str, few))} seeds an interval is too narrow: of the variance between n seeds the "
                     "bootstrap sees (n - 1) / n.")  # fmt: skip
    return notes


def lead(found: dict[str, Any]) -> str:
    """Say what is shown in one sentence."""
    suites = [f"{name} ({suite['n']} prompts)" for name, suite in found["suites"].items()]
    measured = " and ".join([", ".join(suites[:-1])] * (len(suites) > 1) + suites[-1:])
    return f"{', '.join(step['name'] for step in found['steps'])}: steps that build on one another, measured on {measured}."


def tables(found: dict[str, Any]) -> list[Table]:
    """Return the matrix, the chains with their differences, and what is kept of each teacher, as tables."""
    names = list(found["suites"])
    rows = [["base", *(_score(found["base"].get(n)) for n in names)]]
    rows += [[f"{s['name']}\n{s['seeds']} seed{'s' * (s['seeds'] > 1)}", *(_score(s["scores"].get(n)) for n in names)] for s in found["steps"]]
    caption = "What the model scores after each step. Brackets are 95 % intervals: a bootstrap over prompts, and over seeds where there are several."
    shown = [Table("After each step", ["step", *(f"{n}\n{found['suites'][n]['role']}" for n in names)], rows, caption)]
    if found["chains"]:
        rows = [[c["name"], *(_score(c[k]) for k in ("average", "forgetting", "backward_transfer"))] for c in found["chains"]]
        rows += [[f"{d['of']}\nminus {d['against']}", _points(d["average"]), _points(d["forgetting"]), ""] for d in found["differences"]]
        caption = ("Average: all suites at the end. Forgetting: how far they lie below the best reached before the last step, "
                   "base's retention included. Backward transfer: how far earlier domains have moved since they were learned. "
                   "Differences are in points, paired by prompt and seed.")  # fmt: skip
        shown.append(Table("Chains", ["chain", "average", "forgetting", "backward transfer"], rows, caption))
    if found["kept"]:
        rows = [[k["step"], k["teacher"], k["suite"], interval(k["kept"]).replace(" [", "\n[", 1) if k["kept"] else ""] for k in found["kept"]]
        caption = "The share of a teacher's gain over base that the step has, on the suite that the teacher learned."
        shown.append(Table("Kept of each teacher", ["step", "teacher", "suite", "kept"], rows, caption))
    return shown


def _score(estimate: dict | None) -> str:
    return f"{percent(estimate['value'])}\n{span(estimate)}" if estimate else ""


def _points(estimate: dict | None) -> str:
    if not estimate:
        return ""
    value, low, high = (f"{100 * estimate[k]:+.1f}" for k in ("value", "low", "high"))
    return f"{value}\n[{low}, {high}]"
