"""The arguments and options of the commands, each declared once."""

import os
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from opdcl.errors import UsageError


def _go_offline(offline: bool) -> None:
    if offline:  # huggingface_hub reads it on import, which comes later
        os.environ["HF_HUB_OFFLINE"] = "1"


def _setting(example: str) -> Any:
    text = f"Override a setting of `opdcl config schema`, e.g. {example}. Repeatable."
    return Option("--set", metavar="KEY=VALUE", help=text)


def _columns(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(ours and theirs for ours, _, theirs in pairs):
        hint = "--columns question=Frage,answer=Antwort"
        raise UsageError(f"--columns {text!r} is not OURS=YOURS,...", hint)
    return {ours.strip(): theirs.strip() for ours, _, theirs in pairs}


Texts = list[str] | None

# Arguments.
RunDir = Annotated[Path, Argument(metavar="RUN", help="Run directory.")]
RunOrTuned = Annotated[
    str,
    Argument(metavar="SOURCE", help="Run directory; or an adapter or tuned model: a folder, or a Hub id."),
]
Source = Annotated[
    str, Argument(metavar="RUN", help="Run directory, adapter folder, or Hub id of an adapter.")
]
Runs = Annotated[
    list[Path],
    Argument(metavar="RUN", help="Two or more run directories. Runs that differ only in seeds are pooled."),
]
Workflow = Annotated[list[str], Argument(help="Recipe or YAML files, merged left to right.")]
Recipe = Annotated[str, Argument(help="Name of a recipe.")]
Key = Annotated[str | None, Argument(metavar="[KEY]", help="A section or key, such as recover.loss.")]
Target = Annotated[Path, Argument(help="File or folder to write to.")]
Prompt = Annotated[list[str] | None, Argument(help="Prompt to answer. Default: read prompts line by line.")]
Repository = Annotated[str, Argument(metavar="OWNER/NAME", help="Repository; created if it does not exist.")]

# Options that several commands share.
Out = Annotated[Path | None, Option("-o", "--out", metavar="RUN", help="Run directory. Default: runs/NAME.")]
NewRun = Annotated[
    Path | None, Option("-o", "--out", metavar="RUN", help="Run directory to make. Default: runs/NAME.")
]
ItsBase = Annotated[
    str | None,
    Option("--base", help="Base of the adapter or tuned model. Default: the one that the adapter names."),
]
Folder = Annotated[Path, Option("-o", "--out", metavar="FOLDER", help="Folder to write.")]
Model = Annotated[str | None, Option(help="Base model: smollm2-135m (embedded), a Hub id, or a path.")]
Seed = Annotated[int | None, Option(help="Random seed of the stage.")]
LearningRate = Annotated[float | None, Option(help="Peak learning rate.")]
Settings = Annotated[Texts, _setting("recover.steps=60")]
DryRun = Annotated[bool, Option("--dry-run", help="Print what the command would do, and write nothing.")]
Force = Annotated[bool, Option("--force", help="Repeat stages whose settings or data have changed.")]
Workers = Annotated[
    int, Option(min=1, metavar="N", help="Number of worker processes: one per GPU, or several on CPU.")
]
Offline = Annotated[
    bool, Option("--offline", callback=_go_offline, help="Use cached files only; see `opdcl fetch`.")
]
Json = Annotated[bool, Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, Option("-q", "--quiet", help="Print errors only.")]
State = Annotated[str | None, Option(help="Adapter: tuned or recovered. Default: the last one of the run.")]

# run and finetune.
Deterministic = Annotated[bool, Option("--deterministic", help="Use only kernels that repeat bit for bit.")]
Rows = Annotated[
    str, Option("--data", help="Training rows: handbook (shipped), a file, a folder, or a Hub id.")
]
FinetuneOut = Annotated[Path, Option("-o", "--out", metavar="RUN", help="Run directory.")]
FinetuneSettings = Annotated[Texts, _setting("finetune.lora.r=16")]
Columns = Annotated[
    dict[str, str] | None,
    Option(
        parser=_columns, metavar="OURS=YOURS,...", help="Your columns' names: question=Frage,answer=Antwort."
    ),
]
Epochs = Annotated[float | None, Option(help="Passes over the data.")]

# recover.
Prompts = Annotated[
    str | None,
    Option(help="General prompts: everyday (shipped), self (base writes them), a file, or a Hub id."),
]
DomainPrompts = Annotated[str | None, Option(help="Domain prompts. Default: the data of the fine-tune.")]
Steps = Annotated[int | None, Option(help="Optimizer steps.")]

# eval.
EvalSettings = Annotated[Texts, _setting("eval.max_new_tokens=256")]
Limit = Annotated[int | None, Option(help="Evaluate only the first N documents of each suite.")]
Retention = Annotated[
    Texts, Option(metavar="SUITE,...", help="Suites that measure forgetting: ifeval,arc_easy. Repeatable.")
]
DomainSuites = Annotated[
    Texts, Option(metavar="SUITE", help="Domain suite, or a file of questions and answers. Repeatable.")
]
SuiteFiles = Annotated[
    Texts, Option(metavar="SUITE=PATH", help="Local file with a suite's data. Repeatable.")
]

MaxDrop = Annotated[
    Texts,
    Option(
        metavar="POINTS",
        help="Points that retention suites may fall below base: 5, or SUITE=3, or closeness=0.8. Repeatable.",
    ),
]

# report, compare, chat, export, push and serve.
GatesFile = Annotated[
    Path | None, Option("--gates", metavar="FILE", help="Judge the stored scores by a YAML file's `gates`.")
]
ReportFormat = Annotated[str, Option(help="report, or pr: Markdown for a pull request, on standard output.")]
CompareOut = Annotated[
    Path | None,
    Option("-o", "--out", metavar="FOLDER", help="Folder for compare.md, compare.html and compare.json."),
]
System = Annotated[str | None, Option(help="System prompt.")]
Temperature = Annotated[float, Option(min=0, help="0 takes the likeliest token; above, answers are sampled.")]
MaxNewTokens = Annotated[int, Option(help="Longest answer, in tokens.")]
Format = Annotated[
    str, Option(help="merged (safetensors that any loader reads), adapter, or gguf (llama.cpp, Ollama).")
]
OutType = Annotated[str, Option(help="Number format of a GGUF file: f32, f16, bf16 or q8_0.")]
Converter = Annotated[
    str | None,
    Option(help="llama.cpp's convert_hf_to_gguf.py. Default: the one in $LLAMA_CPP, or on the path."),
]
Check = Annotated[
    bool, Option(help="Load what was written and compare: GGUF files, and after a quantized run.")
]
Private = Annotated[bool, Option("--private", help="If the repository is created, make it private.")]
Base = Annotated[str | None, Option(help="Hub id of the base model, needed if the run used a local folder.")]
Host = Annotated[str, Option(help="Address to listen on.")]
Port = Annotated[int, Option(help="Port to listen on.")]
Vllm = Annotated[str, Option(help="The vllm program, if it is in another environment.")]
PrintOnly = Annotated[bool, Option("--dry-run", help="Print the vLLM command instead of running it.")]
