"""`init` and `clean`: what they ask, write and delete."""

import io
import json
import shutil

import pytest
from helpers import command as runner
from helpers.tiny import make_project

from opdcl.cli import asking, screen
from opdcl.rundir.layout import RunDir

ENDINGS = ("mar", "vane", "noch", "wick", "esk", "ton", "by", "ham")


class Typed(io.StringIO):
    """A terminal at which somebody types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path, tiny_model, monkeypatch):
    """A folder with forty rows in which little is alike, and the tiny model."""
    monkeypatch.chdir(tmp_path)
    make_project(tmp_path, tiny_model)
    words = [a + b for a in ("ola", "bri", "cor", "dun", "fen") for b in ENDINGS]
    rows = [{"question": f"Where is {word}?", "answer": word.upper()} for word in words]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(tiny_model, tmp_path / "a model")
    return tmp_path


def test_what_init_writes_runs_as_it_says(folder):
    words = ["init", "rows.jsonl", "--base", "a model", "--test-share", 0.25, "-o", "my-flow.yaml"]
    written = runner.opdcl(*words)
    assert written.returncode == 0, written.stderr
    assert written.stdout == "wrote my-flow.yaml, my-flow-rows.jsonl, my-flow-test-rows.jsonl\n"
    assert "10 of 40 rows are set aside" in written.stderr
    assert written.stderr.endswith("next: opdcl run my-flow.yaml --dry-run\n")
    planned = runner.opdcl("run", "my-flow.yaml", "--dry-run", "--json")
    assert json.loads(planned.stdout)["data"]["rows"] == 30, planned.stderr
    assert runner.opdcl(*words).stderr.startswith("error: my-flow.yaml exists\n")
    assert "name: must be a name of letters" in runner.opdcl(*words[:-1], "my flow.yaml").stderr


def test_init_asks_on_a_terminal_and_names_the_options_elsewhere(folder, refused, monkeypatch, capsys):
    assert "not given: ROWS, --base, --test-share\n" in refused("init")
    assert "not given: --base\n" in refused("init", "rows.jsonl", "--test-share", "0.1")
    screen.reset()
    monkeypatch.setattr("sys.stdin", Typed("rows.jsonl\na model\n0.3\n"))
    asking.init()
    assert (folder / "my-run-test-rows.jsonl").read_text().count("\n") == 12
    assert "a tenth" not in capsys.readouterr().err
    assert "is not a number" in type_in(monkeypatch, "rows.jsonl\na model\nfew\n")
    assert "data 'nowhere.jsonl' does not exist" in type_in(monkeypatch, "nowhere.jsonl\na model\n\n")


def type_in(monkeypatch, text: str) -> str:
    monkeypatch.setattr("sys.stdin", Typed(text))
    with pytest.raises(asking.UsageError) as fault:
        asking.init(out=RunDir("new.yaml").path)
    return fault.value.message
