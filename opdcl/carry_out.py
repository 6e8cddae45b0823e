"""What `run`, `finetune`, `recover` and `evaluate` share: settle what to do, then do it or describe it."""

from __future__ import annotations

from collections.abc import Sequence
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


def carry_out(
    stage: str,
    given: dict[str, Any],
    settings: Settings = None,
    dry_run: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> Result | Comparison | Plan:
    """Run a `workflow` from its files; or the one of a run or an adapter, `path`, with one more stage.

    `given` has the arguments of the verb: these two, `out`, and by their names those that are settings.
    """
    files, source, out = (given.pop(name, None) for name in ("workflow", "path", "out"))
    overrides, flags = as_settings(settings, stage, given)
    flow, origins, path, sources = _configure(
        stage, overrides, flags, out, strings(files or ()), source, force
    )
    output, run = Output("quiet" if quiet else "human"), RunDir(path)
    sweep = bool(files) and bool(flow.arms or flow.seeds)
    if not sweep:  # found before the libraries are imported
        refuse_foreign(run)
        sources.read(flow)
    if dry_run:
        title = f"dry run: {path}"
        with output.busy("checking model and data"), quiet_libraries():
            from opdcl.pipeline.dry_run import data_table, describe

            if sweep:
                lines, plans = describe_all(flow, origins, path, sources, force)
                return Plan(title, [Table(title, ["run", "stage", "action", "why"], lines, "")], plans)
            lines, plan = describe(Job.of(flow, run, sources, origins), force)
        tables = [Table(title, ["stage", "action", "why"], lines, ""), *data_table(plan)]
        return Plan(title, tables, plan, plan["notes"])
    parallel.join()
    if not sweep:
        return Result(path, execute(Job.of(flow, run, sources, origins), output, force))
    if comparison := execute_all(flow, origins, path, sources, output, force):
        return Comparison(comparison, path)
    # One arm with one seed has nothing to be compared with.
    from opdcl.results.summary import summarise

    only = open_run(path / next(iter(expand(flow, path))))
    return Result(only.path, summarise(only))


def _configure(
    stage: str,
    overrides: list[str],
    flags: dict[str, Any],
    out: PathLike | None,
    files: Sequence[str],
    source: PathLike,
    force: bool,
) -> tuple[Workflow, dict[str, str], Path, Sources]:
    """Return the workflow, the origins of its settings, its run directory and its data."""

    def read() -> tuple[Workflow, dict[str, str], Path]:
        if not source:
            flow, origins = load([*files], overrides, flags)
            refuse_consent_of_files(flow, origins)
            return flow, origins, as_folder(out or Path("runs") / flow.name)
        path, saved = open_or_begin(str(source), as_folder(out) if out else None, flags.get("model.id"))
        if not force:
            _refuse_another_file(RunDir(path), saved["workflow"], flags)
        stored = saved["workflow"]
        flow, origins = load_tree(without_consent(stored), saved["origins"], overrides, flags, stage)
        refuse_stored_consent(stored, flow, path)
        return flow, origins, path

    texts = take_rows(flags)
    flow, origins, path = read()
    if texts:  # rows in memory become files of the run, whose directory is known only now
        flags |= {key: str((path / "data" / flags[key]).resolve()) for key in texts}
        flow, origins, path = read()
    return flow, origins, path, Sources({flags[key]: text for key, text in texts.items()})


def _refuse_another_file(run: RunDir, settings: dict[str, Any], flags: dict[str, Any]) -> None:
    """Refuse a file that is named like a suite measured on another one: the results would be lost."""
    for name, known in ((settings.get("eval") or {}).get("data") or {}).items():
        place = flags.get(f"eval.data.{name}", known)
        # A user who gives a suite other data by name means it.
        is_another = place != known and name.endswith(Path(place).stem)
        if is_another and any(run.eval_result(state, name).exists() for state in STATES):
            hint = f"--domain NAME --data NAME={place} gives it another name; --force replaces the results"
            raise UsageError(f"this run has measured the suite {name!r} on {known}, not on {place}", hint)
