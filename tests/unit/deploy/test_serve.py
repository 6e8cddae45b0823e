"""What the server of a run is told about its chat template."""

import shutil

from opdcl.config.workflow import Workflow
from opdcl.deploy.serve import serve_command
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
