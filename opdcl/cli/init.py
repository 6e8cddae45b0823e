"""The command that writes a workflow for somebody's rows and model, with test rows set aside."""

from __future__ import annotations

import os
import tempfile
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer

from opdcl.cli import options as opt
from opdcl.cli import screen
from opdcl.cli.screen import start, suggest
from opdcl.errors import UsageError

ROWS = "Rows to learn: a file, a folder, or a Hub id"
BASE = "Model: smollm2-135m (embedded), a Hub id, or a folder"


def init(
    data: Annotated[str | None, typer.Argument(metavar="ROWS", help=f"{ROWS}.")] = None,
    base: Annotated[str | None, typer.Option(help=f"{BASE}.")] = None,
    test_share: Annotated[float, typer.Option(help="Share of the rows to set aside as a test.")] = 0.1,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Workflow.")] = Path("mine.yaml"),
    json: opt.Json = False,
) -> None:
    """Write a workflow for your rows and model, with test rows set aside. Asks for what is not given."""
    from ruamel.yaml import YAML

    from opdcl.api import run
    from opdcl.config.shipped import find_workflow
    from opdcl.data.rows import load_records
    from opdcl.data.split import split_rows

    start(json)
    files = [out, *(out.with_name(f"{out.stem}-{part}.jsonl") for part in ("rows", "test-rows"))]
    if there := [str(place) for place in (*files, Path("runs") / out.stem) if place.exists()]:
        raise UsageError(f"{there[0]} exists", "-o NAME.yaml chooses another name")
    if (data is None or base is None) and not screen.output.can_ask():
        missing = "ROWS" if data is None else "--base"
        raise UsageError(
            f"{missing} is not given, and nobody can be asked", "opdcl init rows.jsonl --base MODEL"
        )
    data = data or typer.prompt(ROWS, err=True)
    base = base or typer.prompt(BASE, "smollm2-135m", err=True)
    *rows, note = split_rows(load_records(data), {}, test_share)
    yaml = YAML()
    flow = yaml.load(find_workflow("own-data"))
    flow.yaml_set_start_comment(f"Your rows, {data}. `opdcl config show {out} --all` shows all defaults.")
    flow["name"], flow["description"] = out.stem, f"{data} on {base}"
    flow["model"]["id"] = str(Path(base).resolve()) if os.path.exists(base) else base
    flow["finetune"]["data"], flow["eval"]["data"]["mine"] = files[1].name, files[2].name
    text = StringIO()
    yaml.dump(flow, text)
    # Nothing stays behind of a workflow that would be refused.
    with (
        tempfile.TemporaryDirectory(dir=out.parent) as scratch,
        screen.output.busy("checking model and data"),
    ):
        drafts = [Path(scratch) / file.name for file in files]
        for draft, content in zip(drafts, (text.getvalue(), *rows), strict=True):
            draft.write_text(content, encoding="utf-8")
        run(drafts[0], dry_run=True, quiet=True)
        for draft, file in zip(drafts, files, strict=True):
            draft.rename(file)
    screen.output.note(note)
    screen.output.result(f"wrote {', '.join(map(str, files))}", {"wrote": [str(file) for file in files]})
    suggest("run", out, "--dry-run")
