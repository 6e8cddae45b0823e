"""Write all that the runs in a folder show, for a change of `opdcl/results` that must change none of it.

    .venv/bin/python -m pytest tests/unit/results --basetemp RUNS -o tmp_path_retention_policy=all
    .venv/bin/python tests/shown.py RUNS OUT    all synthetic runs of the tests, and their comparisons

At the commit before and at the one after, with the same RUNS. `diff -r` of the two shows what is unlike.
Figures keep their description only: to draw them takes most of the time.
"""

import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from helpers.page import Page
from matplotlib.figure import Figure

from opdcl import api
from opdcl.errors import OpdclError
from opdcl.outcomes import Outcome
from opdcl.results.gates import judge_gates
from opdcl.results.summary import Results
from opdcl.rundir.layout import RunDir

GATES = {"recovery": 0.5, "domain_retention": 0.5, "closeness": 0.5, "max_drop": 5}


def texts(outcome: Outcome) -> dict[str, str]:
    """Return the JSON of an outcome, and what a terminal and a notebook show of it."""
    said = [outcome.sentence, *outcome.faults, *outcome.remarks, *outcome.notes]
    for table in outcome.tables:
        said += ["", table.title, *(" | ".join(row) for row in [table.columns, *table.rows]), table.caption]
    data = json.dumps(outcome.data, indent=1)
    return {"json": data, "terminal": "\n".join(said), "notebook": outcome._repr_html_()}


def of_run(run: Path) -> dict[str, str]:
    result, files = api.report(run, update=True, quiet=True), [*map(Path, RunDir(run).reports)]
    gates = json.dumps(judge_gates(GATES, Results(RunDir(run))), indent=1)
    read = {file.name: file.read_text() for file in files if file.is_file()}
    return texts(result) | read | {"pull": result.pull_request(), "gates": gates}


def of_comparison(runs: list[Path], folder: Path) -> dict[str, str]:
    outcome = api.compare(runs, folder, quiet=True)
    return {file.name: file.read_text() for file in folder.iterdir()} | texts(outcome)


def seen(html: str) -> str:
    """Return what a reader sees of a page, a line for each element."""
    shown = re.sub("<style>.*?</style>", "", html, flags=re.DOTALL)
    lines = map(str.strip, Page(shown.replace("<", "\n<")).text.splitlines())
    return "\n".join(filter(None, lines))


def keep(out: Path, show: Callable, *given: object) -> None:
    """Write the texts of a run or a comparison, or else its error; of a page also what a reader sees."""
    try:
        shown = show(*given)
    except OpdclError as fault:
        shown = {"error": f"{fault.message}\n{fault.hint}"}
    out.mkdir(parents=True)
    for kind, text in shown.items():
        (out / kind).write_text(text, errors="backslashreplace")
        if kind.endswith("html"):
            (out / f"{kind}.seen").write_text(seen(text), errors="backslashreplace")


def main(folder: Path, out: Path) -> None:
    Figure.savefig = lambda figure, file, **_: file.write("<svg></svg>")
    runs = sorted(
        (file.parent for file in folder.rglob("config.json") if RunDir(file.parent).is_run()),
        key=lambda run: (run.parent, run),
    )
    for run in runs:
        keep(out / run.relative_to(folder) / "run", of_run, run)
    for beside, found in itertools.groupby(runs, key=lambda run: run.parent):
        several = [*found]
        for number, some in enumerate([several, *map(list, itertools.pairwise(several))]):
            place = folder.parent / "comparison"
            shutil.rmtree(place, ignore_errors=True)
            if len(some) > 1:
                keep(out / beside.relative_to(folder) / f"comparison{number}", of_comparison, some, place)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
