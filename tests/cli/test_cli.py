"""The command line as a user meets it: in a process of its own, from an empty folder."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "lm_eval", "accelerate", "pandas", "numpy")
# Packages and modules that may import torch and its like; everything else must stay light.
HEAVY_MODULES = (
    "distill",
    "sampling",
    "stages",
    "training",
    "model.backbone",
    "model.forward",
    "model.fused_lora",
    "model.short_attention",
    "model.distributions",
    "model.compatibility",
    "pipeline.dry_run",
    "results.stats",
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


def python(code: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "TERM": "dumb", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    for name in ("FORCE_COLOR", "OPDCL_DEBUG"):
        env.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def opdcl(tmp_path: Path):
    """Return a function that runs one command in an empty folder and expects it to work."""

    def command(*args: str) -> str:
        done = python(ENTRY, *args, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return command


@pytest.fixture
def refused(tmp_path: Path):
    """Return a function that runs one command, expects it to be refused cleanly, and returns what it said."""

    def command(*args: str, code: int = 2) -> str:
        before = snapshot(tmp_path)
        done = python(ENTRY, *args, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert done.stdout == ""
        first, *rest = done.stderr.splitlines()
        assert first.startswith("error: ")
        assert rest, "an error says what to do next"
        assert rest[-1].startswith("hint: ")
        assert "Traceback" not in done.stderr
        assert snapshot(tmp_path) == before, "a refused command leaves nothing behind"
        return done.stderr

    return command


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def imported(code: str, cwd: Path) -> list[str]:
    """Return which heavy packages `code` brings into a fresh process."""
    done = python(f"import sys\n{code}\nprint('HEAVY', *[m for m in {HEAVY!r} if m in sys.modules])", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


def test_help_imports_no_heavy_library(tmp_path):
    assert (
        imported(
            "sys.argv = ['opdcl', '--help']\nfrom opdcl.cli import app\napp(standalone_mode=False)", tmp_path
        )
        == []
    )


def test_the_import_check_can_fail(tmp_path):
    assert imported("import numpy", tmp_path) == ["numpy"]


def test_the_light_modules_import_no_heavy_library(tmp_path):
    assert imported("\n".join(f"import opdcl.{name}" for name in LIGHT), tmp_path) == []


def test_reading_a_workflow_and_rows_imports_no_heavy_library(tmp_path):
    code = "from opdcl.config.load import load; from opdcl.data.rows import load_rows; load(['quickstart']); load_rows('handbook')"
    assert imported(code, tmp_path) == []


def test_help_answers_in_under_half_a_second(tmp_path):
    best = 9.0
    for _ in range(6):
        started = time.perf_counter()
        assert python(ENTRY, "--help", cwd=tmp_path).returncode == 0
        best = min(best, time.perf_counter() - started)
        if best < 0.5:
            break
    assert best < 0.5


def test_help_names_every_command(opdcl):
    said = opdcl("--help")
    for name in (
        "run",
        "finetune",
        "recover",
        "eval",
        "report",
        "compare",
        "chat",
        "export",
        "push",
        "fetch",
        "workflows",
        "config",
        "doctor",
    ):
        assert f" {name} " in said


def test_version_is_one_line(opdcl):
    from opdcl import __version__

    assert opdcl("--version") == f"{__version__}\n"


def test_workflows_are_listed_for_people_and_for_programs(opdcl):
    assert "quickstart" in opdcl("workflows", "ls")
    listed = json.loads(opdcl("workflows", "ls", "--json"))
    assert "quickstart" in [w["name"] for w in listed]
    assert all(w["description"] for w in listed)


def test_a_shown_workflow_is_the_shipped_file(opdcl):
    assert (
        opdcl("workflows", "show", "quickstart").strip()
        == (ROOT / "workflows" / "quickstart.yaml").read_text().strip()
    )


def test_a_copied_workflow_is_valid_and_never_overwrites(opdcl, refused, tmp_path):
    opdcl("workflows", "cp", "quickstart", "mine.yaml")
    assert (tmp_path / "mine.yaml").read_text() == (ROOT / "workflows" / "quickstart.yaml").read_text()
    assert "valid" in opdcl("config", "validate", "mine.yaml")
    assert "mine.yaml exists" in refused("workflows", "cp", "quickstart", "mine.yaml")


def test_a_workflow_is_copied_into_a_folder_under_its_own_name(opdcl, tmp_path):
    opdcl("workflows", "cp", "quickstart")
    assert [p.name for p in tmp_path.iterdir()] == ["quickstart.yaml"]


def test_config_show_says_where_each_value_comes_from(opdcl):
    args = ("config", "show", "quickstart", "--set", "recover.steps=7")
    rows = {
        line.split()[0]: line.strip().split(maxsplit=2) for line in opdcl(*args).splitlines() if line.strip()
    }
    assert rows["recover.steps"][1:] == ["7", "--set"]
    assert rows["recover.temperature"][1:] == ["1.0", "default"]
    assert rows["finetune.data"][1] == "handbook"
    assert "quickstart.yaml:" in rows["finetune.data"][2]
    shown = json.loads(opdcl(*args, "--json"))
    assert shown["workflow"]["recover"]["steps"] == 7
    assert shown["origins"]["recover.steps"] == "--set"


def test_config_validate_answers_both_ways(opdcl):
    assert opdcl("config", "validate", "quickstart") == "quickstart: valid\n"
    assert json.loads(opdcl("config", "validate", "quickstart", "--json")) == {
        "name": "quickstart",
        "valid": True,
    }


def test_config_schema_is_a_table_for_people_and_a_json_schema_for_editors(opdcl):
    table = opdcl("config", "schema")
    assert "recover.general_per_domain" in table
    schema = json.loads(opdcl("config", "schema", "--json"))
    assert schema["additionalProperties"] is False
    assert "recover" in schema["properties"]


# Command -> what its complaint must contain.
WRONG = {
    "run quikstart": ("no workflow 'quikstart'", "did you mean quickstart?"),
    "run missing.yaml -o out": ("missing.yaml",),
    "workflows show quikstart": ("did you mean quickstart?",),
    "config show quickstart --set recover.stepz=3": (
        "unknown key recover.stepz",
        "did you mean recover.steps?",
    ),
    "run quickstart -o out --set recover.stepz=3": (
        "unknown key recover.stepz",
        "did you mean recover.steps?",
    ),
    "run quickstart -o out --set recover.steps=many": ("recover.steps", "integer", "'many'", "--set"),
    "run quickstart -o out --set recover.steps": ("is not KEY=VALUE", "--set recover.steps=60"),
    "finetune --data missing.jsonl -o out": ("missing.jsonl' does not exist",),
    "finetune --data handbook -o out --epochs 0": ("finetune.epochs", "greater than 0", "flag"),
    "finetune --data handbook -o out --epochs few": ("--epochs", "number"),
    "finetune -o out": ("--data",),
    "recover nowhere": ("nowhere is not a run directory", "opdcl finetune"),
    "eval nowhere": ("nowhere is not a run directory",),
    "eval nowhere --data ifeval": ("is not SUITE=PATH",),
    "eval . --domain missing.jsonl": ("domain questions 'missing.jsonl' do not exist", "the name of a suite"),
    "report nowhere": ("nowhere is not a run directory",),
    "report . --json": ("is not a run directory",),
    "nosuchcommand": ("nosuchcommand",),
    "run quickstart --nosuchflag": ("--nosuchflag",),
}


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_is_refused_with_words_that_help(refused, command):
    found = refused(*command.split())
    for words in WRONG[command]:
        assert words in found


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "rows.jsonl",
            '{"question": "q", "answer": "a"}\n{"question": "q", "ans\n',
            "rows.jsonl:2 is not valid JSON",
        ),
        ("rows.jsonl", '{"question": "q", "answer": "a"}\n{"answer": "a"}\n', "rows.jsonl:2 has only answer"),
        (
            "rows.jsonl",
            '{"question": "q", "answer": "a"}\n{"question": "q"}\n',
            "rows.jsonl:2 has no answer to learn",
        ),
        ("rows.jsonl", '{"question": "q", "answer": 5}\n', "rows.jsonl:1: answer is a number, not text"),
        ("rows.jsonl", "", "rows.jsonl has no rows"),
        ("rows.csv", "id,name\n1,x\n", "rows.csv:2 has only id, name"),
        ("rows.xlsx", "x", "cannot tell the format of .xlsx"),
    ],
)
def test_bad_rows_are_refused_before_anything_is_loaded_or_written(refused, tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    started = time.perf_counter()
    assert said in refused("finetune", "--data", name, "-o", "out")
    assert time.perf_counter() - started < 20
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"recover:\n  stepz: 3\n", "unknown key recover.stepz, flow.yaml:2"),
        (b"recover:\n  steps: many\n", "flow.yaml:2)"),
        (b"recover:\n  steps: 1\n  steps: 2\n", "flow.yaml:3: found duplicate key"),
        (b"recover: [\n", "flow.yaml:"),
        (b"recover: &a {}\n", "flow.yaml:1 uses an anchor or alias"),
        (b"name: \xff\n", "not UTF-8"),
        (b"- a\n", "not a mapping"),
        (b"finetune: {data: missing.jsonl}\n", "missing.jsonl' does not exist"),
        (
            b"finetune: {data: handbook}\neval: {data: {ifeval: missing.jsonl}}\n",
            "missing.jsonl does not exist",
        ),
    ],
)
def test_a_bad_workflow_file_is_refused_with_its_line(refused, tmp_path, content, said):
    (tmp_path / "flow.yaml").write_bytes(content)
    assert said in refused("run", "flow.yaml", "-o", "out")


def test_an_escape_sequence_in_the_input_does_not_reach_the_terminal(refused):
    assert "\x1b" not in refused("run", "\x1b[31mred")


def test_debug_shows_where_a_defect_is_and_normal_use_does_not(tmp_path):
    code = f"import ruamel.yaml\nruamel.yaml.YAML = None\n{ENTRY}"  # a library that fails as nobody foresaw
    plain = python(code, "config", "validate", "quickstart", cwd=tmp_path)
    assert plain.returncode == 1
    assert "Traceback" not in plain.stderr
    assert "OPDCL_DEBUG=1" in plain.stderr
    loud = python(
        f"import os; os.environ['OPDCL_DEBUG'] = '1'\n{code}",
        "config",
        "validate",
        "quickstart",
        cwd=tmp_path,
    )
    assert "Traceback" in loud.stderr


def test_a_reader_that_stops_early_is_no_error(tmp_path):
    script = f"{shlex.quote(sys.executable)} -c '{ENTRY}' config schema | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = python(
        "import subprocess, sys; sys.exit(subprocess.run(['bash', '-c', sys.argv[1]]).returncode)",
        script,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


# From here on each command loads torch and takes seconds.


def test_a_directory_that_is_no_run_is_refused_and_left_as_it_was(refused, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    said = refused("finetune", "--data", "handbook", "-o", "photos")
    assert "photos exists and is not a run directory" in said


def test_a_file_as_run_directory_is_refused(refused, tmp_path):
    (tmp_path / "note").write_text("mine")
    assert "note is a file" in refused("finetune", "--data", "handbook", "-o", "note")


def test_an_unknown_trainer_field_is_refused_with_the_nearest_one(refused):
    said = refused(
        "finetune", "--data", "handbook", "-o", "out", "--set", "finetune.trainer.weight_decai=0.1"
    )
    assert "weight_decai" in said
    assert "weight_decay" in said


def test_a_dry_run_is_one_json_document_and_writes_nothing(opdcl, tmp_path):
    plan = json.loads(opdcl("finetune", "--data", "handbook", "-o", "out", "--dry-run", "--json"))
    assert [(task["stage"], task["action"]) for task in plan["tasks"]] == [("finetune", "run")]
    assert plan["steps"]["finetune"] == 263  # 840 rows, five times, 16 to a step, rounded up
    assert plan["memory_bytes"]["finetune"] > 135e6 * 2
    assert plan["disk_bytes"] > 0
    assert [*tmp_path.iterdir()] == []


def test_a_dry_run_counts_the_longest_prompt(opdcl, tmp_path):
    sizes = []
    for words in (10, 4000):
        (tmp_path / "prompts.jsonl").write_text(json.dumps({"question": "word " * words}) + "\n")
        plan = opdcl(
            "run",
            "quickstart",
            "-o",
            "out",
            "--set",
            f"recover.general={tmp_path}/prompts.jsonl",
            "--dry-run",
            "--json",
        )
        sizes.append(json.loads(plan)["memory_bytes"]["recover"])
    assert sizes[1] > 1.5 * sizes[0]


def test_doctor_finds_this_machine_fit(opdcl):
    found = {check["name"]: check for check in json.loads(opdcl("doctor", "--json"))}
    assert {"python", "torch", "trl", "memory", "disk", "device"} <= {*found}
    assert all(check["ok"] for check in found.values() if check["needed"])


def test_doctor_ends_with_4_where_something_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("OPDCL_CACHE", "/proc/self/opdcl")  # a folder that even root cannot write to
    done = python(ENTRY, "doctor", "--json", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert [check["name"] for check in json.loads(done.stdout) if check["needed"] and not check["ok"]] == [
        "cache"
    ]
    assert "error: this machine cannot run opdcl: cache\n" in done.stderr
