"""The commands that look at results: report, compare, verify, and doctor, which looks at the machine."""

from __future__ import annotations

import opdcl
from opdcl.cli import options as opt
from opdcl.cli import screen
from opdcl.cli.screen import show, start
from opdcl.errors import EnvironmentFault, OpdclError


def report(run_dir: opt.RunDir, json: opt.Json = False, quiet: opt.Quiet = False) -> None:
    """Print the verdict, and rewrite the report. Writes report.md, report.html and the model card."""
    start(json, quiet)
    show(opdcl.report(run_dir, update=True, quiet=quiet or json))


def compare(
    runs: opt.Runs, out: opt.CompareOut = None, json: opt.Json = False, quiet: opt.Quiet = False
) -> None:
    """Show runs side by side. Prints scores, R and D with intervals, and the settings that differ."""
    start(json, quiet)
    show(opdcl.compare(runs, out, quiet or json))


def verify(run_dir: opt.RunDir, json: opt.Json = False) -> None:
    """Check a run's files for damage or change, by their hashes. Exit code 1 if a check fails."""
    start(json)
    outcome = opdcl.verify(run_dir)
    if outcome.failed:
        sentence, outcome.sentence = outcome.sentence, ""
        show(outcome)
        raise OpdclError(sentence, "restore the files from a copy, or repeat the stages with --force")
    show(outcome)


def doctor(json: opt.Json = False) -> None:
    """Check this machine, with a remedy for each problem. Exit code 4 if something needed is missing."""
    from opdcl.doctor import checks

    start(json)
    found = checks()
    rows = [
        [c.name, "ok" if c.ok else "missing" if c.needed else "note", c.finding, "" if c.ok else c.remedy]
        for c in found
    ]
    screen.output.table("", ["check", "", "finding", "remedy"], rows, [vars(c) for c in found])
    if missing := [c.name for c in found if c.needed and not c.ok]:
        raise EnvironmentFault(
            f"this machine cannot run opdcl: {', '.join(missing)}", "see the remedy column"
        )
