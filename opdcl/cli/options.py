"""The options of the commands. Those of a verb of `opdcl.api` come from its signature and docstring."""

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from typer import Argument, Option

from opdcl.errors import UsageError

Texts = list[str] | None
Command = TypeVar("Command", bound=Callable[..., None])

# A line under "Args:" with those that continue it.
ABOUT = re.compile(r"^    (\w+): (.+(?:\n        .+)*)", re.MULTILINE)


def takes(verb: Callable[..., Any], further: str = "json", **own: Any) -> Callable[[Command], Command]:
    """Give a command the parameters of a verb, with their defaults, and `further` ones of `FURTHER`.

    A parameter's help is its line in the docstring of the verb. `own` has metavar and type of those that
    are typed in another form, or a whole declaration.
    """
    about = dict(ABOUT.findall(inspect.getdoc(verb) or ""))
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = []
    for name, parameter in inspect.signature(verb).parameters.items():
        # A verb is quiet for --quiet and for --json.
        if name != "quiet" and name not in further.split() and parameter.kind != parameter.VAR_KEYWORD:
            declared = own.get(name, {})
            if isinstance(declared, dict):
                text = " ".join(about.get(name, "").split())  # `python -OO` has no docstrings
                declared = _declare(parameter, text, **declared)
            parameters.append(parameter.replace(annotation=declared, kind=keyword))
    for name in further.split():
        declared, default = FURTHER[name]
        parameter = inspect.Parameter(name, keyword, default=default, annotation=own.get(name, declared))
        parameters.append(parameter)

    def decorate(command: Command) -> Command:
        described: Any = command
        described.__signature__, described.__annotations__ = inspect.Signature(parameters), {}
        return command

    return decorate


def typed(metavar: str | None = None, kind: Any = None) -> dict[str, Any]:
    """Return how a parameter is typed, where this is not said by the type that the verb names first."""
    return {"metavar": metavar, "kind": kind}


def _declare(parameter: inspect.Parameter, text: str, metavar: str | None = None, kind: Any = None) -> Any:
    """Return a parameter as an option, a flag if it is off by default; one without default as an argument."""
    kind = kind or (get_args(parameter.annotation) or (parameter.annotation,))[0]
    names = ["-o", "--out"] if parameter.name == "out" else []
    if parameter.default is parameter.empty and not names:
        return Annotated[kind, Argument(metavar=metavar, help=text)]
    if parameter.default is False:
        names = [f"--{parameter.name.replace('_', '-')}"]
    if get_args(kind):
        text += " Repeatable."
    optional = kind | None if parameter.default in (None, ()) else kind
    return Annotated[optional, Option(*names, metavar=metavar, help=text)]


def _go_offline(offline: bool) -> None:
    if offline:  # huggingface_hub reads it on import, which comes later
        os.environ["HF_HUB_OFFLINE"] = "1"


def _setting(example: str) -> Any:
    text = f"Override a setting of `opdcl config schema`, e.g. {example}. Repeatable."
    return Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help=text)]


def _columns(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(ours and theirs for ours, _, theirs in pairs):
        hint = "--columns question=Frage,answer=Antwort"
        raise UsageError(f"--columns {text!r} is not OURS=YOURS,...", hint)
    return {ours.strip(): theirs.strip() for ours, _, theirs in pairs}


def suite_files(texts: list[str] | None) -> dict[str, str]:
    """Return `--data` as suite -> file."""
    files = {}
    for text in texts or ():
        suite, separator, path = text.partition("=")
        if not separator:
            raise UsageError(f"--data {text!r} is not SUITE=PATH", "--data ifeval=input_data.jsonl")
        files[suite] = path
    return files


def drops(texts: list[str] | None) -> float | dict[str, float] | None:
    """Return `--max-drop` as the setting `gates.max_drop`."""
    found: dict[str, float] = {}
    for text in texts or ():
        suite, _, number = text.rpartition("=")
        try:
            found[suite] = float(number)
        except ValueError:
            raise UsageError(f"--max-drop {text!r} is not a number", "--max-drop 5, or SUITE=3") from None
    if "" in found and len(found) > 1:
        raise UsageError("--max-drop names a limit for all suites and one for some", "name all suites")
    return found.get("", found or None)


# Arguments.
RunDir = Annotated[Path, Argument(metavar="RUN", help="Run directory.")]
Workflow = Annotated[list[str], Argument(help="Recipe or YAML files, merged left to right.")]
Recipe = Annotated[str, Argument(help="Name of a recipe.")]
Key = Annotated[str | None, Argument(metavar="[KEY]", help="A section or key, such as recover.loss.")]
Target = Annotated[Path, Argument(help="File or folder to write to.")]
Prompts = Annotated[
    Texts, Argument(metavar="prompt", help="Prompt to answer. Default: read prompts line by line.")
]

# Options that are no parameter of a verb, or are typed in another form.
Rows = Annotated[
    str, Option("--data", help="Training rows: handbook (shipped), a file, a folder, or a Hub id.")
]
Columns = Annotated[
    dict[str, str] | None,
    Option(
        parser=_columns, metavar="OURS=YOURS,...", help="Your columns' names: question=Frage,answer=Antwort."
    ),
]
Temperature = Annotated[float, Option(min=0, help="0 takes the likeliest token; above, answers are sampled.")]
GatesFile = Annotated[
    Path | None, Option("--gates", metavar="FILE", help="Judge the stored scores by a YAML file's `gates`.")
]
ReportFormat = Annotated[str, Option(help="report, or pr: Markdown for a pull request, on standard output.")]
Host = Annotated[str, Option(help="Address to listen on.")]
Port = Annotated[int, Option(help="Port to listen on.")]
Vllm = Annotated[str, Option(help="The vllm program, if it is in another environment.")]
PrintOnly = Annotated[bool, Option("--dry-run", help="Print the vLLM command instead of running it.")]
Model = Annotated[str | None, Option(help="Base model: smollm2-135m (embedded), a Hub id, or a path.")]
Settings = _setting("recover.steps=60")
FinetuneSettings = _setting("finetune.lora.r=16")
EvalSettings = _setting("eval.max_new_tokens=256")
DryRun = Annotated[bool, Option("--dry-run", help="Print what the command would do, and write nothing.")]
Force = Annotated[bool, Option("--force", help="Repeat stages whose settings or data have changed.")]
Offline = Annotated[
    bool,
    Option("--offline", callback=_go_offline, help="Use cached files only; `hf download` fills the cache."),
]
Workers = Annotated[
    int, Option(min=1, metavar="N", help="Number of worker processes: one per GPU, or several on CPU.")
]
Json = Annotated[bool, Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, Option("-q", "--quiet", help="Print errors only.")]

# Options that verbs do not name, with their defaults, and those of the commands that run stages.
FURTHER: dict[str, tuple[Any, Any]] = {
    "prompts": (Prompts, None),
    "settings": (Settings, None),
    "dry_run": (DryRun, False),
    "force": (Force, False),
    "offline": (Offline, False),
    "num_processes": (Workers, 1),
    "json": (Json, False),
    "quiet": (Quiet, False),
}
OF_STAGES = "settings dry_run force offline num_processes json quiet"
