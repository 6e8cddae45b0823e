"""`opdcl init`: what it asks, refuses and writes."""

import json
import os
from pathlib import Path

import pytest
from helpers import command as runner

ENDINGS = ("mar", "vane", "noch", "wick", "esk", "ton", "by", "ham")


@pytest.fixture
def model(tiny_folder, tiny_model):
    """The tiny model, in a folder with forty rows of which none are alike."""
    words = [a + b for a in ("ola", "bri", "cor", "dun", "fen") for b in ENDINGS]
    rows = [{"question": f"Where is {word}?", "answer": word.upper()} for word in words]
    (tiny_folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tiny_model)


def test_the_workflow_runs_as_the_command_says(model):
    words = ["init", "rows.jsonl", "--base", model, "--test-share", 0.25, "-o", "my-flow.yaml"]
    written = runner.opdcl(*words, code=0)
    assert written.stdout == "wrote my-flow.yaml, my-flow-rows.jsonl, my-flow-test-rows.jsonl\n"
    assert "10 of 40 rows are set aside" in written.stderr
    assert written.stderr.endswith("next: opdcl run my-flow.yaml --dry-run\n")
    planned = runner.opdcl("run", "my-flow.yaml", "--dry-run", "--json")
    assert json.loads(planned.stdout)["data"]["rows"] == 30, planned.stderr
    assert runner.opdcl(*words).stderr.startswith("error: my-flow.yaml exists, and would be overwritten\n")


def test_few_rows_make_a_workflow_too_and_own_test_rows_are_asked_beside_a_run_of_its_name(model, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    few = runner.opdcl("init", "rows.jsonl", "--base", model)
    assert few.stdout == "wrote mine.yaml, mine-rows.jsonl\n", few.stderr
    assert "40 rows: none set aside; 4 could be" in few.stderr
    assert "runs/mine exists: this workflow runs in runs/mine-2" in few.stderr
    again = runner.opdcl("init", "rows.jsonl")
    assert again.stderr.endswith("hint: opdcl init rows.jsonl -o mine-2.yaml\n")
    runner.opdcl("init", "rows.jsonl", "--base", model, "--test", "rows.jsonl", "-o", "own.yaml", code=0)
    for flow, asked in (("mine.yaml", False), ("own.yaml", True)):
        planned = json.loads(runner.opdcl("run", flow, "--dry-run", "--json").stdout)
        assert planned["data"]["rows"] == 40
        assert "epochs: 4 " in (tmp_path / flow).read_text()
        assert ("mine" in {task["suite"] for task in planned["tasks"]}) == asked


def test_rows_that_do_not_exist_leave_nothing_behind(model, tmp_path):
    before = sorted(tmp_path.iterdir())
    assert "nowhere.jsonl" in runner.opdcl("init", "nowhere.jsonl", "-o", "new.yaml").stderr
    assert sorted(tmp_path.iterdir()) == before


def test_the_name_of_a_file_of_rows_runs_no_code(model, tmp_path):
    evil = "import pathlib; pathlib.Path('PWNED').touch()\nfrom transformers import LlamaConfig as C\n"
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil/config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}})
    )
    (tmp_path / "evil/evil.py").write_text(evil)
    arms = "arms: {a: {model: {id: evil, trust_remote_code: true}}} # .jsonl"
    name = os.rename("rows.jsonl", f"rows\r{arms}") or f"rows\r{arms}"
    runner.opdcl("init", name, "--base", model, "--test-share", 0.25, code=0)
    assert "evil" not in runner.opdcl("run", "mine.yaml", "--dry-run", "--json").stdout
    refused = runner.opdcl("init", name, "--base", "evil", "--test-share", 0.25, "-o", "other.yaml")
    assert (refused.returncode, Path("other.yaml").exists()) != (0, True)
    assert not Path("PWNED").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "/"], "error: / is a folder, or"),
        (["-o", ".."], "error: .. is a folder, or"),
        (["-o", "sub/mine.yaml"], "error: sub/mine.yaml is a folder, or"),
    ],
)
def test_what_names_no_workflow_or_model_is_refused_at_once(model, words, said):
    done = runner.opdcl("init", "rows.jsonl", "--base", model, *words)
    assert (done.returncode, done.stderr.startswith(said)) == (2, True), done.stderr


def test_a_refusal_of_the_dry_run_names_the_place_of_the_workflow(model, tmp_path):
    (tmp_path / "empty").mkdir()
    done = runner.opdcl("init", "rows.jsonl", "--base", tmp_path / "empty", "--test-share", 0.25, code=2)
    assert "tmp" not in done.stderr.replace(str(tmp_path), "")


def test_bytes_that_are_no_text_are_named(model):
    lone = Path("rows.jsonl").read_text().replace('"answer"', '"note": "\\ud800", "answer"')
    Path(os.fsdecode(b"rows-\xe9.jsonl")).write_text(lone)
    done = runner.opdcl("init", os.fsdecode(b"rows-\xe9.jsonl"), "--base", model, "--test-share", 0.3, code=2)
    assert "is not valid Unicode" in done.stderr
