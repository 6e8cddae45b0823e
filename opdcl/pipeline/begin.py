"""A workflow of the user's own: the recipe `own-data` with their rows and model, and test rows set aside."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from opdcl.config.load import load
from opdcl.config.shipped import find_workflow
from opdcl.console import Output, quiet_libraries
from opdcl.data.rows import load_records
from opdcl.data.split import split_rows
from opdcl.errors import UsageError
from opdcl.pipeline.dry_run import describe
from opdcl.pipeline.inputs import Inputs
from opdcl.pipeline.job import Job
from opdcl.rundir.files import write_atomic
from opdcl.rundir.layout import RunDir


def write_workflow(target: Path, source: str, base: str, share: float, output: Output) -> list[Path]:
    """Write a workflow and, beside it, the rows to learn and those to test, once a dry run accepts them.

    Raises:
        UsageError: One of the files exists, or rows or model are refused.
    """
    files = [target, *(target.with_name(f"{target.stem}-{part}.jsonl") for part in ("rows", "test-rows"))]
    run = RunDir(Path("runs") / target.stem)
    for place in (*files, run.path):
        if place.exists():
            raise UsageError(f"{place} exists", "-o NAME.yaml chooses another name")
    split = split_rows(load_records(source), {}, share)
    _, learned, test = (str(file.resolve()) for file in files)
    settings = {"name": target.stem, "model.id": base, "finetune.data": learned, "eval.data.mine": test}
    with output.busy("checking model and data"), quiet_libraries():
        flow, origins = load(["own-data"], (), settings)
        inputs = Inputs({learned: split.learned, test: split.test}, output.note)
        _, plan = describe(Job(flow, run, inputs, origins))
    for note in (split.note, *plan["notes"]):
        output.note(note)
    id = os.path.relpath(base, target.parent) if os.path.exists(base) else base
    text = _filled(id, target.stem, f"{source} on {base}", *(file.name for file in files[1:]))
    for file, content in zip(files, (text, split.learned, split.test), strict=True):
        write_atomic(file, content)
    return files


def _filled(base: str, name: str, description: str, learned: str, test: str) -> str:
    """Return the text of the recipe with values of the user's; its comments stay, but for those on top."""
    recipe = find_workflow("own-data").read_text(encoding="utf-8")
    text = f"# {description}. Written by opdcl init.\n{recipe[recipe.index('name:') :]}"
    values = {"name": name, "description": description, "id": base, "data": learned, "mine": test}
    for key, value in values.items():
        written = json.dumps(value).replace("\\", r"\\")
        text = re.sub(rf"(?m)^( *{key}: )[^#\n]+?(?= *(#|$))", rf"\g<1>{written}", text, count=1)
    return text
