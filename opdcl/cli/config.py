"""The commands about recipes and settings: opdcl workflows ..., opdcl config ..., opdcl init."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer

from opdcl.cli import options as opt
from opdcl.cli import screen
from opdcl.cli.options import describe_commands
from opdcl.cli.screen import start, suggest
from opdcl.config.shipped import described_suites, find_workflow, workflow_files
from opdcl.console import quiet_libraries
from opdcl.errors import OpdclError, UsageError, typed

Recipe = Annotated[str, typer.Argument(metavar="NAME", help="Name of a recipe.", autocompletion=opt.recipes)]
Target = Annotated[Path, typer.Argument(metavar="TO", help="File or folder to write to.")]
All = Annotated[bool, typer.Option("--all", help="Show the settings at their defaults too.")]
Key = Annotated[str | None, typer.Argument(metavar="KEY", help="A section or key, such as recover.loss.")]

workflows_app = typer.Typer(help="List, show or copy the shipped recipes.", no_args_is_help=True)
suites_app = typer.Typer(help="List the shipped suites.", no_args_is_help=True)
config_app = typer.Typer(help="Show or check settings, and list every key.", no_args_is_help=True)


@workflows_app.command("ls")
def list_workflows(json: opt.Json = False) -> None:
    """List the shipped recipes."""
    from opdcl.config.load import load

    start(json)
    rows = [[name, load([str(file)])[0].description] for name, file in workflow_files().items()]
    data = [{"name": name, "description": description} for name, description in rows]
    screen.output.table("", ["name", "what it does"], rows, data)
    suggest("run", "quickstart", "--dry-run")


@workflows_app.command("show")
def show_workflow(name: Recipe) -> None:
    """Print a recipe."""
    screen.output.result(find_workflow(name).read_text(encoding="utf-8").rstrip(), None)
    suggest("workflows", "cp", name, "mine.yaml")


@workflows_app.command("cp")
def copy_workflow(name: Recipe, to: Target = Path(".")) -> None:
    """Copy a recipe, to edit it."""
    source = find_workflow(name)
    target = to / source.name if to.is_dir() else to
    if not target.parent.is_dir():
        raise UsageError(f"folder {target.parent} does not exist", typed("mkdir", "-p", target.parent))
    if target.exists():
        raise UsageError(f"{target} exists", f"opdcl workflows cp {name} another-name.yaml")
    target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    screen.output.result(f"wrote {target}", None)
    suggest("run", target, "--dry-run")


@suites_app.command("ls")
def list_suites(json: opt.Json = False) -> None:
    """List the shipped suites: what each measures, as what it counts, and on how many prompts."""
    start(json)
    with screen.output.busy("counting prompts"), quiet_libraries():
        from opdcl.data.suites import load_suite

        rows, data = [], []
        for name, (role, purpose) in described_suites().items():
            prompts = len(load_suite(name).documents(None))
            rows.append([name, role, str(prompts), purpose])
            data.append({"name": name, "role": role, "prompts": prompts, "measures": purpose})
    screen.output.table("", ["name", "role", "prompts", "what it measures"], rows, data)
    suggest("eval", "RUN", "--retention", rows[0][0])


@config_app.command("show")
def show_config(
    workflow: opt.Workflow, settings: opt.Settings = None, all: All = False, json: opt.Json = False
) -> None:
    """Print the settings of a workflow, and where each value comes from. Defaults are left out."""
    from opdcl.config.load import flatten, load
    from opdcl.config.reference import as_yaml
    from opdcl.model.consent import is_stored_file
    from opdcl.pipeline.defaults import resolve_for_machine

    start(json)
    flow, origins = load(workflow, settings or (), is_stored=is_stored_file, note=screen.output.note)
    with contextlib.suppress(OpdclError):  # without the model at hand its automatic settings stay unknown
        flow, automatic = resolve_for_machine(flow)
        origins |= automatic
    values = flow.model_dump()
    rows, defaults = [], []
    for key, value in flatten(values).items():
        if key in origins:
            rows.append([key, as_yaml(value), _short_origin(origins[key])])
        else:
            defaults.append([key, as_yaml(value), "default"])
    shown = rows + defaults if all else rows
    screen.output.table("", ["key", "value", "origin"], shown, {"workflow": values, "origins": origins})
    if not all:
        screen.output.note(f"{len(defaults)} other settings are at their defaults: --all shows them")
    suggest("run", *workflow, "--dry-run")


def _short_origin(origin: str) -> str:
    """Return the origin of a setting without the folder of its file."""
    file, separator, line = origin.rpartition(":")
    return f"{Path(file).name}:{line}" if separator and line.isdecimal() else origin


@config_app.command("validate")
def validate_config(workflow: opt.Workflow, settings: opt.Settings = None, json: opt.Json = False) -> None:
    """Check the keys and values of a workflow. Reads no data and no model."""
    from opdcl.config.load import load
    from opdcl.model.consent import is_stored_file
    from opdcl.pipeline.sweep import expand

    start(json)
    flow, _ = load(workflow, settings or (), is_stored=is_stored_file, note=screen.output.note)
    expand(flow, Path("runs") / flow.name, screen.output.note)
    screen.output.result(f"{flow.name}: valid", {"name": flow.name, "valid": True})
    suggest("run", *workflow, "--dry-run")


@config_app.command("schema")
def print_schema(key: Key = None, json: opt.Json = False) -> None:
    """List every key, or those of a section, with values, default and meaning. With --json, print a JSON
    schema for editors, or the keys of the section."""
    from opdcl.config.reference import describe_fields, fields_below
    from opdcl.config.workflow import Workflow

    start(json)
    fields = fields_below(key) if key else describe_fields()
    names = "key", "values", "default", "meaning"
    data: Any = [dict(zip(names, field, strict=True)) for field in fields]
    wrapped = [textwrap.fill(field[-1], screen.output.width - 4) for field in fields]
    blocks = [
        f"{name}: {default}  ({kind})\n{textwrap.indent(meaning, '    ')}"
        for (name, kind, default, _), meaning in zip(fields, wrapped, strict=True)
    ]
    screen.output.result("\n".join(blocks), data if key else Workflow.model_json_schema())
    suggest("run", "quickstart", "--set", f"{fields[0][0]}=VALUE", "--dry-run")


describe_commands(workflows_app, "workflows ")
describe_commands(suites_app, "suites ")
describe_commands(config_app, "config ")


ROWS_HELP = "Rows to learn: a file, a folder, or a Hub id."
BASE_HELP = "Base model: smollm2-135m (embedded), a Hub id, or a folder."
TEST_HELP = "Your own test rows; no others are set aside."


def init(
    data: Annotated[str, typer.Argument(metavar="ROWS", help=ROWS_HELP)],
    base: Annotated[str, typer.Option(help=BASE_HELP)] = "smollm2-135m",
    test: Annotated[str | None, typer.Option(metavar="FILE", help=TEST_HELP)] = None,
    test_share: Annotated[float, typer.Option(help="Share of the rows to set aside as a test.")] = 0.1,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Workflow.")] = Path("mine.yaml"),
    json: opt.Json = False,
) -> None:
    """Write a workflow for your rows and model, with test rows set aside where there are enough."""
    from opdcl.api import run
    from opdcl.data.rows import load_records
    from opdcl.data.split import split_rows

    start(json)
    if out.is_dir() or not out.parent.is_dir():
        hint = "-o NAME.yaml names the workflow, in a folder that exists"
        raise UsageError(f"{out} is a folder, or in none that exists", hint)
    files = [out, *(out.with_name(f"{out.stem}-{part}.jsonl") for part in ("rows", "test-rows"))]
    if there := [str(file) for file in files if file.exists()]:
        other = typed("opdcl", *sys.argv[1:], "-o", f"{out.stem}-2.yaml")
        raise UsageError(f"{there[0]} exists, and would be overwritten", other)
    *rows, note = split_rows(load_records(data), {}, 0 if test else test_share)
    if test:
        rows[1], _, _ = split_rows(load_records(test), {}, 0)
        note = f"{test}: the test rows"
    elif not rows[1]:
        files, rows = files[:2], rows[:1]
        note += ". Test rows of your own, the same facts asked in other words: --test FILE, or after the run "
        note += "opdcl eval RUN --domain FILE"
    names = itertools.chain([out.stem], (f"{out.stem}-{number}" for number in itertools.count(2)))
    name = next(name for name in names if not (Path("runs") / name).exists())
    if name != out.stem:
        note += f"\nruns/{out.stem} exists: this workflow runs in runs/{name}"
    # Nothing stays behind of a workflow that would be refused.
    with (
        tempfile.TemporaryDirectory(dir=out.parent) as scratch,
        screen.output.busy("checking model and data"),
    ):
        drafts = [Path(scratch) / file.name for file in files]
        text = workflow_text(name, data, base, files, rows[0].count("\n"))
        for draft, content in zip(drafts, (text, *rows), strict=True):
            draft.write_text(content, encoding="utf-8")
        try:
            run(drafts[0], settings={"model.trust_remote_code": False}, dry_run=True, quiet=True)
        except OpdclError as fault:
            fault.message = fault.message.replace(scratch, str(out.parent))
            raise
        for draft, file in zip(drafts, files, strict=True):
            draft.rename(file)
    screen.output.note(note)
    screen.output.result(f"wrote {', '.join(map(str, files))}", {"wrote": [str(file) for file in files]})
    suggest("run", out, "--dry-run")


def workflow_text(name: str, data: str, base: str, files: Sequence[Path], rows: int) -> str:
    """Return a workflow for a model and some rows; `files` are its own, that of the rows, and of test rows.

    Raises:
        UsageError: Reading it again, a name would be another one, or more than a name.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString as Quoted

    yaml, text = YAML(), StringIO()
    flow = yaml.load(find_workflow("own-data"))
    flow.yaml_set_start_comment("Your rows and model. `opdcl config show FILE --all` shows all defaults.")
    flow["name"], flow["description"] = name, Quoted(f"{data} on {base}")
    flow["model"]["id"] = Quoted(os.path.realpath(base) if os.path.exists(base) else base)
    flow["finetune"]["data"] = files[1].name
    flow["finetune"]["epochs"] = max(4, 180 // max(rows, 1))  # few rows are hardly learned in few steps
    if files[2:]:
        flow["eval"]["data"]["mine"] = files[2].name
    else:
        del flow["eval"]["domain"], flow["eval"]["data"]
    yaml.dump(flow, text)
    try:
        same = YAML(typ="safe").load(text.getvalue()) == flow
    except YAMLError:
        same = False
    if not same:
        raise UsageError(f"YAML cannot hold the names {data!r} and {base!r}", "rename the rows or the model")
    return text.getvalue()
