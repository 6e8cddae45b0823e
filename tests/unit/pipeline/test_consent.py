"""The Python code of a model runs only if the command says so: nothing that lies in a run directory can."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.command import opdcl
from helpers.tiny import make_project

import opdcl as api
from opdcl.errors import UsageError

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

class TheirConfig(LlamaConfig):
    def __init__(self, **fields):
        super().__init__(**fields)
        Path({ran!r}).touch()

class TheirModel(LlamaForCausalLM):
    config_class = TheirConfig
"""
ALLOW = ("--set", "model.trust_remote_code=true")


@pytest.fixture(scope="module")
def project(tiny_model, tmp_path_factory) -> Path:
    """A folder with the run `theirs`, whose model has code of its own."""
    folder = make_project(tmp_path_factory.mktemp("consent"), tiny_model)
    shutil.copytree(tiny_model, folder / "model")
    classes = {"AutoConfig": "theirs.TheirConfig", "AutoModelForCausalLM": "theirs.TheirModel"}
    allow(folder / "model/config.json", "auto_map", value=classes)
    (folder / "model/theirs.py").write_text(CODE.format(ran=str(folder / "ran")))
    words = ("rows.jsonl", "--base", "model", "--epochs", "1", "--set", "model.dtype=float32")
    opdcl("finetune", *words, *ALLOW, "-o", "theirs", cwd=folder, code=0)
    assert ran(folder), "the code does run where it is allowed"
    return folder


def allow(file: Path, *path: str, value: object = True) -> None:
    """Set a value deep in a JSON file."""
    content = json.loads(file.read_text())
    node = content
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = value
    file.write_text(json.dumps(content))


def ran(folder: Path) -> bool:
    """Say whether the model's code has run since the last call."""
    if happened := (folder / "ran").exists():
        (folder / "ran").unlink()
    return happened


# What a command needs of the machine comes after the question of consent.
READ_THE_RUN = {
    "chat": ("chat", "theirs", "Hello", "--max-new-tokens", "2"),
    "export": ("export", "theirs", "-o", "out"),
    "export adapter": ("export", "theirs", "--format", "adapter", "-o", "out"),
    "serve": ("serve", "theirs", "--vllm", "true", "--dry-run"),
    "eval": ("eval", "theirs", "--retention", "instructions", "--limit", "2"),
    "recover": ("recover", "theirs", "--steps", "2", "--dry-run"),
    "run": ("run", "theirs/workflow.yaml", "-o", "theirs"),
    "run elsewhere": ("run", "theirs/workflow.yaml", "-o", "new", "--dry-run"),
}


@pytest.mark.parametrize("words", READ_THE_RUN.values(), ids=READ_THE_RUN)
def test_a_run_directory_cannot_allow_its_models_code(project, words):
    done = opdcl(*words, cwd=project)
    assert not ran(project), "code of the run directory has run"
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "a run directory cannot allow this command to run it" in done.stderr
    for flag in ("--set model.trust_remote_code=true", "--trust-remote-code"):
        assert flag in done.stderr
    assert not (project / "out").exists()


@pytest.mark.parametrize("words", [("report", "theirs"), ("verify", "theirs")], ids=["report", "verify"])
def test_commands_that_load_no_model_need_no_consent(project, words):
    opdcl(*words, cwd=project)
    assert not ran(project)


@pytest.mark.parametrize(
    "words",
    [
        (*READ_THE_RUN["chat"], "--trust-remote-code"),
        (*READ_THE_RUN["export"], "--trust-remote-code"),
        (*READ_THE_RUN["recover"], *ALLOW),
        (*READ_THE_RUN["run elsewhere"], *ALLOW),
    ],
    ids=["chat", "export", "recover", "run"],
)
def test_the_command_can_allow_it(project, words):
    opdcl(*words, cwd=project, code=0)
    assert ran(project)
    shutil.rmtree(project / "out", ignore_errors=True)


def test_serve_takes_the_option_of_vllm_for_consent(project):
    done = opdcl(*READ_THE_RUN["serve"], "--", "--trust-remote-code", cwd=project, code=0)
    assert done.stdout.split()[-1] == "--trust-remote-code"


def test_python_can_allow_it_by_an_argument(project):
    with pytest.raises(UsageError, match="cannot allow"):
        api.chat(project / "theirs", "Hello", max_new_tokens=2, quiet=True)
    assert not ran(project)
    [answers] = api.chat(project / "theirs", "Hello", max_new_tokens=2, quiet=True, trust_remote_code=True)
    assert {*answers.data["answers"]} == {"base", "tuned"}
    assert ran(project)


@pytest.fixture
def copy(project, tmp_path) -> Path:
    """A copy of the run, to be forged."""
    shutil.copytree(project / "theirs", tmp_path / "theirs")
    return tmp_path / "theirs"


FORGED = {
    "origin": lambda run: allow(run / "config.json", "origins", "model.trust_remote_code", value="--set"),
    "model": lambda run: allow(run / "config.json", "workflow", "model", "trust_remote_code", value=1),
    "text": lambda run: allow(run / "config.json", "workflow", "model", "trust_remote_code", value="true"),
    "arm": lambda run: allow(run / "config.json", "workflow", "arms", "a", "model", "trust_remote_code"),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("command", ["chat", "recover"])
def test_no_form_of_stored_consent_counts(project, copy, forge, command):
    forge(copy)
    opdcl(*READ_THE_RUN[command], cwd=copy.parent, code=2)
    assert not ran(project)


@pytest.mark.parametrize("command", ["chat", "export"])
def test_a_tuned_model_that_the_run_names_never_runs_its_code(project, copy, command):
    model = {"id": str(project / "model"), "trust_remote_code": True, "dtype": "float32"}
    allow(copy / "stages/01-finetune/stage.json", "tuned_model", value=model)
    opdcl(*READ_THE_RUN[command], "--trust-remote-code", cwd=copy.parent)
    (project / "ran").unlink(missing_ok=True)  # of the base, for which the command has consented
    allow(copy / "config.json", "workflow", "model", "trust_remote_code", value=False)
    opdcl(*READ_THE_RUN[command], cwd=copy.parent)
    assert not ran(project)


def test_code_that_nobody_mentioned_is_refused_with_the_same_hint(project, tmp_path):
    shutil.copytree(project / "model", tmp_path / "model")
    allow(tmp_path / "model/config.json", "model_type", value="theirs")
    words = (project / "rows.jsonl", "--base", "model", "-o", "run", "--dry-run")
    done = opdcl("finetune", *words, cwd=tmp_path, code=2)
    assert "comes with Python code" in done.stderr
    assert "--set model.trust_remote_code=true" in done.stderr
    assert not ran(project)
