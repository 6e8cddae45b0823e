"""The verbs of opdcl. The command line calls these functions, so both do the same.

    import opdcl

    opdcl.finetune("rows.jsonl", out="runs/mine", epochs=3)
    opdcl.recover("runs/mine", steps=60)
    opdcl.evaluate("runs/mine", domain=["questions.jsonl"])     # in a notebook: the verdict and a table of scores

The first four verbs resume where an earlier call stopped. They share these arguments:

    settings: Further settings by the keys of `opdcl config schema`, as a mapping or as "KEY=VALUE" strings. An argument
        with a name of its own, such as `steps`, takes precedence.
    dry_run: Return the plan of the run, and write nothing.
    force: Repeat stages whose settings or data have changed, instead of refusing them.
    quiet: Print errors only; otherwise progress goes to stderr.

Every verb raises `opdcl.errors.OpdclError`, whose `hint` names the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from opdcl import parallel
from opdcl.config.load import FILE_ENDINGS, load, load_tree
from opdcl.config.workflow import Workflow
from opdcl.console import Output, quiet_libraries
from opdcl.errors import UsageError
from opdcl.results.compare import refuse_folder, view, write
from opdcl.results.scores import STATES
from opdcl.results.summary import summarise, table_rows
from opdcl.results.tables import Table
from opdcl.rundir.files import read_json
from opdcl.rundir.layout import RunDir
from opdcl.sanitize import harmless

PathLike = str | Path

Settings = Mapping[str, Any] | Sequence[str]

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


class Outcome:
    """What a verb returns: a sentence, tables, notes, and the same as plain data. A notebook shows it as a page."""

    def __init__(self, sentence: str, tables: Sequence[Table], data: Any, notes: Sequence[str] = ()):
        self.sentence, self.tables, self.data, self.notes = sentence, tables, data, notes

    def __repr__(self) -> str:
        return f"<opdcl: {self.sentence}>"

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            texts = (escape(harmless(cell)).replace("\n", "<br>") for cell in cells)
            return f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"

        page = f"<p><strong>{escape(harmless(self.sentence))}</strong></p>"
        for table in self.tables:
            body = "".join(row(cells, "td") for cells in table.rows)
            page += f"<table><thead>{row(table.columns, 'th')}</thead><tbody>{body}</tbody></table>"
        return page


class Plan(Outcome):
    """What a run would do; `data` has the keys of `--dry-run --json`."""


class Result(Outcome):
    """The results of a run so far; `summary` has the keys of `opdcl report RUN --json`, `path` is the run directory."""

    def __init__(self, path: Path, summary: dict[str, Any]):
        self.path, self.summary = path, summary
        rows = table_rows(summary)
        tables = [Table("", ["suite", "n", "floor", *STATES], rows, "")] if rows else []
        super().__init__(summary["verdict"], tables, summary, [f"report: {self.report}"])

    @property
    def report(self) -> Path:
        """The path of report.html."""
        return RunDir(self.path).reports[1]

    @property
    def adapters(self) -> dict[str, Path]:
        """The adapters' folders by state: `tuned`, `recovered`."""
        return RunDir(self.path).adapters()


class Comparison(Outcome):
    """Several runs side by side; `data` has the keys of `compare.json`, `path` is the folder that holds it, if any."""

    def __init__(self, data: dict[str, Any], path: Path | None = None):
        self.path = path
        lead, (scores, *others) = view(data)[:2]
        # A status takes several lines, so that the table fits a terminal of 80 columns.
        names = scores.columns
        rows = [
            [c.replace(" ", "\n") if name == "status" else c for name, c in zip(names, row, strict=True)]
            for row in scores.rows
        ]
        notes = [f"note: {note}" for note in data["notes"]]
        super().__init__(lead, [scores._replace(title=lead, rows=rows), *others], data, notes)


class Verification(Outcome):
    """The checks of a run's files; `failed` names those that do not hold."""

    def __init__(self, findings: Sequence[Any]):
        self.failed = [f.what for f in findings if not f.ok]
        rows = [[f.what, "ok" if f.ok else "BAD", f.finding] for f in findings]
        bad, total = len(self.failed), len(findings)
        sentence = f"{bad} of {total} checks failed" if bad else f"all {total} checks hold"
        super().__init__(
            sentence, [Table("", ["what", "", "finding"], rows, "")], [vars(f) for f in findings]
        )


def run(
    workflow: PathLike | Sequence[PathLike],
    out: PathLike | None = None,
    model: PathLike | None = None,
    deterministic: bool = False,
    settings: Settings = (),
    dry_run: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> Result | Comparison | Plan:
    """Run a workflow: fine-tune, recover, evaluate, report.

    Args:
        workflow: The name of a recipe, or YAML files, merged left to right.
        out: Run directory. Default: `runs/NAME`, with the workflow's name.
        model: Base model: `smollm2-135m` (embedded), a Hub id, or a path.
        deterministic: Use only kernels that repeat bit for bit.
        settings, dry_run, force, quiet: See `help(opdcl.api)`.

    Returns:
        The run's results; the comparison of all runs if the workflow has arms or seeds.

    Example:
        opdcl.run("quickstart", out="runs/quickstart", settings={"recover.steps": 60})
    """
    overrides, flags = _settings(settings, "model", model=model, deterministic=deterministic or None)
    flow, origins = load([str(file) for file in _as_list(workflow)], overrides, flags)
    path = Path(out) if out else Path("runs") / flow.name
    if flow.arms or flow.seeds:
        return _execute_all(flow, origins, path, dry_run, force, quiet)
    return _execute(flow, origins, path, dry_run, force, quiet)


def finetune(
    data: PathLike,
    out: PathLike = "runs/finetune",
    model: PathLike | None = None,
    epochs: float | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    settings: Settings = (),
    dry_run: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> Result | Plan:
    """Learn a domain: train a LoRA adapter on rows.

    Args:
        data: Rows to learn from: `handbook` (shipped), a file, a folder, or a Hub id.
        out: Run directory.
        model: Base model: `smollm2-135m` (embedded), a Hub id, or a path.
        epochs: Passes over the data.
        learning_rate: Peak learning rate.
        seed: Seed of the fine-tune.
        settings, dry_run, force, quiet: See `help(opdcl.api)`.

    Returns:
        The run's results, which hold no scores before `evaluate`.

    Example:
        opdcl.finetune("rows.jsonl", out="runs/mine", epochs=3)
    """
    named = {"data": data, "model": model, "epochs": epochs, "learning_rate": learning_rate, "seed": seed}
    flow, origins = load([], *_settings(settings, "finetune", **named))
    return _execute(flow, origins, Path(out), dry_run, force, quiet)


def recover(
    path: PathLike,
    prompts: PathLike | None = None,
    domain: PathLike | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    settings: Settings = (),
    dry_run: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> Result | Plan:
    """Recover what a fine-tune forgot, by on-policy distillation from the original model.

    Args:
        path: Run directory with a fine-tuned adapter.
        prompts: General prompts: `everyday` (shipped) or a file.
        domain: Domain prompts. Default: the data of the fine-tune.
        steps: Optimizer steps.
        learning_rate: Peak learning rate.
        seed: Seed of the recovery.
        settings, dry_run, force, quiet: See `help(opdcl.api)`.

    Returns:
        The run's results.

    Example:
        opdcl.recover("runs/mine", prompts="prompts.jsonl", steps=60)
    """
    named = {
        "prompts": prompts,
        "domain": domain,
        "steps": steps,
        "learning_rate": learning_rate,
        "seed": seed,
    }
    return _extend(Path(path), "recover", _settings(settings, "recover", **named), dry_run, force, quiet)


def evaluate(
    path: PathLike,
    retention: str | Sequence[str] = (),
    domain: PathLike | Sequence[PathLike] = (),
    data: Mapping[str, PathLike] | None = None,
    limit: int | None = None,
    settings: Settings = (),
    dry_run: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> Result | Plan:
    """Score base, tuned and recovered on the same prompts, and write the report.

    Args:
        path: Run directory.
        retention: Suites that measure forgetting.
        domain: Suites that measure the domain, or files of questions and answers.
        data: Suite -> local file to read instead of downloading the suite's data.
        limit: Evaluate only the first N documents of each suite.
        settings, dry_run, force, quiet: See `help(opdcl.api)`.

    Returns:
        The run's results: verdict, scores, R and D with intervals.

    Example:
        opdcl.evaluate("runs/mine", retention=["instructions"], domain=["test-rows.jsonl"])
    """
    suites, files = _split_files([str(suite) for suite in _as_list(domain)])
    lists = {"retention": [*_as_list(retention)] or None, "domain": suites or None}
    overrides, flags = _settings(settings, "eval", limit=limit, **lists)
    local = {name: Path(file).resolve() for name, file in (data or {}).items()} | files
    flags |= {f"eval.data.{name}": str(file) for name, file in local.items()}
    return _extend(Path(path), "eval", (overrides, flags), dry_run, force, quiet)


def report(path: PathLike, update: bool = False, quiet: bool = False) -> Result:
    """Return the results of a run; nothing is run or measured.

    Args:
        path: Run directory.
        update: Also write report.md, report.html and the model card again, as the command line does.
        quiet: Do not name the files that are written.

    Example:
        opdcl.report("runs/mine").summary["status"]
    """
    found = open_run(path)
    if update:
        from opdcl.results.report import write as write_report

        _note_files(write_report(found), quiet)
    return Result(found.path, summarise(found))


def compare(
    paths: PathLike | Sequence[PathLike], out: PathLike | None = None, quiet: bool = False
) -> Comparison:
    """Compare runs: scores, R and D with intervals, and the settings that differ.

    Args:
        paths: Run directories. Runs that differ only in their seeds are pooled.
        out: Folder for compare.md, compare.html and compare.json.
        quiet: Do not name the files that are written.

    Example:
        opdcl.compare(["runs/mine", "runs/other"], out="comparison").data["arms"]
    """
    from opdcl.results.compare import compare as compare_runs

    if out:
        refuse_folder(Path(out))
    data = compare_runs([open_run(path) for path in _as_list(paths)])
    if out:
        _note_files(write(data, Path(out)), quiet)
    return Comparison(data, Path(out) if out else None)


def verify(path: PathLike) -> Verification:
    """Hash a run's files again, and compare them with what was recorded.

    Example:
        assert not opdcl.verify("runs/mine").failed
    """
    from opdcl.rundir.verify import verify as verify_run

    return Verification(verify_run(open_run(path)))


def fetch(
    workflow: PathLike | Sequence[PathLike],
    model: PathLike | None = None,
    settings: Settings = (),
    dry_run: bool = False,
    quiet: bool = False,
) -> Outcome:
    """Download what a workflow needs from the Hub into the local cache; it then runs offline.

    Args:
        workflow: The name of a recipe, or YAML files, merged left to right.
        model: Base model instead of the workflow's.
        settings: See `help(opdcl.api)`.
        dry_run: Only list what is needed, with sizes.
        quiet: Print errors only.

    Example:
        opdcl.fetch("quickstart")
    """
    from opdcl.pipeline.fetch import fetch as fetch_all

    flow, _ = load([str(file) for file in _as_list(workflow)], *_settings(settings, "model", model=model))
    with quiet_libraries():
        items = fetch_all(flow, dry_run, _output(quiet).note)
    table = Table("", ["what", "which", "commit", "size", ""], [item.row() for item in items], "")
    return Outcome("", [table], [vars(item) for item in items])


def chat(source: PathLike, prompts: str | Iterable[str], max_new_tokens: int = 200) -> Iterator[Outcome]:
    """Yield, prompt by prompt, the greedy answers of base, tuned and recovered.

    Args:
        source: A run directory, an adapter's folder, or an adapter's Hub id.
        prompts: One prompt or several; they are read one at a time.
        max_new_tokens: Longest answer, in tokens.

    Example:
        for answers in opdcl.chat("runs/mine", "Who signs the form?"):
            print(answers.data["answers"]["recovered"])
    """
    from opdcl.deploy.chat import answers

    turns = answers(str(source), iter([prompts] if isinstance(prompts, str) else prompts), max_new_tokens)
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

    Example:
        opdcl.export("runs/mine", "my-model")
    """
    from opdcl.deploy.export import export as export_model

    with quiet_libraries(), _output(quiet).stage("export") as line:
        done = export_model(str(source), state, Path(out), format, outtype, converter, check, line)
    return Outcome(f"{done['state']} written to {out}", [], done)


def push(
    path: PathLike, repository: str, state: str | None = None, private: bool = False, base: str | None = None
) -> Outcome:
    """Upload a run's adapter to the Hugging Face Hub, with a model card that holds its results. Needs HF_TOKEN.

    Args:
        path: Run directory.
        repository: `owner/name`; it is created if it does not exist.
        state: `tuned` or `recovered`. Default: the last one that the run has.
        private: Create the repository as a private one.
        base: The base model's Hub id, needed if the run used a local folder.

    Example:
        opdcl.push("runs/mine", "me/my-adapter").data["url"]
    """
    from opdcl.deploy.push import push as push_adapter

    found = open_run(path)
    with quiet_libraries():
        done = push_adapter(found, state, repository, private, base)
    return Outcome(f"{done['state']} is at {done['url']}, commit {done['commit']}", [], done)


def open_run(path: PathLike) -> RunDir:
    """Return an existing run directory.

    Raises:
        UsageError: The path is not a run directory.
    """
    run = RunDir(Path(path))
    if not run.config.exists():
        raise UsageError(f"{path} is not a run directory", "opdcl finetune --data ROWS -o RUN makes one")
    return run


def _settings(settings: Settings, stage: str, **arguments: Any) -> tuple[list[str], dict[str, Any]]:
    """Return `KEY=VALUE` overrides and a mapping of settings, in which a verb's own arguments have precedence."""
    overrides, flags = ([], dict(settings)) if isinstance(settings, Mapping) else (list(settings), {})
    for name, value in arguments.items():
        if value is not None:
            key = ARGUMENTS[name].format(stage=stage)
            flags[key] = str(value) if isinstance(value, Path) else value
    return overrides, flags


def _split_files(domain: Sequence[str]) -> tuple[list[str], dict[str, Path]]:
    """Return the names of domain suites, and the file of each one that was given as a file of questions.

    Raises:
        UsageError: A name ends like a file, and there is no such file.
    """
    files = {Path(suite).stem: Path(suite).resolve() for suite in domain if _is_question_file(suite)}
    return [Path(suite).stem if _is_question_file(suite) else suite for suite in domain], files


def _is_question_file(suite: str) -> bool:
    path = Path(suite)
    if path.suffix in FILE_ENDINGS and not path.is_file():
        raise UsageError(
            f"domain questions {suite!r} do not exist", "name a file of questions and answers, or a suite"
        )
    return bool(path.suffix) and path.is_file()


def _as_list(value: PathLike | Sequence[PathLike]) -> list[PathLike]:
    return [value] if isinstance(value, str | Path) else list(value)


def _extend(
    path: Path,
    stage: str,
    settings: tuple[list[str], dict[str, Any]],
    dry_run: bool,
    force: bool,
    quiet: bool,
) -> Result | Plan:
    """Add a stage to the workflow that a run was made with, and execute it."""
    saved = read_json(open_run(path).config)
    flow, origins = load_tree(saved["workflow"], saved["origins"], *settings, stage)
    return _execute(flow, origins, path, dry_run, force, quiet)


def _execute(
    flow: Workflow, origins: dict[str, str], path: Path, dry_run: bool, force: bool, quiet: bool
) -> Result | Plan:
    if dry_run:
        from opdcl.pipeline.dry_run import describe

        return _plan(flow, path, ["stage", "action", "why"], *describe(flow, RunDir(path)))
    parallel.join()
    from opdcl.pipeline.execute import execute

    return Result(path, execute(flow, origins, RunDir(path), _output(quiet), force))


def _execute_all(
    flow: Workflow, origins: dict[str, str], path: Path, dry_run: bool, force: bool, quiet: bool
) -> Result | Comparison | Plan:
    from opdcl.pipeline.sweep import describe_all, execute_all, expand

    if dry_run:
        return _plan(flow, path, ["run", "stage", "action", "why"], *describe_all(flow, path))
    parallel.join()
    if data := execute_all(flow, origins, path, _output(quiet), force):
        return Comparison(data, path)
    (name,) = expand(flow, path)  # one arm with one seed: there is nothing to compare it with
    return report(path / name)


def _plan(flow: Workflow, path: Path, columns: list[str], rows: list[list[str]], data: Any) -> Plan:
    title = f"dry run of {flow.name} in {path}"
    return Plan(title, [Table(title, columns, rows, "")], data)


def _note_files(files: Iterable[Path], quiet: bool) -> None:
    for file in files:
        _output(quiet).note(f"wrote {file}")


def _output(quiet: bool) -> Output:
    return Output("quiet" if quiet else "human")
