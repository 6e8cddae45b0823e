"""opdcl from Python: the verbs of the command line, with results that a notebook shows.

    import opdcl

    opdcl.finetune("rows.jsonl", out="runs/mine")
    opdcl.recover("runs/mine", settings={"recover.steps": 60})
    opdcl.evaluate("runs/mine", domain=["questions.jsonl"])     # as the last line of a cell: verdict and scores

Every verb goes on where an earlier call stopped, and raises `opdcl.errors.OpdclError`, whose `hint` says what to do next.
Settings have the keys of `opdcl config schema`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opdcl import parallel
from opdcl.config.load import FILE_ENDINGS, load, load_tree
from opdcl.console import Output
from opdcl.errors import UsageError
from opdcl.results.compare import refuse_folder, view, write
from opdcl.results.scores import STATES
from opdcl.results.summary import summarise, table_rows
from opdcl.rundir.files import read_json
from opdcl.rundir.layout import RunDir, open_run
from opdcl.sanitize import harmless

Place = str | Path

Settings = Mapping[str, Any]


class Shown:
    """What a verb gives back: printed, it is one sentence; in a notebook, that and tables."""

    def __init__(self, sentence: str, tables: list[tuple[list[str], list[list[str]]]]):
        self._sentence, self._tables = sentence, tables

    def __repr__(self) -> str:
        return f"<opdcl: {self._sentence}>"

    def _repr_html_(self) -> str:
        from html import escape

        def cell(text: str) -> str:
            return escape(harmless(text)).replace("\n", "<br>")

        parts = [f"<p><strong>{cell(self._sentence)}</strong></p>"]
        for columns, rows in self._tables:
            head = "".join(f"<th>{cell(c)}</th>" for c in columns)
            body = "".join(f"<tr>{''.join(f'<td>{cell(c)}</td>' for c in row)}</tr>" for row in rows)
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        return "".join(parts)


class Result(Shown):
    """What a run has shown so far: `path` is its directory, `summary` has the keys of `opdcl report RUN --json`."""

    def __init__(self, path: Path, summary: dict[str, Any]):
        self.path, self.summary = path, summary
        super().__init__(
            summary["verdict"],
            [(["suite", "n", "floor", *STATES], rows)] if (rows := table_rows(summary)) else [],
        )

    @property
    def report(self) -> Path:
        """The report as one page."""
        return RunDir(self.path).reports[1]

    @property
    def adapters(self) -> dict[str, Path]:
        """The adapters' folders by state: `tuned`, `recovered`."""
        return RunDir(self.path).adapters()


class Comparison(Shown):
    """Several runs side by side: `found` has the keys of `compare.json`, `path` is the folder that holds it."""

    def __init__(self, found: dict[str, Any], path: Path | None = None):
        self.found, self.path = found, path
        shown = view(found)
        super().__init__(shown.lead, [(table.columns, table.rows) for table in shown.tables])


def run(
    workflow: Place | Sequence[Place],
    out: Place | None = None,
    settings: Settings | None = None,
    force: bool = False,
    quiet: bool = False,
) -> Result | Comparison:
    """Run a workflow: a shipped recipe's name or YAML files, merged left to right. One with arms or seeds gives a comparison."""
    flow, origins = load([str(file) for file in _several(workflow)], flags=dict(settings or {}))
    place = Path(out) if out else Path("runs") / flow.name
    if flow.arms or flow.seeds:
        from opdcl.pipeline.sweep import execute_all

        found = execute_all(flow, origins, place, _output(quiet), force)
        if not found:
            raise UsageError(
                "one arm with one seed has nothing to be compared with",
                "leave arms and seeds out, or name more",
            )
        return Comparison(found, place)
    return _execute(flow, origins, place, force, quiet)


def finetune(
    data: Place,
    out: Place = "runs/finetune",
    model: Place | None = None,
    settings: Settings | None = None,
    force: bool = False,
    quiet: bool = False,
) -> Result:
    """Learn a domain from rows: a file, a folder, a hub id, or `handbook`."""
    flow, origins = load(
        [], flags={"finetune.data": str(data), "model.id": model and str(model), **(settings or {})}
    )
    return _execute(flow, origins, Path(out), force, quiet)


def recover(
    path: Place,
    prompts: Place | None = None,
    domain: Place | None = None,
    settings: Settings | None = None,
    force: bool = False,
    quiet: bool = False,
) -> Result:
    """Win back what a run's fine-tune forgot."""
    flags = {
        "recover.general": prompts and str(prompts),
        "recover.domain": domain and str(domain),
        **(settings or {}),
    }
    flow, origins = extend(Path(path), [], flags, "recover")
    return _execute(flow, origins, Path(path), force, quiet)


def evaluate(
    path: Place,
    retention: str | Sequence[str] = (),
    domain: Place | Sequence[Place] = (),
    settings: Settings | None = None,
    force: bool = False,
    quiet: bool = False,
) -> Result:
    """Measure base, tuned and recovered; a domain suite may be a file of questions and answers."""
    suites, files = suites_and_files([str(suite) for suite in _several(domain)])
    flags = {
        "eval.retention": [str(suite) for suite in _several(retention)] or None,
        "eval.domain": suites or None,
        **files,
        **(settings or {}),
    }
    flow, origins = extend(Path(path), [], flags, "eval")
    return _execute(flow, origins, Path(path), force, quiet)


def report(path: Place) -> Result:
    """Return what a run has shown, without doing anything."""
    return Result(Path(path), summarise(open_run(Path(path))))


def compare(paths: Place | Sequence[Place], out: Place | None = None) -> Comparison:
    """Compare runs; those that differ in their seeds only are pooled. `out` is a folder for compare.md, .html and .json."""
    from opdcl.results.compare import compare as compare_runs

    if out:
        refuse_folder(Path(out))
    found = compare_runs([open_run(Path(path)) for path in _several(paths)])
    if out:
        write(found, Path(out))
    return Comparison(found, Path(out) if out else None)


def extend(path: Path, overrides: list[str], flags: dict[str, Any], stage: str) -> tuple[Any, dict[str, str]]:
    """Load the workflow that a run was made with, extended by a stage."""
    saved = read_json(open_run(path).config)
    return load_tree(saved["workflow"], saved["origins"], overrides, flags, stage)


def suites_and_files(domain: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return domain suites by name, and for those that are files of questions the settings that say where these are.

    Raises:
        UsageError: What is named like a file of rows is none.
    """
    suites, files = [], {}
    for suite in domain:
        path = Path(suite)
        if path.suffix and path.is_file():
            files[f"eval.data.{path.stem}"] = str(path.resolve())
            suites.append(path.stem)
        elif path.suffix in FILE_ENDINGS:
            raise UsageError(
                f"domain questions {suite!r} do not exist",
                "a file of question and answer rows, or the name of a suite",
            )
        else:
            suites.append(suite)
    return suites, files


def _several(given: Place | Sequence[Place]) -> list[Place]:
    return [given] if isinstance(given, str | Path) else list(given)


def _execute(flow: Any, origins: dict[str, str], path: Path, force: bool, quiet: bool) -> Result:
    from opdcl.pipeline.execute import execute

    return Result(path, execute(flow, origins, RunDir(path), _output(quiet), force))


def _output(quiet: bool) -> Output:
    parallel.join()  # a script may have been launched several times over, as the commands may
    return Output("silent" if parallel.rank() else "quiet" if quiet else "human")
