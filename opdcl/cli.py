"""The commands: parse, load, call, render. No logic lives here, and nothing heavy is imported before it is needed."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from opdcl import parallel
from opdcl.console import Output
from opdcl.errors import EnvironmentFault, OpdclError, UsageError, translate
from opdcl.version import __version__

app = typer.Typer(
    help="Fine-tune a model on a domain, recover what it forgot, keep what it learned, and prove both.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

workflows_app = typer.Typer(help="The shipped recipes.", no_args_is_help=True)

config_app = typer.Typer(
    help="Settings: what they are, where they come from, whether they hold.", no_args_is_help=True
)

app.add_typer(workflows_app, name="workflows")

app.add_typer(config_app, name="config")

Set = Annotated[
    list[str], typer.Option("--set", help="Override a setting: --set recover.steps=60. Repeatable.")
]

Out = Annotated[Path | None, typer.Option("-o", "--out", help="Run directory.")]

Model = Annotated[str | None, typer.Option("--model", help="smollm2-135m (embedded), a hub id, or a path.")]

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and write nothing.")]

Force = Annotated[bool, typer.Option("--force", help="Do stages again whose settings or data have changed.")]

Many = Annotated[
    int,
    typer.Option(
        "--num-processes", min=1, help="So many processes share the work: one a GPU, or some on a CPU."
    ),
]

Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the stage.")]

State = Annotated[
    str | None, typer.Option(help="tuned or recovered. Default: the last one that the run has.")
]

PLACE_HELP = "A run directory, an adapter's folder, or an adapter's hub id."

output = Output()


def _go_offline(wanted: bool) -> None:
    if wanted:  # read by the hub's client when it is imported, which nothing has done yet
        os.environ["HF_HUB_OFFLINE"] = "1"


Offline = Annotated[
    bool,
    typer.Option("--offline", callback=_go_offline, help="No network: only what is cached, see opdcl fetch."),
]


def main() -> None:
    """Run the command line; every failure leaves with its exit code and without a traceback."""
    try:
        # What `typer.Exit` carries comes back as a value: without a process of its own Typer does not exit.
        sys.exit(app(standalone_mode=False))
    except OpdclError as fault:
        output.error(fault)
        sys.exit(fault.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        output.error(OpdclError("interrupted"))
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
        sys.exit(0)
    except Exception as fault:
        if os.environ.get("OPDCL_DEBUG"):
            raise
        # Typer's own complaints about flags carry their exit code and format themselves.
        if hasattr(fault, "format_message"):
            if type(fault).__name__ == "NoArgsIsHelpError":
                print(fault.format_message())
                sys.exit(2)
            output.error(UsageError(fault.format_message(), "opdcl --help"))
            sys.exit(2)
        known = translate(fault, parallel.worker_count())
        if parallel.rank():  # what befell this one alone, no other will say
            output.mode, known.message = "quiet", f"process {parallel.rank()}: {known.message}"
        output.error(known)
        sys.exit(known.exit_code)


def _mode(json: bool, quiet: bool) -> None:
    output.mode = "json" if json else "quiet" if quiet else "human"
    # `output` holds the real one. What a library prints when it is imported is no result.
    sys.stdout = sys.stderr


def _together(number: int, dry_run: bool) -> None:
    """Become one of several processes, where that is asked for; what only one of them is to say, process 0 says."""
    if number > 1 and not dry_run and not parallel.launched():
        sys.exit(parallel.launch(number))
    parallel.join()
    if parallel.rank():
        output.mode = "silent"


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def run(
    workflow: Annotated[
        list[str], typer.Argument(help="A shipped recipe or YAML files, merged left to right.")
    ],
    out: Out = None,
    model: Model = None,
    set_: Set = [],
    dry_run: DryRun = False,
    force: Force = False,  # noqa: B006
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Only kernels that repeat bit for bit.")
    ] = False,
    offline: Offline = False,
    num_processes: Many = 1,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a workflow: fine-tune, recover, evaluate, report. A second call goes on where the first stopped."""
    from opdcl.config.load import load

    _mode(json, quiet)
    flow, origins = load(workflow, set_, {"model.id": model, "model.deterministic": deterministic or None})
    place = out or Path("runs") / flow.name
    _together(num_processes, dry_run)
    if flow.arms or flow.seeds:
        _execute_all(flow, origins, place, dry_run, force)
    else:
        _execute(flow, origins, place, dry_run, force)


@app.command()
def finetune(
    data: Annotated[
        str, typer.Option("--data", help="Rows to learn: handbook, a file, a folder, or a hub id.")
    ],
    out: Out = None,
    model: Model = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Passes over the data.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", help="Peak rate.")] = None,
    seed: Seed = None,
    set_: Set = [],
    dry_run: DryRun = False,
    force: Force = False,  # noqa: B006
    offline: Offline = False,
    num_processes: Many = 1,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Learn a domain: train a LoRA adapter on your rows."""
    from opdcl.config.load import load

    _mode(json, quiet)
    flags = {
        "finetune.data": data,
        "model.id": model,
        "finetune.epochs": epochs,
        "finetune.learning_rate": learning_rate,
        "finetune.seed": seed,
    }
    flow, origins = load([], set_, flags)
    _together(num_processes, dry_run)
    _execute(flow, origins, out or Path("runs") / "finetune", dry_run, force)


@app.command()
def recover(
    run_dir: Annotated[Path, typer.Argument(help="A run directory with a fine-tuned adapter.")],
    prompts: Annotated[
        str | None, typer.Option("--prompts", help="General prompts: everyday, or a file.")
    ] = None,
    domain: Annotated[
        str | None, typer.Option("--domain", help="Domain prompts. Default: the fine-tune's data.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Optimizer steps.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", help="Peak rate.")] = None,
    seed: Seed = None,
    set_: Set = [],
    dry_run: DryRun = False,
    force: Force = False,  # noqa: B006
    offline: Offline = False,
    num_processes: Many = 1,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Win back what was forgotten: on-policy distillation from the original checkpoint."""
    _mode(json, quiet)
    flags = {
        "recover.general": prompts,
        "recover.domain": domain,
        "recover.steps": steps,
        "recover.learning_rate": learning_rate,
        "recover.seed": seed,
    }
    flow, origins = _extended(run_dir, set_, flags, "recover")
    _together(num_processes, dry_run)
    _execute(flow, origins, run_dir, dry_run, force)


@app.command(name="eval")
def eval_(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    retention: Annotated[
        list[str], typer.Option("--retention", help="Suite of what must not be lost. Repeatable.")
    ] = [],  # noqa: B006
    domain: Annotated[
        list[str],
        typer.Option(
            "--domain", help="Suite of what was learned, or a file of questions and answers. Repeatable."
        ),
    ] = [],  # noqa: B006
    data: Annotated[
        list[str], typer.Option("--data", help="SUITE=PATH: a local file for a suite. Repeatable.")
    ] = [],  # noqa: B006
    limit: Annotated[
        int | None, typer.Option("--limit", help="First so many documents of each suite.")
    ] = None,
    set_: Set = [],
    dry_run: DryRun = False,
    force: Force = False,  # noqa: B006
    offline: Offline = False,
    num_processes: Many = 1,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure base, tuned and recovered on the same prompts, and write the report."""
    _mode(json, quiet)
    from opdcl.api import suites_and_files

    suites, files = suites_and_files(domain)
    flags: dict[str, Any] = {
        "eval.limit": limit,
        "eval.retention": list(retention) or None,
        "eval.domain": suites or None,
    }
    flags |= {f"eval.data.{k}": v for k, v in map(_pair, data)} | files
    flow, origins = _extended(run_dir, set_, flags, "eval")
    _together(num_processes, dry_run)
    _execute(flow, origins, run_dir, dry_run, force)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write report.md, report.html and the model card anew, and print the verdict."""
    from opdcl.results.report import summarise, write
    from opdcl.rundir.layout import RunDir

    _mode(json, quiet)
    run = _existing(run_dir)
    for file in write(run):
        output.note(f"wrote {file}")
    _show_summary(summarise(RunDir(run.path)), run.path)


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN...", help="Run directories. Those that differ only in seeds are pooled."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder for compare.md, compare.html and compare.json.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show several runs side by side: scores, R and D with intervals, and the settings in which they differ."""
    from opdcl.results.compare import compare as compare_runs
    from opdcl.results.compare import refuse_folder, write

    _mode(json, quiet)
    if out:
        refuse_folder(out)
    found = compare_runs([_existing(path) for path in runs])
    for file in write(found, out) if out else ():
        output.note(f"wrote {file}")
    _show_comparison(found)


@app.command()
def chat(
    place: Annotated[str, typer.Argument(metavar="RUN", help=PLACE_HELP)],
    prompt: Annotated[
        list[str], typer.Argument(help="Ask this and leave; without it, read prompts line by line.")
    ] = [],  # noqa: B006
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 200,
    offline: Offline = False,
    json: Json = False,
) -> None:
    """Ask base, tuned and recovered the same thing, side by side."""
    from opdcl.console import quiet_libraries
    from opdcl.deploy.chat import answers

    _mode(json, False)
    asked = iter([" ".join(prompt)]) if prompt else (line.strip() for line in iter(output.ask, ""))
    said = answers(place, (q for q in asked if q), max_new_tokens)
    while True:
        with quiet_libraries():
            found = next(said, None)
        if found is None:
            return
        question, states = found
        output.table(
            question,
            ["state", "answer"],
            [[k, v] for k, v in states.items()],
            {"prompt": question, "answers": states},
        )


@app.command()
def export(
    place: Annotated[str, typer.Argument(metavar="RUN", help=PLACE_HELP)],
    to: Annotated[Path, typer.Option("-o", "--out", help="Folder to write.")],
    state: State = None,
    format: Annotated[
        str,
        typer.Option(
            help="merged (safetensors that any loader reads), adapter, or gguf (llama.cpp, Ollama)."
        ),
    ] = "merged",
    outtype: Annotated[str, typer.Option(help="Numbers of a GGUF file: f32, f16, bf16 or q8_0.")] = "f16",
    converter: Annotated[
        str | None,
        typer.Option(help="llama.cpp's convert_hf_to_gguf.py. Default: that of $LLAMA_CPP, or on the path."),
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Load a GGUF file back and compare it with the merged model.")
    ] = True,
    offline: Offline = False,
    json: Json = False,
) -> None:
    """Write a run's adapter, or base + adapter as one model, for others to load."""
    from opdcl.console import quiet_libraries
    from opdcl.deploy.export import export as export_model

    _mode(json, False)
    with quiet_libraries(), output.stage("export") as line:
        written = export_model(place, state, to, format, outtype, converter, check, line)
    output.result(f"{written['state']} written to {to}", written)


@app.command()
def push(
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    repository: Annotated[
        str, typer.Argument(help="Where to on the hub: owner/name. It is made if need be.")
    ],
    state: State = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private, if it is made.")
    ] = False,
    base: Annotated[
        str | None, typer.Option(help="The base's hub id, where the run names a folder of this machine.")
    ] = None,
    json: Json = False,
) -> None:
    """Upload a run's adapter to the Hugging Face hub, with a model card that holds its results. Needs HF_TOKEN."""
    from opdcl.console import quiet_libraries
    from opdcl.deploy.push import push as push_adapter

    _mode(json, False)
    run = _existing(run_dir)
    with quiet_libraries():
        done = push_adapter(run, state, repository, private, base)
    output.result(f"{done['state']} is at {done['url']}, commit {done['commit']}", done)


@app.command()
def fetch(
    workflow: Annotated[
        list[str], typer.Argument(help="A shipped recipe or YAML files, merged left to right.")
    ],
    model: Model = None,
    set_: Set = [],
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,  # noqa: B006
) -> None:
    """Bring all that a workflow needs from the hub into the local cache: it then runs with --offline."""
    from opdcl.config.load import load
    from opdcl.console import quiet_libraries
    from opdcl.pipeline.fetch import fetch as fetch_all

    _mode(json, quiet)
    flow, _ = load(workflow, set_, {"model.id": model})
    with quiet_libraries():
        found = fetch_all(flow, dry_run, output.note)
    output.table(
        "",
        ["what", "which", "commit", "size", ""],
        [one.row() for one in found],
        [vars(one) for one in found],
    )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    run_dir: Annotated[Path, typer.Argument(help="A run directory.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    vllm: Annotated[str, typer.Option(help="The vllm program, if it is in another environment.")] = "vllm",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command instead of becoming it.")
    ] = False,
    json: Json = False,
) -> None:
    """Serve base, tuned and recovered under these names with vLLM; what follows -- goes to vllm itself."""
    from opdcl.deploy.serve import execute, serve_command

    _mode(json, False)
    command = serve_command(_existing(run_dir), vllm, host, port, context.args)
    if dry_run:
        words = [f"{k}={v}" for k, v in command.environment.items() if k != "VLLM_API_KEY"] + command.words
        output.result(shlex.join(words), {"command": command.words, "url": f"http://{host}:{port}/v1"})
        return
    execute(command)


@app.command()
def doctor(json: Json = False) -> None:
    """Check this machine, each finding with its remedy. Exit code 4 where something is missing."""
    from opdcl.doctor import checks

    _mode(json, False)
    found = checks()
    output.table(
        "",
        ["check", "", "finding", "remedy"],
        [
            [c.name, "ok" if c.ok else "missing" if c.needed else "note", c.finding, "" if c.ok else c.remedy]
            for c in found
        ],
        [vars(c) for c in found],
    )
    if missing := [c.name for c in found if c.needed and not c.ok]:
        raise EnvironmentFault(
            f"this machine cannot run opdcl: {', '.join(missing)}", "each one's remedy stands beside it"
        )


@app.command()
def verify(run_dir: Annotated[Path, typer.Argument(help="A run directory.")], json: Json = False) -> None:
    """Hash a run's files again, and say what is damaged, missing or changed. Exit code 1 where anything is."""
    from opdcl.rundir.verify import verify as verify_run

    _mode(json, False)
    found = verify_run(_existing(run_dir))
    output.table(
        "",
        ["what", "", "finding"],
        [[f.what, "ok" if f.ok else "BAD", f.finding] for f in found],
        [vars(f) for f in found],
    )
    if bad := sum(not f.ok for f in found):
        raise OpdclError(
            f"{bad} of {len(found)} checks failed",
            "restore the files from a copy, or do the stages again with --force",
        )


@workflows_app.command("ls")
def workflows_ls(json: Json = False) -> None:
    """List the shipped recipes."""
    from opdcl.config.load import load
    from opdcl.config.shipped import workflow_files

    _mode(json, False)
    rows = [[name, load([str(file)])[0].description] for name, file in workflow_files().items()]
    output.table("", ["name", "what it does"], rows, [{"name": n, "description": d} for n, d in rows])


@workflows_app.command("show")
def workflows_show(name: str) -> None:
    """Print a recipe."""
    output.result(_recipe(name).read_text(encoding="utf-8").rstrip(), None)


@workflows_app.command("cp")
def workflows_cp(name: str, to: Annotated[Path, typer.Argument(help="File to write.")] = Path(".")) -> None:
    """Copy a recipe, to be changed."""
    source = _recipe(name)
    target = to / source.name if to.is_dir() else to
    if not target.parent.is_dir():
        raise UsageError(f"folder {target.parent} does not exist", f"mkdir -p {target.parent}")
    if target.exists():
        raise UsageError(f"{target} exists", f"opdcl workflows cp {name} another-name.yaml")
    target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    output.result(f"wrote {target}", {"path": str(target)})


@config_app.command("show")
def config_show(workflow: list[str], set_: Set = [], json: Json = False) -> None:  # noqa: B006
    """Print every value of a workflow, and where it comes from."""
    from opdcl.config.load import flatten, load

    _mode(json, False)
    flow, origins = load(workflow, set_)
    rows = [
        [key, str(value), origins.get(key, "default")] for key, value in flatten(flow.model_dump()).items()
    ]
    output.table("", ["key", "value", "origin"], rows, {"workflow": flow.model_dump(), "origins": origins})


@config_app.command("validate")
def config_validate(workflow: list[str], set_: Set = [], json: Json = False) -> None:  # noqa: B006
    """Check a workflow's keys and values. Reads no data and no model."""
    from opdcl.config.load import load
    from opdcl.pipeline.sweep import expand

    _mode(json, False)
    flow, _ = load(workflow, set_)
    expand(flow, Path("runs") / flow.name)
    output.result(f"{flow.name}: valid", {"name": flow.name, "valid": True})


@config_app.command("schema")
def config_schema(json: Json = False) -> None:
    """Print every key with its default and meaning; --json gives a JSON schema for editors."""
    from opdcl.config.reference import describe_fields
    from opdcl.config.workflow import Workflow

    _mode(json, False)
    rows = describe_fields()
    output.table("", ["key", "default", "meaning"], rows, Workflow.model_json_schema())


def _execute(flow: Any, origins: dict[str, str], out: Path, dry_run: bool, force: bool) -> None:
    from opdcl.pipeline.execute import execute
    from opdcl.rundir.layout import RunDir

    run = RunDir(out)
    if dry_run:
        from opdcl.pipeline.dry_run import describe

        rows, plan = describe(flow, run)
        output.table(f"dry run of {flow.name} in {out}", ["stage", "action", "why"], rows, plan)
        return
    _show_summary(execute(flow, origins, run, output, force), out)


def _execute_all(flow: Any, origins: dict[str, str], out: Path, dry_run: bool, force: bool) -> None:
    from opdcl.pipeline.sweep import describe_all, execute_all

    if dry_run:
        rows, plans = describe_all(flow, out)
        output.table(f"dry run of {flow.name} in {out}", ["run", "stage", "action", "why"], rows, plans)
        return
    _show_comparison(execute_all(flow, origins, out, output, force))


def _extended(
    run_dir: Path, overrides: list[str], flags: dict[str, Any], stage: str
) -> tuple[Any, dict[str, str]]:
    from opdcl.api import extend

    return extend(run_dir, overrides, flags, stage)


def _existing(run_dir: Path) -> Any:
    from opdcl.api import open_run

    return open_run(run_dir)


def _show_summary(summary: dict[str, Any], path: Path) -> None:
    from opdcl.results.summary import table_rows

    if output.mode == "json":
        output.result("", summary)
        return
    if rows := table_rows(summary):
        output.table("", ["suite", "n", "floor", "base", "tuned", "recovered"], rows, summary)
    output.result(summary["verdict"], summary)
    output.note(f"report: {path / 'report.html'}")


def _show_comparison(found: dict[str, Any]) -> None:
    from opdcl.results.compare import view

    if output.mode == "json" or not found:
        output.result("", found)
        return
    scores, *others = view(found).tables
    # The words of a status stand below each other, so that the table fits a terminal of 80 columns.
    rows = [
        [
            cell.replace(" ", "\n") if name == "status" else cell
            for name, cell in zip(scores.columns, row, strict=True)
        ]
        for row in scores.rows
    ]
    output.table("", scores.columns, rows, found)
    for table in others:
        output.table(f"\n{table.title}", table.columns, table.rows, found)
    for note in found["notes"]:
        output.note(f"note: {note}")


def _recipe(name: str) -> Path:
    from opdcl.config.shipped import find_workflow

    return find_workflow(name)


def _pair(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not separator:
        raise UsageError(f"--data {text!r} is not SUITE=PATH", "--data ifeval=input_data.jsonl")
    return name, str(Path(path).resolve())
