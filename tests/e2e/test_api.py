"""The verbs from Python: they do what the command line does, and display themselves in a notebook."""

import json
import re

import pytest
from helpers.command import opdcl

import opdcl as api
from opdcl.errors import OpdclError


def test_each_verb_continues_the_run_and_displays_itself(finished, tiny_model, monkeypatch, capsys):
    """On plain text, with a recovery that no prompts of the domain guard."""
    folder = finished.parent
    monkeypatch.chdir(folder)
    (folder / "questions.jsonl").write_bytes((folder / "rows.jsonl").read_bytes())
    (folder / "pages").mkdir()
    for name in ("one", "two"):
        (folder / "pages" / f"{name}.md").write_text(f"The lift of house {name} came in 1931. " * 8)
    tuned = {"model.id": str(tiny_model), "model.dtype": "float32", "finetune.lora.r": 4}
    tuned |= {"finetune.batch_size": 4, "finetune.epochs": 1}
    api.finetune("pages", out="mine", settings=tuned, quiet=True)
    recovered = {"recover.steps": 2, "recover.rollouts": 4, "recover.max_new_tokens": 6}
    recovered |= {"recover.validation_prompts": 2}
    api.recover("mine", prompts="prompts.jsonl", settings=recovered)
    said = capsys.readouterr().err
    assert "name some with --domain" in said
    assert said.index("warning: no prompts guard the domain") < re.search("recover [12]/2", said).start()
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
    assert "2 rows" in page
    assert "M parameters" in page
    assert (folder / "side" / "compare.html").exists()
    with pytest.raises(OpdclError) as refused:
        api.recover("nowhere")
    assert "opdcl finetune" in refused.value.hint
    # The command line finds nothing left to do in the same run.
    done = opdcl("eval", "mine", cwd=folder)
    assert "nothing to do: all stages are finished" in done.stderr
