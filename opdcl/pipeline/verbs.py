"""What `run`, `finetune`, `recover` and `evaluate` share: settle what to do, then do it or describe it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, Unpack

from opdcl import parallel
from opdcl.arguments import Options, PathLike, Settings, as_folder, as_settings, strings, take_rows
from opdcl.config.load import load, load_tree
from opdcl.config.workflow import Workflow
from opdcl.console import Output, quiet_libraries
from opdcl.errors import UsageError
from opdcl.model.consent import (
    is_stored_file,
    refuse_consent_of_files,
    refuse_stored_consent,
    without_consent,
)
from opdcl.outcomes import Comparison, Plan, Result
from opdcl.pipeline.checks import refuse_foreign
from opdcl.pipeline.execute import execute
from opdcl.pipeline.inputs import Sources
from opdcl.pipeline.job import Job
from opdcl.pipeline.open import open_or_begin, refuse_other_finetune, run_beside
from opdcl.pipeline.reuse import offered
from opdcl.pipeline.sweep import describe_all, execute_all, expand
from opdcl.results.status import STATES
from opdcl.results.tables import Table
from opdcl.rundir.layout import RunDir

# A workflow, the origins of its settings by key, and its run directory.
Configured: TypeAlias = tuple[Workflow, dict[str, str], Path]


def run_files(
    files: PathLike | Sequence[PathLike],
    out: PathLike | None,
    chosen: Mapping[str, Any],
    **options: Unpack[Options],
) -> Result | Comparison | Plan:
    """Run the workflow of some files, or of none; `chosen` are settings by key."""

    def read(overrides: list[str], flags: dict[str, Any]) -> Configured:
        flow, origins = load(strings(files), overrides, flags, is_stored_file)
        refuse_consent_of_files(flow, origins)
        return flow, origins, as_folder(out or Path("runs") / flow.name)

    return _carry_out(read, chosen, **options)


def add_stage(
    stage: str, source: PathLike, out: PathLike | None, chosen: Mapping[str, Any], **options: Unpack[Options]
) -> Result | Comparison | Plan:
    """Run the workflow of a run or an adapter, `source`, with one more stage: `recover` or `eval`."""
    donor = run_beside(str(source), as_folder(out) if out else None)
    if donor and stage != "recover":
        raise UsageError(f"{source} is a run directory: what is measured stays in it", "leave out -o")

    def read(overrides: list[str], flags: dict[str, Any]) -> Configured:
        folder = as_folder(out) if out else None
        path, saved = open_or_begin(str(source), folder, flags.get("model.id"), stage)
        stored = saved["workflow"]
        if not options.get("force"):
            _refuse_another_file(RunDir(path), stored, flags)
        flow, origins = load_tree(*without_consent(saved, path), overrides, flags, stage)
        refuse_stored_consent(stored, flow, path)
        return flow, origins, path

    return _carry_out(read, chosen, donor, **options)


def _carry_out(
    read: Callable[[list[str], dict[str, Any]], Configured],
    chosen: Mapping[str, Any],
    donor: RunDir | None = None,
    settings: Settings = None,
    dry_run: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> Result | Comparison | Plan:
    """Run the workflow that `read` reads from overrides and settings by key, or describe what it would do.

    What `donor` has finished with the same settings is taken from it, the fine-tune always.
    """
    overrides, flags = as_settings(settings, chosen)
    texts = take_rows(flags)
    flow, origins, path = read(overrides, flags)
    if texts:  # the directory of the files that these rows become is known only now
        for key in texts:
            flags[key] = str((path / "data" / flags[key]).resolve())
        flow, origins, path = read(overrides, flags)
    output = Output("quiet" if quiet else "human")
    sources = Sources({flags[key]: text for key, text in texts.items()}, output.note)
    several = flow.arms or flow.seeds
    if not several:  # what is wrong here is found before the libraries are imported
        refuse_foreign(RunDir(path))
        sources.read(flow)
    if donor:
        refuse_other_finetune(Job.of(flow, RunDir(path), sources, origins), donor)
    if dry_run:
        from opdcl.pipeline.dry_run import data_table, describe

        title, columns = f"dry run: {path}", ["stage", "action", "why"]
        with output.busy("checking model and data"), quiet_libraries():
            if several:
                lines, plans = describe_all(flow, origins, path, sources, force)
                return Plan(title, [Table(title, ["run", *columns], lines, "")], plans)
            made_by = offered([donor] if donor else [])
            lines, plan = describe(Job.of(flow, RunDir(path), sources, origins), force, made_by)
            return Plan(title, [Table(title, columns, lines, ""), *data_table(plan)], plan, plan["notes"])
    parallel.join()
    if not several:
        job = Job.of(flow, RunDir(path), sources, origins)
        return Result(path, execute(job, output, force, continued=donor))
    if comparison := execute_all(flow, origins, path, sources, output, force):
        return Comparison(comparison, path)
    # One arm with one seed has nothing to be compared with.
    from opdcl.results.summary import Results

    only = path / next(iter(expand(flow, path)))
    return Result(only, Results(RunDir(only)).summary)


def _refuse_another_file(run: RunDir, settings: dict[str, Any], flags: dict[str, Any]) -> None:
    """Refuse a file that is named like a suite measured on another one: the results would be lost."""
    for name, known in ((settings.get("eval") or {}).get("data") or {}).items():
        place = flags.get(f"eval.data.{name}", known)
        # A user who gives a suite other data by name means it.
        is_another = place != known and Path(place).name.startswith(f"{name}.")
        if is_another and any(run.eval_result(state, name).exists() for state in STATES):
            hint = f"--domain NAME --data NAME={place} gives it another name; --force replaces the results"
            raise UsageError(f"this run has measured the suite {name!r} on {known}, not on {place}", hint)
