"""The verbs of opdcl. The command line calls these functions, so both do the same.

    import opdcl

    opdcl.finetune("rows.jsonl", out="runs/mine", epochs=3)
    opdcl.recover("runs/mine", steps=60)
    opdcl.evaluate("runs/mine", domain=["questions.jsonl"])  # a notebook shows verdict and scores

`run`, `finetune`, `recover` and `evaluate` resume where an earlier call stopped, and all take `Options`.
In place of a file they take rows: a list of dicts, or a `datasets.Dataset`, which the run directory stores.
Every verb raises `opdcl.errors.OpdclError`, whose `hint` names the next step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from opdcl.arguments import Data, Options, PathLike, as_folder, question_suites, strings
from opdcl.console import Output, quiet_libraries
from opdcl.errors import UsageError, typed
from opdcl.faults import translate
from opdcl.outcomes import Comparison, Outcome, Plan, Result, Verification
from opdcl.results.format import Table
from opdcl.rundir.layout import RunDir, open_run

if TYPE_CHECKING:
    from opdcl.deploy.chat import Chat, ChatServer

# What takes time to import is imported by the verb that needs it.


def run(
    workflow: PathLike | Sequence[PathLike],
    out: PathLike | None = None,
    base: PathLike | None = None,
    deterministic: bool = False,
    **options: Unpack[Options],
) -> Result | Comparison | Plan:
    """Run a workflow: fine-tune, recover, evaluate, report.

    Args:
        workflow: Recipe or YAML files, merged left to right.
        out: Run directory. Default: runs/NAME.
        base: Base model: smollm2-135m (embedded, the default), a Hub id, or a path.
        deterministic: Use only kernels that repeat bit for bit.
        options: `settings`, `dry_run`, `force`, `quiet`; see `help(opdcl.api.Options)`.

    Returns: The run's results; the comparison of all runs if the workflow has arms or seeds.
    Raises: UsageError: a setting or the data is wrong, and nothing was written. GateError: a score missed
        its gate.
    Example: opdcl.run("quickstart", out="runs/quickstart", settings={"recover.steps": 60})
    """
    from opdcl.pipeline.verbs import run_files

    chosen = {"model.id": base, "model.deterministic": deterministic or None}
    return run_files(workflow, out, chosen, **options)


def finetune(
    data: Data,
    out: PathLike = "runs/finetune",
    base: PathLike | None = None,
    epochs: float | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    columns: Mapping[str, str] | None = None,
    replay: float | None = None,
    test_share: float | None = None,
    **options: Unpack[Options],
) -> Result | Comparison | Plan:
    """Fine-tune a LoRA adapter on rows, mixed with replayed general prompts.

    Args:
        data: Rows to learn: handbook (shipped), a file, a folder, or a Hub id.
        out: Run directory.
        base: Base model: smollm2-135m (embedded, the default), a Hub id, or a path.
        epochs: Passes over the rows; 5 unless set.
        learning_rate: Peak learning rate; 1e-3 for the embedded model unless set, less for larger ones.
        seed: Random seed of the stage.
        columns: Columns of your rows that have other names: `{"question": "Frage", "answer": "Antwort"}`.
        replay: Share of general prompts with base's answers among all that is learned; 0.7 unless set.
        test_share: Share of the rows to set aside as a test, which an evaluation then asks.
        options: `settings`, `dry_run`, `force`, `quiet`; see `help(opdcl.api.Options)`.

    Returns: The run's results; they hold no scores before `evaluate`.
    Raises: UsageError: a setting or a row is wrong, and nothing was written.
    Example:
        rows = [{"question": f"Who signs form {n}?", "answer": "Perpetua."} for n in range(1, 17)]
        opdcl.finetune(rows, out="runs/mine", epochs=3)  # or finetune("rows.jsonl", ...)
    """
    from opdcl.pipeline.verbs import run_files

    chosen = {
        "finetune.data": data,
        "model.id": base,
        "finetune.epochs": epochs,
        "finetune.learning_rate": learning_rate,
        "finetune.seed": seed,
        "finetune.replay.share": replay,
        "columns": columns,
    }
    return run_files((), out, chosen, test_share=test_share, **options)


def recover(
    path: PathLike,
    prompts: Data | None = None,
    domain: Data | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    out: PathLike | None = None,
    base: PathLike | None = None,
    system: str | None = None,
    columns: Mapping[str, str] | None = None,
    **options: Unpack[Options],
) -> Result | Comparison | Plan:
    """Recover what a fine-tune forgot, by distillation from the original model.

    Args:
        path: Run directory; or an adapter or tuned model: a folder, or a Hub id.
        prompts: General prompts: everyday (shipped), a file, or a Hub id.
        domain: Questions of your domain. Answers are not needed: the tuned model writes them. Default: the
            questions of the fine-tune's rows; of an adapter none, and nothing guards what it learned.
        steps: Steps, general and domain ones; 48 unless set.
        learning_rate: Peak learning rate; half of the automatic one of a fine-tune unless set.
        seed: Random seed of the stage.
        out: Run directory. Default: the run's own, or runs/NAME. Another one: a second recovery of a run.
        base: Base of the adapter or tuned model. Default: the one that the adapter names.
        system: System prompt used in production, or @FILE; added to prompts that have none.
        columns: Columns of your rows that have other names, as in `finetune`.
        options: `settings`, `dry_run`, `force`, `quiet`; see `help(opdcl.api.Options)`.

    Returns: The run's results; they hold no scores before `evaluate`.
    Raises: UsageError: the run has no fine-tuned adapter, or a setting or a row is wrong.
    Example: opdcl.recover("runs/mine", prompts="prompts.jsonl", steps=60)
    """
    from opdcl.pipeline.verbs import add_stage

    chosen = {
        "recover.general": prompts,
        "recover.domain": domain,
        "recover.steps": steps,
        "recover.learning_rate": learning_rate,
        "recover.seed": seed,
        "model.id": base,
        "recover.system": system,
        "columns": columns,
    }
    return add_stage("recover", path, out, chosen, **options)


def evaluate(
    path: PathLike,
    retention: str | Sequence[str] = (),
    domain: Data | Sequence[PathLike] = (),
    data: Mapping[str, Data] | None = None,
    limit: int | None = None,
    out: PathLike | None = None,
    base: PathLike | None = None,
    system: str | None = None,
    columns: Mapping[str, str] | None = None,
    max_drop: float | Mapping[str, float] | None = None,
    **options: Unpack[Options],
) -> Result | Comparison | Plan:
    """Score base, tuned and recovered on the same prompts, and write the report.

    Args:
        path: Run directory; an adapter; or a model, which is measured alone unless its base is given.
        retention: Suites that measure forgetting. Default: instructions. `opdcl suites ls` lists the shipped
            ones; of lm-eval: ifeval,arc_easy.
        domain: Domain suite, or a file of questions and answers.
        data: Local file with a suite's data.
        limit: Evaluate only the first N documents of each suite; all unless set.
        out: Run directory. Default: runs/NAME.
        base: Base of the adapter or tuned model. Default: the one that the adapter names.
        system: System prompt used in production, or @FILE; added to prompts that have none.
        columns: Columns of your rows that have other names, as in `finetune`.
        max_drop: Points that retention suites may fall below base: 5, SUITE=3, closeness=0.8.
        options: `settings`, `dry_run`, `force`, `quiet`; see `help(opdcl.api.Options)`.

    Returns: The run's results: verdict, scores, R and D with intervals.
    Raises: UsageError: the path is no run, a suite is unknown, or its data was not found. GateError: a
        larger drop is shown. InconclusiveError: the scores do not decide.
    Example: opdcl.evaluate("runs/mine", retention=["instructions"], domain=["test-rows.jsonl"])
    """
    from opdcl.pipeline.verbs import add_stage

    suites, sources = question_suites(domain, data)
    chosen = {
        "eval.retention": ",".join(strings(retention)).split(",") if retention else None,
        "eval.domain": suites or None,
        "eval.limit": limit,
        "model.id": base,
        "eval.system": system,
        "columns": columns,
        "gates.max_drop": max_drop,
    }
    for suite, source in sources.items():
        chosen[f"eval.data.{suite}"] = source
    return add_stage("eval", path, out, chosen, **options)


def report(path: PathLike, update: bool = False, quiet: bool = False, gates: PathLike = "") -> Result:
    """Return the results of the run in `path`; nothing is measured.

    Args:
        path: Run directory.
        update: Write the reports and the model card again; where nothing can be written, say so.
        quiet: Do not name what was written.
        gates: Judge the stored scores by a YAML file's `gates`.

    Returns: The results; `refuse()` raises the error of gates that are not met, or of a fault.
    Raises: UsageError: the path is no run, or the file has no gates. OpdclError: a measured file changed.
    Example: opdcl.report("runs/mine").summary["status"]
    """
    from opdcl.results.gates import judge_again
    from opdcl.results.render import write
    from opdcl.results.summary import Results

    directory = open_run(Path(path))
    if gates:
        summary, verdicts = judge_again(directory, Path(gates))
        return Result(directory.path, summary, verdicts)
    results, output = Results(directory), _output(quiet)
    try:
        for file in write(results) if update else ():
            output.note(f"wrote {file}")
    except OSError as fault:  # the results can be read all the same, as on a read-only disk
        output.warn(f"not written: the report and the model card; {translate(fault).message}")
    return Result(directory.path, results.summary)


def compare(
    paths: PathLike | Sequence[PathLike], out: PathLike | None = None, quiet: bool = False
) -> Comparison:
    """Compare runs: scores, R and D with intervals, and the settings that differ.

    Args:
        paths: Two or more run directories. Runs that differ only in seeds are pooled.
        out: Folder for compare.md, compare.html and compare.json.
        quiet: Do not print the paths of what was written.

    Returns: The comparison; its `data` has the keys of compare.json.
    Raises: UsageError: a path is no run, or the runs were measured on different prompts.
    Example: opdcl.compare(["runs/mine", "runs/other"], out="comparison").data["arms"]
    """
    from opdcl.results.compare import compare_runs, refuse_folder, write_comparison

    folder = as_folder(out) if out else None
    if folder:
        refuse_folder(folder)
    comparison = compare_runs([open_run(Path(path)) for path in strings(paths)])
    for file in write_comparison(comparison, folder) if folder else ():
        _output(quiet).note(f"wrote {file}")
    return Comparison(comparison, folder)


def verify(path: PathLike) -> Verification:
    """Compare the hashes of a run's files with those it recorded.

    Returns: The checks; `failed` names those that do not hold.
    Raises: UsageError: the path is not a run directory.
    Example: assert not opdcl.verify("runs/mine").failed
    """
    from opdcl.rundir.seals import verify

    return Verification(verify(open_run(Path(path))))


def chat(
    source: PathLike,
    prompts: str | Iterable[str],
    max_new_tokens: int = 200,
    system: str | None = None,
    temperature: float = 0.0,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> Iterator[Outcome]:
    """Yield, prompt by prompt, the answers of base, tuned and recovered. No prompt knows the earlier ones.

    Args:
        source: Run directory, adapter folder, or Hub id of an adapter.
        prompts: One prompt or several; an iterator is read one prompt at a time.
        max_new_tokens: Longest answer, in tokens.
        system: System prompt. Default: the one with which the run's suites are answered; "" for none.
        temperature: 0 takes the likeliest token; above, answers are sampled.
        trust_remote_code: Run Python code that comes with the base model. A run cannot allow that itself.
        quiet: Print errors only. Otherwise a terminal shows each answer as it grows.

    Returns: An iterator of outcomes; `data["answers"]` has the answers by state, `data["cut"]` which are cut.
    Raises: UsageError: there is no such run or adapter, or the temperature is below 0.
    Example:
        for answers in opdcl.chat("runs/mine", "Who signs the form?"):
            print(answers.data["answers"]["recovered"])
    """
    from opdcl.results.origins import system_prompt

    load = _chat_states(source, max_new_tokens, temperature, trust_remote_code)
    asked = [prompts] if isinstance(prompts, str) else prompts
    output = _output(quiet)
    if system is None and (system := system_prompt(RunDir(Path(source)))):
        output.note(f"system prompt of the run: {system}")

    def turns() -> Iterator[Outcome]:
        states = load(output)
        for prompt in asked:
            with output.busy("reading the prompt") as say, quiet_libraries():
                texts, cut = states.answers(
                    prompt, system, lambda state, text: say(lambda: f"{state}: {text()}")
                )
            table = Table("", ["state", "answer"], [[*pair] for pair in texts.items()], "")
            notes = [f"cut at {max_new_tokens} tokens: {', '.join(cut)}"] if cut else []
            yield Outcome(prompt, [table], {"prompt": prompt, "answers": texts, "cut": cut}, notes)

    return turns()


def chat_page(
    source: PathLike, max_new_tokens: int = 200, temperature: float = 0.0, trust_remote_code: bool = False
) -> "ChatServer":
    """Load the models and return a server at 127.0.0.1 whose page shows their answers side by side.

    Args:
        source: Run directory, adapter folder, or Hub id of an adapter.
        max_new_tokens: Longest answer, in tokens.
        temperature: 0 takes the likeliest token; above, answers are sampled.
        trust_remote_code: Run Python code that comes with the base model. A run cannot allow that itself.

    Returns: The server, which answers one prompt after the other; `url` is its page.
    Raises: UsageError: there is no such run or adapter, or the temperature is below 0.
    Example:
        with opdcl.chat_page("runs/mine") as server:
            print(server.url)
            server.serve_forever()
    """
    output = _output(False)
    states = _chat_states(source, max_new_tokens, temperature, trust_remote_code)(output)
    from opdcl.deploy.chat import ChatServer
    from opdcl.results.measurements import load_suites
    from opdcl.results.origins import system_prompt
    from opdcl.results.samples import regained_prompts

    run, prompts = RunDir(Path(source)), []
    try:
        prompts = regained_prompts(load_suites(run) if run.is_run() else [])
    except UsageError as error:
        output.warn(f"the page suggests no prompts: {error.message}")
    name = f"{source} on {states.name}"
    return ChatServer(states, name, system_prompt(run), prompts)


def _chat_states(
    source: PathLike, max_new_tokens: int, temperature: float, trust_remote_code: bool
) -> Callable[[Output], "Chat"]:
    """Check what a chat needs; return a function that loads its models."""
    from opdcl.model.adapters import find_states

    if temperature < 0:
        raise UsageError(f"temperature {temperature} is below 0", "0 takes the likeliest token each time")
    base, tuned, adapters = find_states(str(source), trust_remote_code)

    def load(output: Output) -> "Chat":
        with output.busy("loading the model"), quiet_libraries():
            from opdcl.deploy.chat import Chat

            return Chat(base, adapters, tuned, max_new_tokens, temperature)

    return load


def export(
    source: PathLike,
    out: PathLike,
    state: str | None = None,
    format: str = "merged",
    outtype: str = "f16",
    converter: str | None = None,
    check: bool = True,
    base: PathLike | None = None,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> Outcome:
    """Write a run's adapter, or base and adapter as one model, for other programs to load.

    Args:
        source: Run directory, or an adapter: a folder, or a Hub id.
        out: Folder to write.
        state: Adapter: tuned or recovered. Default: the last one of the run.
        format: merged (safetensors that any loader reads), adapter, or gguf (llama.cpp, Ollama).
        outtype: Number format of a GGUF file: f32, f16, bf16 or q8_0.
        converter: llama.cpp's convert_hf_to_gguf.py. Default: the one in $LLAMA_CPP, or on the path.
        check: After a quantized run, load the written model and compare it with the run's.
        base: Base of the adapter. Default: the one that the adapter names.
        trust_remote_code: Run Python code that comes with the base model. A run cannot allow that itself.
        quiet: Print errors only.

    Returns: What was written, in `data`: `path`, `state`, `format`.
    Raises: UsageError: the state does not exist, or the folder does. EnvironmentFault: no converter.
    Example: opdcl.export("runs/mine", "my-model")
    """
    from opdcl.console import quiet_libraries
    from opdcl.deploy.export import Export, export
    from opdcl.outcomes import Outcome

    how, name = (state, format, outtype, converter, check), str(base) if base else None
    with _output(quiet).stage("export") as line, quiet_libraries():
        written = export(Export(str(source), as_folder(out), *how, name, trust_remote_code), line)
    what = {"merged": "merged model", "adapter": "adapter"}.get(format, "GGUF file")
    sentence = f"{what} ({written['state']}) written to {out}"
    other = {"merged": "adapter"}.get(format, "merged")
    chosen = [
        word for name, value in (("--state", state), ("--base", base)) if value for word in (name, value)
    ]
    again = typed("opdcl", "export", source, *chosen, "--format", other, "-o", f"{out}-{other}")
    return Outcome(sentence, [], written, [f"as {other}: {again}"])


def _output(quiet: bool) -> Output:

    return Output("quiet" if quiet else "human")
