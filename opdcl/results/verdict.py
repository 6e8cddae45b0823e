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
from opdcl.results.format import POINTS, SCORE, SHARE, interval, is_few, percent, value
from opdcl.results.measurements import MeasuredSuite
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
    """How a report tells one outcome, before a recovery and after it."""

    heading: str
    sentence: str = "{levels}; {why}"
    """`{levels}` are the scores, `{back}` is the share that came back, `{why}` says why there is none."""
    severity: str = ""
    """The colour of the heading: good, mixed, bad, or none where all is open."""


BACK = "{back} of the lost {skill} is back"

# `docs/reading-the-report.md` explains each of them.
OUTCOMES = {
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
# What is open, or a matter of degree, only the sentence says.
DOMAIN_HEADINGS = {
    Domain.KEPT: "domain kept",
    Domain.PARTLY: "",
    Domain.LOST: "domain lost",
    Domain.NOT_SHOWN: "",
    Domain.LEARNED: "",
    Domain.GAIN_NOT_SHOWN: "domain not shown to be learned",
    Domain.NOT_MEASURED: "domain not measured",
}

# Fewer prompts hardly ever show that a model as good as base has recovered.
FIRST_LOOK = 100

# This many prompts detect the smallest relevant drop, even if half of all answers change sides.
TO_TELL = 400

# What is wrong with answers unlike base's; `{}` is recovered's share, then base's. The first is said first.
DEFECTS = {
    "ended": "{} of its answers run into the token limit (base {})",
    "repetition": "{} of the 4-grams in its answers are repetitions (base {})",
    "tokens": "its answers are {} than base's",
}

# The place of the run in a command. A page that may be moved says RUN.
PLACE = re.compile(r"(opdcl [a-z]+ |-o )RUN\b")


def conclude(
    summary: Summary, run: RunDir, headline: Mapping[str, MeasuredSuite], faults: Sequence[str] = ()
) -> Summary:
    """Return the results of a run: its summary, with settled findings, and the verdict.

    `faults` are those of the run; a headline suite has faults of its own.
    """
    faults = [*faults, *(fault for suite in headline.values() for fault in suite.faults)]
    summary = replace(summary, findings=_settled(summary, faults))
    why, command = _next(summary, run)
    if summary.findings.status == FAULT:
        more = f"; {len(faults) - 1} more of this kind" if len(faults) > 1 else ""
        heading, sentence = "Fault", f"{faults[0]}{more}. So there is no R, no D and no verdict"
    elif summary.findings.status == ALONE:
        scores = []
        for suite in summary.suites.values():
            if base := suite.states.get("base"):
                scores.append(f"{suite.plain} {interval(base, SCORE)} on {suite.n} prompts")
        heading, sentence = "Base alone", ", ".join(scores)
    else:
        heading, sentence = _outcome(summary, run, headline.get("retention"))
    first, *others = [*_defects(summary), ""]
    is_told = summary.findings.retention_status in (Retention.RECOVERED, Retention.PARTLY)
    said, unsaid = (f" But {first}.", others) if is_told and first else ("", [first, *others])
    unlike = "; ".join(filter(None, unsaid))
    further = [_distance(summary.closeness), f"Unlike base, {unlike}." if unlike else ""]
    verdict = Verdict(heading, f"{sentence}.{said}", [*filter(None, further)], why, command)
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
    """Return the summary with `place`, where the run lies, in its command."""
    said = summary.verdict
    command = PLACE.sub(lambda found: f"{found[1]}{place}", said.next)
    return replace(summary, verdict=replace(said, next=command))


def _outcome(summary: Summary, run: RunDir, retention: MeasuredSuite | None) -> tuple[str, str]:
    """Return the first words, and the outcome in one sentence."""
    heading, findings = OUTCOMES[Retention.NOT_MEASURED].heading, summary.findings
    if retention is None or not retention.rows:
        if summary.trained:
            did, size = summary.trained
            return did, f"{size}; not measured yet"
        missing = f"suite {retention.name} has no results" if retention else "there is no retention suite"
        return heading, missing if summary.suites else "nothing was evaluated"
    if not summary.changes["tuned_minus_base"]:
        states, missing = summary.suites[retention.name].states.items(), " and ".join(retention.missing)
        known = ", ".join(f"{state} {percent(score.value)}" for state, score in states)
        return heading, f"{retention.plain} has no result for {missing} (so far: {known})"
    heading, few = _heading(summary), {}
    if findings.retention_status is Retention.LOST and "recovered" in run.adapters():
        heading = "Recovered, but not measured yet"
    for role, ratio in (("retention", findings.recovery), ("domain", findings.domain_retention)):
        if ratio and summary.prompts_of(role) < FIRST_LOOK:
            few[role] = f"{summary.prompts_of(role)} {role}"
    look = f". {' and '.join(few.values())} prompts are a first look" if few else ""
    return heading, "; ".join(filter(None, (_recovery(summary, retention), _domain(summary)))) + look


def _recovery(summary: Summary, retention: MeasuredSuite) -> str:
    """Return the recovery's outcome: the sentence of its status, with its numbers."""
    findings, near, suite = summary.findings, _deciding(summary), summary.suites[retention.name]
    change, gain = summary.changes["tuned_minus_base"], summary.changes["recovered_minus_tuned"]
    r, scores = findings.recovery, [percent(score.value) for score in suite.states.values()]
    levels = f"the fine-tune changed {retention.plain}"
    if change:
        levels += f" by {interval(change, POINTS, n=suite.n)}, from {scores[0]} to {scores[1]}"
    if scores[2:]:
        levels += f", and recovered has {scores[2]}"
    if gain and gain.high < 0:
        levels += ", measurably below tuned"
    elif (findings.retention_status, findings.no_recovery_because) == (Retention.NOT_SHOWN, NoRatio.NO_DROP):
        levels += ", measurably below base, as tuned is not"
    sentence = BY_CLOSENESS if near else OUTCOMES[findings.retention_status].sentence
    if not r and "{back}" in sentence:
        sentence = "{levels}; {why}"
    said = sentence.format(
        levels=levels,
        skill=retention.plain,
        back=r and interval(r, SHARE, n=suite.n),
        why=why_no_ratio(summary),
        floor_is=retention.floor_is,
        floor=percent(suite.floor or 0.0),
        gone=near and near.c and interval(near.c, SHARE, n=near.n),
        start=near and f"{near.start}, on {near.n} prompts",
    )
    _, unseen = summary.groups.get("unseen", (None, None))
    if r and unseen and unseen.recovery:
        said += f" ({interval(unseen.recovery, SHARE)} on kinds that the recovery did not practise)"
    return said


def _domain(summary: Summary) -> str:
    """Return what became of the domain, with its numbers."""
    findings, suite = summary.findings, summary.headline_suite("domain")
    if kept := findings.domain_retention:
        return f"{interval(kept, SHARE, n=summary.prompts_of('domain'))} of the domain gain is kept"
    change = summary.changes["domain_tuned_minus_base"]
    if suite is None or change is None:
        return ""
    before, after = (percent(suite.states[state].value) for state in STATES[:2])
    if findings.domain_status is Domain.GAIN_NOT_SHOWN:
        said = "the domain is not learned" if _is_unlearned(summary) else "no gain on the domain is shown"
        return f"{said} ({after}, base {before})"
    return f"{suite.plain} rose from {before} to {after}"


def _is_unlearned(summary: Summary) -> bool:
    """Return whether the domain shows no gain, nor one of a size that more rows would show."""
    change = summary.changes["domain_tuned_minus_base"]
    is_open = summary.findings.domain_status is Domain.GAIN_NOT_SHOWN
    return is_open and change is not None and change.value < SMALLEST_DROP


def _heading(summary: Summary) -> str:
    """Return the first words: what is shown of the recovery, and of the domain."""
    findings, r = summary.findings, summary.findings.recovery
    found, kept = findings.retention_status, findings.domain_status
    if (found, kept) == (Retention.RECOVERED, Domain.KEPT):
        return "Recovered and kept"
    words, is_as_good = OUTCOMES[found].heading, findings.non_inferiority and findings.non_inferiority.shown
    if found is Retention.PARTLY and is_as_good and not _deciding(summary):
        words = "Score recovered, writing not"
    elif found is Retention.PARTLY and r and r.high >= 1:
        words = "Recovered at least in part"
    return ", ".join(filter(None, (words, DOMAIN_HEADINGS[kept])))


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
            if not test or measure != name or not test.different or test.shown:
                continue
            if name == "tokens":
                size = f"{100 * abs(test.value):.0f} % {'shorter' if test.value < 0 else 'longer'}"
                text = words.format(size)
            elif name == "ended" and test.value > 0:
                continue
            else:
                shares = [abs(share - (name == "ended")) for share in (test.recovered, test.base)]
                text = words.format(*(f"{100 * share:.0f} %" for share in shares))
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
    if summary.faults or findings.status == FAULT:
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
    if "recovered" not in adapters and not summary.suites:
        # After replay there may be nothing to recover.
        return measure if (finetune.get("replay") or {}).get("share") else ("", recovery)
    if not any([*adapters][-1] in suite.states for suite in summary.suites.values()):
        return measure
    if _is_unlearned(summary) and finetune:
        command = f"{again} --set finetune.epochs={_twice(finetune.get('epochs'))} -o RUN-2"
        return "to learn the domain for longer", command
    is_unknown = found is Retention.NOT_MEASURED and "recovered" not in adapters
    if found is Retention.LOST or is_unknown:
        return "", recovery
    almost_all = findings.recovery and findings.recovery.value >= MOST_OF_THE_GAIN
    is_open = almost_all and ratios.alike(summary.writing_tests)
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
        if summary.prompts_of("retention") < FIRST_LOOK or is_open:
            return _more_prompts(summary, settings, "to show more")
        return (
            "more steps bring more back",
            f"opdcl recover RUN --steps {_twice(recover.get('steps'))} -o RUN-2",
        )
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
    is_floor_too_near = summary.findings.no_recovery_because is NoRatio.FLOOR_TOO_NEAR
    is_open = summary.findings.retention_status is Retention.TOO_FEW and not is_floor_too_near
    if is_open or is_few(measured):
        enough = _prompts_to_tell(measured, summary.detectable_drop or 0.0)
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
    findings, detectable = summary.findings, summary.detectable_drop
    suite, change = summary.headline_suite("retention"), summary.changes["tuned_minus_base"]
    found, reason = findings.retention_status, findings.no_recovery_because
    if findings.status == FAULT:
        return "a score is not a number"
    if suite is None or change is None or detectable is None:
        return "base and tuned are not both measured"
    if reason in (NoRatio.FLOOR_TOO_HIGH, NoRatio.FLOOR_TOO_NEAR):
        return reason.value
    if change.low > 0:
        return "nothing is lost"
    needed, shown = f"{100 * SMALLEST_DROP:.0f}", 100 * detectable
    if found is Retention.TOO_FEW:
        seen = f"show a loss from {shown:.0f} points on"
        if is_few(suite.n) or shown >= 100:
            seen = "show nothing"
        enough = _prompts_to_tell(suite.n, detectable)
        return f"{suite.n} prompts {seen}, a loss of {needed} points takes about {enough}"
    if found is Retention.NO_FORGETTING:
        return f"{suite.n} prompts would show a loss of {shown:.1f} points"
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
