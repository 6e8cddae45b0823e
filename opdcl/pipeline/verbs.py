"""What `run`, `finetune`, `recover` and `evaluate` share: settle what to do, then do it or describe it.

A recovery and an evaluation continue a run, or begin one from an adapter or a model tuned elsewhere:

opdcl recover my-adapter --domain prompts.jsonl -o runs/mine
opdcl recover my-model --base its-base --domain prompts.jsonl -o runs/mine
opdcl eval my-model -o runs/mine  # the scores of this model alone
opdcl recover runs/mine --steps 60 -o runs/mine-60
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from opdcl import launcher, parallel
from opdcl.arguments import PathLike, Settings, as_folder, as_settings, strings
from opdcl.config.load import load, load_tree, with_setting
from opdcl.config.model import ModelConfig
from opdcl.config.workflow import Workflow
from opdcl.console import Output, quiet_libraries
from opdcl.data.rows import load_records, records_in
from opdcl.data.split import split_rows
from opdcl.errors import UsageError, typed
from opdcl.hub import HUB_IDS
from opdcl.model import consent
from opdcl.model.adapters import base_of, find_adapter, template_beside, tuned_model
from opdcl.model.load import check_exists
from opdcl.outcomes import Comparison, Plan, Result
from opdcl.pipeline.execute import execute
from opdcl.pipeline.job import Inputs, Job, Order
from opdcl.pipeline.sweep import describe_all, execute_all, expand
from opdcl.pipeline.tasks import offered
from opdcl.results.format import Table
from opdcl.results.origins import LEARNED, SET_ASIDE, SPLIT, sets_asked
from opdcl.results.status import STATES
from opdcl.rundir.files import cache_home
from opdcl.rundir.hashes import SEAL
from opdcl.rundir.layout import RunDir, read_config, refuse_foreign


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
    flow, inputs = _with_rows(flow, folder, rows, output)
    return _carry_out(flow, origins, folder, inputs, output, Order("run", None, **how))


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
    flow, inputs = _with_rows(flow, folder, rows, output)
    return _carry_out(flow, origins, folder, inputs, output, Order(stage, donor, **how))


def open_or_begin(
    source: str, out: Path | None, base: str | None, next_stage: str = "recover"
) -> tuple[Path, dict[str, Any]]:
    """Return the run directory of `source`, a run, an adapter or a model, and its settings so far.

    `out` is the run directory for an adapter, a model or a second recovery of a fine-tune; a run that is
    there continues. `base` replaces the base that the adapter names. A model names none: without `base` it is
    measured alone, if `next_stage` is `eval`. Nothing is written.

    Raises:
        UsageError: `source` is none of these, or its base was not found.
    """
    run = RunDir(Path(source))
    if donor := run_beside(source, out):
        if "tuned" not in donor.intact_adapters():
            hint = typed("opdcl", "run", donor.workflow, "-o", source)
            raise UsageError(f"{source} has no fine-tuned adapter", hint)
        second = RunDir(out)
        return second.path, read_config((second if second.is_run() else donor).config)
    if run.is_run():
        return run.path, read_config(run.config)
    if stage := run.last_stage():
        hint = f"its adapter can begin another run: name {stage.adapter}"
        raise UsageError(f"{source} is a run directory that has lost its config.json", hint)
    tuned = tuned_model(source, ModelConfig())
    place = str(Path(source).resolve()) if os.path.exists(source) else source
    run = RunDir(out or Path("runs") / Path(place.partition("@")[0]).name)
    saved = read_config(run.config) if run.is_run() else {"workflow": {}, "origins": {}}
    is_whole = tuned or source in HUB_IDS or (source.endswith(".gguf") and os.path.isfile(source))
    if is_whole and next_stage == "eval" and not base and not saved["workflow"].get("start"):
        return run.path, _alone(saved, tuned, place)
    if is_whole and not tuned:
        hint = "a tuned model is a folder with safetensors, or a Hub id; opdcl eval MODEL measures one alone"
        raise UsageError(f"{source} cannot be compared with a base", hint)
    folder = Path() if tuned else find_adapter(source)
    if run.is_run():
        if tuned and not saved["workflow"].get("start"):
            hint = "choose another directory with -o"
            raise UsageError(f"{run.path} is a run without a tuned model, and can have none later", hint)
        return run.path, {**saved, "workflow": saved["workflow"] | {"start": place}}
    tree: dict[str, Any] = {"start": place}
    origins = {"start": "argument"}
    if tuned and not base:
        hint = "--base BASE names the model that it was fine-tuned from"
        raise UsageError(f"{source} is a whole model, which does not name its base", hint)
    if not base:
        tree["model"] = _base(source, folder)
        origins["model.id"] = f"{source}/adapter_config.json"
    elif not tuned and (template := template_beside(folder, ModelConfig(id=base))):
        tree["model"] = {"chat_template": template}
        origins["model.chat_template"] = source
    return run.path, {"workflow": tree, "origins": origins}


def _alone(saved: dict[str, Any], found: ModelConfig | None, place: str) -> dict[str, Any]:
    """Return the settings of a run whose base is the model that was named, which is measured alone."""
    model = {"id": place}
    if found and found.revision:
        model = {"id": found.id, "revision": found.revision}
    workflow = saved["workflow"]
    origins = saved["origins"] | {"model.id": "argument"}
    return {**saved, "workflow": workflow | {"model": workflow.get("model", {}) | model}, "origins": origins}


def run_beside(source: str, out: Path | None) -> RunDir | None:
    """Return the run whose fine-tune is recovered again, in `out`; None if `source` is no other run."""
    run = RunDir(Path(source))
    is_elsewhere = out is not None and out.resolve() != run.path.resolve()
    return run if is_elsewhere and run.is_run() else None


def _base(source: str, folder: Path) -> dict[str, Any]:
    """Return the settings of the base that an adapter names, if it can be had."""
    base = base_of(source, folder)
    try:
        check_exists(base)
    except UsageError as fault:
        hint = "--base BASE names the folder or Hub id of the model that the adapter was trained on"
        raise UsageError(f"the base of adapter {source} was not found: {fault.message}", hint) from fault
    id = str(Path(base.id).resolve()) if os.path.exists(base.id) else base.id
    template = {"chat_template": base.chat_template} if base.chat_template else {}
    return {"id": id, "revision": base.revision, **template}


def _with_rows(
    flow: Workflow, folder: Path, rows: Mapping[str, str], output: Output
) -> tuple[Workflow, Inputs]:
    """Return a workflow that names files of a run in place of rows in memory, and the inputs that hold those.

    `rows` are text by the key of their setting.
    """
    given = dict[str, str]()
    for key, text in rows.items():
        file = str((folder / "data" / f"{key}.jsonl").resolve())
        given[file] = text
        if key != SET_ASIDE:
            flow = with_setting(flow, key, file)
    return flow, Inputs(given, output.note)


def _carry_out(
    flow: Workflow, origins: dict[str, str], folder: Path, inputs: Inputs, output: Output, order: Order
) -> Result | Comparison | Plan:
    """Run a workflow in a folder, or describe what it would do; its settings are final."""
    run = RunDir(folder)
    for model in flow.models():
        if model.id in HUB_IDS and not (cache_home() / "models" / model.id / SEAL).exists():
            output.note("unpacking the embedded model, once")
    several, title = bool(flow.arms or flow.seeds), f"dry run: {folder}"
    if several and order.dry_run:
        with output.busy("checking model and data"), quiet_libraries():
            lines, plans = describe_all(flow, origins, folder, inputs, order, output.note)
        return Plan(title, [Table(title, ["run", "stage", "action", "why"], lines, "")], plans)
    if several:
        launcher.start_workers()
        parallel.join()
        if comparison := execute_all(flow, origins, folder, inputs, output, order):
            return Comparison(comparison, folder)
        # One arm with one seed has nothing to be compared with.
        from opdcl.results.summary import Results

        only = folder / next(iter(expand(flow, folder)))
        return Result(only, Results(RunDir(only)).summary)
    # What is wrong here is found before the libraries are imported.
    refuse_foreign(run)
    inputs.read(flow)
    if not order.dry_run:
        launcher.start_workers()
        parallel.join()
        job = Job(flow, run, inputs, origins, order)
        return Result(folder, execute(job, output))
    from opdcl.pipeline.dry_run import data_table, describe

    with output.busy("checking model and data"), quiet_libraries():
        job = Job(flow, run, inputs, origins, order)
        lines, plan = describe(job, offered([order.continued] if order.continued else []))
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
