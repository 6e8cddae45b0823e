"""Generate the site's reference of commands, settings and recipes from the code at build time.

`<!-- opdcl: NAME -->` in a page is replaced by the part with that name. Addresses of earlier pages lead to
the present ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from opdcl.cli import app
from opdcl.config.reference import describe_fields
from opdcl.config.shipped import workflow_files

# A table with more columns than this has no room beside a page's contents.
NARROW = 6
RECIPES = Path(__file__).parents[1] / "workflows"
# Earlier pages, and where their content is now.
MOVED = {
    "ci": "take-it-away.html#in-ci",
    "command-line": "reference.html#commands",
    "container": "install.html#in-a-container",
    "dependencies": "index.html#where-to-go",
    "export": "take-it-away.html#export",
    "methods": "how-it-works.html#the-loop",
    "older-results": "evidence.html#limits-first",
    "performance": "larger-machines.html#speed",
    "processes": "larger-machines.html#several-processes",
    "python": "take-it-away.html#python-and-notebooks",
    "questions": "choosing-settings.html#questions",
    "recipes": "reference.html#recipes",
    "reliability": "evidence.html#what-we-broke-on-purpose",
    "results": "evidence.html#limits-first",
    "results-method": "evidence.html#what-each-part-adds",
    "results-models": "evidence.html#other-models-and-data",
    "results-replay": "evidence.html#recovery-replay-or-both",
    "results-scores": "evidence.html#can-the-scores-be-gamed",
    "servers": "larger-machines.html#servers",
    "settings": "reference.html#settings",
    "troubleshooting": "choosing-settings.html#by-what-you-see",
}
MARK = re.compile(r"^<!-- opdcl: (\w+) -->$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace a page's marks, and point its links to recipes at the site's reference."""
    parts = {"commands": commands, "settings": settings, "recipes": recipes}
    filled = MARK.sub(lambda mark: parts[mark[1]](), markdown)
    filled = re.sub(r"\]\(\.\./workflows/README\.md", "](reference.md#recipes", filled)
    return re.sub(
        r"\]\(\.\./workflows/([\w.-]+)\.yaml\)", lambda link: f"](reference.md#{anchor(link[1])})", filled
    )


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Name each cell's column, so that a phone can show a row as a card; give wide tables a wide page."""
    html = re.sub(r"<table>.*?</table>", lambda table: _with_labels(table[0]), html, flags=re.S)
    if "<table data-wide>" in html:
        page.meta["hide"] = ["toc"]
    return html


def on_post_build(config: Any, **_: Any) -> None:
    """Let the address of an earlier page lead to the present one."""
    for name, target in MOVED.items():
        refresh = f'<meta http-equiv="refresh" content="0; url={target}">'
        page = f'<!doctype html>{refresh}<a href="{target}">This page has moved.</a>\n'
        (Path(config["site_dir"]) / f"{name}.html").write_text(page, encoding="utf-8")


def on_post_template(output: str, template_name: str, **_: Any) -> str:
    """Let the page of a wrong address load its styles, wherever the site lies: the pages form one folder."""
    if template_name != "404.html":
        return output
    relative = re.sub(r'((?:href|src)=")/(?!/)', r"\1./", output)
    return relative.replace('"base": "/"', '"base": "."')


def _with_labels(table: str) -> str:
    head, _, body = table.partition("<tbody>")
    labels = [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<th[^>]*>(.*?)</th>", head, re.S)]
    rows = []
    for row in body.split("<tr>"):
        cells = row.split("<td")
        for i, label in enumerate(labels[: len(cells) - 1]):
            cells[i + 1] = f' data-label="{label}"{cells[i + 1]}'
        rows.append("<td".join(cells))
    if len(labels) > NARROW:
        head = head.replace("<table>", "<table data-wide>", 1)
    return f"{head}<tbody>{'<tr>'.join(rows)}"


def every_command(words: str = "opdcl", command: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield each runnable command with its full name, such as `opdcl config show`; no hidden one."""
    command = command or get_command(app)
    subcommands = getattr(command, "commands", None)
    if command.hidden:
        return
    if subcommands is None:
        yield words, command
    for name, subcommand in (subcommands or {}).items():
        yield from every_command(f"{words} {name}", subcommand)


def commands() -> str:
    """Return all commands with their arguments and options as Markdown."""
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
    """Return all settings with defaults and meanings as Markdown, one table per section."""
    sections: dict[str, list[str]] = {}
    for key, _, default, meaning in describe_fields():
        value = f"`{_cell(default)}`" if default else ""
        row = f"| `{key}` | {value} | {_cell(meaning)} |"
        sections.setdefault(key.rpartition(".")[0], []).append(row)
    parts = []
    for section, rows in sections.items():
        heading = f"### {section or 'top of the file'}\n"
        parts += ["", heading, "| key | default | meaning |\n| --- | --- | --- |", *rows]
    return "\n".join(parts)


def recipes() -> str:
    """Return the recipes' README and each recipe as Markdown, with links that work within the site."""
    text = (RECIPES / "README.md").read_text(encoding="utf-8").partition("\n")[2]
    text = re.sub(r"\]\(([\w.-]+)\.yaml\)", lambda link: f"](#{anchor(link[1])})", text)
    parts = [text.replace("](../README.md", "](index.md").replace("](../docs/", "](")]
    for name, file in workflow_files().items():
        parts.append(
            f"### {name} {{#{anchor(name)}}}\n\n```yaml\n{file.read_text(encoding='utf-8').rstrip()}\n```\n"
        )
    return "\n".join(parts)


def anchor(name: str) -> str:
    return name.replace(".", "-")


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
