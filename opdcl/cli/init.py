"""The command that writes a workflow for somebody's rows and model, with test rows set aside."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer

from opdcl.cli import options as opt
from opdcl.cli import screen
from opdcl.cli.screen import start, suggest
from opdcl.errors import OpdclError, UsageError

ROWS_HELP = "Rows to learn: a file, a folder, or a Hub id"
BASE = "Model: smollm2-135m (embedded), a Hub id, or a folder"


def init(
    data: Annotated[str | None, typer.Argument(metavar="ROWS_HELP", help=f"{ROWS_HELP}.")] = None,
    base: Annotated[str | None, typer.Option(help=f"{BASE}.")] = None,
    test_share: Annotated[float, typer.Option(help="Share of the rows to set aside as a test.")] = 0.1,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Workflow.")] = Path("mine.yaml"),
    json: opt.Json = False,
) -> None:
    """Write a workflow for your rows and model, with test rows set aside. Asks for what is not given."""
    from opdcl.api import run
    from opdcl.data.rows import load_records
    from opdcl.data.split import split_rows

    start(json)
    if out.is_dir() or not out.parent.is_dir():
        problem = f"{out} is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise UsageError(problem, "-o NAME.yaml names the workflow, in a folder that exists")
    files = [out, *(out.with_name(f"{out.stem}-{part}.jsonl") for part in ("rows", "test-rows"))]
    if there := [str(place) for place in (*files, Path("runs") / out.stem) if place.exists()]:
        raise UsageError(f"{there[0]} exists", "-o NAME.yaml chooses another name")
    for name, given in (("ROWS_HELP", data), ("--base", base)):
        if given == "" or (given is None and not screen.output.can_ask()):
            problem = "is empty" if given == "" else "is not given, and nobody can be asked"
            raise UsageError(f"{name} {problem}", "opdcl init rows.jsonl --base MODEL")
    data = data or typer.prompt(ROWS_HELP, err=True)
    base = base or typer.prompt(BASE, "smollm2-135m", err=True)
    *rows, note = split_rows(load_records(data), {}, test_share)
    text = workflow_text(data, base, files)
    # Nothing stays behind of a workflow that would be refused.
    with (
        tempfile.TemporaryDirectory(dir=out.parent) as scratch,
        screen.output.busy("checking model and data"),
    ):
        drafts = [Path(scratch) / file.name for file in files]
        for draft, content in zip(drafts, (text, *rows), strict=True):
            draft.write_text(content, encoding="utf-8")
        try:
            run(drafts[0], settings={"model.trust_remote_code": False}, dry_run=True, quiet=True)
        except OpdclError as fault:
            fault.message = fault.message.replace(scratch, str(out.parent))
            raise
        for draft, file in zip(drafts, files, strict=True):
            draft.rename(file)
    screen.output.note(note)
    screen.output.result(f"wrote {', '.join(map(str, files))}", {"wrote": [str(file) for file in files]})
    suggest("run", out, "--dry-run")


def workflow_text(data: str, base: str, files: Sequence[Path]) -> str:
    """Return a workflow for a model and rows; `files` are its own, and those of the rows and the test rows.

    Raises:
        UsageError: Reading it again, a name would be another one, or more than a name.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString as Quoted

    from opdcl.config.shipped import find_workflow

    yaml, text = YAML(), StringIO()
    flow = yaml.load(find_workflow("own-data"))
    flow.yaml_set_start_comment("Your rows and model. `opdcl config show FILE --all` shows all defaults.")
    flow["name"], flow["description"] = files[0].stem, Quoted(f"{data} on {base}")
    flow["model"]["id"] = Quoted(os.path.realpath(base) if os.path.exists(base) else base)
    flow["finetune"]["data"], flow["eval"]["data"]["mine"] = files[1].name, files[2].name
    yaml.dump(flow, text)
    try:
        same = YAML(typ="safe").load(text.getvalue()) == flow
    except YAMLError:
        same = False
    if not same:
        raise UsageError(f"YAML cannot hold the names {data!r} and {base!r}", "rename the rows or the model")
    return text.getvalue()
