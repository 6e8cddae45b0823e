"""How `--help` looks: main commands first, arguments in the words of `opdcl.api`, no types of Python."""

from __future__ import annotations

import inspect
import re
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup

from opdcl import api

MAIN = ("run", "finetune", "recover", "eval", "report", "chat", "export")

# What the value of an option is called, by its type.
VALUES = {"str": "TEXT", "int": "N", "float": "NUMBER", "Path": "PATH"}


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
