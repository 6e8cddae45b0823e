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
from opdcl.results.estimates import Scores, Summary, Verdict
from opdcl.results.format import POINTS, SCORE, SHARE, interval, is_few, percent, value
from opdcl.results.intervals import Estimate
from opdcl.results.measurements import MeasuredSuite
from opdcl.results.origins import rows_set_aside
from opdcl.results.ratios import Closeness, Findings, ResponseTests
from opdcl.results.status import (
    ALONE,
    BOTH,
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
    """How a report tells one outcome, before a recovery and after it."""

    heading: str
    sentence: str = "{levels}; {why}"
    """`{levels}` are the scores, `{back}` is the share that came back, `{why}` says why there is none."""
    severity: str = ""


BACK = "{back} of the lost {skill} is back"

# By the status of the run, or else by that of the recovery. `docs/reading-the-report.md` explains each.
OUTCOMES: dict[str, Words] = {
    FAULT: Words("Fault", "{fault}. So there is no R, no D and no verdict", "bad"),
    ALONE: Words("Base alone", "{scores}"),
    BOTH: Words("Recovered and kept", BACK, "good"),
    Retention.RECOVERED: Words("Recovered", BACK, "mixed"),
    Retention.PARTLY: Words("Partly recovered", BACK, "mixed"),
    Retention.NOT_SHOWN: Words("Recovery not shown", f"{{levels}}; {BACK}", "bad"),
    Retention.LOST: Words("Not recovered yet", "{levels}"),
    Retention.NO_FORGETTING: Words("No measurable forgetting"),
    Retention.TOO_FEW: Words("Too few prompts to tell"),
    Retention.NO_HEADROOM: Words("Suite unfit for this model", "{levels}; {floor_is} scores {floor}"),
    Retention.NOT_MEASURED: Words("Not measured yet"),
}
# Where the suite has no headroom, so that closeness decides.
BY_CLOSENESS = "{gone} of the distance to base is gone, counted from {start}"
# Of what is open, or a matter of degree, only the sentence speaks.
DOMAIN_HEADINGS = {
    Domain.KEPT: "domain kept",
    Domain.LOST: "domain lost",
    Domain.GAIN_NOT_SHOWN: "domain not shown to be learned",
    Domain.NOT_MEASURED: "domain not measured",
}

# Fewer prompts hardly ever show that a model as good as base has recovered.
FIRST_LOOK = 100

# This many prompts detect the smallest relevant drop, even if half of all answers change sides.
TO_TELL = 400

# What is wrong with answers unlike base's; the first is said first.
DEFECTS = {
    "ended": "{cut} of its answers run into the token limit (base {base_cut})",
    "repetition": "{own} of the 4-grams in its answers are repetitions (base {base})",
    "tokens": "its answers are {size} {than} than base's",
}

# The place of the run in a command. A page that may be moved says RUN.
PLACE = re.compile(r"(opdcl [a-z]+ |-o )RUN\b")


def conclude(summary: Summary, run: RunDir, faults: Sequence[str] = ()) -> Summary:
    """Return the summary with settled findings and the verdict; with one of these faults, there is none."""
    summary = replace(summary, findings=_settled(summary, faults))
    found, kept = summary.findings.retention_status, summary.findings.domain_status
    heading, sentence = _outcome(summary, run, faults)
    severity = _words(summary.findings).severity if kept is not Domain.LOST else "bad"
    defects, but = _defects(summary), ""
    if defects and found in (Retention.RECOVERED, Retention.PARTLY):
        but = f" But {defects.pop(0)}."
    further = [_distance(summary.closeness), f"Unlike base, {'; '.join(defects)}." if defects else ""]
    said = Verdict(heading, f"{sentence}.{but}", [*filter(None, further)], *_next(summary, run), severity)
    return replace(summary, verdict=said)


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
    """Return the summary with `place`, where the run lies, in its command."""
    command = PLACE.sub(lambda found: f"{found[1]}{place}", summary.verdict.next)
    return replace(summary, verdict=replace(summary.verdict, next=command))


def _words(findings: Findings) -> Words:
    return OUTCOMES.get(findings.status) or OUTCOMES[findings.retention_status]


def _outcome(summary: Summary, run: RunDir, faults: Sequence[str]) -> tuple[str, str]:
    """Return the first words, and the outcome in one sentence."""
    heading, findings = OUTCOMES[Retention.NOT_MEASURED].heading, summary.findings
    words = _words(findings)
    if findings.status == FAULT:
        more = f"; {len(faults) - 1} more of this kind" if len(faults) > 1 else ""
        return words.heading, words.sentence.format(fault=faults[0] + more)
    if findings.status == ALONE:
        measured = [suite for suite in summary.suites.values() if "base" in suite.states]
        scores = [f"{s.plain} {interval(s.states['base'], SCORE)} on {s.n} prompts" for s in measured]
        return words.heading, words.sentence.format(scores=", ".join(scores))
    suite, change = summary.headline_suite("retention"), summary.tests.changes["tuned_minus_base"]
    if suite is None or not suite.n:
        if summary.trained:
            did, size = summary.trained
            return did, f"{size}; not measured yet"
        missing = "there is no retention suite"
        if suite:
            missing = f"suite {summary.headline['retention']} has no results"
        return heading, missing if summary.suites else "nothing was evaluated"
    if change is None:
        missing = " and ".join(state for state in STATES if state not in suite.states)
        known = ", ".join(f"{state} {percent(score.value)}" for state, score in suite.states.items())
        return heading, f"{suite.plain} has no result for {missing} (so far: {known})"
    few = []
    for role, ratio in (("retention", findings.recovery), ("domain", findings.domain_retention)):
        if ratio and summary.prompts_of(role) < FIRST_LOOK:
            few.append(f"{summary.prompts_of(role)} {role}")
    look = f". {' and '.join(few)} prompts are a first look" if few else ""
    halves = filter(None, (_recovery(summary, suite, change), _domain(summary)))
    return _heading(summary, "recovered" in run.adapters()), "; ".join(halves) + look


def _recovery(summary: Summary, suite: Scores, change: Estimate) -> str:
    """Return the recovery's outcome: the sentence of its status, with its numbers."""
    findings, near, r = summary.findings, _deciding(summary), summary.findings.recovery
    gain = summary.tests.changes["recovered_minus_tuned"]
    base, tuned, *recovered = (percent(score.value) for score in suite.states.values())
    levels = f"the fine-tune changed {suite.plain} by {interval(change, POINTS, n=suite.n)}"
    levels += f", from {base} to {tuned}"
    if recovered:
        levels += f", and recovered has {recovered[0]}"
    if gain and gain.high < 0:
        levels += ", measurably below tuned"
    elif (findings.retention_status, findings.no_recovery_because) == (Retention.NOT_SHOWN, NoRatio.NO_DROP):
        levels += ", measurably below base, as tuned is not"
    sentence = BY_CLOSENESS if near else OUTCOMES[findings.retention_status].sentence
    if not r and "{back}" in sentence:
        sentence = "{levels}; {why}"
    said = sentence.format(
        levels=levels,
        skill=suite.plain,
        back=r and interval(r, SHARE, n=suite.n),
        why=why_no_ratio(summary),
        floor_is=suite.floor_is,
        floor=percent(suite.floor or 0.0),
        gone=near and near.c and interval(near.c, SHARE, n=near.n),
        start=near and f"{near.start}, on {near.n} prompts",
    )
    unseen = summary.groups.get("unseen")
    if r and unseen and unseen.recovery:
        said += f" ({interval(unseen.recovery, SHARE)} on kinds that the recovery did not practise)"
    return said


def _domain(summary: Summary) -> str:
    """Return what became of the domain, with its numbers."""
    findings, suite = summary.findings, summary.headline_suite("domain")
    if kept := findings.domain_retention:
        return f"{interval(kept, SHARE, n=summary.prompts_of('domain'))} of the domain gain is kept"
    if suite is None or summary.tests.changes["domain_tuned_minus_base"] is None:
        return ""
    before, after = (percent(suite.states[state].value) for state in STATES[:2])
    if findings.domain_status is Domain.GAIN_NOT_SHOWN:
        said = "the domain is not learned" if _is_unlearned(summary) else "no gain on the domain is shown"
        return f"{said} ({after}, base {before})"
    return f"{suite.plain} rose from {before} to {after}"


def _is_unlearned(summary: Summary) -> bool:
    """Return whether the domain shows no gain, nor one of a size that more rows would show."""
    change = summary.tests.changes["domain_tuned_minus_base"]
    is_open = summary.findings.domain_status is Domain.GAIN_NOT_SHOWN
    return is_open and change is not None and change.value < SMALLEST_DROP


def _heading(summary: Summary, is_trained: bool) -> str:
    """Return the first words: what is shown of the recovery, which `is_trained` or not, and of the domain."""
    findings, r = summary.findings, summary.findings.recovery
    found, kept = findings.retention_status, findings.domain_status
    words, is_as_good = _words(findings).heading, findings.non_inferiority and findings.non_inferiority.shown
    if findings.status == BOTH:
        return words
    if found is Retention.LOST and is_trained:
        return "Recovered, but not measured yet"
    if found is Retention.PARTLY and is_as_good and not _deciding(summary):
        words = "Score recovered, writing not"
    elif found is Retention.PARTLY and r and r.high >= 1:
        words = "Recovered at least in part"
    return ", ".join([words, DOMAIN_HEADINGS[kept]] if kept in DOMAIN_HEADINGS else [words])


def _deciding(summary: Summary) -> Closeness | None:
    """Return the closeness if the verdict rests on it, because the suite has no headroom."""
    unfit = summary.findings.no_recovery_because is NoRatio.FLOOR_TOO_HIGH
    return summary.closeness if unfit and summary.closeness and summary.closeness.c else None


def _distance(near: Closeness | None) -> str:
    """Say how far from base the answers of tuned and recovered are, and how many are like the domain's."""
    states = [near.states[state] for state in STATES[1:] if near.states.get(state)] if near else []
    if near is None or not states:
        return ""
    moved = " -> ".join(f"{max(state['distance'].value, 0):.2f}" for state in states)
    shares = " -> ".join(value(state["domain_manner"], SHARE) for state in states)
    return f"Distance to base: {moved} nats a token; answered in domain style: {shares} of {near.n} requests."


def unlike_base(tests: ResponseTests) -> list[str]:
    """Say how recovered writes unlike base, the worst first; empty where no difference is shown."""
    said = []
    for name, words in DEFECTS.items():
        for key, test in tests.items():
            measure, _, where = key.partition(" ")
            is_better = name == "ended" and test and test.value > 0
            if test and measure == name and test.different and not (test.shown or is_better):
                shares = {"own": test.recovered, "base": test.base, "size": abs(test.value)}
                shares |= {"cut": 1 - test.recovered, "base_cut": 1 - test.base}
                percents = {name: f"{100 * share:.0f} %" for name, share in shares.items()}
                text = words.format(than="shorter" if test.value < 0 else "longer", **percents)
                said.append(f"{where}, {text}" if where else text)
    return said


def _defects(summary: Summary) -> list[str]:
    """Say what is still wrong with recovered's answers, the worst first."""
    said, near = unlike_base(summary.writing_tests), summary.closeness
    manner = near.states.get("recovered", {}).get("domain_manner") if near else None
    if manner and manner.low > 0 and manner.value >= ratios.MARGINS["ended"]:
        said.append(f"{value(manner, SHARE)} of unrelated requests are answered in domain style (base 0 %)")
    return said


def _next(summary: Summary, run: RunDir) -> tuple[str, str]:
    """Return what the next command is for, which may go without saying, and the command. RUN is the run."""
    settings, adapters, findings = run.settings(), run.adapters(), summary.findings
    found, kept = findings.retention_status, findings.domain_retention
    finetune, recover = settings.get("finetune") or {}, settings.get("recover") or {}
    if summary.faults:
        return "checks the files", "opdcl verify RUN"
    if summary.alone and summary.suites:
        base = settings.get("model", {}).get("id", "MODEL")
        return "", f"opdcl finetune ROWS.jsonl --base {shlex.quote(str(base))}"
    # Not the command that began the run: its relative paths may have started in another folder.
    again = f"opdcl run RUN/{run.workflow.name}" if run.workflow.exists() else "opdcl finetune ROWS.jsonl"
    if not adapters:
        return "", f"{again} -o RUN"
    measure = "TEST.jsonl asks what it should now know, in other words", "opdcl eval RUN --domain TEST.jsonl"
    if rows_set_aside(run):
        measure = "", "opdcl eval RUN"
    # An adapter made elsewhere brings no prompts of its domain.
    made_elsewhere = settings.get("start") and not finetune
    recovery = f"opdcl recover RUN{' --domain PROMPTS.jsonl' if made_elsewhere else ''}"
    if not any([*adapters][-1] in suite.states for suite in summary.suites.values()):
        return measure
    if _is_unlearned(summary) and finetune:
        command = f"{again} --set finetune.epochs={_twice(finetune.get('epochs'))} -o RUN-2"
        return "to learn the domain for longer", command
    is_unknown = found is Retention.NOT_MEASURED and "recovered" not in adapters
    if found is Retention.LOST or is_unknown:
        return "", recovery
    if found is Retention.TOO_FEW:
        return _more_prompts(summary, settings, "to tell")
    if kept and kept.value < MOST_OF_THE_GAIN and kept.high < 1:
        is_known = isinstance(recover.get("rollouts"), int)
        rows = RecoverConfig.model_construct(**recover).completions("domain") if is_known else None
        command = f"opdcl recover RUN --set recover.domain_rollouts={_twice(rows)} -o RUN-2"
        return "to keep more of the domain, from more of its rows in each step", command
    if found is Retention.NOT_SHOWN and findings.no_recovery_because is NoRatio.NO_DROP:
        return "compares with tuned, which has lost nothing that is shown", "opdcl chat RUN"
    if found in (Retention.PARTLY, Retention.NOT_SHOWN):
        is_almost_all = findings.recovery and findings.recovery.value >= MOST_OF_THE_GAIN
        is_open = is_almost_all and ratios.alike(summary.writing_tests)
        if summary.prompts_of("retention") < FIRST_LOOK or is_open:
            return _more_prompts(summary, settings, "to show more")
        more = f"opdcl recover RUN --steps {_twice(recover.get('steps'))} -o RUN-2"
        return "more steps bring more back", more
    if found is Retention.NO_HEADROOM:
        return "lists other suites", "opdcl suites ls"
    return "", "opdcl chat RUN"


def _twice(number: float | None) -> str:
    return f"{2 * number:g}" if number else "N"


def _more_prompts(summary: Summary, settings: Mapping[str, Any], why: str) -> tuple[str, str]:
    """Return the command that measures on enough prompts if that is known, else on four times as many."""
    limit, measured = (settings.get("eval") or {}).get("limit"), summary.prompts_of("retention")
    if not limit or measured < limit:
        return f"{why}, a suite with more prompts", "opdcl suites ls"
    enough = 4 * measured  # four times as many: intervals half as wide
    findings, detectable = summary.findings, summary.tests.detectable_drop or 0.0
    is_open = findings.retention_status is Retention.TOO_FEW
    if is_few(measured) or (is_open and findings.no_recovery_because is not NoRatio.FLOOR_TOO_NEAR):
        enough = _prompts_to_tell(measured, detectable)
    return why, f"opdcl eval RUN --limit {enough}"


def _prompts_to_tell(prompts: int, detectable: float) -> int:
    """Estimate how many prompts would detect the smallest relevant drop, given what this many detect.

    It is rounded up to two significant digits: an estimate is not more exact.
    """
    if is_few(prompts):
        return TO_TELL
    enough = prompts * (detectable / SMALLEST_DROP) ** 2
    unit = 10 ** max(0, math.floor(math.log10(enough)) - 1)
    return math.ceil(enough / unit) * unit


def why_no_ratio(summary: Summary) -> str:
    """Say why there is no R, with the numbers behind the reason."""
    found, reason = summary.findings.retention_status, summary.findings.no_recovery_because
    suite, change = summary.headline_suite("retention"), summary.tests.changes["tuned_minus_base"]
    if suite is None or change is None:
        return "base and tuned are not both measured"
    if reason in (NoRatio.FLOOR_TOO_HIGH, NoRatio.FLOOR_TOO_NEAR):
        return reason.value
    if change.low > 0:
        return "nothing is lost"
    detectable, needed = summary.tests.detectable_drop or 0.0, f"{100 * SMALLEST_DROP:.0f}"
    if found is Retention.TOO_FEW:
        seen = f"show a loss from {100 * detectable:.0f} points on"
        if is_few(suite.n) or detectable >= 1:
            seen = "show nothing"
        enough = _prompts_to_tell(suite.n, detectable)
        return f"{suite.n} prompts {seen}, a loss of {needed} points takes about {enough}"
    if found is Retention.NO_FORGETTING:
        return f"{suite.n} prompts would show a loss of {100 * detectable:.1f} points"
    if "recovered" not in suite.states:
        return "recovered is not measured"
    if reason is NoRatio.NO_DROP:
        return "a loss by the fine-tune alone is not shown"
    if -change.value < SMALLEST_DROP:
        return f"too small a loss for a share, which needs {needed} points"
    return f"base is less than {needed} points above the floor"


def why_no_domain_retention(domain: MeasuredSuite | None) -> str:
    """Say why there is no D."""
    if domain is None:
        return "there is no domain suite"
    if not domain.complete:
        return f"{domain.name} is not measured on {', '.join(domain.missing)}"
    return "tuned's score on the domain is not measurably above base's and the floor"
