"""Standard streams that are closed, broken, or of another encoding; and a library that panics."""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import command as runner
from helpers.command import ENV, OPDCL, ROOT

from opdcl.cli import screen
from opdcl.console import Output


def shell(line: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash in which `opdcl` is this checkout's command."""
    command = shlex.join(OPDCL)
    return subprocess.run(
        ["bash", "-c", f'opdcl() {{ {command} "$@"; }}; {line}'],
        cwd=cwd,
        env={**ENV, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_stops_no_command(tmp_path, closed):
    done = shell(f"opdcl workflows cp quickstart mine.yaml {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert "finetune:" in (tmp_path / "mine.yaml").read_text(), "nothing was printed into the file"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_in_another_encoding_loses_no_result(encoding, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    screen.prepare()
    answer = {"answer": "Prüfung ⟦1⟧ 😀"}
    Output("json").result("", answer)
    sys.stdout.flush()
    assert json.loads(written.getvalue().decode(encoding)) == answer
    Output().result(answer["answer"], answer)
    sys.stdout.flush()
    shown = written.getvalue().decode(encoding).splitlines()[-1]
    assert shown == answer["answer"].encode(encoding, "replace").decode(encoding)


def test_without_docstrings_opdcl_says_why_it_does_not_run(tmp_path):
    done = shell("opdcl --version", tmp_path, PYTHONOPTIMIZE="2")
    assert done.returncode == 4
    assert done.stderr.decode().splitlines()[0] == "error: opdcl does not run without docstrings"


@pytest.fixture
def unread():
    """A text stream on a pipe whose reader is gone."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = io.TextIOWrapper(open(writing, "wb", 0), encoding="utf-8", write_through=True)  # noqa: SIM115
    yield stream
    stream.close()


def test_a_run_goes_on_when_nobody_reads_its_notes(unread, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", unread)
    output = Output()
    for _ in range(3):
        output.note("step 1 of 3")
    with output.stage("finetune") as line:
        line.progress(1, 1)
    output.result("done", {})
    assert capsys.readouterr().out == "done\n"


def test_a_result_that_nobody_reads_is_told_apart_from_a_failure(unread, monkeypatch):
    monkeypatch.setattr(sys, "stdout", unread)
    with pytest.raises(BrokenPipeError):
        Output().result("done", {})


def test_a_library_that_panics_ends_in_a_sentence(tiny_model, tmp_path):
    """Rust's panics are no subclass of `Exception`; a pattern that backtracks without end makes one."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "((a+)+)+!"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, tokenizer["pre_tokenizer"]]}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "a" * 60, "answer": "b"}))
    done = runner.opdcl("finetune", "rows.jsonl", "--base", model, "-o", "out", cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert "error: a library failed" in done.stderr
    assert "Traceback" not in done.stderr
