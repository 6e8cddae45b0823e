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
        command, _ = serve_command(run, shutil.which("true"), "127.0.0.1", 8000, [])
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


@pytest.mark.parametrize(
    ("host", "arguments"),
    [
        ("0.0.0.0", []),
        ("::", []),
        ("192.168.1.7", []),
        ("node7", []),
        ("127.0.0.1", ["--host", "0.0.0.0"]),
        ("127.0.0.1", ["--host=0.0.0.0"]),
    ],
)
def test_a_server_that_others_can_reach_needs_a_key(run, monkeypatch, host, arguments):
    with pytest.raises(UsageError, match="without a key, anybody on the network") as caught:
        serve_command(run, shutil.which("true"), host, 8000, arguments)
    assert "OPDCL_SERVER_KEY" in caught.value.hint
    serve_command(run, shutil.which("true"), host, 8000, [*arguments, "--api-key", "of-my-own"])
    monkeypatch.setenv("OPDCL_SERVER_KEY", "of-my-own")
    _, environment = serve_command(run, shutil.which("true"), host, 8000, arguments)
    assert environment["VLLM_API_KEY"] == "of-my-own"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_server_for_this_machine_needs_none(run, host):
    _, environment = serve_command(run, shutil.which("true"), host, 8000, [])
    assert "VLLM_API_KEY" not in environment
