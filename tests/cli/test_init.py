"""`opdcl init`: what it asks, refuses and writes."""

import io
import json

import pytest
from helpers import command as runner
from helpers.tiny import make_project

from opdcl.cli import screen
from opdcl.cli.init import init
from opdcl.errors import UsageError

ENDINGS = ("mar", "vane", "noch", "wick", "esk", "ton", "by", "ham")


class Typed(io.StringIO):
    """A terminal at which somebody types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def model(tmp_path, tiny_model, monkeypatch):
    """The tiny model, in a folder with forty rows of which none are alike."""
    monkeypatch.chdir(tmp_path)
    make_project(tmp_path, tiny_model)
    words = [a + b for a in ("ola", "bri", "cor", "dun", "fen") for b in ENDINGS]
    rows = [{"question": f"Where is {word}?", "answer": word.upper()} for word in words]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tiny_model)


def test_the_workflow_runs_as_the_command_says(model):
    words = ["init", "rows.jsonl", "--base", model, "--test-share", 0.25, "-o", "my-flow.yaml"]
    written = runner.opdcl(*words)
    assert written.returncode == 0, written.stderr
    assert written.stdout == "wrote my-flow.yaml, my-flow-rows.jsonl, my-flow-test-rows.jsonl\n"
    assert "10 of 40 rows are set aside" in written.stderr
    assert written.stderr.endswith("next: opdcl run my-flow.yaml --dry-run\n")
    planned = runner.opdcl("run", "my-flow.yaml", "--dry-run", "--json")
    assert json.loads(planned.stdout)["data"]["rows"] == 30, planned.stderr
    assert runner.opdcl(*words).stderr.startswith("error: my-flow.yaml exists\n")


def test_it_asks_on_a_terminal_and_names_what_is_missing_elsewhere(model, tmp_path, refused, monkeypatch):
    assert "ROWS is not given, and nobody can be asked" in refused("init")
    assert "--base is not given" in refused("init", "rows.jsonl")
    screen.reset()
    monkeypatch.setattr("sys.stderr", Typed())
    monkeypatch.setattr("sys.stdin", Typed(f"rows.jsonl\n{model}\n"))
    init(test_share=0.3)
    assert (tmp_path / "mine-test-rows.jsonl").read_text().count("\n") == 12
    monkeypatch.setattr("sys.stdin", Typed(f"nowhere.jsonl\n{model}\n"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match=r"nowhere\.jsonl"):
        init(out=tmp_path / "new.yaml")
    assert sorted(tmp_path.iterdir()) == before
