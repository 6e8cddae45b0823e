"""The commands about recipes and settings: opdcl workflows ..., opdcl config ..."""

from __future__ import annotations

import contextlib
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from opdcl.cli import options as opt
from opdcl.cli import screen
from opdcl.cli.guidance import describe_commands
from opdcl.cli.screen import start, suggest
from opdcl.config.shipped import described_suites, workflow_files
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
    from opdcl.config.shipped import find_workflow

    screen.output.result(find_workflow(name).read_text(encoding="utf-8").rstrip(), None)
    suggest("workflows", "cp", name, "mine.yaml")


@workflows_app.command("cp")
def copy_workflow(name: Recipe, to: Target = Path(".")) -> None:
    """Copy a recipe, to edit it."""
    from opdcl.config.shipped import find_workflow

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
