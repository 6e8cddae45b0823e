"""The verbs of opdcl. The command line calls these functions, so both do the same.

    import opdcl

    opdcl.finetune("rows.jsonl", out="runs/mine", epochs=3)
    opdcl.recover("runs/mine", steps=60)
    opdcl.evaluate("runs/mine", domain=["questions.jsonl"])  # a notebook shows verdict and scores

`run`, `finetune`, `recover` and `evaluate` resume where an earlier call stopped, and all take `Options`.
Every verb raises `opdcl.errors.OpdclError`, whose `hint` names the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from opdcl import parallel
from opdcl.config.load import FILE_ENDINGS, load, load_tree
from opdcl.console import Output, quiet_libraries
from opdcl.deploy.export import export as export_model
from opdcl.deploy.push import push as push_adapter
from opdcl.errors import UsageError
from opdcl.outcomes import Comparison, Outcome, Plan, Result, Verification
from opdcl.pipeline.execute import execute
from opdcl.pipeline.fetch import fetch as fetch_all
from opdcl.pipeline.sweep import describe_all, execute_all, expand
from opdcl.results.compare import compare as compare_runs
from opdcl.results.compare import refuse_folder, write
from opdcl.results.report import write as write_report
from opdcl.results.summary import summarise
from opdcl.results.tables import Table
from opdcl.rundir.files import read_json
from opdcl.rundir.layout import RunDir, open_run
from opdcl.rundir.verify import verify as verify_run

PathLike = str | Path

Settings = Mapping[str, Any] | Sequence[str] | None


class Options(TypedDict, total=False):
    """What `run`, `finetune`, `recover` and `evaluate` have in common."""

    settings: Settings
    """By the keys of `opdcl config schema`: a mapping, or "KEY=VALUE" strings. Arguments take precedence."""
    dry_run: bool
    """Return the plan of the run, and write nothing."""
    force: bool
    """Repeat stages whose settings or data have changed, instead of refusing to start."""
    quiet: bool
    """Print errors only. Otherwise progress goes to stderr."""


# Argument of a verb -> the setting that it stands for.
ARGUMENTS = {
    "data": "finetune.data",
    "deterministic": "model.deterministic",
    "domain": "{stage}.domain",
    "epochs": "finetune.epochs",
    "learning_rate": "{stage}.learning_rate",
    "limit": "eval.limit",
    "model": "model.id",
    "prompts": "recover.general",
    "retention": "eval.retention",
    "seed": "{stage}.seed",
    "steps": "recover.steps",
}


def run(
    workflow: PathLike | Sequence[PathLike],
    out: PathLike | None = None,
    model: PathLike | None = None,
    deterministic: bool = False,
    **options: Unpack[Options],
) -> Result | Comparison | Plan:
    """Run a workflow: fine-tune, recover, evaluate, report.

    Args:
        workflow: The name of a recipe, or YAML files, merged left to right.
        out: Run directory. Default: `runs/NAME`, with the workflow's name.
        model: Base model: `smollm2-135m` (embedded), a Hub id, or a path.
        deterministic: Use only kernels that repeat bit for bit.

    Returns: The run's results; the comparison of all runs if the workflow has arms or seeds.
    Example: opdcl.run("quickstart", out="runs/quickstart", settings={"recover.steps": 60})
    """
    named = {"model": model, "deterministic": deterministic or None}
    return _execute("model", named, out, _strings(workflow), **options)


def finetune(
    data: PathLike,
    out: PathLike = "runs/finetune",
    model: PathLike | None = None,
    epochs: float | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    **options: Unpack[Options],
) -> Result | Plan:
    """Learn a domain: train a LoRA adapter on rows.

    Args:
        data: Rows to learn from: `handbook` (shipped), a file, a folder, or a Hub id.
        out: Run directory.
        model: Base model: `smollm2-135m` (embedded), a Hub id, or a path.
        epochs: Passes over the data.
        learning_rate: Peak learning rate.
        seed: Seed of the fine-tune.

    Returns: The run's results; they hold no scores before `evaluate`.
    Example: opdcl.finetune("rows.jsonl", out="runs/mine", epochs=3)
    """
    named = {"data": data, "model": model, "epochs": epochs, "learning_rate": learning_rate, "seed": seed}
    return _execute("finetune", named, out, [], **options)


def recover(
    path: PathLike,
    prompts: PathLike | None = None,
    domain: PathLike | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    **options: Unpack[Options],
) -> Result | Plan:
    """Recover what a fine-tune forgot, by distillation from the original model.

    Args:
        path: Run directory with a fine-tuned adapter.
        prompts: General prompts: `everyday` (shipped) or a file.
        domain: Domain prompts. Default: the data of the fine-tune.
        steps: Optimizer steps.
        learning_rate: Peak learning rate.
        seed: Seed of the recovery.

    Example: opdcl.recover("runs/mine", prompts="prompts.jsonl", steps=60)
    """
    named: dict[str, Any] = {"prompts": prompts, "domain": domain, "steps": steps}
    named |= {"learning_rate": learning_rate, "seed": seed}
    return _execute("recover", named, path, **options)


def evaluate(
    path: PathLike,
    retention: str | Sequence[str] = (),
    domain: PathLike | Sequence[PathLike] = (),
    data: Mapping[str, PathLike] | None = None,
    limit: int | None = None,
    **options: Unpack[Options],
) -> Result | Plan:
    """Score base, tuned and recovered on the same prompts, and write the report.

    Args:
        path: Run directory.
        retention: Suites that measure forgetting.
        domain: Suites that measure the domain, or files of questions and answers.
        data: Suite -> local file to read instead of downloading the suite's data.
        limit: Evaluate only the first N documents of each suite.

    Returns: The run's results: verdict, scores, R and D with intervals.
    Example: opdcl.evaluate("runs/mine", retention=["instructions"], domain=["test-rows.jsonl"])
    """
    names = {suite: Path(suite).stem if _is_question_file(suite) else suite for suite in _strings(domain)}
    files = {name: suite for suite, name in names.items() if name != suite}
    suites = [names[suite] for suite in _strings(domain)]
    named: dict[str, Any] = {"retention": _strings(retention) or None, "domain": suites or None}
    named |= {"limit": limit}
    named |= {f"eval.data.{name}": Path(file).resolve() for name, file in {**(data or {}), **files}.items()}
    return _execute("eval", named, path, **options)


def report(path: PathLike, update: bool = False, quiet: bool = False) -> Result:
    """Return the results of the run in `path`; nothing is run or measured.

    `update` also writes report.md, report.html and the model card again, and names them unless `quiet`.

    Example: opdcl.report("runs/mine").summary["status"]
    """
    directory = open_run(Path(path))
    summary = summarise(directory)
    for file in write_report(directory, summary) if update else ():
        _output(quiet).note(f"wrote {file}")
    return Result(directory.path, summary)


def compare(
    paths: PathLike | Sequence[PathLike], out: PathLike | None = None, quiet: bool = False
) -> Comparison:
    """Compare runs: scores, R and D with intervals, and the settings that differ.

    Runs that differ only in their seeds are pooled. `out` is a folder for compare.md, compare.html and
    compare.json, whose paths are printed unless `quiet`.

    Example: opdcl.compare(["runs/mine", "runs/other"], out="comparison").data["arms"]
    """
    if out:
        refuse_folder(Path(out))
    data = compare_runs([open_run(Path(path)) for path in _strings(paths)])
    for file in write(data, Path(out)) if out else ():
        _output(quiet).note(f"wrote {file}")
    return Comparison(data, Path(out) if out else None)


def verify(path: PathLike) -> Verification:
    """Compare the hashes of a run's files with those it recorded.

    Example: assert not opdcl.verify("runs/mine").failed
    """
    return Verification(verify_run(open_run(Path(path))))


def fetch(
    workflow: PathLike | Sequence[PathLike],
    model: PathLike | None = None,
    settings: Settings = None,
    dry_run: bool = False,
    quiet: bool = False,
) -> Outcome:
    """Download what a workflow needs from the Hub into the local cache; it then runs offline.

    Takes a recipe or YAML files; `model` and `settings` replace theirs. `dry_run` only lists names and sizes.

    Example: opdcl.fetch("quickstart")
    """
    flow, _ = load(_strings(workflow), *_settings(settings, "model", {"model": model}))
    with quiet_libraries():
        items = fetch_all(flow, dry_run, _output(quiet).note)
    table = Table("", ["what", "which", "commit", "size", ""], [item.row() for item in items], "")
    return Outcome("", [table], [vars(item) for item in items])


def chat(source: PathLike, prompts: str | Iterable[str], max_new_tokens: int = 200) -> Iterator[Outcome]:
    """Yield, prompt by prompt, the greedy answers of base, tuned and recovered.

    Args:
        source: A run directory, an adapter's folder, or an adapter's Hub id.
        prompts: One prompt or several; an iterator is read one prompt at a time.
        max_new_tokens: Longest answer, in tokens.

    Example:
        for answers in opdcl.chat("runs/mine", "Who signs the form?"):
            print(answers.data["answers"]["recovered"])
    """
    from opdcl.deploy.chat import answers

    turns = answers(str(source), [prompts] if isinstance(prompts, str) else prompts, max_new_tokens)
    while True:
        with quiet_libraries():
            turn = next(turns, None)
        if turn is None:
            return
        prompt, by_state = turn
        table = Table(prompt, ["state", "answer"], [[*pair] for pair in by_state.items()], "")
        yield Outcome(prompt, [table], {"prompt": prompt, "answers": by_state})


def export(
    source: PathLike,
    out: PathLike,
    state: str | None = None,
    format: str = "merged",
    outtype: str = "f16",
    converter: str | None = None,
    check: bool = True,
    quiet: bool = False,
) -> Outcome:
    """Write a run's adapter, or base and adapter as one model, for other programs to load.

    Args:
        source: A run directory, an adapter's folder, or an adapter's Hub id.
        out: Folder to write; it must not exist.
        state: `tuned` or `recovered`. Default: the last one that the run has.
        format: `merged` (safetensors), `adapter`, or `gguf` (llama.cpp, Ollama).
        outtype: Number format of a GGUF file: f32, f16, bf16 or q8_0.
        converter: Path of llama.cpp's convert_hf_to_gguf.py. Default: `$LLAMA_CPP`, or the search path.
        check: Load a GGUF file back and compare its probabilities with those of the merged model.
        quiet: Print errors only.

    Example: opdcl.export("runs/mine", "my-model")
    """
    with quiet_libraries(), _output(quiet).stage("export") as line:
        written = export_model(str(source), state, Path(out), format, outtype, converter, check, line)
    return Outcome(f"{written['state']} written to {out}", [], written)


def push(
    path: PathLike, repository: str, state: str | None = None, private: bool = False, base: str | None = None
) -> Outcome:
    """Upload a run's adapter to the Hub, with its results on the model card. Needs HF_TOKEN.

    Args:
        path: Run directory.
        repository: `owner/name`; it is created if it does not exist.
        state: `tuned` or `recovered`. Default: the last one that the run has.
        private: Create the repository as a private one.
        base: The base model's Hub id, needed if the run used a local folder.

    Example: opdcl.push("runs/mine", "me/my-adapter").data["url"]
    """
    with quiet_libraries():
        upload = push_adapter(open_run(Path(path)), state, repository, private, base)
    return Outcome(f"{upload['state']} is at {upload['url']}, commit {upload['commit']}", [], upload)


def _settings(
    settings: Settings, stage: str, arguments: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Return `KEY=VALUE` overrides and a mapping of settings, in which arguments take precedence."""
    overrides, flags = ([], dict(settings)) if isinstance(settings, Mapping) else ([*(settings or ())], {})
    for name, value in arguments.items():
        if value is not None:
            key = ARGUMENTS.get(name, name).format(stage=stage)
            flags[key] = str(value) if isinstance(value, Path) else value
    return overrides, flags


def _is_question_file(suite: str) -> bool:
    path = Path(suite)
    if path.suffix in FILE_ENDINGS and not path.is_file():
        hint = "give a file of questions and answers, or the name of a suite"
        raise UsageError(f"domain questions {suite!r} do not exist", hint)
    return bool(path.suffix) and path.is_file()


def _strings(value: PathLike | Sequence[PathLike]) -> list[str]:
    return [str(value)] if isinstance(value, str | Path) else [str(one) for one in value]


def _execute(
    stage: str,
    arguments: Mapping[str, Any],
    out: PathLike | None,
    sources: list[str] | None = None,
    settings: Settings = None,
    dry_run: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> Any:
    """Run a workflow from its sources or, without them, that of an existing run with one more stage."""
    overrides = _settings(settings, stage, arguments)
    if sources is None:
        saved = read_json(open_run(Path(out)).config)
        flow, origins = load_tree(saved["workflow"], saved["origins"], *overrides, stage)
    else:
        flow, origins = load(sources, *overrides)
    path = Path(out or Path("runs") / flow.name)
    sweep = bool(sources) and bool(flow.arms or flow.seeds)
    if dry_run:
        from opdcl.pipeline.dry_run import data_table, describe

        title = f"dry run: {path}"
        if sweep:
            rows, plans = describe_all(flow, path, origins, force)
            return Plan(title, [Table(title, ["run", "stage", "action", "why"], rows, "")], plans)
        with quiet_libraries():
            rows, plan = describe(flow, RunDir(path), origins=origins, force=force)
        table = Table(title, ["stage", "action", "why"], rows, "")
        return Plan(title, [table, *data_table(plan)], plan, [*plan["notes"], plan["seconds_from"]])
    parallel.join()
    if sweep:
        data = execute_all(flow, origins, path, _output(quiet), force)
        # One arm with one seed has nothing to be compared with.
        return Comparison(data, path) if data else report(path / next(iter(expand(flow, path))))
    return Result(path, execute(flow, origins, RunDir(path), _output(quiet), force))


def _output(quiet: bool) -> Output:
    return Output("quiet" if quiet else "human")
