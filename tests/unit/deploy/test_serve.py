"""What the server of a run is told about its chat template."""

import shutil

import pytest

from opdcl.config.workflow import Workflow
from opdcl.deploy.serve import serve_command
from opdcl.errors import UsageError
from opdcl.rundir.files import write_json
from opdcl.rundir.layout import RunDir


def test_the_server_gets_the_chat_template_of_the_run(tiny_model, tmp_path):
    run = RunDir(tmp_path / "run")
    for kwargs in ({}, {"tone": "kind"}):
        template = "{{ tone }}{% for m in messages %}{{ m.content }}{% endfor %}" if kwargs else None
        model = {"id": str(tiny_model), "chat_template": template, "chat_template_kwargs": kwargs}
        workflow = Workflow.model_validate({"model": model})
        write_json(run.config, {"workflow": workflow.model_dump(), "origins": {}})
        dry, _ = serve_command(run, shutil.which("true"), "127.0.0.1", 8000, [], dry_run=True)
        assert [file.name for file in run.path.iterdir()] == ["config.json"]
        command, _ = serve_command(run, shutil.which("true"), "127.0.0.1", 8000, [])
        assert command == dry
        assert ("--chat-template" in command) == bool(kwargs)
    file = command[command.index("--chat-template") + 1]
    assert 'default("kind")' in (tmp_path / "run" / "chat_template.jinja").read_text()
    assert file == str(tmp_path / "run" / "chat_template.jinja")


@pytest.fixture
def run(tiny_model, tmp_path, monkeypatch):
    monkeypatch.delenv("OPDCL_SERVER_KEY", raising=False)
    run = RunDir(tmp_path / "run")
    workflow = Workflow.model_validate({"model": {"id": str(tiny_model)}})
    write_json(run.config, {"workflow": workflow.model_dump(), "origins": {}})
    return run


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node7", "0", "", "::ffff:0.0.0.0", "127.x"])
def test_a_server_that_others_can_reach_needs_a_key(run, monkeypatch, host):
    for blank in (None, "", " "):
        if blank is not None:
            monkeypatch.setenv("OPDCL_SERVER_KEY", blank)
        with pytest.raises(UsageError, match="without a key, anybody on the network") as caught:
            serve_command(run, shutil.which("true"), host, 8000, [])
        assert "OPDCL_SERVER_KEY" in caught.value.hint
    monkeypatch.setenv("OPDCL_SERVER_KEY", "of-my-own")
    _, environment = serve_command(run, shutil.which("true"), host, 8000, [])
    assert environment["VLLM_API_KEY"] == "of-my-own"


# vLLM takes abbreviations and underscores, reads a file of options, and drops keys that are empty.
OPENING = ("--host 0.0.0.0", "--host=0.0.0.0", "--hos 0.0.0.0", "--h=::", "--config o.yaml", "--conf=a.yaml")
OPENING += ("--api-key", "--api-key=", "--api_key=", "--api-k x", "--api-key of-my-own")


@pytest.mark.parametrize("words", OPENING)
def test_no_option_for_vllm_decides_who_may_reach_the_server(run, monkeypatch, words):
    monkeypatch.setenv("OPDCL_SERVER_KEY", "of-my-own")
    with pytest.raises(UsageError, match="after -- would decide who may reach the server") as caught:
        serve_command(run, shutil.which("true"), "127.0.0.1", 8000, words.split(" "))
    assert caught.value.hint


def test_other_options_for_vllm_pass(run):
    words = ["--max-model-len", "512", "--hf-overrides={}", "--config-format=hf", "--headless", "-cc.mode=0"]
    command, _ = serve_command(run, shutil.which("true"), "127.0.0.1", 8000, words)
    assert command[-len(words) :] == words


LOCAL = ["127.0.0.1", "127.0.0.2", "127.1", "2130706433", "localhost", "LOCALHOST", "::1", "[::1]"]


@pytest.mark.parametrize("host", [*LOCAL, "::ffff:127.0.0.1"])
def test_a_server_for_this_machine_needs_none(run, host):
    _, environment = serve_command(run, shutil.which("true"), host, 8000, [])
    assert "VLLM_API_KEY" not in environment
