"""Arguments and options that several commands share, and how the text of some is read.

What is not said here about an argument of a verb is in the docstring of that verb in `opdcl.api`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from opdcl.config.shipped import workflow_files
from opdcl.errors import UsageError

# -- arguments


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def recipes(incomplete: str) -> list[str]:
    """Return the names of the shipped recipes that begin so."""
    return _beginning(incomplete, workflow_files())


RunDir = Annotated[Path, Argument(metavar="RUN", help="Run directory.")]
FILES_HELP = "Recipe or YAML files, merged left to right."
Workflow = Annotated[list[str], Argument(metavar="WORKFLOW", help=FILES_HELP, autocompletion=recipes)]
# -- options of the commands that run stages


def _go_offline(offline: bool) -> None:
    if offline:  # huggingface_hub reads it on import, which comes later
        os.environ["HF_HUB_OFFLINE"] = "1"


def _keys(incomplete: str) -> list[str]:
    """Return the settings that complete a `--set`, each with its equals sign."""
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


System = Annotated[str | None, Option(metavar="TEXT|@FILE")]
Out = Annotated[Path | None, Option("-o", "--out", metavar="RUN")]
Columns = Annotated[
    dict[str, str] | None,
    Option(parser=_columns, metavar="OURS=YOURS,...", help="Your columns: question=Frage,answer=Antwort."),
]
SET_HELP = "Override a setting of `opdcl config schema`, e.g. recover.steps=60. Repeatable."
Settings = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", autocompletion=_keys, help=SET_HELP)
]
DryRun = Annotated[bool, Option("--dry-run", help="Print what the command would do, and write nothing.")]
Force = Annotated[bool, Option("--force", help="Repeat stages whose settings or data have changed.")]
OFFLINE_HELP = "Use cached files only; `hf download` fills the cache."
Offline = Annotated[bool, Option("--offline", callback=_go_offline, help=OFFLINE_HELP)]
WORKERS_HELP = "Worker processes: one per GPU, or several on CPU."
Workers = Annotated[int, Option("--num-processes", min=1, metavar="N", help=WORKERS_HELP)]
Json = Annotated[bool, Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, Option("-q", "--quiet", help="Print errors only.")]
TrustRemoteCode = Annotated[bool, Option("--trust-remote-code")]

# -- options of `opdcl eval`


def suite_files(texts: list[str]) -> dict[str, str]:
    """Return `--data` as suite -> file."""
    files = {}
    for text in texts:
        suite, separator, path = text.partition("=")
        if not separator:
            raise UsageError(f"--data {text!r} is not SUITE=PATH", "--data ifeval=input_data.jsonl")
        files[suite] = path
    return files


def drops(texts: list[str]) -> Any:
    """Return `--max-drop` as the setting `gates.max_drop`: one number, a number by suite, or None."""
    found: dict[str, float] = {}
    for text in texts:
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
