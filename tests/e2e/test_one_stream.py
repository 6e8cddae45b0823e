"""A recovery with one stream, verb by verb: a warning before training, then a measurement and a report."""

import json

import pytest
from helpers.command import opdcl
from helpers.tiny import make_project

FINETUNE = ["finetune.lora.r=4", "finetune.batch_size=4", "model.dtype=float32"]
RECOVER = ["recover.rollouts=2", "recover.max_new_tokens=6", "recover.validation_prompts=2"]


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.fixture
def folder(tmp_path, tiny_model):
    make_project(tmp_path, tiny_model)
    (tmp_path / "pages").mkdir()
    for name in ("one", "two"):
        (tmp_path / "pages" / f"{name}.md").write_text(f"The lift of house {name} came in 1931. " * 8)
    return tmp_path


def verbs(folder, model, data: str, recovery: list[str]) -> tuple[str, dict]:
    """Fine-tune, recover and evaluate; return what the recovery said and the summary."""
    steps = [
        ["finetune", "--base", model, data, "-o", "mine", "--epochs", "1", *sets(*FINETUNE)],
        ["recover", "mine", "--steps", "2", *sets(*RECOVER, *recovery)],
        ["eval", "mine", "--domain", "rows.jsonl", "--limit", "4", *sets("eval.max_new_tokens=8")],
    ]
    said = []
    for words in steps:
        done = opdcl(*words, cwd=folder)
        assert done.returncode == 0, done.stderr
        said.append(done.stderr)
    summary = json.loads(opdcl("report", "mine", "--json", cwd=folder).stdout)
    assert summary["suites"]["rows"]["recovered"]
    return said[1], summary


def test_plain_text_without_domain_prompts_is_recovered_measured_and_reported(folder, tiny_model):
    said, summary = verbs(folder, tiny_model, "pages", ["recover.general=prompts.jsonl"])
    warning = said.index("warning: no prompts guard the domain")
    assert "name some with --domain" in said
    assert (
        warning < said.index("recover 1/2") if "recover 1/2" in said else warning < said.index("recover 2/2")
    )
    report = (folder / "mine" / "report.md").read_text()
    # One command per verb, and the name is that of the directory.
    for words in ("opdcl finetune --base", "opdcl recover mine --steps 2 --set", "opdcl eval mine --domain"):
        assert words in report
    assert report.startswith("# mine")
    assert summary["name"] == "mine"


def test_a_recovery_on_the_domain_alone_is_measured_and_reported(folder, tiny_model):
    settings = ["recover.general=null", "recover.general_per_domain=0"]
    said, _ = verbs(folder, tiny_model, "rows.jsonl", settings)
    assert "warning: there are no general prompts" in said
