"""The verdict in words: a table of outcomes, and what fills it. No word claims more than the numbers show."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from opdcl.config.recover import RecoverConfig
from opdcl.results import ratios
from opdcl.results.estimates import Summary, Verdict
from opdcl.results.format import POINTS, SCORE, SHARE, interval, is_few, percent, points
from opdcl.results.intervals import Estimate
from opdcl.results.measurements import PLAIN_WORDS, MeasuredSuite
from opdcl.results.notes import learned_note
from opdcl.results.origins import rows_set_aside
from opdcl.results.ratios import Closeness, Findings, ResponseTests
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
from opdcl.rundir.layout import RunDir


class Words(NamedTuple):
    """How a report tells one outcome of the recovery."""

    heading: str
    sentence: str = "{levels}, {why}"
    """`{levels}` are the scores of the three models, `{harm}` says what lies measurably below what."""
    advice: str = ""
    """`{prompts}` says how to measure on more of them, `{steps}` is a longer recovery."""
    severity: str = ""
    """The colour of the heading: good, mixed, bad, or none where all is open."""


CAME_BACK = "{share} of the lost {skill} came back (R = {r})"
ELSE_MORE_STEPS = "{prompts}; if not, take more steps: {steps}"

# `docs/reading-the-report.md` explains each of them.
OUTCOMES = {
    Retention.RECOVERED: Words("Recovered", CAME_BACK, "", "mixed"),
    Retention.PARTLY: Words("Partly recovered", CAME_BACK, "More steps bring more back: {steps}", "mixed"),
    Retention.NOT_SHOWN: Words(
        "Recovery not shown", "{levels}{harm}, R = {r}", f"If the held-out KL fell, {ELSE_MORE_STEPS}", "bad"
    ),
    Retention.NO_FORGETTING: Words("No measurable forgetting"),
    Retention.TOO_FEW: Words("Too few prompts to tell", advice="To tell, {prompts}"),
    Retention.NO_HEADROOM: Words("Recovery not measured", "{levels}, where {floor_is} scores {floor}"),
    Retention.NOT_MEASURED: Words("Not measured yet"),
}
# Where one of the first three has no R; and where the suite has no headroom, so that closeness decides.
WITHOUT_R = "{levels}{harm}, no R, {why}"
BY_CLOSENESS = (
    "{gone} of the distance to base is gone, counted from {start} ({levels}: no measure here, see the note)"
)
DOMAIN_HEADINGS = {
    Domain.KEPT: "domain kept",
    Domain.PARTLY: "domain partly kept",
    Domain.LOST: "domain lost",
    Domain.NOT_SHOWN: "domain not shown to be kept",
    Domain.GAIN_NOT_SHOWN: "domain gain not shown",
    Domain.NOT_MEASURED: "domain not measured",
}
BOTH_HEADINGS = {
    (Retention.RECOVERED, Domain.KEPT): "Recovered and kept",
    (Retention.NOT_SHOWN, Domain.KEPT): "Kept, recovery not shown",
}

# Fewer prompts hardly ever show that a model as good as base has recovered; the estimate says more.
FIRST_LOOK = 100

# How far from base's the answers are, in words; `{}` is recovered's share, then base's.
UNLIKE_BASE = {
    "ended": "{} end before the token limit (base {})",
    "repetition": "{} of their 4-grams are repetitions (base {})",
}

# The place of the run in a command. A page says RUN, since it may be moved.
PLACE = re.compile(r"(opdcl [a-z]+ |-o )RUN\b")

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
    headline = [suite for suite in (retention, domain) if suite]
    faults = [*faults, *(fault for suite in headline for fault in suite.faults)]
    findings = _settled(summary, faults)
    summary = replace(summary, findings=findings)
    if findings.status == FAULT:
        more = f"; {len(faults) - 1} more of this kind" if len(faults) > 1 else ""
        verdict = Verdict("Fault", f"{faults[0]}{more}. So there is no R, no D and no verdict.")
    elif findings.status == ALONE:
        scores = []
        for name, suite in summary.suites.items():
            if base := suite.states.get("base"):
                plain = PLAIN_WORDS.get(name, name)
                scores.append(f"{plain} {interval(base, SCORE)} on {suite.n} prompts")
        verdict = Verdict("Base alone", f"{', '.join(scores)}.", [NOTHING_COMPARED])
    else:
        to_do = _advice(summary, settings)
        further = [
            *(learned_note(suite.name, suite.learned, len(suite.measured)) for suite in headline),
            _distance(summary.closeness),
            _neighbours(summary),
            writing_sentence(summary.writing_tests),
            to_do,
        ]
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
    said = summary.verdict
    texts = [PLACE.sub(lambda found: f"{found[1]}{place}", text) for text in (said.to_do, *said.further)]
    return replace(summary, verdict=replace(said, to_do=texts[0], further=texts[1:]))


def _outcome(
    summary: Summary, retention: MeasuredSuite | None, domain: MeasuredSuite | None
) -> tuple[str, str]:
    """Return the first words, and the outcome in one sentence."""
    not_yet = OUTCOMES[Retention.NOT_MEASURED].heading
    if retention is None or not retention.rows:
        if summary.trained:
            did, size = summary.trained
            return did, f"{size}; not measured yet"
        missing = f"suite {retention.name} has no results" if retention else "there is no retention suite"
        return not_yet, missing if summary.suites else "nothing was evaluated"
    scores = {state: percent(score.value) for state, score in summary.suites[retention.name].states.items()}
    change = summary.changes["tuned_minus_base"]
    if not retention.complete and change:
        prompts, learned = len(retention.measured), ""
        if domain and {"base", "tuned"} <= domain.rows.keys():
            states = summary.suites[domain.name].states
            before, after = (percent(states[state].value) for state in ("base", "tuned"))
            learned = f"; {domain.plain} from {before} to {after}"
        changed = f"the fine-tune changed {retention.plain} by {interval(change, POINTS, n=prompts)}"
        heading = "Not recovered yet" if change.high < 0 else "No forgetting measured"
        return heading, f"{changed}, from {scores['base']} to {scores['tuned']}{learned}"
    if not retention.complete:
        missing = " and ".join(retention.missing)
        known = ", ".join(f"{state} {score}" for state, score in scores.items())
        return not_yet, f"{retention.plain} has no result for {missing} (so far: {known})"
    kept = summary.findings.domain_retention
    domain_outcome = f"no D, because {why_no_domain_retention(domain)}"
    if kept:
        bounded = interval(kept, n=summary.prompts_of("domain"))
        domain_outcome = f"{_share(kept)} of the domain gain is kept (D = {bounded})"
    return _heading(summary), f"{_recovery(summary, retention, scores)}; {domain_outcome}"


def _recovery(summary: Summary, retention: MeasuredSuite, scores: Mapping[str, str]) -> str:
    """Return the recovery's outcome: the sentence of its status, with its numbers."""
    findings, gain, near = summary.findings, summary.changes["recovered_minus_tuned"], _deciding(summary)
    sentence, r, harm = OUTCOMES[findings.retention_status].sentence, findings.recovery, ""
    if near:
        sentence = BY_CLOSENESS
    elif not r and "{r}" in sentence:
        sentence = WITHOUT_R
    if gain and gain.high < 0:
        harm = ", measurably below tuned"
    elif (findings.retention_status, findings.no_recovery_because) == (Retention.NOT_SHOWN, NoRatio.NO_DROP):
        harm = ", measurably below base, as tuned is not"
    base, tuned, recovered = (scores[state] for state in STATES)
    return sentence.format(
        levels=f"{retention.plain} is {base} for base, {tuned} for tuned and {recovered} for recovered",
        skill=retention.plain,
        harm=harm,
        share=r and _share(r),
        r=r and interval(r, n=len(retention.measured)),
        why=why_no_ratio(summary),
        floor_is=retention.floor_is,
        floor=percent(summary.suites[retention.name].floor or 0.0),
        gone=near and near.c and interval(near.c, SHARE, n=near.n),
        start=near and f"{near.start}, on {near.n} prompts",
    )


def _heading(summary: Summary) -> str:
    """Return the first words: what is shown of the recovery, and of the domain."""
    findings, tests = summary.findings, summary.writing_tests.values()
    found, kept, share = findings.retention_status, findings.domain_status, findings.domain_retention
    if both := BOTH_HEADINGS.get((found, kept)):
        return both
    words, domain_words, first_look = OUTCOMES[found].heading, DOMAIN_HEADINGS[kept], ""
    is_back = findings.non_inferiority and findings.non_inferiority.shown and not _deciding(summary)
    if found is Retention.PARTLY and is_back:
        differs = any(test and test.different for test in tests)
        words = "Score recovered, writing differs" if differs else "Score recovered, writing uncertain"
    elif prompts := _first_look(summary):
        words = f"{_share(findings.recovery).capitalize()} came back"
        first_look = f" ({prompts} prompts, a first look)"
    if kept is Domain.PARTLY and share and share.value >= MOST_OF_THE_GAIN:
        domain_words = "domain probably kept"
    return f"{words}, {domain_words}{first_look}"


def _first_look(summary: Summary) -> int:
    """Return the number of prompts if they are so few that R says more than its status; else 0."""
    findings, prompts = summary.findings, summary.prompts_of("retention")
    if findings.retention_status is not Retention.PARTLY or findings.recovery is None or _deciding(summary):
        return 0
    return prompts if prompts < FIRST_LOOK else 0


def _share(share: Estimate) -> str:
    """Format a share: "all", or a percentage."""
    return "all" if share.value >= 0.995 else f"{100 * share.value:.0f} %"


def _deciding(summary: Summary) -> Closeness | None:
    """Return the closeness if the verdict rests on it, because the suite has no headroom."""
    unfit = summary.findings.no_recovery_because is NoRatio.FLOOR_TOO_HIGH
    return summary.closeness if unfit and summary.closeness and summary.closeness.c else None


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


def writing_sentence(tests: ResponseTests) -> str:
    """Say how recovered writes unlike base; empty where no difference is shown."""
    faults = []
    for key, test in tests.items():
        if test and test.different and not test.shown:
            name, _, where = key.partition(" ")
            if name == "tokens":
                fault = f"they are {100 * abs(test.value):.0f} % {'shorter' if test.value < 0 else 'longer'}"
            else:
                fault = UNLIKE_BASE[name].format(percent(test.recovered), percent(test.base))
            faults.append(f"{where}, {fault}" if where else fault)
    return f"Its answers still differ from base's: {'; '.join(faults)}." if faults else ""


def _advice(summary: Summary, settings: Mapping[str, Any]) -> str:
    """Say what to do next, with the command; empty where nothing is missing, or nothing is measured yet."""
    findings, recover = summary.findings, settings.get("recover") or {}
    found, recovery, kept = findings.retention_status, findings.recovery, findings.domain_retention
    if kept and kept.value < MOST_OF_THE_GAIN:
        is_known = isinstance(recover.get("rollouts"), int)
        rows = RecoverConfig.model_construct(**recover).completions("domain") if is_known else None
        command = f"opdcl recover RUN --set recover.domain_rollouts={_twice(rows)} -o RUN-2"
        return f"To keep more of the domain, learn from more of its rows in each step: {command}"
    is_alike = ratios.alike(summary.writing_tests)
    almost_all = recovery and recovery.value >= MOST_OF_THE_GAIN and is_alike
    advice = OUTCOMES[found].advice
    if found is Retention.PARTLY and (almost_all or _first_look(summary)):
        advice = "To show more, {prompts}"
    more_steps = f"opdcl recover RUN --steps {_twice(recover.get('steps'))} -o RUN-2"
    return advice.format(prompts=_more_prompts(summary, settings), steps=more_steps)


def _twice(number: int | None) -> str:
    return str(2 * number) if number else "N"


def _more_prompts(summary: Summary, settings: Mapping[str, Any]) -> str:
    """Say how to measure on more prompts: on enough of them if that is known, else on four times as many."""
    limit, measured = (settings.get("eval") or {}).get("limit"), summary.prompts_of("retention")
    if not limit or measured < limit:
        return "measure on a suite with more prompts: opdcl suites ls"
    enough, findings = 4 * measured, summary.findings  # four times as many: intervals half as wide
    is_floor_too_near = findings.no_recovery_because is NoRatio.FLOOR_TOO_NEAR
    if findings.retention_status is Retention.TOO_FEW and not is_floor_too_near:
        enough = _prompts_to_tell(measured, summary.detectable_drop or 0.0)
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
    settings, adapters = run.settings(), run.adapters()
    if summary.alone and summary.suites:
        base = settings.get("model", {}).get("id", "MODEL")
        return f"opdcl finetune ROWS.jsonl --base {shlex.quote(str(base))}"
    test_rows = "TEST.jsonl  # questions that it should now know, in other words"
    measure = f"opdcl eval {place}" + ("" if rows_set_aside(run) else f" --domain {test_rows}")
    if not adapters:
        # Not the command that began the run: its relative paths may have started in another folder.
        if run.workflow.exists():
            return f"opdcl run {place}/{run.workflow.name} -o {place}"
        return f"opdcl finetune ROWS.jsonl -o {place}"
    if "recovered" in adapters:
        measured = any("recovered" in suite.states for suite in summary.suites.values())
        return f"opdcl chat {place}" if measured else measure
    finetune, change = settings.get("finetune"), summary.changes["tuned_minus_base"]
    # After replay there may be nothing to recover.
    if finetune and finetune.get("replay", {}).get("share") and not summary.suites:
        return measure
    if change and change.low > -SMALLEST_DROP:
        return f"opdcl chat {place}"  # too little was forgotten for a recovery to show
    # An adapter made elsewhere brings no prompts of its domain.
    made_elsewhere = settings.get("start") and not finetune
    return f"opdcl recover {place}{' --domain PROMPTS.jsonl' if made_elsewhere else ''}"


def why_no_ratio(summary: Summary) -> str:
    """Say why there is no R, with the numbers behind the reason."""
    findings, detectable = summary.findings, summary.detectable_drop
    suite, change = summary.headline_suite("retention"), summary.changes["tuned_minus_base"]
    found, reason = findings.retention_status, findings.no_recovery_because
    if findings.status == FAULT:
        return "a score is not a number"
    if suite is None or change is None or detectable is None:
        return "base and tuned are not both measured"
    if found is Retention.NOT_MEASURED:
        return "recovered is not measured"
    if reason in (NoRatio.FLOOR_TOO_HIGH, NoRatio.FLOOR_TOO_NEAR):
        return reason.value
    if change.low > 0:
        return f"tuned is {points(change.value).lstrip('+')} points above base"
    # + 0.0 turns -0.0 into 0.0.
    value, low, high = (round(-100 * x, 1) + 0.0 for x in (change.value, change.high, change.low))
    drop = f"a drop from base to tuned of {value} points" + ("" if is_few(suite.n) else f" [{low}, {high}]")
    needed, shown = f"{100 * SMALLEST_DROP:.0f}", 100 * detectable
    if found is Retention.TOO_FEW:
        enough = _prompts_to_tell(suite.n, detectable)
        seen = f"{suite.n} prompts show a drop from {shown:.0f} points on"
        return f"{drop}: {seen}, one of {needed} points takes about {enough}"
    if found is Retention.NO_FORGETTING:
        return f"{drop}, where {suite.n} prompts would show one of {shown:.1f}"
    if -change.value < SMALLEST_DROP:
        return f"because {drop} is too small for a ratio, which needs {needed}"
    if reason is NoRatio.NO_DROP:
        return f"because {drop} may be chance"
    return f"because base is less than {needed} points above the floor"


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
    return "good" if (found, kept) == (Retention.RECOVERED, Domain.KEPT) else OUTCOMES[found].severity
