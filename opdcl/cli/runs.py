"""The commands about finished runs: report, compare, verify, chat, export, serve; and doctor."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import typer

from opdcl import api
from opdcl.cli import options as opt
from opdcl.cli import screen
from opdcl.cli.options import typed
from opdcl.cli.screen import lead, show, start
from opdcl.errors import EnvironmentFault, OpdclError, UsageError

FOLDER = typed("FOLDER", Path)


def report(
    run_dir: opt.RunDir,
    gates: opt.GatesFile = None,
    format: opt.ReportFormat = "report",
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Print the verdict, and rewrite the report. Writes report.md, report.html and the model card.

    With --gates, only judge the stored scores: exit code 3 if a gate is missed, 5 if one is undecided. A
    fault, such as an adapter that has changed, is named, and the exit code is 1.
    """
    start(json, quiet)
    if format not in ("report", "pr"):
        raise UsageError(f"--format {format} is neither report nor pr", "--format pr")
    outcome = api.report(run_dir, format == "report" and not gates, quiet or json, gates or "")
    if format == "pr":
        text = outcome.pull_request()
        screen.output.remarks(outcome.faults, [])
        screen.output.result(text, {"markdown": text})
    else:
        outcome.notes += [f"gate {v['outcome']}: {v['sentence']}" for v in outcome.summary.get("gates", [])]
        show(outcome)
    outcome.refuse()


@opt.takes(api.compare, "json quiet", paths=typed("RUN", list[Path]), out=FOLDER)
def compare(paths: list[Path], out: Path | None, json: bool, quiet: bool) -> None:
    """Show runs side by side. Prints scores, R and D with intervals, and the settings that differ.

    If a run has a fault, it is named, and the exit code is 1.
    """
    start(json, quiet)
    outcome = api.compare(paths, out, quiet or json)
    show(outcome)
    outcome.refuse()
    lead(*(("chat", paths[0]) if out else ("compare", *paths, "-o", "comparison")))


def verify(run_dir: opt.RunDir, json: opt.Json = False) -> None:
    """Check a run's files for damage or change, by their hashes. Exit code 1 if a check fails."""
    start(json)
    outcome = api.verify(run_dir)
    if outcome.failed:
        sentence, outcome.sentence = outcome.sentence, ""
        show(outcome)
        raise OpdclError(sentence, "restore the files from a copy, or repeat the stages with --force")
    show(outcome)
    lead("report", run_dir)


@opt.takes(api.chat, "prompts offline json", source=typed("RUN"), temperature=opt.Temperature)
def chat(source: str, prompts: list[str] | None, offline: bool, json: bool, **given: Any) -> None:
    """Ask base, tuned and recovered the same prompt. Each prompt stands alone: there is no memory."""
    start(json)
    lines = [" ".join(prompts)] if prompts else (line.strip() for line in iter(screen.output.ask, ""))
    turns = api.chat(source, (line for line in lines if line), **given, quiet=json)
    typed = bool(prompts) or sys.stdin.isatty()
    if typed and not prompts:
        screen.output.note("Each prompt stands alone: the models see no earlier one. Ctrl-D ends.")
    for outcome in turns:
        if typed:
            outcome.sentence = ""  # it stands on the screen already
        elif not json:
            screen.output.result(outcome.sentence, None)
            outcome.sentence = ""
        show(outcome)
    lead("export", source, "-o", "my-model")


@opt.takes(api.export, "offline json", source=typed("RUN"), out=FOLDER)
def export(source: str, out: Path, offline: bool, json: bool, **given: Any) -> None:
    """Write the merged model, or its adapter, for other programs."""
    start(json)
    show(api.export(source, out, **given, quiet=json))
    screen.output.note(f"next: hf upload OWNER/NAME {shlex.quote(str(out))}")


def serve(
    context: typer.Context,
    run_dir: opt.RunDir,
    host: opt.Host = "127.0.0.1",
    port: opt.Port = 8000,
    vllm: opt.Vllm = "vllm",
    dry_run: opt.PrintOnly = False,
    json: opt.Json = False,
) -> None:
    """Serve base, tuned and recovered with vLLM, under these names. Arguments after -- are passed to vLLM."""
    from opdcl.deploy.serve import serve_command
    from opdcl.rundir.layout import open_run

    start(json)
    command, environment = serve_command(open_run(run_dir), vllm, host, port, context.args)
    if not dry_run:
        os.execve(command[0], command, os.environ | environment)
    variables = [f"{name}={value}" for name, value in environment.items() if name != "VLLM_API_KEY"]
    data = {"command": command, "url": f"http://{host}:{port}/v1"}
    screen.output.result(shlex.join(variables + command), data)
    lead(*(word for word in sys.argv[1:] if word != "--dry-run"))


def doctor(model: opt.Model = None, json: opt.Json = False) -> None:
    """Check this machine, with a remedy for each problem. Exit code 4 if something needed is missing.

    With --model, also say which share of its weights an adapter changes.
    """
    from opdcl.doctor import checks

    start(json)
    results = checks(model)
    rows = [[c.name, c.status, c.finding, "" if c.ok else c.remedy] for c in results]
    screen.output.table("", ["check", "", "finding", "remedy"], rows, [vars(c) for c in results])
    if missing := ", ".join(c.name for c in results if c.status == "missing"):
        raise EnvironmentFault(f"this machine cannot run opdcl: {missing}", "see the remedy column")
    lead("run", "quickstart")
