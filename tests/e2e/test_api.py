"""The verbs from Python: they do what the command line does, and display themselves in a notebook."""

import json
import subprocess
import sys

import pytest
from helpers.command import ENV, opdcl

import opdcl as api
from opdcl.errors import OpdclError

LIGHT = "import sys, opdcl; assert not {'torch', 'transformers', 'scipy'} & set(sys.modules)"


@pytest.fixture(scope="module")
def folder(finished):
    folder = finished.parent
    (folder / "questions.jsonl").write_bytes((folder / "rows.jsonl").read_bytes())
    return folder


def test_importing_the_package_loads_no_heavy_library(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIGHT], cwd=tmp_path, env=ENV, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr


def test_each_verb_continues_the_run_and_displays_itself(folder, tiny_model, monkeypatch):
    monkeypatch.chdir(folder)
    tuned = {"model.id": str(tiny_model), "model.dtype": "float32", "finetune.lora.r": 4}
    tuned |= {"finetune.batch_size": 4, "finetune.epochs": 1}
    api.finetune("rows.jsonl", out="mine", settings=tuned, quiet=True)
    recovered = {"recover.steps": 4, "recover.rollouts": 4, "recover.max_new_tokens": 6}
    recovered |= {"recover.validation_prompts": 2}
    api.recover("mine", prompts="prompts.jsonl", settings=recovered, quiet=True)
    suites = {"retention": ["instructions"], "domain": ["questions.jsonl"]}
    limits = {"eval.limit": 6, "eval.max_new_tokens": 12, "eval.closeness": None}
    measured = api.evaluate("mine", **suites, settings=limits, quiet=True)
    again = api.evaluate("mine", quiet=True)
    compared = api.compare(["mine", "whole"], out="side")
    whole = api.run("tiny.yaml", out="whole", quiet=True)

    verdict = measured.summary["verdict"]
    assert repr(measured) == f"<opdcl: {verdict}>"
    html = measured._repr_html_()
    assert f"<strong>{verdict}" in html.replace("&#x27;", "'")
    assert "<th>recovered</th>" in html
    assert again.summary == measured.summary
    assert api.report("mine").summary == measured.summary
    assert sorted(measured.adapters) == ["recovered", "tuned"]
    assert measured.report.name == "report.html"
    assert measured.report.exists()
    assert repr(whole).startswith("<opdcl: ")
    assert "<table>" in compared._repr_html_()
    # What the report says of the model and its rows.
    page = measured.report.read_text()
    manifest = json.loads((folder / "mine" / "manifest.json").read_text())
    weights = json.loads((tiny_model / "config.json").read_text())
    assert manifest["base"]["parameters"] > weights["vocab_size"] * weights["hidden_size"]
    assert f"{len((folder / 'rows.jsonl').read_text().splitlines())} rows" in page
    assert "M parameters" in page
    assert (folder / "side" / "compare.html").exists()
    with pytest.raises(OpdclError) as refused:
        api.recover("nowhere")
    assert "opdcl finetune" in refused.value.hint
    # The command line finds nothing left to do in the same run.
    done = opdcl("eval", "mine", cwd=folder)
    assert "nothing to do: all stages are finished" in done.stderr
