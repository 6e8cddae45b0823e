"""The verdict in words: no word claims more than the numbers show."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opdcl.config.recover import RecoverConfig
from opdcl.results import ratios
from opdcl.results.estimates import Summary, Verdict
from opdcl.results.format import POINTS, SCORE, SHARE, interval, is_few, percent, points
from opdcl.results.measurements import PLAIN_WORDS
from opdcl.results.notes import learned_note
from opdcl.results.origins import rows_set_aside
from opdcl.results.status import (
    ALONE,
    FAULT,
    MOST_OF_THE_GAIN,
    SMALLEST_DROP,
    STATES,
    Domain,
    NoRatio,
    Retention,
    both_halves,
)

if TYPE_CHECKING:
    from opdcl.results.intervals import Estimate
    from opdcl.results.measurements import MeasuredSuite
    from opdcl.results.ratios import Closeness, Findings, ResponseTests
    from opdcl.rundir.layout import RunDir

# Fewer prompts hardly ever show that a model as good as base has recovered; the estimate says more.
FIRST_LOOK = 100

# How far from base's the answers are, in words; `{}` is recovered's share, then base's.
FAULTS = {
    "ended": "{} end before the token limit (base {})",
    "repetition": "{} of their 4-grams are repetitions (base {})",
}

# The place of the run in a command. A page says RUN, since it may be moved.
PLACE = re.compile(r"(opdcl [a-z]+ |-o )RUN\b")

NOT_YET = "Not measured yet"
NOTHING_COMPARED = "No other model is compared with it: opdcl eval OTHER --base MODEL does that."


def conclude(
    summary: Summary,
    retention: MeasuredSuite | None,
    domain: MeasuredSuite | None,
    settings: Mapping[str, Any],
    faults: Sequence[str] = (),
) -> Summary:
    """Return the results of a run: its summary, with settled findings, and the verdict.

    `settings` and `faults` are those of the run; a headline suite has faults of its own.
    """
    for suite in filter(None, (retention, domain)):
        faults = [*faults, *suite.faults]
    summary = replace(summary, findings=_settled(summary, faults))
    findings = summary.findings
    if findings.status == FAULT:
        more = f"; {len(faults) - 1} more of this kind" if len(faults) > 1 else ""
        verdict = Verdict("Fault", f"{faults[0]}{more}. So there is no R, no D and no verdict.")
    elif findings.status == ALONE:
        verdict = Verdict("Base alone", f"{_scores_of_base(summary)}.", [NOTHING_COMPARED])
    else:
        to_do, written = _advice(summary, settings), writing_sentence(summary.writing_tests)
        learned = [learned_note(s.name, s.learned, len(s.measured)) for s in (retention, domain) if s]
        further = [*learned, _distance(summary.closeness), _neighbours(summary), written, to_do]
        heading, sentence = _outcome(summary, retention, domain)
        verdict = Verdict(heading, f"{sentence}.", [*filter(None, further)], to_do)
    return replace(summary, verdict=verdict)


def _settled(summary: Summary, faults: Sequence[str]) -> Findings:
    """Return the findings after closeness, which counts where the suite has no headroom, and faults."""
    findings, near = summary.findings, summary.closeness
    if findings.retention_status is Retention.NO_HEADROOM and near and near.status:
        found = near.status
        if found is Retention.RECOVERED and not ratios.alike(summary.writing_tests):
            found = Retention.PARTLY
        status = both_halves(found, findings.domain_status)
        findings = replace(findings, retention_status=found, status=status)
    if faults:
        return replace(findings, status=FAULT)
    is_alone = summary.alone and any(suite.n for suite in summary.suites.values())
    return replace(findings, status=ALONE) if is_alone else findings


def at_place(summary: Summary, place: str) -> Summary:
    """Return the summary with `place`, where the run lies, in its commands."""

    def placed(text: str) -> str:
        return PLACE.sub(lambda found: f"{found[1]}{place}", text)

    said = summary.verdict
    further = [placed(text) for text in said.further]
    return replace(summary, verdict=replace(said, to_do=placed(said.to_do), further=further))


def _scores_of_base(summary: Summary) -> str:
    scores = []
    for name, suite in summary.suites.items():
        if base := suite.states.get("base"):
            scores.append(f"{PLAIN_WORDS.get(name, name)} {interval(base, SCORE)} on {suite.n} prompts")
    return ", ".join(scores)


def _outcome(
    summary: Summary, retention: MeasuredSuite | None, domain: MeasuredSuite | None
) -> tuple[str, str]:
    """Return the first words, and the outcome in one sentence."""
    if retention is None or not retention.rows:
        if summary.trained:
            did, size = summary.trained
            return did, f"{size}; not measured yet"
        if not summary.suites:
            return NOT_YET, "nothing was evaluated"
        missing = f"suite {retention.name} has no results" if retention else "there is no retention suite"
        return NOT_YET, missing
    states = summary.suites[retention.name].states
    scores = {state: percent(score.value) for state, score in states.items()}
    change, prompts = summary.changes["tuned_minus_base"], len(retention.measured)
    if change and not retention.complete:
        changed = f"the fine-tune changed {retention.plain} by {interval(change, POINTS, n=prompts)}"
        shown = f"from {scores['base']} to {scores['tuned']}{_learned(summary, domain)}"
        return "Not recovered yet" if change.high < 0 else "No forgetting measured", f"{changed}, {shown}"
    if not retention.complete:
        missing = " and ".join(retention.missing)
        known = ", ".join(f"{state} {score}" for state, score in scores.items())
        return NOT_YET, f"{retention.plain} has no result for {missing} (so far: {known})"
    recovery, kept = summary.findings.recovery, summary.findings.domain_retention
    is_back = summary.findings.retention_status in (Retention.RECOVERED, Retention.PARTLY)
    if is_back and recovery and not _deciding_closeness(summary):
        bounded = interval(recovery, n=prompts)
        outcome = f"{_share(recovery)} of the lost {retention.plain} came back (R = {bounded})"
    else:
        outcome = _retention_clause(summary, retention, scores)
    if kept:
        bounded = interval(kept, n=summary.prompts_of("domain"))
        domain_outcome = f"{_share(kept)} of the domain gain is kept (D = {bounded})"
    else:
        domain_outcome = f"no D, because {why_no_domain_retention(domain)}"
    return _heading(summary), f"{outcome}; {domain_outcome}"


def _learned(summary: Summary, domain: MeasuredSuite | None) -> str:
    """Say what the fine-tune taught of the domain, if that is measured."""
    if domain is None or not {"base", "tuned"} <= domain.rows.keys():
        return ""
    states = summary.suites[domain.name].states
    return f"; {domain.plain} from {percent(states['base'].value)} to {percent(states['tuned'].value)}"


def _heading(summary: Summary) -> str:
    """Return the first words: what is shown of the recovery, and of the domain."""
    findings = summary.findings
    found, kept = findings.retention_status, findings.domain_status
    if (found, kept) == (Retention.RECOVERED, Domain.KEPT):
        return "Recovered and kept"
    if (found, kept) == (Retention.NOT_SHOWN, Domain.KEPT):
        return "Kept, recovery not shown"
    words, domain_words, first_look = found.heading, kept.heading, ""
    is_back = findings.non_inferiority and findings.non_inferiority.shown and not _deciding_closeness(summary)
    if found is Retention.PARTLY and is_back:
        differs = any(test and test.different for test in summary.writing_tests.values())
        words = "Score recovered, writing differs" if differs else "Score recovered, writing uncertain"
    elif prompts := _first_look(summary):
        words = f"{_share(findings.recovery).capitalize()} came back"
        first_look = f" ({prompts} prompts, a first look)"
    share = findings.domain_retention
    if kept is Domain.PARTLY and share and share.value >= MOST_OF_THE_GAIN:
        domain_words = "domain probably kept"
    return f"{words}, {domain_words}{first_look}"


def _first_look(summary: Summary) -> int:
    """Return the number of prompts if they are so few that R says more than its status; else 0."""
    findings, suite = summary.findings, summary.headline_suite("retention")
    if findings.retention_status is not Retention.PARTLY or findings.recovery is None or suite is None:
        return 0
    return suite.n if suite.n < FIRST_LOOK and not _deciding_closeness(summary) else 0


def _share(share: Estimate) -> str:
    """Format a share: "all", or a percentage."""
    return "all" if share.value >= 0.995 else f"{100 * share.value:.0f} %"


def _deciding_closeness(summary: Summary) -> Closeness | None:
    """Return the closeness if the verdict rests on it, because the suite has no headroom."""
    unfit = summary.findings.no_recovery_because is NoRatio.FLOOR_TOO_HIGH
    return summary.closeness if unfit and summary.closeness and summary.closeness.c else None


def _retention_clause(summary: Summary, retention: MeasuredSuite, scores: dict[str, str]) -> str:
    """Return the scores of the three models, and R, or why there is none."""
    findings, gain = summary.findings, summary.changes["recovered_minus_tuned"]
    base, tuned, recovered = (scores[state] for state in STATES)
    levels = f"{retention.plain} is {base} for base, {tuned} for tuned and {recovered} for recovered"
    closeness = _deciding_closeness(summary)
    if closeness and closeness.c:
        gone = f"{interval(closeness.c, SHARE, n=closeness.n)} of the distance to base is gone, counted from"
        where = f"{closeness.start}, on {closeness.n} prompts"
        return f"{gone} {where} ({levels}: no measure here, see the note)"
    status = findings.retention_status
    if status is Retention.NO_HEADROOM:
        floor = summary.suites[retention.name].floor or 0.0
        return f"{levels}, where {retention.floor_is} scores {percent(floor)}"
    if status in (Retention.TOO_FEW, Retention.NO_FORGETTING):
        return f"{levels}, {why_no_ratio(summary)}"
    if gain and gain.high < 0:
        levels += ", measurably below tuned"
    elif status is Retention.NOT_SHOWN and findings.no_recovery_because is NoRatio.NO_DROP:
        levels += ", measurably below base, as tuned is not"
    if findings.recovery:
        return f"{levels}, R = {interval(findings.recovery, n=len(retention.measured))}"
    return f"{levels}, no R, {why_no_ratio(summary)}"


def _distance(near: Closeness | None) -> str:
    """Say how far from base the answers of tuned and recovered are, and how many are like the domain's."""
    if near is None or not near.states.get("tuned"):
        return ""
    states = [near.states[state] for state in STATES[1:] if near.states.get(state)]
    distances = [max(state["distance"].value, 0) for state in states]
    moved = " -> ".join(f"{distance:.2f}" for distance in distances) + " nats a token"
    if len(states) > 1 and distances[1] > distances[0]:
        moved += ", farther than before"
    elif len(states) > 1 and distances[0]:
        moved += f", {100 * (1 - distances[1] / distances[0]):.0f} % gone"
    shares = [f"{100 * state['domain_manner'].value:.0f} %" for state in states]
    changed = f"{shares[0]} before, {shares[1]} after" if len(shares) > 1 else shares[0]
    style = f"Unrelated requests answered in domain style: {changed} ({near.n} requests)."
    return f"{style} Distance to base: {moved} (base against itself: {near.noise:.3f})."


def _neighbours(summary: Summary) -> str:
    """Say how short questions beside the domain are answered, where a control suite asks them."""
    for name, suite in summary.suites.items():
        if "neighbours" in name and "tuned" in suite.states:
            scores = [f"{percent(score.value)} for {state}" for state, score in suite.states.items()]
            return f"Beside the domain ({name}): {', '.join(scores)}."
    return ""


def _advice(summary: Summary, settings: Mapping[str, Any]) -> str:
    """Say what to do next, with the command; empty where nothing is missing, or nothing is measured yet."""
    findings, recover = summary.findings, settings.get("recover") or {}
    found, recovery, kept = findings.retention_status, findings.recovery, findings.domain_retention
    more_steps = f"opdcl recover RUN --steps {_twice(recover.get('steps'))} -o RUN-2"
    if kept and kept.value < MOST_OF_THE_GAIN:
        is_known = isinstance(recover.get("rollouts"), int)
        rows = _twice(RecoverConfig.model_construct(**recover).completions("domain") if is_known else None)
        command = f"opdcl recover RUN --set recover.domain_rollouts={rows} -o RUN-2"
        return f"To keep more of the domain, learn from more of its rows in each step: {command}"
    advice = found.advice
    almost_all = recovery and recovery.value >= MOST_OF_THE_GAIN and ratios.alike(summary.writing_tests)
    if found is Retention.PARTLY and (almost_all or _first_look(summary)):
        advice = "To show more, {prompts}"
    return advice.format(prompts=_more_prompts(summary, settings), steps=more_steps) if advice else ""


def _twice(number: int | None) -> str:
    return str(2 * number) if number else "N"


def _more_prompts(summary: Summary, settings: Mapping[str, Any]) -> str:
    """Say how to measure on more prompts: on enough of them if that is known, else on four times as many."""
    limit, measured = (settings.get("eval") or {}).get("limit"), summary.prompts_of("retention")
    if not limit or measured < limit:
        return "measure on a suite with more prompts: opdcl suites ls"
    detectable, unfit = summary.detectable_drop, summary.findings.no_recovery_because
    # Four times as many prompts have intervals half as wide.
    enough = 4 * measured
    is_floor_too_near = unfit is NoRatio.FLOOR_TOO_NEAR
    if summary.findings.retention_status is Retention.TOO_FEW and not is_floor_too_near:
        enough = _prompts_to_tell(measured, detectable or 0.0)
    return f"measure on more prompts: opdcl eval RUN --limit {enough}"


def _prompts_to_tell(prompts: int, detectable: float) -> int:
    """Estimate how many prompts would detect the smallest relevant drop, given what this many detect.

    It is rounded up to two significant digits: an estimate is not more exact.
    """
    enough = prompts * (detectable / SMALLEST_DROP) ** 2
    unit = 10 ** max(0, math.floor(math.log10(enough)) - 1)
    return math.ceil(enough / unit) * unit


def next_command(run: RunDir, summary: Summary, place: str) -> str:
    """Return the next command to suggest: the missing stage, or chat.

    `place` stands for the run directory in it.
    """
    if summary.alone and summary.suites:
        base = run.settings().get("model", {}).get("id", "MODEL")
        return f"opdcl finetune ROWS.jsonl --base {shlex.quote(str(base))}"
    adapters = run.adapters()
    measure = f"opdcl eval {place}" + ("" if rows_set_aside(run) else " --domain TEST.jsonl")
    if not adapters:
        # Not the command that began the run: its relative paths may have started in another folder.
        if run.workflow.exists():
            return f"opdcl run {place}/{run.workflow.name} -o {place}"
        return f"opdcl finetune ROWS.jsonl -o {place}"
    if "recovered" not in adapters:
        settings = run.settings()
        finetune = settings.get("finetune")
        # After replay there may be nothing to recover.
        if finetune and finetune.get("replay", {}).get("share") and not summary.suites:
            return measure
        change = summary.changes["tuned_minus_base"]
        if change and change.low > -SMALLEST_DROP:
            return f"opdcl chat {place}"  # too little was forgotten for a recovery to show
        # An adapter made elsewhere brings no prompts of its domain.
        made_elsewhere = settings.get("start") and not finetune
        return f"opdcl recover {place}{' --domain PROMPTS.jsonl' if made_elsewhere else ''}"
    measured = any("recovered" in suite.states for suite in summary.suites.values())
    return f"opdcl chat {place}" if measured else measure


def writing_sentence(tests: ResponseTests) -> str:
    """Say how recovered writes unlike base; empty where no difference is shown."""
    faults = []
    for key, test in tests.items():
        if test and test.different and not test.shown:
            name, _, where = key.partition(" ")
            if name == "tokens":
                longer = "shorter" if test.value < 0 else "longer"
                fault = f"they are {100 * abs(test.value):.0f} % {longer}"
            else:
                fault = FAULTS[name].format(percent(test.recovered), percent(test.base))
            faults.append(f"{where}, {fault}" if where else fault)
    return f"Its answers still differ from base's: {'; '.join(faults)}." if faults else ""


def why_no_ratio(summary: Summary) -> str:
    """Say why there is no R, with the numbers behind the reason."""
    findings, detectable = summary.findings, summary.detectable_drop
    suite, change = summary.headline_suite("retention"), summary.changes["tuned_minus_base"]
    if findings.status == FAULT:
        return "a score is not a number"
    if suite is None or change is None or detectable is None:
        return "base and tuned are not both measured"
    if findings.retention_status is Retention.NOT_MEASURED:
        return "recovered is not measured"
    reason = findings.no_recovery_because
    if reason in (NoRatio.FLOOR_TOO_HIGH, NoRatio.FLOOR_TOO_NEAR):
        return reason.value
    if change.low > 0:
        return f"tuned is {points(change.value).lstrip('+')} points above base"
    # + 0.0 turns -0.0 into 0.0.
    value, low, high = (round(-100 * x, 1) + 0.0 for x in (change.value, change.high, change.low))
    drop = f"a drop from base to tuned of {value} points"
    if not is_few(suite.n):
        drop += f" [{low}, {high}]"
    needed = 100 * SMALLEST_DROP
    if findings.retention_status is Retention.TOO_FEW:
        enough = _prompts_to_tell(suite.n, detectable)
        seen = f"{suite.n} prompts show a drop from {100 * detectable:.0f} points on"
        return f"{drop}: {seen}, one of {needed:.0f} points takes about {enough}"
    if findings.retention_status is Retention.NO_FORGETTING:
        return f"{drop}, where {suite.n} prompts would show one of {100 * detectable:.1f}"
    if -change.value < SMALLEST_DROP:
        return f"because {drop} is too small for a ratio, which needs {needed:.0f}"
    if reason is NoRatio.NO_DROP:
        return f"because {drop} may be chance"
    return f"because base is less than {needed:.0f} points above the floor"


def why_no_domain_retention(domain: MeasuredSuite | None) -> str:
    """Say why there is no D."""
    if domain is None:
        return "there is no domain suite"
    if domain.faults:
        return "a score is not a number"
    if not domain.complete:
        return f"{domain.name} is not measured on {', '.join(domain.missing)}"
    return "tuned's score on the domain is not measurably above base's and the floor"


def severity(summary: Summary) -> str:
    """Return whether the outcome is `good` in both halves, `mixed`, `bad` in one, or open: an empty text."""
    findings = summary.findings
    found, kept = findings.retention_status, findings.domain_status
    if findings.status == FAULT or kept is Domain.LOST:
        return "bad"
    return "good" if (found, kept) == (Retention.RECOVERED, Domain.KEPT) else found.severity
