"""Several runs side by side: run directories -> arms, pooled over seeds, and the settings that set them apart.

opdcl compare runs/ours runs/general runs/interpolate
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcl.config.identity import WITHOUT_MEANING
from opdcl.config.load import flatten
from opdcl.errors import UsageError
from opdcl.results.format import interval
from opdcl.results.scores import STATES, Suite, load_suites, read_record, section
from opdcl.results.summary import on_detectable, summarise_suites
from opdcl.results.tables import (
    MISSING,
    Figure,
    Table,
    View,
    measured_on,
    notes_on_seeds,
    points_cell,
    score_cell,
)
from opdcl.rundir.layout import RunDir

if TYPE_CHECKING:
    import numpy as np

    from opdcl.results.stats import Point


ROLES = ("retention", "domain")

SEEDS = {"seed", "data_seed"}

# Sections of a workflow that cannot change a score.
IGNORED = {"name", "description", "gates", "arms", "seeds"}


@dataclass(frozen=True, eq=False)
class Member:
    """One run: what it was made with, and its headline suites."""

    run: RunDir
    settings: dict[str, Any]
    """Flat key -> value, without seeds and without what cannot change a score."""
    seeds: dict[str, Any]
    """The seeds of training, by their keys."""
    suites: dict[str, Suite]
    """Role -> headline suite, where there is one."""
    further: dict[str, Suite]
    """Name -> suite beyond these."""

    @property
    def missing(self) -> list[str]:
        """Return what is not measured yet, in words."""
        return [
            f"{s} on {suite.name}" for suite in self.suites.values() for s in STATES if s not in suite.rows
        ]

    @cached_property
    def summary(self) -> dict[str, Any]:
        return summarise_suites(self.run, list(self.suites.values()))

    def scores(self, state: str) -> dict[str, np.ndarray]:
        """Return role -> `(N,)` scores of a state, where it is measured."""
        return {role: suite.values(state) for role, suite in self.suites.items() if state in suite.rows}


@dataclass(frozen=True)
class Arm:
    """Runs that differ in nothing but their seeds."""

    name: str
    members: list[Member]

    @property
    def settings(self) -> dict[str, Any]:
        return self.members[0].settings

    @property
    def pooled(self) -> list[Member]:
        """Return the runs that the arm's numbers are made of: the finished ones, if there are any."""
        return [m for m in self.members if not m.missing] or self.members

    def scores(self, role: str, state: str = "recovered") -> np.ndarray | None:
        """Return `(seeds, N)` scores, or None where nothing is measured."""
        import numpy as np

        found = [scores[role] for m in self.pooled if role in (scores := m.scores(state))]
        return np.stack(found) if found else None

    def point(self, state: str = "recovered") -> Point | None:
        """Return the scores on domain and retention, or None where one of them is not measured."""
        found = self.scores("domain", state), self.scores("retention", state)
        return None if found[0] is None or found[1] is None else (found[0], found[1])

    def states(self, role: str) -> list[np.ndarray] | None:
        """Return the scores of base, tuned and recovered, or None unless all of them are measured."""
        if not all(role in m.suites and m.suites[role].complete for m in self.pooled):
            return None
        return [scores for state in STATES if (scores := self.scores(role, state)) is not None]


def compare(runs: list[RunDir]) -> dict[str, Any]:
    """Return the comparison of runs that do not build on one another, pooled over seeds into arms."""
    members = [_load(run) for run in runs]
    _refuse_unlike(members)
    arms = _arms(members)
    seed = int(section(runs[0], "eval").get("seed") or 0)
    (base, _), (tuned, shared) = (_references(state, arms, seed) for state in ("base", "tuned"))
    differences = _differences(arms)
    rows = [_row(arm, seed) for arm in arms]
    _compare_with_the_curve(arms, rows, shared, seed)
    suites = {role: s for role in ROLES if (s := _model(members, role).suites.get(role)) and s.rows}
    found = {
        "headline": {role: s.name if (s := members[0].suites.get(role)) else None for role in ROLES},
        "suites": {
            s.name: {"role": role, "metric": s.metric, "n": len(s.prompts)} for role, s in suites.items()
        },
        "references": base + tuned,
        "arms": rows,
        "further": _further(arms, seed),
        "alpha_curve": _alpha_curve(arms, shared),
        "differences": differences,
        "notes": _notes(arms, rows, base, tuned, differences),
    }
    return found


def _load(run: RunDir) -> Member:
    workflow = read_record(run.config).get("workflow") or {}
    settings = flatten({key: value for key, value in workflow.items() if key not in IGNORED})
    for name in ("finetune", "recover"):
        stage = run.find_stage(name)
        # The same path may have held other rows when another run was made.
        inputs = (stage.state().get("inputs") or {}) if stage else {}
        settings |= {
            f"{name}.{key}": str(value)[:12]
            for key, value in inputs.items()
            if key.startswith("content of ") and not key.endswith(".adapter")
        }
    seeds = {key: settings[key] for key in settings if key.rsplit(".", 1)[-1] in SEEDS}
    kept = {
        k: _without_seed(v, seeds) if v and (k == "start" or k.endswith(".adapter")) else v
        for k, v in settings.items()
        if k not in seeds and k.rsplit(".", 1)[-1] not in WITHOUT_MEANING
    }
    suites = load_suites(run)
    headline = {role: found for role in ROLES if (found := next((s for s in suites if s.role == role), None))}
    if not any(suite.rows for suite in headline.values()):
        raise UsageError(f"{run.path} has no results yet", f"opdcl eval {shlex.quote(str(run.path))}")
    further = {suite.name: suite for suite in suites if headline.get(suite.role) is not suite}
    return Member(run, kept, {k: v for k, v in seeds.items() if not k.startswith("eval.")}, headline, further)


def _without_seed(place: str, seeds: dict[str, Any]) -> str:
    """Return the name of the run that another builds on, without its seed: over seeds these are one arm."""
    name = Path(place).name
    return next((name.removesuffix(f"-{seed}") for seed in seeds.values() if name.endswith(f"-{seed}")), name)


def _model(members: list[Member], role: str) -> Member:
    """Return the first run with results of a role, if any: the others must be measured like it."""
    return next((m for m in members if role in m.suites and m.suites[role].rows), members[0])


def _refuse_unlike(members: list[Member]) -> None:
    for role in ROLES:
        model = _model(members, role)
        for other in members:
            if what := _unlike(role, model.suites.get(role), other.suites.get(role)):
                both = f"{other.run.path} and {model.run.path}"
                raise UsageError(f"{both} cannot be compared: {what}", _remedy(model, other))


def _unlike(role: str, wanted: Suite | None, found: Suite | None) -> str:
    """Say in what two runs' suites of a role differ; empty where they are alike, or one is not measured yet."""
    here, there = (suite.name if suite else "none" for suite in (found, wanted))
    if here != there:
        return f"their {role} suites are {here} and {there}"
    if not (found and wanted and found.rows and wanted.rows):
        return ""
    if found.metric != wanted.metric:
        return f"{here} is scored by {found.metric} and by {wanted.metric}"
    prompts, others = found.prompts, wanted.prompts
    if len(prompts) != len(others):
        return f"{here} was answered on {len(prompts)} and on {len(others)} prompts"
    return "" if prompts == others else f"{here} has other prompts in one than in the other"


def _remedy(model: Member, other: Member) -> str:
    """Return the command that measures a run as its model was measured."""
    evaluation = section(model.run, "eval")
    words = ["opdcl", "eval", str(other.run.path)]
    for role, suite in model.suites.items():
        words += [f"--{role}", suite.name]
        if file := (evaluation.get("data") or {}).get(suite.name):
            words += ["--data", f"{suite.name}={file}"]
    limit = evaluation.get("limit")
    return shlex.join([*words, *(["--limit", str(limit)] if limit else ["--set", "eval.limit=null"])])


def _arms(members: list[Member]) -> list[Arm]:
    """Group the runs by their settings; the runs of an arm are in the order of their seeds."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(_text(member.settings), []).append(member)
    arms: list[list[Member]] = []
    for group in groups.values():
        # The same seeds twice are one result seen twice; as two seeds they would make an interval too narrow.
        distinct = len({_text(m.seeds) for m in group}) == len(group)
        arms += [sorted(group, key=lambda m: _text(m.seeds))] if distinct else [[m] for m in group]
    names = [common_name([member.run for member in arm]) for arm in arms]
    return [
        Arm(name if name and names.count(name) == 1 else str(arm[0].run.path), arm)
        for name, arm in zip(names, arms, strict=True)
    ]


def common_name(runs: list[RunDir]) -> str:
    """Return what the names of the run directories begin with, up to a hyphen, underscore or dot."""
    parts = [re.split(r"([-_.])", run.path.resolve().name) for run in runs]
    shared = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return " ".join("".join(column[0] for column in shared).rstrip("-_.").split())


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _references(state: str, arms: list[Arm], seed: int) -> tuple[list[dict], dict[str, tuple[int, ...]]]:
    """Return one row per different result of base or tuned, and which of the results each arm has.

    Runs share a result where every prompt got the same score. An arm over several fine-tunes has several of tuned.
    """
    import numpy as np

    from opdcl.results import stats

    results: list[dict[str, np.ndarray]] = []
    of_arm: dict[str, tuple[int, ...]] = {}
    for arm in arms:
        found = set()
        for scores in filter(None, (m.scores(state) for m in arm.pooled)):
            same = (i for i, known in enumerate(results) if _agree(known, scores))
            if (index := next(same, len(results))) == len(results):
                results.append({})
            results[index] |= scores
            found.add(index)
        of_arm[arm.name] = tuple(sorted(found))
    rows: list[dict[str, Any]] = []
    groups = list(dict.fromkeys(filter(None, of_arm.values())))
    for group in groups:
        names = [name for name, found in of_arm.items() if found == group]
        name = f"{state} of {', '.join(names)}" if len(groups) > 1 else state
        row = {
            "state": state,
            "name": name,
            "arms": names,
            "results": len(group),
            "retention": {},
            "domain": {},
        }
        for role in ROLES:
            if each := [results[i][role] for i in group if role in results[i]]:
                row[role] = stats.mean(np.stack(each), seed).as_dict()
        rows.append(row)
    return rows, of_arm


def _agree(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Say whether two results give every prompt the same score, on the suites that both have."""
    return all((a[role] == b[role]).all() for role in a.keys() & b.keys())


def _row(arm: Arm, seed: int) -> dict[str, Any]:
    """Return an arm's numbers; an estimate is empty, and a ratio None, where it is not measured or means nothing."""
    from opdcl.results import stats

    row: dict[str, Any] = {
        "name": arm.name,
        "method": arm.settings.get("recover.method"),
        "seeds": len(arm.pooled),
        **{role: {} if (s := arm.scores(role)) is None else stats.mean(s, seed).as_dict() for role in ROLES},
        "recovery": None,
        "domain_retention": None,
        "status": "not measured",
        "above_alpha_curve": None,
        "runs": [_run_row(member) for member in arm.members],
    }
    if three := arm.states("retention"):
        row["status"] = stats.status_of(*three, seed=seed)
        estimate = stats.recovery(*three, seed=seed)
        row["recovery"] = estimate and estimate.as_dict()
    if three := arm.states("domain"):
        estimate = stats.domain_retention(*three, seed=seed)
        row["domain_retention"] = estimate and estimate.as_dict()
    return row


def _run_row(member: Member) -> dict[str, Any]:
    estimates = member.summary["suites"]
    return {
        "path": str(member.run.path),
        "seeds": member.seeds,
        **{
            role: estimates[member.suites[role].name]["recovered"] if role in member.suites else {}
            for role in ROLES
        },
        **{key: member.summary[key] for key in ("recovery", "domain_retention", "status")},
        "missing": member.missing,
    }


def _further(arms: list[Arm], seed: int) -> list[dict[str, Any]]:
    """Return what the arms came to on each suite beyond the headline's that all finished runs have answered alike."""
    import numpy as np

    from opdcl.results import stats

    finished = [arm for arm in arms if not any(m.missing for m in arm.pooled)]
    runs = [member for arm in finished for member in arm.pooled]
    found = []
    for name, suite in runs[0].further.items() if runs else ():
        if not all(
            (s := m.further.get(name)) and s.complete and not _unlike(suite.role, suite, s) for m in runs
        ):
            continue
        rows = []
        for arm in finished:
            scores = [np.stack([m.further[name].values(state) for m in arm.pooled]) for state in STATES]
            kept = stats.domain_retention(*scores, seed=seed) if suite.role == "domain" else None
            row = {state: stats.mean(x, seed).as_dict() for state, x in zip(STATES, scores, strict=True)}
            rows.append({"name": arm.name, **row, "domain_retention": kept and kept.as_dict()})
        found.append(
            {"name": name, "role": suite.role, "metric": suite.metric, "n": len(suite.prompts), "arms": rows}
        )
    return found


def _compare_with_the_curve(
    arms: list[Arm], rows: list[dict], shared: dict[str, tuple[int, ...]], seed: int
) -> None:
    """Add to each row its paired difference to the first arm that only scales the same tuned adapter, if one does.

    And how far it lies above the whole curve, from base over all such arms to tuned.
    """
    from opdcl.results import stats

    curve = [arm for arm in arms if arm.settings.get("recover.method") == "interpolate"]
    for arm, row in zip(arms, rows, strict=True):
        rivals = [c for c in curve if shared[c.name] == shared[arm.name]] or (
            curve if len(curve) == 1 else []
        )
        if arm in curve or not rivals:
            continue
        above: dict[str, Any] = {"arm": rivals[0].name, "retention": {}, "domain": {}, "at_its_domain": {}}
        for role in ROLES:
            a, b = arm.scores(role), rivals[0].scores(role)
            if a is not None and b is not None:
                above[role] = stats.difference(a, b, seed).as_dict()
                row["above_alpha_curve"] = above
        if (here := arm.point()) and all(
            points := [arm.point("base"), arm.point("tuned"), *(r.point() for r in rivals)]
        ):
            above["at_its_domain"] = stats.above_mixtures(here, points, seed).as_dict()


def _alpha_curve(arms: list[Arm], shared: dict[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    """Return base, the scaled adapters and tuned, least domain first, and which of them lie on the upper edge of their mixtures.

    Empty without scaled adapters, or where several models were tuned.
    """
    from opdcl.results import stats

    curve = [arm for arm in arms if arm.settings.get("recover.method") == "interpolate"]
    if not curve or len(set(filter(None, shared.values()))) > 1:
        return []
    points = [
        point
        for point in (arms[0].point("base"), arms[0].point("tuned"), *(arm.point() for arm in curve))
        if point
    ]
    edge = stats.upper_edge(points)
    found = [
        {"domain": float(d.mean()), "retention": float(r.mean()), "edge": i in edge}
        for i, (d, r) in enumerate(points)
    ]
    return sorted(found, key=lambda point: point["domain"])


def _differences(arms: list[Arm]) -> dict[str, dict[str, Any]]:
    """Return setting -> arm -> value for the settings in which the arms differ; an arm without the key is left out."""
    found: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(key for arm in arms for key in arm.settings):
        # An arm without a section has its name as a key. Then the section is the difference, not each key inside.
        section_name = key.split(".")[0]
        having = [arm for arm in arms if section_name not in arm.settings]
        values = {arm.name: arm.settings[key] for arm in having if key in arm.settings}
        if key == section_name:
            if having:
                found[key] = {arm.name: "given" if arm in having else "left out" for arm in arms}
        elif len(values) < len(having) or len({_text(v) for v in values.values()}) > 1:
            found[key] = values
    return found


def _notes(
    arms: list[Arm], rows: list[dict], base: list[dict], tuned: list[dict], differences: dict
) -> list[str]:
    """Return what a careful reader must know before believing the comparison."""
    notes = [
        f"The arms have {len(several)} different results of {several[0]['state']}: R and D of each refer to its own."
        for several in (base, tuned)
        if len(several) > 1
    ]
    if len(tuned) > 1 and any(row["above_alpha_curve"] for row in rows):
        notes.append(
            "An arm that starts from another tuned model than the alpha-curve differs from it by that too."
        )
    unlike = [
        k
        for k in differences
        if k.startswith("eval.") and k.split(".")[1] not in (*ROLES, "control", "limit")
    ]
    if unlike:
        notes.append(f"The arms were not measured with the same settings ({', '.join(unlike)}).")
    settings = [_text(arm.settings) for arm in arms]
    if same := [arm.name for arm, text in zip(arms, settings, strict=True) if settings.count(text) > 1]:
        notes.append(
            f"{', '.join(same)}: the same settings, and some of the same seeds, so they are not pooled."
        )
    for arm in arms:
        for member in arm.members:
            if member.missing:
                left_out = "" if member in arm.pooled else f", and is left out of {arm.name}"
                notes.append(
                    f"{member.run.path} is not finished: no result of {', '.join(member.missing)}{left_out}."
                )
    notes += _notes_of_runs([m for arm in arms for m in arm.members])
    return notes + notes_on_seeds({row["seeds"] for row in rows})


def _notes_of_runs(members: list[Member]) -> list[str]:
    """Return the notes of the runs' own reports; what holds for all of them is said once, and so is how fine their tests are."""
    found: dict[str, list[str]] = {}
    fineness: dict[str, float] = {}
    for member in members:
        if smallest := member.summary["tests"]["detectable_difference"]:
            note = on_detectable(member.suites["retention"], [smallest])
            fineness |= {note: smallest} if note in member.summary["notes"] else {}
        for note in member.summary["notes"]:
            found.setdefault(note, []).append(str(member.run.path))
    notes = [
        n if len(p) == len(members) else f"{', '.join(p)}: {n}" for n, p in found.items() if n not in fineness
    ]
    return notes + (
        [on_detectable(_model(members, "retention").suites["retention"], list(fineness.values()))]
        if fineness
        else []
    )


def view(found: dict[str, Any]) -> View:
    """Return how a comparison of arms is shown."""
    lead = f"{', '.join(row['name'] for row in found['arms'])}: compared on {measured_on(found)}."
    figure = Figure(
        "Frontier",
        "frontier",
        "What was learned against what was kept. Bars are 95 % intervals; up and right is better.",
    )
    return View(lead, _tables(found), [_runs_table(found)], figure)


def _tables(found: dict[str, Any]) -> list[Table]:
    """Return the scores, the distance to the alpha-curve, and the settings that differ."""
    columns = [
        "arm",
        *(f"{role}\n{found['headline'][role] or 'no suite'}" for role in ROLES),
        "R",
        "D",
        "status",
    ]
    rows = []
    for row in found["references"]:
        name = row["name"] + (f"\nmean of {row['results']}" if row["results"] > 1 else "")
        rows.append([name, score_cell(row["retention"]), score_cell(row["domain"]), "", "", ""])
    for row in found["arms"]:
        seeds = f"{row['seeds']} seed{'s' if row['seeds'] > 1 else ''}"
        rows.append([f"{row['name']}\n{seeds}", *_numbers(row), row["status"]])
    caption = (
        "Brackets are 95 % intervals: a bootstrap over prompts, and over seeds where an arm has several. R is the "
        "share of the loss that came back, D the share of the domain gain that is kept. Where one is missing, it is "
        "not measured, or the loss or gain to divide by is too small. The status speaks of retention alone."
    )
    shown = [Table("Scores", columns, rows, caption)]
    if against := [(row["name"], d) for row in found["arms"] if (d := row["above_alpha_curve"])]:
        rows = [
            [name, *(points_cell(d[key]) for key in ("at_its_domain", *ROLES)), d["arm"]]
            for name, d in against
        ]
        caption = (
            "The curve leads from base over the tuned adapter scaled without training to tuned, in straight lines, since two models "
            "can be mixed answer by answer. First the distance in retention from the curve at the arm's own domain score; then the "
            "differences, on the same prompts, to one point of it. Where an interval contains zero, the difference may be chance."
        )
        columns = [
            "arm",
            "retention\nat its domain",
            "retention\nto the point",
            "domain\nto the point",
            "point",
        ]
        shown.append(Table("Above the alpha-curve, in points", columns, rows, caption))
    for suite in found["further"]:
        rows = [
            [arm["name"], *(score_cell(arm[state]) for state in STATES), _ratio(arm["domain_retention"])]
            for arm in suite["arms"]
        ]
        caption = f"{suite['metric']} on {suite['n']} prompts. It has no part in the status."
        shown.append(Table(f"{suite['name']}, {suite['role']}", ["arm", *STATES, "D"], rows, caption))
    if found["differences"]:
        names = [row["name"] for row in found["arms"]]
        rows = [
            [k, *(_value(v[n]) if n in v else MISSING for n in names)]
            for k, v in found["differences"].items()
        ]
        shown.append(
            Table("Settings that differ", ["setting", *names], rows, "Seeds, names and gates are left out.")
        )
    return shown


def _runs_table(found: dict[str, Any]) -> Table:
    """Return every run with its seeds and its own numbers, which the arms are made of."""
    rows = []
    for row in found["arms"]:
        for run in row["runs"]:
            seeds = ", ".join(f"{key} {_value(value)}" for key, value in run["seeds"].items())
            rows.append([f"{run['path']}\n{seeds}", row["name"], *_numbers(run), run["status"]])
    columns = ["run", "arm", *ROLES, "R", "D", "status"]
    return Table("Runs", columns, rows, "Each by itself, as its own report shows it.")


def _numbers(row: dict[str, Any]) -> list[str]:
    return [
        score_cell(row["retention"]),
        score_cell(row["domain"]),
        _ratio(row["recovery"]),
        _ratio(row["domain_retention"]),
    ]


def _ratio(estimate: dict[str, Any] | None) -> str:
    return interval(estimate).replace(" [", "\n[", 1) if estimate else ""


def _value(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else "none"
        if value is None
        else json.dumps(value, ensure_ascii=False)
    )
