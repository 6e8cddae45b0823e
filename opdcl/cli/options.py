"""Arguments and options that several commands share, how `--help` shows them, and what a mistyped one means.

What is not said here about an argument of a verb is in the docstring of that verb in `opdcl.api`.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperArgument, TyperCommand, TyperGroup

from opdcl import api
from opdcl.config.shipped import workflow_files
from opdcl.errors import UsageError, nearest

MAIN = ("run", "finetune", "recover", "eval", "report", "chat", "export")

# What the value of an option is called, by its type.
VALUES = {"str": "TEXT", "int": "N", "float": "NUMBER", "Path": "PATH"}


# -- arguments


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def recipes(incomplete: str) -> list[str]:
    """Return the names of the shipped recipes that begin so."""
    return _beginning(incomplete, workflow_files())


RunDir = Annotated[Path, Argument(metavar="RUN", help="Run directory.")]
FILES_HELP = "Recipe or YAML files, merged left to right."
Workflow = Annotated[list[str], Argument(metavar="WORKFLOW", help=FILES_HELP, autocompletion=recipes)]

# -- options of the commands that run stages


def _go_offline(offline: bool) -> None:
    if offline:  # huggingface_hub reads it on import, which comes later
        os.environ["HF_HUB_OFFLINE"] = "1"


def _keys(incomplete: str) -> list[str]:
    """Return the settings that complete a `--set`, each with its equals sign."""
    from opdcl.config.reference import describe_fields  # it imports the schema, which takes time

    keys = [field[0] for field in describe_fields()]
    return [f"{key}=" for key in _beginning(incomplete, keys)]


def _columns(text: str) -> dict[str, str]:
    """Return `--columns` as our name of a column -> the user's."""
    columns = {}
    for pair in text.split(","):
        ours, _, theirs = pair.partition("=")
        if not (ours and theirs):
            hint = "--columns question=Frage,answer=Antwort"
            raise UsageError(f"--columns {text!r} is not OURS=YOURS,...", hint)
        columns[ours.strip()] = theirs.strip()
    return columns


System = Annotated[str | None, Option(metavar="TEXT|@FILE")]
Out = Annotated[Path | None, Option("-o", "--out", metavar="RUN")]
Columns = Annotated[
    dict[str, str] | None,
    Option(parser=_columns, metavar="OURS=YOURS,...", help="Your columns: question=Frage,answer=Antwort."),
]
SET_HELP = "Override a setting of `opdcl config schema`, e.g. recover.steps=60. Repeatable."
Settings = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", autocompletion=_keys, help=SET_HELP)
]
DryRun = Annotated[bool, Option("--dry-run", help="Print what the command would do, and write nothing.")]
Force = Annotated[bool, Option("--force", help="Repeat stages whose settings or data have changed.")]
OFFLINE_HELP = "Use cached files only; `hf download` fills the cache."
Offline = Annotated[bool, Option("--offline", callback=_go_offline, help=OFFLINE_HELP)]
WORKERS_HELP = "Worker processes: one per GPU, or several on CPU."
Workers = Annotated[int, Option("--num-processes", min=1, metavar="N", help=WORKERS_HELP)]
Json = Annotated[bool, Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, Option("-q", "--quiet", help="Print errors only.")]
TrustRemoteCode = Annotated[bool, Option("--trust-remote-code")]

# -- options of `opdcl eval`


def suite_files(texts: list[str]) -> dict[str, str]:
    """Return `--data` as suite -> file."""
    files = {}
    for text in texts:
        suite, separator, path = text.partition("=")
        if not separator:
            raise UsageError(f"--data {text!r} is not SUITE=PATH", "--data ifeval=input_data.jsonl")
        files[suite] = path
    return files


def drops(texts: list[str]) -> Any:
    """Return `--max-drop` as the setting `gates.max_drop`: one number, a number by suite, or None."""
    found: dict[str, float] = {}
    for text in texts:
        suite, _, number = text.rpartition("=")
        try:
            found[suite] = float(number)
        except ValueError:
            raise UsageError(f"--max-drop {text!r} is not a number", "--max-drop 5, or SUITE=3") from None
    if "" in found and len(found) > 1:
        raise UsageError("--max-drop names a limit for all suites and one for some", "name all suites")
    if "" in found:
        return found[""]
    return found or None


def argument_texts(verb: Any) -> dict[str, str]:
    """Return what the docstring of a verb says of its arguments, by name."""
    _, _, arguments = (inspect.getdoc(verb) or "").partition("\nArgs:\n")
    found = {}
    for text in re.split(r"(?m)^    (?=\w)", arguments.split("\n\n")[0])[1:]:
        name, _, meaning = text.partition(": ")
        found[name] = " ".join(meaning.split())
    return found


class PlainCommand(TyperCommand):
    """A command whose help has the words of the verb of its name, and names no type of Python."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        texts = argument_texts(getattr(api, self.callback.__name__, None))
        params: list[Any] = self.params
        for parameter in params:
            if not parameter.help and parameter.name in texts:
                often = " Repeatable." if parameter.multiple else ""
                parameter.help = texts[parameter.name] + often
            if isinstance(parameter, TyperArgument):
                parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
                # Typer's braces would say that there is a choice.
                name = re.sub("[{}]", "", parameter.get_usage_pieces(None)[0])
                parameter.get_usage_pieces = lambda ctx, name=name: [name]  # type: ignore
            elif parameter.metavar is None:
                parameter.metavar = VALUES.get(parameter.bare_type())


class TwoLists(TyperGroup):
    """The group of all commands, the main ones apart."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
        others = [name for name in shown if name not in MAIN]
        for title, names in (("Commands", MAIN), ("More commands", others)):
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(200)) for name in names])


# Command -> how it is typed.
EXAMPLES = {
    "init": "opdcl init rows.jsonl",
    "run": "opdcl run quickstart",
    "finetune": "opdcl finetune rows.jsonl -o runs/mine",
    "recover": "opdcl recover runs/mine --prompts prompts.jsonl",
    "eval": "opdcl eval runs/mine --domain test-rows.jsonl",
    "report": "opdcl report runs/mine",
    "ls": "opdcl ls",
    "compare": "opdcl compare runs/mine runs/other -o comparison",
    "chat": 'opdcl chat runs/mine "Who signs the form?"',
    "export": "opdcl export runs/mine -o my-model",
    "serve": "opdcl serve runs/mine -- --max-model-len 2048",
    "doctor": "opdcl doctor",
    "verify": "opdcl verify runs/mine",
    "clean": "opdcl clean runs/mine --dry-run",
    "workflows ls": "opdcl workflows ls",
    "workflows show": "opdcl workflows show own-data",
    "workflows cp": "opdcl workflows cp own-data mine.yaml",
    "suites ls": "opdcl suites ls",
    "config show": "opdcl config show quickstart --set recover.steps=60",
    "config validate": "opdcl config validate mine.yaml",
    "config schema": "opdcl config schema recover.loss",
}


def describe_commands(group: typer.Typer, prefix: str = "") -> None:
    """Give each command its first sentence as its summary, at any width, and its example."""
    for info in group.registered_commands:
        command: Any = info.callback
        name = prefix + (info.name or command.__name__)
        text = command.__doc__ or ""  # none with -OO, which `main` refuses
        info.cls = PlainCommand
        info.short_help = text.split(". ")[0].rstrip(".") + "."
        if name in EXAMPLES:
            info.epilog = f"\b\nExample:\n  {EXAMPLES[name]}"


def hint_for(fault: Any) -> str:
    """Return what to type instead of a command that its parser refused."""
    command = fault.ctx.command_path if getattr(fault, "ctx", None) else "opdcl"
    help_line = f"{command} --help"
    match type(fault).__name__:
        case "MissingParameter":
            if example := EXAMPLES.get(command.removeprefix("opdcl ")):
                return f"{example}  # {help_line} lists all options"
        case "NoSuchOption":
            if (command, fault.option_name) == ("opdcl finetune", "--data"):
                return f"{EXAMPLES['finetune']}  # the rows come without an option"
            if near := _option_meant(fault):
                return f"did you mean {near}? {help_line}"
    if "No such command" in fault.format_message():
        from opdcl.config.shipped import workflow_files

        typed = fault.format_message().split("'")[1]
        names = list(fault.ctx.command.commands)
        if typed in workflow_files():
            return f"opdcl run {typed}"
        if typed in ("resume", "continue"):
            return "give the same command again: it continues where it stopped"
        near = next((n for n in names if typed.startswith(n)), "") or nearest(typed, names, 0.7)
        if near:
            return f"{command} {near} --help  # did you mean {near}?"
    return help_line


def _option_meant(fault: Any) -> str:
    """Return the option, or the setting, that an unknown option may mean."""
    options = []
    for parameter in fault.ctx.command.params:
        options += [option for option in parameter.opts if option.startswith("--")]
    if fault.option_name == "--model" and "--base" in options:
        return "--base"  # other programs say model for it
    return nearest(fault.option_name, options, 0.7) or similar_setting(fault.option_name)


def similar_setting(typed: str) -> str:
    """Return the setting of this name, as an option."""
    from opdcl.config.reference import describe_fields  # it imports the schema, which takes time

    name = typed.lstrip("-").replace("-", "_")
    key = next((row[0] for row in describe_fields() if row[0].endswith(f".{name}")), "")
    return f"--set {key}=VALUE" if key else ""
