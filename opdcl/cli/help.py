"""How `--help` looks: main commands before others, and what to type in place of Python's types."""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup

MAIN = ("run", "finetune", "recover", "eval", "report", "chat", "export")

# What the value of an option is called, by its type.
VALUES = {"str": "TEXT", "int": "N", "float": "NUMBER", "Path": "PATH"}


class PlainCommand(TyperCommand):
    """A command whose help names no type of Python."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument):
                parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
            elif parameter.metavar is None:
                parameter.metavar = VALUES.get(parameter.bare_type())  # type: ignore[attr-defined]


class TwoLists(TyperGroup):
    """The group of all commands, the main ones apart."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
        others = [name for name in shown if name not in MAIN]
        for title, names in (("Commands", MAIN), ("More commands", others)):
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(200)) for name in names])
