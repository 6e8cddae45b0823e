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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from opdcl.config.load import flatten
from opdcl.errors import UsageError
from opdcl.results.format import interval
from opdcl.results.scores import Suite, load_suites, read_record
from opdcl.results.tables import Figure, Table, View, measured_on, notes_on_seeds, points_cell, score_cell
from opdcl.rundir.layout import RunDir

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
    sections = {f"{s} teacher": recover.get(f"{s}_teacher") or {} for s in ("general", "domain")} | (
        recover.get("teachers") or {}
    )
    return {
        name: Path(section["adapter"]).resolve()
        for name, section in sections.items()
        if section.get("adapter")
    }


@dataclass(frozen=True, eq=False)
class Step:
    """Runs that differ in nothing but their seeds, as one step of a chain."""

    name: str
    runs: list[RunDir]

    @cached_property
    def learned(self) -> str | None:
        """The suite of the domain that this step learned: the first that its configuration names."""
        workflow = read_record(self.runs[0].config).get("workflow") or {}
        domains = (workflow.get("eval") or {}).get("domain") or [None]
        return domains[0] if workflow.get("finetune") else None


class Results:
    """What every run scored on every suite, where it answered the same prompts as the others, scored the same way."""

    def __init__(self, runs: list[RunDir]):
        self.suites: dict[str, Suite] = {}
        self.unlike: list[str] = []
        self._found: dict[tuple[RunDir, str], Suite] = {}
        for run in runs:
            for suite in load_suites(run):
                if suite.rows:
                    model = self.suites.setdefault(suite.name, suite)
                    if (suite.metric, suite.prompts) == (model.metric, model.prompts):
                        self._found[run, suite.name] = suite
                    else:
                        self.unlike.append(
                            f"{run.path} answered other prompts of {suite.name}, or was scored otherwise, and is left out there."
                        )

    def scores(self, runs: Sequence[RunDir], suite: str, base: bool = False) -> np.ndarray | None:
        """Return `(runs, N)` scores of what each ended with, or of base; None unless all of them have some."""
        import numpy as np

        found = []
        for run in runs:
            state = "base" if base else "recovered" if run.find_stage("recover") else "tuned"
            rows = self._found[run, suite].rows if (run, suite) in self._found else {}
            if state not in rows:
                return None
            found.append(self._found[run, suite].values(state))
        return np.stack(found) if found else None


class Chain(NamedTuple):
    """Steps that follow one another; a line is one run of each, the next started from the one before."""

    steps: list[Step]
    lines: dict[str, list[RunDir]]
    """The last run's seeds -> its line."""

    def at(self, step: int, seeds: Sequence[str]) -> list[RunDir]:
        return [self.lines[seed][step] for seed in seeds]


def compare(runs: list[RunDir]) -> dict[str, Any]:
    """Return scores after every step, what each chain of steps comes to, and how much of each teacher is kept."""
    from opdcl.results import stats

    results, steps = Results(runs), _steps(runs)
    names = list(results.suites)
    chains = _chains(steps)
    every = [_summarise(chain, list(chain.lines), results) for chain in chains]
    base = {
        n: [r for step in steps for r in step.runs if results.scores([r], n, base=True) is not None][:1]
        for n in names
    }
    return {
        "suites": {
            n: {"role": s.role, "metric": s.metric, "n": len(s.prompts)} for n, s in results.suites.items()
        },
        "base": {
            n: stats.mean(results.scores(run, n, base=True)).as_dict() for n, run in base.items() if run
        },
        "steps": [
            {
                "name": step.name,
                "seeds": len(step.runs),
                "runs": [str(run.path) for run in step.runs],
                "scores": {
                    n: stats.mean(x).as_dict()
                    for n in names
                    if (x := results.scores(step.runs, n)) is not None
                },
            }
            for step in steps
        ],
        "chains": [
            {
                "name": _name(chain),
                "steps": [step.name for step in chain.steps],
                "seeds": len(chain.lines),
                **{
                    figure: stats.mean_over(list(parts.values())).as_dict() if parts else None
                    for figure, parts in found.items()
                },
            }
            for chain, found in zip(chains, every, strict=True)
        ],
        "differences": [d for a, b in itertools.combinations(chains, 2) if (d := _difference(a, b, results))],
        "kept": [kept for step in steps for kept in _kept(step, steps, results)],
        "notes": _notes(steps, chains, results),
    }


def _seeds(run: RunDir) -> str:
    """Return the seeds of a run's stages, whichever stages it has: two of like seeds are a pair."""
    from opdcl.results.arms import SEEDS

    settings = flatten(read_record(run.config).get("workflow") or {})
    return str(
        sorted(
            {
                str(v)
                for k, v in settings.items()
                if k.rsplit(".", 1)[-1] in SEEDS and not k.startswith("eval.")
            }
        )
    )


def _steps(runs: list[RunDir]) -> list[Step]:
    """Group runs by their settings and by what they build on.

    Raises:
        UsageError: A run builds on itself.
    """
    from opdcl.config.identity import WITHOUT_MEANING
    from opdcl.results.arms import IGNORED, SEEDS, common_name

    by_path = {run.path.resolve(): run for run in runs}

    def key(run: RunDir, after: tuple[Path, ...] = ()) -> str:
        here = run.path.resolve()
        if here in after:
            raise UsageError(f"{run.path} builds on itself", "name another run as its start or teacher")
        workflow = read_record(run.config).get("workflow") or {}
        settings = flatten({k: v for k, v in workflow.items() if k not in {*IGNORED, "start"}})
        kept = {
            k: v
            for k, v in settings.items()
            if k.rsplit(".", 1)[-1] not in {*SEEDS, *WITHOUT_MEANING, "adapter"}
        }
        places = {"start": _start(run), **_teachers(run)}
        return json.dumps(
            [
                kept,
                {
                    n: key(by_path[p], (*after, here)) if p in by_path else str(p)
                    for n, p in places.items()
                    if p
                },
            ],
            sort_keys=True,
        )

    alike: dict[str, list[RunDir]] = {}
    for run in runs:
        alike.setdefault(key(run), []).append(run)
    groups: list[list[RunDir]] = []
    for group in alike.values():
        # The same seeds twice are one result seen twice.
        groups += (
            [sorted(group, key=_seeds)]
            if len({_seeds(run) for run in group}) == len(group)
            else [[run] for run in group]
        )
    names = [common_name(group) for group in groups]
    return [
        Step(name if name and names.count(name) == 1 else str(group[0].path), group)
        for name, group in zip(names, groups, strict=True)
    ]


def _chains(steps: list[Step]) -> list[Chain]:
    """Return every chain from a first step to one that no other starts from, of two steps at least."""
    step_of = {run.path.resolve(): step for step in steps for run in step.runs}
    by_path = {run.path.resolve(): run for step in steps for run in step.runs}
    starts = {_start(run) for run in by_path.values()}
    found: dict[tuple[int, ...], Chain] = {}
    for place, run in by_path.items():
        if place in starts:
            continue
        line = [run]
        while (before := _start(line[0])) in by_path:
            line.insert(0, by_path[before])
        chain = [step_of[r.path.resolve()] for r in line]
        if len(chain) > 1:
            found.setdefault(tuple(map(id, chain)), Chain(chain, {})).lines[_seeds(run)] = line
    return list(found.values())


def _name(chain: Chain) -> str:
    return " \N{RIGHTWARDS ARROW} ".join(step.name for step in chain.steps)


def _summarise(chain: Chain, seeds: Sequence[str], results: Results) -> dict[str, dict[str, np.ndarray]]:
    """Return what average, forgetting and backward transfer are the mean of: suite -> `(seeds, N)`; empty where not measured."""
    *earlier, last = (chain.at(i, seeds) for i in range(len(chain.steps)))
    learned = {step.learned: i for i, step in enumerate(chain.steps) if step.learned}
    counted = [n for n, s in results.suites.items() if s.role == "retention" or n in learned]
    ends = {n: x for n in counted if (x := results.scores(last, n)) is not None}
    falls, moves = {}, {}
    for name, end in ends.items():
        reached = [results.scores(runs, name) for runs in earlier[learned.get(name, 0) :]]
        if name not in learned:
            reached.insert(0, results.scores(last, name, base=True))
        if reached and all(x is not None for x in reached):
            falls[name] = max(reached, key=lambda x: x.mean()) - end
            if name in learned:
                moves[name] = end - reached[0]
    return {
        "average": ends if len(ends) == len(counted) else {},
        "forgetting": falls,
        "backward_transfer": moves,
    }


def _difference(one: Chain, other: Chain, results: Results) -> dict[str, Any] | None:
    """Return how two chains that learned the same differ, paired by prompt and seed."""
    from opdcl.results import stats

    seeds = [seed for seed in one.lines if seed in other.lines]
    if [s.learned for s in one.steps] != [s.learned for s in other.steps] or not seeds:
        return None
    mine, theirs = (_summarise(chain, seeds, results) for chain in (one, other))
    found: dict[str, Any] = {"of": _name(one), "against": _name(other), "seeds": len(seeds)}
    for figure in ("average", "forgetting"):
        alike = mine[figure].keys() == theirs[figure].keys() and mine[figure]
        found[figure] = (
            stats.mean_over([x - theirs[figure][n] for n, x in mine[figure].items()]).as_dict()
            if alike
            else None
        )
    return found


def _kept(step: Step, steps: list[Step], results: Results) -> list[dict[str, Any]]:
    """Return, for each adapter that taught a step, how much of its gain over base the step has, each seed by its own teacher."""
    from opdcl.results import stats

    owner = {run.path.resolve(): (other, run) for other in steps for run in other.runs}
    found = []
    for name in _teachers(step.runs[0]):
        pairs = [(run, *owner[place]) for run in step.runs if (place := _teachers(run).get(name)) in owner]
        suite = pairs[0][1].learned if pairs else None
        if suite is None or len(pairs) < len(step.runs):
            continue
        mine, theirs = [run for run, _, _ in pairs], [teacher for _, _, teacher in pairs]
        three = (
            results.scores(mine, suite, base=True),
            results.scores(theirs, suite),
            results.scores(mine, suite),
        )
        if all(x is not None for x in three):
            kept = stats.domain_retention(*three)
            found.append(
                {"step": step.name, "teacher": name, "suite": suite, "kept": kept and kept.as_dict()}
            )
    return found


def _notes(steps: list[Step], chains: list[Chain], results: Results) -> list[str]:
    notes = results.unlike + [
        f"{step.name} is not measured on {', '.join(missing)}."
        for step in steps
        if (missing := [name for name in results.suites if results.scores(step.runs, name) is None])
    ]
    for chain in chains:
        if left := max(len(step.runs) for step in chain.steps) - len(chain.lines):
            notes.append(
                f"{_name(chain)}: {left} seed{'s have' if left > 1 else ' has'} not reached the last step, and so no part in the chain."
            )
    return notes + notes_on_seeds(
        {len(chain.lines) for chain in chains} or {len(step.runs) for step in steps}
    )


def view(found: dict[str, Any]) -> View:
    """Return how steps that build on one another are shown."""
    lead = f"{', '.join(step['name'] for step in found['steps'])}: steps that build on one another, measured on {measured_on(found)}."
    figure = Figure(
        "From step to step",
        "steps",
        "Each suite after each step. Bars are 95 % intervals; a line that falls is forgetting.",
    )
    return View(lead, _tables(found), [], figure)


def _tables(found: dict[str, Any]) -> list[Table]:
    """Return the matrix, the chains with their differences, and what is kept of each teacher."""
    names = list(found["suites"])
    rows = [["base", *(score_cell(found["base"].get(n)) for n in names)]]
    rows += [
        [
            f"{s['name']}\n{s['seeds']} seed{'s' * (s['seeds'] > 1)}",
            *(score_cell(s["scores"].get(n)) for n in names),
        ]
        for s in found["steps"]
    ]
    caption = "What the model scores after each step. Brackets are 95 % intervals: a bootstrap over prompts, and over seeds where there are several."
    shown = [
        Table(
            "After each step", ["step", *(f"{n}\n{found['suites'][n]['role']}" for n in names)], rows, caption
        )
    ]
    if found["chains"]:
        rows = [
            [c["name"], *(score_cell(c[k]) for k in ("average", "forgetting", "backward_transfer"))]
            for c in found["chains"]
        ]
        rows += [
            [f"{d['of']}\nminus {d['against']}", points_cell(d["average"]), points_cell(d["forgetting"]), ""]
            for d in found["differences"]
        ]
        caption = (
            "Average: all suites at the end. Forgetting: how far they lie below the best reached before the last step, "
            "base's retention included. Backward transfer: how far earlier domains have moved since they were learned. "
            "Differences are in points, paired by prompt and seed."
        )
        shown.append(Table("Chains", ["chain", "average", "forgetting", "backward transfer"], rows, caption))
    if found["kept"]:
        rows = [
            [
                k["step"],
                k["teacher"],
                k["suite"],
                interval(k["kept"]).replace(" [", "\n[", 1) if k["kept"] else "",
            ]
            for k in found["kept"]
        ]
        caption = "The share of a teacher's gain over base that the step has, on the suite that the teacher learned."
        shown.append(Table("Kept of each teacher", ["step", "teacher", "suite", "kept"], rows, caption))
    return shown
