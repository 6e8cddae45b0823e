"""Arguments and options that several commands share, and how the text of some is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from opdcl.config.shipped import workflow_files
from opdcl.errors import UsageError

# -- arguments

RunDir = Annotated[Path, Argument(metavar="RUN", help="Run directory.")]
Source = Annotated[
    str,
    Argument(metavar="SOURCE", help="Run directory; or an adapter or tuned model: a folder, or a Hub id."),
]
Measured = Annotated[
    str,
    Argument(
        metavar="SOURCE",
        help="Run directory; an adapter; or a model, which is measured alone unless --base is given.",
    ),
]
RunOrAdapter = Annotated[
    str, Argument(metavar="RUN", help="Run directory, adapter folder, or Hub id of an adapter.")
]
Workflow = Annotated[
    list[str],
    Argument(
        metavar="WORKFLOW",
        help="Recipe or YAML files, merged left to right.",
        autocompletion=lambda incomplete: _beginning(incomplete, workflow_files()),
    ),
]
Exported = Annotated[
    str,
    Argument(
        metavar="SOURCE",
        help="Run directory; adapter, or with --format adapter a tuned model: a folder, or a Hub id.",
    ),
]

# -- options of the commands that run stages


def _go_offline(offline: bool) -> None:
    if offline:  # huggingface_hub reads it on import, which comes later
        os.environ["HF_HUB_OFFLINE"] = "1"


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _keys(incomplete: str) -> list[str]:
    """Return the settings that a `--set` can go on with, each with its equals sign."""
    from opdcl.config.reference import describe_fields  # it imports the schema, which takes time

    keys = [field[0] for field in describe_fields()]
    return [f"{key}=" for key in _beginning(incomplete, keys)]


def _columns(text: str) -> dict[str, str]:
    """Return `--columns` as our name of a column -> the user's."""
    columns = {}
    for pair in text.split(","):
        ours, _, theirs = pair.partition("=")
        if not (ours and theirs):
            hint = "--columns question=Frage,answer=Antwort"
            raise UsageError(f"--columns {text!r} is not OURS=YOURS,...", hint)
        columns[ours.strip()] = theirs.strip()
    return columns


Base = Annotated[
    str | None, Option(help="Base model: smollm2-135m (embedded, the default), a Hub id, or a path.")
]
System = Annotated[
    str | None,
    Option(metavar="TEXT|@FILE", help="System prompt used in production; added to prompts that have none."),
]
BaseOfAdapter = Annotated[
    str | None, Option(help="Base of the adapter or tuned model. Default: the one that the adapter names.")
]
Out = Annotated[Path | None, Option("-o", "--out", metavar="RUN", help="Run directory. Default: runs/NAME.")]
OutBeside = Annotated[
    Path | None,
    Option(
        "-o",
        "--out",
        metavar="RUN",
        help="Run directory. Default: that of SOURCE, or runs/NAME. Another one: a second recovery of a run.",
    ),
]
Folder = Annotated[Path, Option("-o", "--out", metavar="FOLDER", help="Folder to write.")]
Columns = Annotated[
    dict[str, str] | None,
    Option(
        parser=_columns, metavar="OURS=YOURS,...", help="Your columns' names: question=Frage,answer=Antwort."
    ),
]
LearningRate = Annotated[float | None, Option(help="Peak learning rate.")]
Seed = Annotated[int | None, Option(help="Random seed of the stage.")]
Settings = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        autocompletion=_keys,
        help="Override a setting of `opdcl config schema`, e.g. recover.steps=60. Repeatable.",
    ),
]
DryRun = Annotated[bool, Option("--dry-run", help="Print what the command would do, and write nothing.")]
Force = Annotated[bool, Option("--force", help="Repeat stages whose settings or data have changed.")]
Offline = Annotated[
    bool,
    Option("--offline", callback=_go_offline, help="Use cached files only; `hf download` fills the cache."),
]
Workers = Annotated[
    int,
    Option(
        "--num-processes",
        min=1,
        metavar="N",
        help="Number of worker processes: one per GPU, or several on CPU.",
    ),
]
Json = Annotated[bool, Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, Option("-q", "--quiet", help="Print errors only.")]
TrustRemoteCode = Annotated[
    bool,
    Option(
        "--trust-remote-code",
        help="Run Python code that comes with the base model. A run cannot allow that itself.",
    ),
]

# -- options of `opdcl eval`


def suite_files(texts: list[str] | None) -> dict[str, str]:
    """Return `--data` as suite -> file."""
    files = {}
    for text in texts or ():
        suite, separator, path = text.partition("=")
        if not separator:
            raise UsageError(f"--data {text!r} is not SUITE=PATH", "--data ifeval=input_data.jsonl")
        files[suite] = path
    return files


def drops(texts: list[str] | None) -> Any:
    """Return `--max-drop` as the setting `gates.max_drop`: one number, a number by suite, or None."""
    found: dict[str, float] = {}
    for text in texts or ():
        suite, _, number = text.rpartition("=")
        try:
            found[suite] = float(number)
        except ValueError:
            raise UsageError(f"--max-drop {text!r} is not a number", "--max-drop 5, or SUITE=3") from None
    if "" in found and len(found) > 1:
        raise UsageError("--max-drop names a limit for all suites and one for some", "name all suites")
    if "" in found:
        return found[""]
    return found or None
