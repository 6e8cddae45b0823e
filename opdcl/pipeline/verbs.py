"""What `run`, `finetune`, `recover` and `evaluate` share: settle what to do, then do it or describe it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from opdcl import launcher, parallel
from opdcl.arguments import PathLike, Settings, as_folder, as_settings, strings
from opdcl.config.load import load, load_tree, with_setting
from opdcl.config.workflow import Workflow
from opdcl.console import Output, quiet_libraries
from opdcl.data.rows import load_records, records_in
from opdcl.data.split import split_rows
from opdcl.errors import UsageError, typed
from opdcl.hub import HUB_IDS
from opdcl.model import consent
from opdcl.outcomes import Comparison, Plan, Result
from opdcl.pipeline.execute import execute
from opdcl.pipeline.inputs import Inputs
from opdcl.pipeline.job import Job
from opdcl.pipeline.open import open_or_begin, run_beside
from opdcl.pipeline.reuse import offered
from opdcl.pipeline.sweep import describe_all, execute_all, expand
from opdcl.results.format import Table
from opdcl.results.origins import LEARNED, SET_ASIDE, SPLIT, sets_asked
from opdcl.results.status import STATES
from opdcl.rundir.files import cache_home
from opdcl.rundir.hashes import SEAL
from opdcl.rundir.layout import RunDir
from opdcl.rundir.lock import refuse_foreign


def run_files(
    files: PathLike | Sequence[PathLike],
    out: PathLike | None,
    chosen: Mapping[str, Any],
    settings: Settings = None,
    quiet: bool = False,
    test_share: float | None = None,
    **how: bool,
) -> Result | Comparison | Plan:
    """Run the workflow of some files, or of none; `chosen` are settings by key; `how` is as in `Options`.

    `test_share` is the share of the fine-tune's rows that is set aside for a test, in the run's folder.
    """
    overrides, flags, rows = as_settings(settings, chosen)
    output = Output("quiet" if quiet else "human")
    flow, origins = load(strings(files), overrides, flags, consent.is_stored_file, output.note)
    consent.refuse_consent_of_files(flow, origins)
    folder = as_folder(out or Path("runs") / flow.name)
    if test_share:
        if LEARNED in rows:
            records = records_in(rows[LEARNED], LEARNED)
        else:
            records, origins[LEARNED] = load_records(flow.finetune.data), f"{SPLIT}{flow.finetune.data}"
        rows[LEARNED], rows[SET_ASIDE], note = split_rows(records, flow.columns, test_share)
        if not rows[SET_ASIDE]:
            hint = "leave it out; afterwards, test rows of your own: opdcl eval RUN --domain TEST.jsonl"
            raise UsageError(f"--test-share {test_share:g} of {note}", hint)
        output.note(f"{folder}/data/{SET_ASIDE}.jsonl: {note}")
    return _carry_out(flow, origins, folder, rows, None, output, "run", **how)


def add_stage(
    stage: Literal["recover", "eval"],
    source: PathLike,
    out: PathLike | None,
    chosen: Mapping[str, Any],
    settings: Settings = None,
    quiet: bool = False,
    **how: bool,
) -> Result | Comparison | Plan:
    """Run the workflow of a run or an adapter, `source`, with one more stage: `recover` or `eval`."""
    overrides, flags, rows = as_settings(settings, chosen)
    place = as_folder(out) if out else None
    donor = run_beside(str(source), place)
    if donor and stage != "recover":
        raise UsageError(f"{source} is a run directory: what is measured stays in it", "leave out -o")
    output = Output("quiet" if quiet else "human")
    with output.busy(f"reading {source}"):  # to find an adapter's base loads large libraries
        folder, saved = open_or_begin(str(source), place, flags.get("model.id"), stage)
    run = RunDir(folder)
    if not how.get("force"):
        _refuse_another_file(run, saved["workflow"], flags)
    names_domain = "eval.domain" in flags or any(text.startswith("eval.domain=") for text in overrides)
    asks_already = names_domain or (saved["workflow"].get("eval") or {}).get("domain")
    asked = sets_asked(run) if stage == "eval" and not asks_already else {}
    for name, file in asked.items():
        output.note(f"domain: {file}, the rows that the fine-tune has set aside")
        flags |= {"eval.domain": [*asked], f"eval.data.{name}": str(file)}
    stored = consent.without_consent(saved, folder)
    flow, origins = load_tree(*stored, overrides, flags, stage, output.note)
    consent.refuse_stored_consent(saved["workflow"], flow, folder)
    for begun in run.stages() if stage == "eval" else ():
        if not begun.is_done():
            again = ("run", run.workflow, "-o", folder) if begun.name == "finetune" else ("recover", folder)
            output.note(f"{begun.name} unfinished ({begun.progress()}): {typed('opdcl', *again)}")
    return _carry_out(flow, origins, folder, rows, donor, output, stage, **how)


def _carry_out(
    flow: Workflow,
    origins: dict[str, str],
    folder: Path,
    rows: Mapping[str, str],
    donor: RunDir | None,
    output: Output,
    verb: Literal["run", "recover", "eval"],
    dry_run: bool = False,
    force: bool = False,
) -> Result | Comparison | Plan:
    """Run a workflow in a folder, or describe what it would do; its settings are final.

    `rows` has the rows in memory by their setting, as text. What `donor` has finished with the same settings
    is taken from it, the fine-tune always.
    """
    given = dict[str, str]()
    for key, text in rows.items():
        file = str((folder / "data" / f"{key}.jsonl").resolve())
        given[file] = text
        if key != SET_ASIDE:
            flow = with_setting(flow, key, file)
    inputs, run = Inputs(given, output.note), RunDir(folder)
    for model in flow.models():
        if model.id in HUB_IDS and not (cache_home() / "models" / model.id / SEAL).exists():
            output.note("unpacking the embedded model, once")
    several, title = bool(flow.arms or flow.seeds), f"dry run: {folder}"
    if several and dry_run:
        with output.busy("checking model and data"), quiet_libraries():
            lines, plans = describe_all(flow, origins, folder, inputs, force, output.note)
        return Plan(title, [Table(title, ["run", "stage", "action", "why"], lines, "")], plans)
    if several:
        launcher.start_workers()
        parallel.join()
        if comparison := execute_all(flow, origins, folder, inputs, output, force):
            return Comparison(comparison, folder)
        # One arm with one seed has nothing to be compared with.
        from opdcl.results.summary import Results

        only = folder / next(iter(expand(flow, folder)))
        return Result(only, Results(RunDir(only)).summary)
    # What is wrong here is found before the libraries are imported.
    refuse_foreign(run)
    inputs.read(flow)
    if not dry_run:
        launcher.start_workers()
        parallel.join()
        job = Job(flow, run, inputs, origins, verb)
        return Result(folder, execute(job, output, force, continued=donor))
    from opdcl.pipeline.dry_run import data_table, describe

    with output.busy("checking model and data"), quiet_libraries():
        job = Job(flow, run, inputs, origins, verb)
        lines, plan = describe(job, force, offered([donor] if donor else []), donor)
    tables = [Table(title, ["stage", "action", "why"], lines, ""), *data_table(plan)]
    return Plan(title, tables, plan, plan["notes"])


def _refuse_another_file(run: RunDir, settings: dict[str, Any], flags: dict[str, Any]) -> None:
    """Refuse a file that is named like a suite measured on another one: the results would be lost."""
    for name, known in ((settings.get("eval") or {}).get("data") or {}).items():
        place = flags.get(f"eval.data.{name}", known)
        # A user who gives a suite other data by name means it.
        is_another = place != known and Path(place).name.startswith(f"{name}.")
        if is_another and any(run.eval_result(state, name).exists() for state in STATES):
            other = typed("--domain", "NAME", "--data", f"NAME={place}")
            hint = f"{other} gives it another name; --force replaces the results"
            raise UsageError(f"this run has measured the suite {name!r} on {known}, not on {place}", hint)
