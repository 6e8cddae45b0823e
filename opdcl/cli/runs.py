"""The commands about finished runs: report, compare, verify, chat, export, serve, clean; and doctor."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from opdcl import api
from opdcl.cli import options as opt
from opdcl.cli import screen
from opdcl.cli.screen import show, start, suggest
from opdcl.errors import EnvironmentFault, OpdclError, UsageError, typed
from opdcl.rundir.files import RESTORE
from opdcl.rundir.hashes import ADAPTER, check
from opdcl.rundir.layout import locked, open_run
from opdcl.rundir.seals import refuse_damaged

if TYPE_CHECKING:
    from opdcl.deploy.chat import ChatServer

from opdcl.rundir.stage import StageDir

TEXT_BROWSERS = ("www-browser", "links", "elinks", "lynx", "w3m")


def report(
    run_dir: opt.RunDir,
    gates: Annotated[Path | None, Option(metavar="FILE")] = None,
    format: Annotated[
        Literal["report", "pr"],
        Option(help="report, or pr: Markdown for a pull request, on standard output."),
    ] = "report",
    all: Annotated[bool, Option("--all", help="Print all scores and sentences of the report.")] = False,
    open: Annotated[bool, Option("--open", help="Open report.html in a browser.")] = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Print the verdict, and rewrite the report. Writes report.md, report.html and the model card.

    With --gates, only judge the stored scores: exit code 3 if a gate is missed, 5 if one is undecided. A
    fault, such as an adapter that has changed, is named, and the exit code is 1.
    """
    start(json, quiet)
    outcome = api.report(run_dir, format == "report" and not gates, quiet or json, gates or "")
    if format == "pr":
        text = outcome.pull_request()
        screen.output.remarks(outcome.faults, [])
        screen.output.result(text, {"markdown": text})
    else:
        outcome.notes += [f"gate {v['outcome']}: {v['sentence']}" for v in outcome.summary.get("gates", [])]
        show(outcome, all)
    if open:
        webbrowser.open(outcome.report.resolve().as_uri())
    outcome.refuse()


def ls(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Where the runs are.")] = Path("runs"),
    json: opt.Json = False,
) -> None:
    """List the runs in a folder: what each has, R, D, its distance to base, and when it was begun."""
    from opdcl.results.compare import list_runs

    start(json)
    table, data = list_runs(folder)
    if table.rows or json:
        screen.output.table("", table.columns, table.rows, data)
    else:
        screen.output.note(f"no runs in {folder}")
        suggest("run", "quickstart")


def compare(
    paths: Annotated[list[Path], Argument(metavar="RUN")],
    out: Annotated[Path | None, Option("-o", "--out", metavar="FOLDER")] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Show runs side by side. Prints scores, R and D with intervals, and the settings that differ.

    If a run has a fault, it is named, and the exit code is 1.
    """
    start(json, quiet)
    outcome = api.compare(paths, out, quiet or json)
    show(outcome)
    outcome.refuse()
    if out:
        suggest("chat", paths[0])
    else:
        suggest("compare", *paths, "-o", "comparison")


def verify(run_dir: opt.RunDir, json: opt.Json = False) -> None:
    """Check a run's files for damage or change, by their hashes. Exit code 1 if a check fails."""
    start(json)
    outcome = api.verify(run_dir)
    if outcome.failed:
        sentence, outcome.sentence = outcome.sentence, ""
        show(outcome)
        raise OpdclError(sentence, "restore the files from a copy, or repeat the stages with --force")
    show(outcome)
    suggest("report", run_dir)


def chat(
    source: Annotated[str, Argument(metavar="RUN")],
    prompts: Annotated[
        list[str] | None,
        Argument(metavar="PROMPT", help="Prompt to answer. Default: read prompts line by line."),
    ] = None,
    max_new_tokens: int = 200,
    system: str | None = None,
    temperature: Annotated[float, Option(min=0)] = 0.0,
    browser: Annotated[bool, Option("--browser", help="Open a page with the answers side by side.")] = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    offline: opt.Offline = False,
    json: opt.Json = False,
) -> None:
    """Ask base, tuned and recovered the same prompt. Every prompt starts a new conversation."""
    start(json)
    if browser:
        if prompts or system:
            raise UsageError("the page asks for prompt and system prompt", "opdcl chat RUN --browser")
        _serve_page(api.chat_page(source, max_new_tokens, temperature, trust_remote_code))
        return
    asked = [" ".join(prompts)] if prompts else _typed_lines()
    turns = api.chat(source, asked, max_new_tokens, system, temperature, trust_remote_code, quiet=json)
    typed = bool(prompts) or sys.stdin.isatty()
    if typed and not prompts:
        screen.output.note("Every prompt starts a new conversation. Press Ctrl-C or Ctrl-D to stop.")
    for outcome in turns:
        if typed:
            outcome.sentence = ""  # it is on the screen already
        elif not json:
            screen.output.result(outcome.sentence, None)
            outcome.sentence = ""
        show(outcome)
    suggest("export", source, "-o", "my-model")


def _serve_page(server: ChatServer) -> None:
    """Open the page, and answer until Ctrl-C."""
    screen.output.result(server.url, {"url": server.url})
    port = server.server_port
    screen.output.note(f"Over SSH, open a way first: ssh -L {port}:127.0.0.1:{port} THIS-MACHINE")
    screen.output.note("Press Ctrl-C to stop.")
    # Beside the server, which has to answer: some browsers return only when they are closed.
    threading.Thread(target=_open_page, args=(server.url,), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt), server:
        server.serve_forever()


def _open_page(url: str) -> None:
    """Open a page in the user's browser; one in the terminal would take that, and runs no script."""
    with contextlib.suppress(webbrowser.Error):
        browser = webbrowser.get()
        if Path(getattr(browser, "name", "")).name not in TEXT_BROWSERS:
            browser.open(url)


def _typed_lines() -> Iterator[str]:
    """Yield the prompts that are typed or piped, line by line, without empty lines."""
    for line in iter(screen.output.ask, ""):
        if line.strip():
            yield line.strip()


def export(
    source: Annotated[str, Argument(metavar="SOURCE")],
    out: Annotated[Path, Option("-o", "--out", metavar="FOLDER")],
    state: Literal["tuned", "recovered"] | None = None,
    format: Literal["merged", "adapter", "gguf"] = "merged",
    outtype: Literal["f32", "f16", "bf16", "q8_0"] = "f16",
    converter: str | None = None,
    check: bool = True,
    base: str | None = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    offline: opt.Offline = False,
    json: opt.Json = False,
) -> None:
    """Write the merged model, or its adapter, for other programs."""
    start(json)
    outcome = api.export(
        source, out, state, format, outtype, converter, check, base, trust_remote_code, quiet=json
    )
    show(outcome)
    upload = typed("hf", "upload", "OWNER/NAME", out)
    ollama = typed("ollama", "create", "my-model", "-f", out / "Modelfile")
    screen.output.note(f"next: {ollama if format == 'gguf' else upload}")


def serve(
    context: typer.Context,
    run_dir: opt.RunDir,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on.")] = 8000,
    vllm: Annotated[str, Option(help="The vllm program, if it is in another environment.")] = "vllm",
    dry_run: Annotated[bool, Option("--dry-run", help="Print the vLLM command, and do not run it.")] = False,
    json: opt.Json = False,
) -> None:
    """Serve base, tuned and recovered with vLLM, under these names. Arguments after -- are passed to vLLM."""
    from opdcl.deploy.serve import serve_command

    start(json)
    command, environment = serve_command(open_run(run_dir), vllm, host, port, context.args, dry_run)
    if not dry_run:
        os.execve(command[0], command, os.environ | environment)
    variables = [f"{name}={value}" for name, value in environment.items() if name != "VLLM_API_KEY"]
    data = {"command": command, "url": f"http://{host}:{port}/v1"}
    screen.output.result(typed(*variables, *command), data)
    suggest(*(word for word in sys.argv[1:] if word != "--dry-run"))


def doctor(json: opt.Json = False) -> None:
    """Check this machine, with a remedy for each problem. Exit code 4 if something needed is missing."""
    from opdcl.doctor import checks

    start(json)
    results = checks()
    rows = [[c.name, c.status, c.finding, "" if c.ok else c.remedy] for c in results]
    screen.output.table("", ["check", "", "finding", "remedy"], rows, [vars(c) for c in results])
    if missing := ", ".join(c.name for c in results if c.status == "missing"):
        raise EnvironmentFault(f"this machine cannot run opdcl: {missing}", "see the remedy column")
    suggest("run", "quickstart")


def clean(
    run_dir: opt.RunDir,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
) -> None:
    """Delete the checkpoints of a finished run. Says how large they are, and asks first.

    Adapters, scores and reports stay, so all commands still work. Lost are the adapters of earlier steps.
    """
    start(json)
    run = open_run(run_dir)
    with locked(run):
        for stage in run.stages():
            if not stage.is_done():
                again = f"finish it first: {typed('opdcl', 'run', run.workflow, '-o', run.path)}"
                raise UsageError(f"{stage.path} is not done, and resumes from its checkpoints", again)
            _refuse_only_copy(stage)
        refuse_damaged(run)
        folders = [stage.trainer for stage in run.stages() if stage.trainer.exists()]
        freed, whole = sum(map(_bytes_in, folders)), _bytes_in(run.path)
        found = f"{freed / 2**20:,.1f} of {whole / 2**20:,.1f} MiB"
        if folders and not (yes or dry_run):
            if not screen.output.can_ask():
                raise UsageError(f"{found} would be deleted, and nobody can be asked", "--yes deletes them")
            yes = typer.confirm(f"Delete {found}, which only an unfinished stage needs?", err=True)
        for folder in folders if yes and not dry_run else ():
            shutil.rmtree(folder)
    did = "were" if yes and not dry_run else "can be"
    screen.output.result(f"{found} {did} deleted", {"bytes": freed, "deleted": did == "were"})


def _refuse_only_copy(stage: StageDir) -> None:
    """Refuse a stage whose adapter is damaged or missing, and name the checkpoint that holds it whole."""
    adapter, recorded = stage.adapter / ADAPTER, stage.state().get("adapter_sha256")
    if recorded and (problem := check(adapter, recorded)):
        same = (file for file in sorted(stage.trainer.rglob(ADAPTER)) if not check(file, recorded))
        copy = next(same, None)
        hint = typed("cp", copy, adapter) if copy else RESTORE
        raise UsageError(f"{adapter} {problem}, and a checkpoint may be its only copy", hint)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
