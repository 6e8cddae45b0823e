"""Compare arms: runs that do not build on one another, pooled over their seeds.

Each arm is a column of the board, with the scores of its runs' last models; base and tuned are references.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from opdcl.errors import UsageError
from opdcl.results import intervals, ratios
from opdcl.results.board import Board, Column, cells, compared, pool, said_by, scores_of, seed_notes
from opdcl.results.format import CHANGE, NATS, SHARE, cell, interval, metric_words
from opdcl.results.intervals import Estimate
from opdcl.results.measurements import MeasuredSuite, Row, pooled, section, states_of
from opdcl.results.origins import START, as_key, count_learned, learned_by, line_of, without_seed
from opdcl.results.page import Page
from opdcl.results.ratios import Closeness
from opdcl.results.samples import Group, answers_by_run
from opdcl.results.status import HEADLINE_ROLES, STATES
from opdcl.results.summary import Results
from opdcl.results.tables import IN_DOMAIN_STYLE, MISSING, Table, by_state, distance_cells, with_rows
from opdcl.results.verdict import writing_sentence
from opdcl.rundir.identity import Identity
from opdcl.rundir.layout import RunDir

# Settings of the evaluation that do not change how a suite is measured.
HARMLESS = {f"eval.{option}" for option in (*HEADLINE_ROLES, "control", "limit")}

WHERE = {"retention": " in retention", "domain": " on the domain"}

# Of how many runs the page has answers: more have no room beside one another.
MOST_RUNS = 6


@dataclass(frozen=True)
class Arms(Board):
    """Arms side by side, on the headline suites, which are here by role."""

    references: list[Column]
    """Base and tuned; of an arm over several fine-tunes, the mean of several."""
    differences: dict[str, dict[str, Any]]
    """Setting -> arm -> value, of the settings that differ."""

    @property
    def headline(self) -> dict[str, str | None]:
        return {role: self.suites[role].name if role in self.suites else None for role in HEADLINE_ROLES}

    @property
    def finished(self) -> list[Column]:
        return [arm for arm in self.columns if not any(run.missing for run in arm.pooled)]

    @property
    def further(self) -> list[MeasuredSuite]:
        """Every further suite that all finished arms answered on the same prompts."""
        members = [run for arm in self.finished for run in arm.pooled]
        found = []
        for suite in members[0].suites if members else ():
            is_headline = members[0].headline.get(suite.role) is suite
            if not is_headline and all(_answered(run, suite) for run in members):
                found.append(suite)
        return found

    def on_further(self, arm: Column, suite: MeasuredSuite) -> tuple[dict[str, Estimate], Estimate | None]:
        """Return state -> an arm's score on a further suite, and D if it is one of the domain."""
        scores: dict[str, Estimate] = {}
        for state in STATES:
            found = scores_of(arm.pooled, suite.name, state)
            if found is not None:
                scores[state] = intervals.mean(found, suite.clusters).rounded()
        states = states_of([run.named[suite.name] for run in arm.pooled])
        kept = ratios.domain_retention(states) if states and suite.role == "domain" else None
        return scores, kept and kept.rounded()

    @property
    def against_first(self) -> dict[str, dict[str, Estimate]]:
        """Other arm -> role -> how much higher the first one scores."""
        first, *others = self.columns
        return {arm.name: self.changes(first, arm) for arm in others}


def compare_arms(runs: Sequence[RunDir]) -> Arms:
    """Return the comparison of runs that do not build on one another.

    Raises:
        UsageError: A run has no results, or was not measured like the others.
    """
    groups = load_arms(runs)
    members = [member for group in groups.values() for member in group]
    suites: dict[str, MeasuredSuite] = {}
    for role in HEADLINE_ROLES:
        suite = _first_measured(members, role).headline.get(role)
        if suite:
            suites[role] = suite
    arms = [_arm(name, group, suites) for name, group in groups.items()]
    near = next((run.near for arm in arms for run in arm.pooled if run.near.rows), None)
    arms = [replace(arm, closeness=_closeness(arm, near)) for arm in arms]
    references = [*_references("base", arms, suites), *_references("tuned", arms, suites)]
    differences = _differences(arms)
    faults, of_runs = said_by(members)
    notes = [
        *faults,
        *_reference_notes(references),
        *[f"{arm.name}: {said}" for arm in arms if (said := writing_sentence(arm.writing))],
        *_setting_notes(arms, differences),
        *_measuring_notes(arms, near),
        *of_runs,
        *seed_notes({arm.seeds for arm in arms}),
    ]
    return Arms(suites, arms, faults, notes, references, differences)


def load_arms(runs: Sequence[RunDir]) -> dict[str, list[Results]]:
    """Load runs, and group those that differ only in their seeds; return arm -> runs."""
    members = [Results(run) for run in runs]
    for member in members:
        if not any(suite.rows for suite in member.headline.values()):
            hint = f"opdcl eval {shlex.quote(member.path)}"
            raise UsageError(f"{member.path} has no results yet", hint)
    _name_origins(members)
    for role in HEADLINE_ROLES:
        model = _first_measured(members, role)
        for other in members:
            if reason := mismatch(role, other.headline.get(role), model.headline.get(role)):
                pair = f"{other.path} and {model.path}"
                raise UsageError(f"{pair} cannot be compared: {reason}", _remedy(model, other))
    return pool(members, [as_key(member.seeds) for member in members])


def _name_origins(members: list[Results]) -> None:
    """Put names in place of the paths of adapters, and hashes behind names that several of them have."""
    known: dict[tuple[str, str], set[str]] = {}
    for member in members:
        for key, origin in member.origins.items():
            member.settings[key] = without_seed(Path(member.settings[key]).name, member.seeds)
            known.setdefault((key, member.settings[key]), set()).add(origin)
    for member in members:
        for key, origin in member.origins.items():
            if len(known[key, member.settings[key]]) > 1:
                member.settings[key] += f" ({Identity(origin).key[:8]})"


def _first_measured(members: list[Results], role: str) -> Results:
    """Return the first run with results of a role, or the first run if there is none."""
    return next((m for m in members if role in m.headline and m.headline[role].rows), members[0])


def mismatch(role: str, one: MeasuredSuite | None, other: MeasuredSuite | None) -> str:
    """Say why two suites of a role cannot be compared; empty if they can, or if one is not measured yet."""
    name, other_name = (suite.name if suite else "none" for suite in (one, other))
    if name != other_name:
        return f"their {role} suites are {name} and {other_name}"
    if not (one and other and one.rows and other.rows):
        return ""
    if one.metric != other.metric:
        return f"{name} is scored by {one.metric} and by {other.metric}"
    if len(one.prompts) != len(other.prompts):
        return f"{name} was answered on {len(one.prompts)} and on {len(other.prompts)} prompts"
    return (
        ""
        if one.prompts == other.prompts
        else f"{name} has other prompts, or answers to them, in the two runs"
    )


def _remedy(model: Results, other: Results) -> str:
    """Return the command that measures one run as the other was measured; never on what it has learned."""
    evaluation, learned = section(model.run, "eval"), learned_by(*line_of(other.run))
    for suite in model.headline.values():
        if count := count_learned(suite.measured, learned):
            known = f"{other.path} has learned {count} of the {len(suite.measured)} prompts of {suite.name}"
            return f"{known}: measure both on rows that neither has, opdcl eval RUN --domain TEST.jsonl"
    words = ["opdcl", "eval", other.path]
    for role, suite in model.headline.items():
        words += [f"--{role}", suite.name]
        if file := (evaluation.get("data") or {}).get(suite.name):
            words += ["--data", f"{suite.name}={file}"]
    limit = evaluation.get("limit")
    words += ["--limit", str(limit)] if limit else ["--set", "eval.limit=null"]
    return shlex.join(words)


def _arm(name: str, members: list[Results], suites: Mapping[str, MeasuredSuite]) -> Column:
    """Return an arm: the scores of its runs' last models, and what follows from them."""
    first, scores = members[0], {}
    runs = [member for member in members if not member.missing] or members
    own = {role: [run.headline[role] for run in runs] for role in suites}
    for role, measured in own.items():
        ends = pooled([suite for suite in measured if first.end in suite.rows], first.end)
        if ends is not None:
            scores[role] = ends
    retention, domain = (own.get(role, []) for role in HEADLINE_ROLES)
    tests = ratios.compared_with_base(retention)
    findings = ratios.findings(states_of(retention), states_of(domain), ratios.alike(tests))
    return Column(
        name=name,
        state=first.end,
        seeds=len(runs),
        scores=scores,
        members=members,
        pooled=runs,
        findings=replace(findings, status=first.status(findings)),
        writing=tests,
    )


def _closeness(arm: Column, near: MeasuredSuite | None) -> Closeness | None:
    """Return an arm's closeness; None unless all its runs measured it, on the prompts of the other arms."""
    found = [run.near for run in arm.pooled]
    is_whole = near is not None and all(suite.rows and suite.prompts == near.prompts for suite in found)
    return ratios.closeness_of(found) if is_whole else None


def _references(state: str, arms: list[Column], suites: Mapping[str, MeasuredSuite]) -> list[Column]:
    """Return a column for each different result of base or tuned."""
    results: list[dict[str, np.ndarray]] = []
    # The results that the runs of an arm have, by their numbers -> the names of the arms.
    arms_of: dict[tuple[int, ...], list[str]] = {}
    for arm in arms:
        found = set()
        for run in arm.pooled:
            own = run.headline.items()
            scores = {role: suite.values(state) for role, suite in own if state in suite.rows}
            # The end of a run is its arm's own column.
            if scores and state != run.end:
                found.add(_index(results, scores))
        if found:
            arms_of.setdefault(tuple(sorted(found)), []).append(arm.name)
    references = []
    for indices, names in arms_of.items():
        means = {}
        for role in suites:
            measured = [results[i][role] for i in indices if role in results[i]]
            if measured:
                means[role] = np.stack(measured)
        name = state if len(names) == len(arms) else f"{state} of {', '.join(names)}"
        references.append(Column(name, state, len(indices), means))
    return references


def _index(results: list[dict[str, np.ndarray]], scores: dict[str, np.ndarray]) -> int:
    """Return the index of the result in which every prompt has the same score; without one, add it."""
    for index, result in enumerate(results):
        if all((result[role] == scores[role]).all() for role in result.keys() & scores.keys()):
            result |= scores
            return index
    results.append(scores)
    return len(results) - 1


def _answered(member: Results, suite: MeasuredSuite) -> bool:
    """Return whether a run's last model answered the prompts of another run's suite."""
    own = member.named.get(suite.name)
    return own is not None and member.end in own.rows and not mismatch(suite.role, own, suite)


def _differences(arms: list[Column]) -> dict[str, dict[str, Any]]:
    """Return setting -> arm -> value for the settings that differ; an arm without the key is left out."""
    settings = {arm.name: arm.members[0].settings for arm in arms}
    differences: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(key for of_arm in settings.values() for key in of_arm):
        # If an arm lacks a section, its flat keys hold the section's name alone.
        section_name = key.split(".")[0]
        is_value = key == START  # every other key without a dot names a section
        having = [name for name, of_arm in settings.items() if is_value or section_name not in of_arm]
        values = {name: settings[name][key] for name in having if key in settings[name]}
        if key == section_name and not is_value:
            if having:
                differences[key] = {name: "given" if name in having else "left out" for name in settings}
        elif len(values) < len(having) or len({as_key(value) for value in values.values()}) > 1:
            differences[key] = values
    return differences


def _reference_notes(references: list[Column]) -> list[str]:
    notes = []
    for state in ("base", "tuned"):
        count = sum(reference.state == state for reference in references)
        if count > 1:
            different = f"The arms have {count} different results of {state}"
            notes.append(f"{different}: each arm's R and D refer to its own.")
    return notes


def _setting_notes(arms: list[Column], differences: dict[str, dict]) -> list[str]:
    notes = []
    measuring = []
    for key in differences:
        if key.startswith("eval.") and ".".join(key.split(".")[:2]) not in HARMLESS:
            measuring.append(key)
    if measuring:
        notes.append(f"The arms were measured with different settings ({', '.join(measuring)}).")
    settings = [as_key(arm.members[0].settings) for arm in arms]
    repeated = [arm.name for arm, key in zip(arms, settings, strict=True) if settings.count(key) > 1]
    if repeated:
        names, reason = ", ".join(repeated), "the settings are equal and some seeds occur twice"
        notes.append(f"{names}: {reason}, so the runs are not pooled.")
    return notes


def _measuring_notes(arms: list[Column], near: MeasuredSuite | None) -> list[str]:
    """Say what is not measured yet, and whose closeness was measured on other prompts."""
    notes = []
    for arm in arms:
        for member in arm.members:
            if member.missing:
                what = f"{member.path} is not finished: no result of {', '.join(member.missing)}"
                left_out = "" if member in arm.pooled else f", and is left out of {arm.name}"
                notes.append(f"{what}{left_out}.")
    for arm in arms:
        measured = [run.near for run in arm.pooled if run.near.rows]
        if near and any(suite.prompts != near.prompts for suite in measured):
            notes.append(f"{arm.name}: its closeness to base was measured on other prompts.")
    return notes


def arms_page(board: Arms) -> Page:
    """Lay out a comparison of arms."""
    names = ", ".join(arm.name for arm in board.columns)
    tables = [
        _scores_table(board),
        _closeness_table(board),
        _rivals_table(board),
        *[_further_table(board, suite) for suite in board.further],
        _settings_table(board),
    ]
    return Page(
        name="Comparison",
        heading=_finding(board),
        sentence=f"{names}: compared on {board.measured}.",
        sections=with_rows(tables),
        details=[_runs_table(board)],
        faults=board.faults,
        notes=board.notes,
    )


def _finding(board: Arms) -> str:
    """Compare the first arm with every other one, in retention and on the domain, in one sentence."""
    first, *others = board.columns
    if not others:
        return _alone(first)
    clauses: list[str] = []
    for role in HEADLINE_ROLES:
        changes = [found[role] for found in board.against_first.values() if role in found]
        if changes:
            clause = compared(changes[0]) if len(others) == 1 else _count(changes)
            clauses.append(clause.format("it" if clauses else others[0].name) + WHERE[role])
    if not clauses:
        return "Not measured yet"
    if all(clause.startswith("not shown") for clause in clauses):
        rest = others[0].name if len(others) == 1 else f"the {len(others)} other arms"
        return f"No difference between {first.name} and {rest} is shown"
    return f"{first.name} is " + "; ".join(clauses)


def _alone(arm: Column) -> str:
    """Sum up the only arm: the same run with several seeds."""
    sentence = f"{arm.seeds} seeds: {arm.findings.status}"
    if arm.findings.recovery:
        sentence += f", R = {interval(arm.findings.recovery)}"
    if arm.findings.domain_retention:
        sentence += f", D = {interval(arm.findings.domain_retention)}"
    return sentence


def _count(changes: list[Estimate]) -> str:
    above = sum(change.low > 0 for change in changes)
    below = sum(change.high < 0 for change in changes)
    if not above and not below:
        return f"not shown to differ from any of {len(changes)} other arms"
    return f"above {above or 'none'} and below {below or 'none'} of {len(changes)} other arms"


def _setting(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _scores_table(board: Arms) -> Table:
    rows = []
    for reference in board.references:
        mean_of = f"\nmean of {reference.seeds}" if reference.seeds > 1 else ""
        scores = cells(board.means(reference), HEADLINE_ROLES)
        rows.append([reference.name + mean_of, *scores, "", "", ""])
    for arm in board.columns:
        ratios = [cell(arm.findings.recovery), cell(arm.findings.domain_retention)]
        rows.append([arm.label, *cells(board.means(arm), HEADLINE_ROLES), *ratios, arm.findings.status])
    caption = (
        "Brackets are 95 % intervals over prompts, and over seeds if an arm has several. R is "
        "the share of the lost score that came back, D the share of the domain gain that was kept. A "
        "missing R or D is not measured, the run has no recovery, or the loss or gain in its denominator is "
        "too small. Both count from the floor, where that is higher than the start."
    )
    names = [f"{role}\n{name or 'no suite'}" for role, name in board.headline.items()]
    return Table("Scores", ["arm", *names, "R", "D", "status"], rows, caption)


def _closeness_table(board: Arms) -> Table:
    rows = []
    for arm in board.columns:
        if near := arm.closeness:
            last = next(near.states[state] for state in reversed(STATES) if near.states.get(state))
            shown = [cell(last["median"], NATS), cell(last["domain_manner"], SHARE), cell(near.c)]
            rows.append([arm.label, *distance_cells(near), *shown])
    caption = (
        "The mean distance of each state from base, in nats per token, on answers at temperature 1; that of "
        "base is noise. Median and share in domain style are the last model's. C is the share of the "
        "distance that is gone, counted from tuned or from base's answers to unrelated prompts, whichever is "
        "nearer."
    )
    return Table("Closeness to base", ["arm", *STATES, "median", IN_DOMAIN_STYLE, "C"], rows, caption)


def _rivals_table(board: Arms) -> Table:
    rivals = board.against_first.items()
    rows = [[name, *cells(changes, HEADLINE_ROLES, CHANGE)] for name, changes in rivals if changes]
    caption = (
        "Differences on the same prompts, in points. If an interval contains zero, the difference may be "
        "chance. Each interval stands for itself: of twenty, one may exclude zero by chance."
    )
    title = f"{board.columns[0].name} minus each other arm"
    return Table(title, ["arm", *HEADLINE_ROLES], rows, caption)


def _further_table(board: Arms, suite: MeasuredSuite) -> Table:
    columns, rows = ["arm", *STATES], []
    for arm in board.finished:
        scores, kept = board.on_further(arm, suite)
        rows.append([arm.name, *by_state(scores)])
        if suite.role == "domain":
            rows[-1].append(cell(kept))
    if suite.role == "domain":
        columns.append("D")
    words, n = metric_words(suite.metric or ""), len(suite.measured)
    caption = f"Score: {words}, on {n} prompts. This suite does not affect the status."
    return Table(f"{suite.name}, {suite.role}", columns, rows, caption)


def _settings_table(board: Arms) -> Table:
    names = [arm.name for arm in board.columns]
    rows = []
    for key, values in board.differences.items():
        rows.append([key, *[_setting(values[name]) if name in values else MISSING for name in names]])
    return Table("Settings that differ", ["setting", *names], rows, "Seeds, names and gates are left out.")


def _runs_table(board: Arms) -> Table:
    rows = []
    for arm in board.columns:
        for run in arm.members:
            seeds = ", ".join(f"{key} {_setting(value)}" for key, value in run.seeds.items())
            found = run.summary.findings
            shown = [cell(found.recovery), cell(found.domain_retention), run.status(found)]
            rows.append([f"{run.path}\n{seeds}", arm.name, *cells(run.ends, HEADLINE_ROLES), *shown])
    columns = ["run", "arm", *HEADLINE_ROLES, "R", "D", "status"]
    return Table("Runs", columns, rows, "Each run by itself, with the numbers of its own report.")


def figure(board: Arms) -> str | None:
    """Return a figure of references and arms, retention against domain."""
    from opdcl.results import plots

    styles, marks = plots.arm_styles(), []
    for column in (*board.references, *board.columns):
        if len(column.scores) == len(HEADLINE_ROLES):
            is_arm, at = column in board.columns, board.means(column)
            shape, colour = next(styles) if is_arm else (plots.SHAPES[column.state], column.state)
            marks.append(plots.Mark(column.name, at["domain"], at["retention"], shape, colour))
    return plots.frontier(board.headline, marks)


def answers(board: Arms) -> dict[str, list[Group]]:
    """Return each headline suite's prompts with the answers of base and of the runs' last models.

    Of each arm the first run is shown; of one arm alone, all runs.
    """
    runs = {arm.name: arm.members[0] for arm in board.columns}
    if len(runs) == 1:
        runs = {Path(run.path).name: run for run in board.columns[0].members}
    found = {}
    for role, suite in board.suites.items():
        rows: dict[str, list[Row]] = {}
        for name, run in [*runs.items()][:MOST_RUNS]:
            own = run.headline[role].rows
            if {"base", run.end} <= own.keys() and run.end != "base":
                rows.setdefault("base", own["base"])
                # A run may be called like a model.
                rows[f"{name} (run)" if name in STATES else name] = own[run.end]
        if len(rows) > 2 and (groups := answers_by_run(replace(suite, results={}, rows=rows))):
            found[suite.name] = groups
    return found
