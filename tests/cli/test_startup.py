"""Tests that need new processes: which libraries a command imports, the speed of help, pipes, tracebacks."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import ENV, ROOT

HEAVY = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "lm_eval",
    "accelerate",
    "pandas",
    "scipy",
    "numpy",
)
# Packages and modules that may import torch and its like; everything else must stay light.
HEAVY_MODULES = (
    "sampling",
    "measure",
    "train",
    "model.architecture",
    "model.hardware",
    "model.load_backbone",
    "model.backbone",
    "model.forward",
    "model.lora",
    "model.llama",
    "model.distributions",
    "pipeline.dry_run",
    "pipeline.forecast",
    "results",
    "deploy.chat",
    "__main__",
)
MODULES = sorted(
    ".".join(p.relative_to(ROOT / "opdcl").with_suffix("").parts)
    for p in (ROOT / "opdcl").rglob("*.py")
    if p.stem != "__init__"
)
LIGHT = [name for name in MODULES if not name.startswith(HEAVY_MODULES)]
ENTRY = "from opdcl.cli import main; main()"


def python(code: str, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a new process that imports this checkout."""
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=cwd,
        env={**ENV, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def imported(code: str, cwd: Path) -> list[str]:
    """Return which heavy packages `code` brings into a fresh process."""
    done = python(f"import sys\n{code}\nprint('HEAVY', *[m for m in {HEAVY!r} if m in sys.modules])", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


def test_help_imports_no_heavy_library(tmp_path):
    code = "sys.argv = ['opdcl', '--help']\nfrom opdcl.cli import app\napp(standalone_mode=False)"
    assert imported(code, tmp_path) == []


def test_the_import_check_can_fail(tmp_path):
    assert imported("import numpy", tmp_path) == ["numpy"]


def test_the_light_modules_import_no_heavy_library(tmp_path):
    assert imported("\n".join(f"import opdcl.{name}" for name in LIGHT), tmp_path) == []


def test_reading_a_workflow_and_rows_imports_no_heavy_library(tmp_path):
    code = "from opdcl.config.load import load; from opdcl.data.rows import load_rows"
    code += "; load(['quickstart']); load_rows('handbook')"
    assert imported(code, tmp_path) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("finetune rows.jsonl -o out --dry-run", "rows.jsonl:1: the row has only answer"),
        ("run flow.yaml -o out --dry-run", "rows.jsonl:1: the row has only answer"),
        ("run quickstart -o folder", "folder exists and is not a run directory"),
        ("chat folder hi", "folder holds no adapter"),
        ("run quickstart --set eval.retention=instructons", "names no suite"),
    ],
)
def test_a_fault_is_found_before_a_heavy_library_is_imported(tmp_path, words, message):
    (tmp_path / "rows.jsonl").write_text('{"answer": "a"}\n')
    (tmp_path / "flow.yaml").write_text("finetune: {data: handbook}\nrecover: {general: rows.jsonl}\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "cat.jpg").write_text("meow")
    code = f"sys.argv = ['opdcl', *{words.split()!r}]\nfrom opdcl.cli import main\n"
    code += "try: main()\nexcept SystemExit as end: print(end.code)"
    done = python(f"import sys\n{code}\nprint([m for m in {HEAVY!r} if m in sys.modules])", cwd=tmp_path)
    assert message in done.stderr
    assert done.stdout.split() == ["2", "[]"]


def test_help_answers_in_under_half_a_second(tmp_path):
    best = float("inf")
    for _ in range(6):
        # CPU time: the same on a machine that is busy with other tests.
        before = os.times()
        assert python(ENTRY, "--help", cwd=tmp_path).returncode == 0
        after = os.times()
        seconds = after.children_user - before.children_user + after.children_system - before.children_system
        best = min(best, seconds)
        if best < 0.5:
            break
    assert 0 < best < 0.5


def test_only_debug_mode_shows_a_traceback(tmp_path):
    # A library that fails in an unforeseen way.
    code = f"import ruamel.yaml\nruamel.yaml.YAML = None\n{ENTRY}"
    words = ("config", "validate", "quickstart")
    plain = python(code, *words, cwd=tmp_path)
    assert plain.returncode == 1
    assert "Traceback" not in plain.stderr
    assert "OPDCL_DEBUG=1" in plain.stderr
    loud = python(code, *words, cwd=tmp_path, OPDCL_DEBUG="1")
    assert "Traceback" in loud.stderr


def test_a_reader_that_closes_the_pipe_early_causes_no_error(tmp_path):
    script = f"{shlex.quote(sys.executable)} -c '{ENTRY}' config schema | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = python(
        "import subprocess, sys; sys.exit(subprocess.run(['bash', '-c', sys.argv[1]]).returncode)",
        script,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[-1] == "0"
    assert [line for line in done.stderr.splitlines() if not line.startswith("next: ")] == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "following"),
    [
        ("doctor", "run quickstart"),
        ("run a.yaml --base MODEL --set seeds=[1] --dry-run", "run a.yaml --base MODEL --set 'seeds=[1]'"),
    ],
    ids=["doctor", "dry run"],
)
def test_the_libraries_that_a_command_imports_say_nothing(tiny_model, tmp_path, command, following):
    (tmp_path / "a.yaml").write_text("finetune: {data: handbook}\n")
    command, following = (text.replace("MODEL", str(tiny_model)) for text in (command, following))
    said = python(ENTRY, *command.split(), cwd=tmp_path).stderr.replace("checking model and data\n", "")
    assert said == f"next: opdcl {following}\n"  # a slow machine says what it does after ten seconds
