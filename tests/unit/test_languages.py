"""A text of others is one value in each language that we write: written and read again, it is equal."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from helpers.awkward import AWKWARD, BREAKS
from huggingface_hub import metadata_load

from opdcl.cli import screen
from opdcl.cli.config import workflow_text
from opdcl.config.load import load
from opdcl.config.model import ModelConfig
from opdcl.config.shipped import find_workflow
from opdcl.deploy.export import write_readme
from opdcl.errors import UsageError
from opdcl.sanitize import harmless_json

FILES = [Path(f"mine{end}") for end in (".yaml", "-rows.jsonl", "-test-rows.jsonl")]
CODE = "arms: {a: {model: {id: evil, trust_remote_code: true}}} # .jsonl"


def test_a_name_is_a_name_in_a_workflow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = yaml.safe_load(find_workflow("own-data").read_text())
    for text in (*AWKWARD, *(f"rows{mark}{CODE}" for mark in BREAKS)):
        Path("mine.yaml").write_text(
            workflow_text("mine", text, text, FILES, 9), encoding="utf-8", newline=""
        )
        written = yaml.safe_load(Path("mine.yaml").read_bytes())
        assert written["description"] == f"{text} on {text}"
        assert written["model"]["id"] == text
        assert written.keys() == plain.keys(), text
        assert written["recover"] == plain["recover"], text
        flow, _ = load(["mine.yaml"])
        assert not flow.arms, text
        assert not flow.model.trust_remote_code, text


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(UsageError, match="YAML cannot hold the names"):
        workflow_text("a\x85b", "rows.jsonl", "smollm2-135m", FILES, 9)


def test_a_name_is_a_name_in_a_card_in_json_and_in_a_command(tmp_path, capsys):
    screen.reset()
    for text in AWKWARD:
        base = ModelConfig(id=f"models/of/{text.replace('/', '')}")
        write_readme(tmp_path, "mine", base, "tuned", "adapter")
        assert metadata_load(tmp_path / "README.md")["base_model"] == text.replace("/", "")
        assert json.loads(harmless_json(json.dumps({text: text}, ensure_ascii=False))) == {text: text}
        screen.suggest("run", text)
        (line,) = capsys.readouterr().err.split("next: ")[1:]
        if not set(text) & set(BREAKS):  # those are shown, never obeyed
            assert shlex.split(line) == ["opdcl", "run", text]
        assert not [mark for mark in BREAKS[1:] if mark in line], text
