"""The verbs from Python: they make what the command line makes, and a notebook can show it."""

import json
import os
import subprocess
import sys

import pytest
from helpers.command import opdcl

SCRIPT = """
import json, sys
import opdcl
assert not {"torch", "transformers", "scipy"} & set(sys.modules), "import opdcl must cost nothing"

small = {"model.id": MODEL, "model.dtype": "float32", "finetune.lora.r": 4, "finetune.batch_size": 4}
tuned = opdcl.finetune("rows.jsonl", out="mine", settings=small | {"finetune.epochs": 1}, quiet=True)
recovered = opdcl.recover("mine", prompts="prompts.jsonl", settings={
    "recover.steps": 4, "recover.rollouts": 4, "recover.max_new_tokens": 6, "recover.validation_prompts": 2}, quiet=True)
measured = opdcl.evaluate("mine", retention=["instructions"], domain=["questions.jsonl"], settings={"eval.limit": 6, "eval.max_new_tokens": 12}, quiet=True)
again = opdcl.evaluate("mine", quiet=True)
both = opdcl.compare(["mine", "whole"], out="side")
whole = opdcl.run("tiny.yaml", out="whole", quiet=True)
print(json.dumps({
    "repr": repr(measured), "html": measured._repr_html_(), "verdict": measured.summary["verdict"], "same": again.summary == measured.summary,
    "adapters": sorted(measured.adapters), "report": measured.report.name, "exists": measured.report.exists(), "read": opdcl.report("mine").summary == measured.summary,
    "whole": repr(whole), "compared": both._repr_html_(), "folder": str(both.path),
}))
try:
    opdcl.recover("nowhere")
except opdcl.errors.OpdclError as fault:
    print(fault.hint)
"""


@pytest.fixture(scope="module")
def folder(finished):
    folder = finished.parent
    (folder / "questions.jsonl").write_bytes((folder / "rows.jsonl").read_bytes())
    return folder


def test_the_verbs_go_on_from_one_another_and_show_themselves(folder, tiny_model):
    script = SCRIPT.replace("MODEL", repr(str(tiny_model)))
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    text, hint = done.stdout.strip().splitlines()
    found = json.loads(text)
    assert found["repr"] == f"<opdcl: {found['verdict']}>"
    assert f"<strong>{found['verdict']}" in found["html"].replace("&#x27;", "'")
    assert "<th>recovered</th>" in found["html"]
    assert found["same"]
    assert found["read"]
    assert found["adapters"] == ["recovered", "tuned"]
    assert found["report"] == "report.html"
    assert found["exists"]
    assert found["whole"].startswith("<opdcl: ")
    assert "<table>" in found["compared"]
    assert (folder / "side" / "compare.html").exists()
    assert "opdcl finetune" in hint
    # The same run for the command line: nothing is left to do.
    again = opdcl("eval", "mine", cwd=folder)
    assert "everything is done already" in again.stderr
