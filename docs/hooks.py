"""What the site makes of the code while it is built: commands, settings and recipes, so that none can be out of date.

A page that holds `<!-- opdcl: NAME -->` gets the part of that name there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from opdcl.cli import app
from opdcl.load import describe_fields, workflow_files

RECIPES = Path(__file__).parents[1] / "workflows"
MARK = re.compile(r"^<!-- opdcl: (\w+) -->$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in a page's marks, and lead its links to recipes to the page that shows them."""
    parts = {"commands": commands, "settings": settings, "recipes": recipes}
    filled = MARK.sub(lambda mark: parts[mark[1]](), markdown)
    filled = re.sub(r"\]\(\.\./workflows/README\.md", "](recipes.md", filled)
    return re.sub(r"\]\(\.\./workflows/([\w.-]+)\.yaml\)", lambda link: f"](recipes.md#{anchor(link[1])})", filled)


def every_command() -> Iterator[tuple[str, Any]]:
    """Yield each command that does something, by the words that are typed for it."""

    def below(words: str, command: Any) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield words, command
        for name, further in (inner or {}).items():
            yield from below(f"{words} {name}", further)

    yield from below("opdcl", get_command(app))


def commands() -> str:
    """Return all commands with their arguments and options, as Markdown."""
    parts = []
    for words, command in every_command():
        context = command.make_context(words, [], resilient_parsing=True)
        rows = [record for p in command.get_params(context) if (record := p.get_help_record(context))]
        usage = " ".join([words, *command.collect_usage_pieces(context)])
        parts += [f"### {words}\n", f"{command.help}\n", f"```text\n{usage}\n```\n"]
        parts += ["| argument or option | |\n| --- | --- |"]
        parts += [*(f"| `{_cell(name)}` | {_cell(meaning)} |" for name, meaning in rows), ""]
    return "\n".join(parts)


def settings() -> str:
    """Return all settings with defaults and meanings, a table for each section, as Markdown."""
    parts, last = [], None
    for key, default, meaning in describe_fields():
        section = key.rpartition(".")[0]
        if section != last:
            parts += ["", f"### {section or 'top of the file'}\n", "| key | default | meaning |\n| --- | --- | --- |"]
            last = section
        parts.append(f"| `{key}` | `{_cell(default)}` | {_cell(meaning)} |")
    return "\n".join(parts)


def recipes() -> str:
    """Return the recipes' own README, and each recipe below it, as Markdown."""
    text = (RECIPES / "README.md").read_text(encoding="utf-8").partition("\n")[2]
    text = re.sub(r"\]\(([\w.-]+)\.yaml\)", lambda link: f"](#{anchor(link[1])})", text)
    parts = [text.replace("](../README.md", "](index.md").replace("](../docs/", "](")]
    for name, file in workflow_files().items():
        parts.append(f"## {name} {{#{anchor(name)}}}\n\n```yaml\n{file.read_text(encoding='utf-8').rstrip()}\n```\n")
    return "\n".join(parts)


def anchor(name: str) -> str:
    return name.replace(".", "-")


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
