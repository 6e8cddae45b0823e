"""All that runs and comparisons show, as texts: the terminal, pages, JSON, a notebook and a pull request."""

import json
import re
from pathlib import Path

from helpers.page import Page
from opdcl import api
from opdcl.outcomes import Outcome
from opdcl.rundir.layout import RunDir


def texts(outcome: Outcome) -> dict[str, str]:
    """Return the JSON of an outcome, and what a terminal and a notebook show of it."""
    said = [outcome.sentence, *outcome.faults, *outcome.remarks, *outcome.notes]
    for table in outcome.tables:
        said += ["", table.title, *(" | ".join(row) for row in [table.columns, *table.rows]), table.caption]
    data = json.dumps(outcome.data, indent=1)
    return {"json": data, "terminal": "\n".join(said), "notebook": outcome._repr_html_()}


def of_run(run: Path) -> dict[str, str]:
    result, files = api.report(run, update=True, quiet=True), [*map(Path, RunDir(run).reports)]
    read = {file.name: file.read_text() for file in files if file.is_file()}
    return texts(result) | read | {"pull": result.pull_request()}


def of_comparison(runs: list[Path], folder: Path) -> dict[str, str]:
    outcome = api.compare(runs, folder, quiet=True)
    return {file.name: file.read_text() for file in folder.iterdir()} | texts(outcome)


def seen(html: str) -> str:
    """Return what a reader sees of a page, a line for each element."""
    shown = re.sub("<style>.*?</style>", "", html, flags=re.DOTALL)
    lines = map(str.strip, Page(shown.replace("<", "\n<")).text.splitlines())
    return "\n".join(filter(None, lines))
