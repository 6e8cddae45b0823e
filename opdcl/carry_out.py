"""What `run`, `finetune`, `recover` and `evaluate` share: settle what to do, then do it or describe it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opdcl import parallel
from opdcl.arguments import PathLike, Settings, as_folder, as_settings, strings, take_rows
from opdcl.config.load import load, load_tree
from opdcl.config.workflow import Workflow
from opdcl.console import Output, quiet_libraries
from opdcl.errors import UsageError
from opdcl.model.consent import refuse_consent_of_files, refuse_stored_consent, without_consent
from opdcl.outcomes import Comparison, Plan, Result
from opdcl.pipeline.begin import open_or_begin
from opdcl.pipeline.execute import execute
from opdcl.pipeline.job import Job
from opdcl.pipeline.preflight import refuse_foreign
from opdcl.pipeline.sources import Sources
from opdcl.pipeline.sweep import describe_all, execute_all, expand
from opdcl.results.status import STATES
from opdcl.results.tables import Table
from opdcl.rundir.layout import RunDir, open_run


@dataclass(frozen=True)
class Configured:
    """A workflow, the origins of its settings by key, and its run directory."""

    flow: Workflow
    origins: dict[str, str]
    path: Path


def run_files(
    files: PathLike | Sequence[PathLike],
    out: PathLike | None,
    chosen: Mapping[str, Any],
    settings: Settings = None,
    dry_run: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> Result | Comparison | Plan:
    """Run the workflow of some files; `chosen` are settings by key."""
    overrides, flags = as_settings(settings, chosen)
    configured, sources = _with_rows(flags, lambda: _load(strings(files), out, overrides, flags))
    output = Output("quiet" if quiet else "human")
    if configured.flow.arms or configured.flow.seeds:
        return _sweep(configured, sources, output, dry_run, force)
    return _single(configured, sources, output, dry_run, force)


def run_settings(
    out: PathLike,
    chosen: Mapping[str, Any],
    settings: Settings = None,
    dry_run: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> Result | Plan:
    """Run the workflow that has these settings, `chosen` by key, and no file."""
    overrides, flags = as_settings(settings, chosen)
    configured, sources = _with_rows(flags, lambda: _load([], out, overrides, flags))
    return _single(configured, sources, Output("quiet" if quiet else "human"), dry_run, force)


def add_stage(
    stage: str,
    source: PathLike,
    out: PathLike | None,
    chosen: Mapping[str, Any],
    settings: Settings = None,
    dry_run: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> Result | Plan:
    """Run the workflow of a run or an adapter, `source`, with one more stage: `recover` or `eval`."""
    overrides, flags = as_settings(settings, chosen)

    def read() -> Configured:
        path, saved = open_or_begin(str(source), as_folder(out) if out else None, flags.get("model.id"))
        stored = saved["workflow"]
        if not force:
            _refuse_another_file(RunDir(path), stored, flags)
        flow, origins = load_tree(without_consent(stored), saved["origins"], overrides, flags, stage)
        refuse_stored_consent(stored, flow, path)
        return Configured(flow, origins, path)

    configured, sources = _with_rows(flags, read)
    return _single(configured, sources, Output("quiet" if quiet else "human"), dry_run, force)


def _load(files: list[str], out: PathLike | None, overrides: list[str], flags: dict[str, Any]) -> Configured:
    """Return the workflow of files and settings."""
    flow, origins = load(files, overrides, flags)
    refuse_consent_of_files(flow, origins)
    return Configured(flow, origins, as_folder(out or Path("runs") / flow.name))


def _with_rows(flags: dict[str, Any], read: Callable[[], Configured]) -> tuple[Configured, Sources]:
    """Return what `read` reads from the settings `flags`, and the data, once rows in memory are files."""
    texts = take_rows(flags)
    configured = read()
    if texts:  # the directory of these files is known only now
        for key in texts:
            flags[key] = str((configured.path / "data" / flags[key]).resolve())
        configured = read()
    return configured, Sources({flags[key]: text for key, text in texts.items()})


def _single(
    configured: Configured, sources: Sources, output: Output, dry_run: bool, force: bool
) -> Result | Plan:
    """Run one workflow, or describe what it would do."""
    run = RunDir(configured.path)
    refuse_foreign(run)  # found before the libraries are imported
    sources.read(configured.flow)
    if dry_run:
        from opdcl.pipeline.dry_run import data_table, describe

        title = f"dry run: {run.path}"
        with output.busy("checking model and data"), quiet_libraries():
            job = Job.of(configured.flow, run, sources, configured.origins)
            lines, plan = describe(job, force)
        tables = [Table(title, ["stage", "action", "why"], lines, ""), *data_table(plan)]
        return Plan(title, tables, plan, plan["notes"])
    parallel.join()
    job = Job.of(configured.flow, run, sources, configured.origins)
    return Result(run.path, execute(job, output, force))


def _sweep(
    configured: Configured, sources: Sources, output: Output, dry_run: bool, force: bool
) -> Result | Comparison | Plan:
    """Run the arms and seeds of a workflow, or describe what they would do."""
    flow, origins, path = configured.flow, configured.origins, configured.path
    if dry_run:
        title = f"dry run: {path}"
        with output.busy("checking model and data"), quiet_libraries():
            lines, plans = describe_all(flow, origins, path, sources, force)
        return Plan(title, [Table(title, ["run", "stage", "action", "why"], lines, "")], plans)
    parallel.join()
    comparison = execute_all(flow, origins, path, sources, output, force)
    if comparison:
        return Comparison(comparison, path)
    # One arm with one seed has nothing to be compared with.
    from opdcl.results.summary import Results

    only = open_run(path / next(iter(expand(flow, path))))
    return Result(only.path, Results(only).summary)


def _refuse_another_file(run: RunDir, settings: dict[str, Any], flags: dict[str, Any]) -> None:
    """Refuse a file that is named like a suite measured on another one: the results would be lost."""
    for name, known in ((settings.get("eval") or {}).get("data") or {}).items():
        place = flags.get(f"eval.data.{name}", known)
        # A user who gives a suite other data by name means it.
        is_another = place != known and name.endswith(Path(place).stem)
        if is_another and any(run.eval_result(state, name).exists() for state in STATES):
            hint = f"--domain NAME --data NAME={place} gives it another name; --force replaces the results"
            raise UsageError(f"this run has measured the suite {name!r} on {known}, not on {place}", hint)
