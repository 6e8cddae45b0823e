"""The whole job through the command line, on a two-layer model: run, repeat, interrupt, resume, refuse."""

import json
import os
import shutil

import pytest
from helpers.command import opdcl, sets
from helpers.interrupts import killed
from helpers.synthetic import alter

from opdcl.rundir.layout import RunDir
from opdcl.rundir.seals import forget


def test_a_run_writes_every_file_of_the_layout(finished, project):
    summary = json.loads((project / "summary.json").read_text())
    assert set(summary["suites"]) == {"instructions", "questions"}
    for suite in summary["suites"].values():
        assert suite["n"] == 6
        assert all(
            0 <= suite[s]["low"] <= suite[s]["value"] <= suite[s]["high"] <= 1
            for s in ("base", "tuned", "recovered")
        )
    assert summary["cost"]["recover"]["tokens"] > 0
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["base"]["fingerprint_before"] == manifest["base"]["fingerprint_after"]
    for stage in ("01-finetune", "02-recover"):
        record = json.loads((finished / "stages" / stage / "stage.json").read_text())
        assert record["status"] == "done"
        assert (finished / "stages" / stage / "adapter" / "adapter_model.safetensors").exists()
    for name in ("report.md", "report.html", "README.md", "workflow.yaml", "config.json"):
        assert (finished / name).stat().st_size > 0
    samples = (finished / "evals" / "recovered" / "questions.samples.jsonl").read_text().splitlines()
    assert len(samples) == 6


def test_secrets_are_never_written_and_determinism_changes_nothing_on_the_cpu(finished, project, tmp_path):
    planted = {
        "HF_TOKEN": "hf_" + "Q7" * 17,
        "WANDB_API_KEY": "wandb-3f9a1c77",
        "DB_PASSWORD": "correct-horse",
        "X_CREDENTIALS": "pelican-feet",
    }
    words = ["run", "tiny.yaml", "--deterministic", "-o", tmp_path / "run"]
    description = "description=hf_Q7Q7 and pelican-feet"
    done = opdcl(*words, "--set", description, env=planted, cwd=project)
    assert done.returncode == 2, "a secret in the configuration is refused"
    opdcl(*words, env=planted, cwd=project, code=0)
    url = "https://someone:swordfish@models.example/a"
    bad = opdcl(*words, "--set", f"model.id={url}", env=planted, cwd=project, code=2)
    written = done.stdout + done.stderr + bad.stdout + bad.stderr
    written += "".join(p.read_text(errors="replace") for p in (tmp_path / "run").rglob("*") if p.is_file())
    assert [secret for secret in (*planted.values(), "swordfish") if secret in written] == []
    adapter = "stages/02-recover/adapter/adapter_model.safetensors"
    assert (tmp_path / "run" / adapter).read_bytes() == (finished / adapter).read_bytes()


def test_a_link_that_leaves_the_run_is_refused(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "evals")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "evals").symlink_to(tmp_path / "elsewhere")
    done = opdcl("eval", tmp_path / "run", code=2)
    assert "evals is a symbolic link" in done.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_recovery_learns_and_alternates(finished):
    rows = [json.loads(r) for r in (finished / "stages/02-recover/metrics.jsonl").read_text().splitlines()]
    streams = [r["stream"] for r in rows if "stream" in r]
    assert streams == ["general", "domain"] * 4
    held_out = [r["validation"]["general_kl"] for r in rows if "validation" in r]
    assert min(held_out[1:]) < held_out[0]


def test_a_second_run_skips_everything_and_changes_nothing(finished, project):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*.safetensors")}
    again = opdcl("run", "tiny.yaml", "-o", "whole", cwd=project, code=0)
    assert "finetune" not in again.stderr.partition("next: ")[0]
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*.safetensors")}


def test_a_recovery_on_the_domain_alone_is_measured_and_reported(finished, project):
    alone = ["recover.general=null", "recover.general_per_domain=0", "recover.steps=2"]
    done = opdcl("recover", "whole", "-o", "domain-alone", *sets(*alone), cwd=project, code=0)
    assert "warning: there are no general prompts" in done.stderr
    done = opdcl("eval", "domain-alone", "--json", cwd=project, code=0)
    assert json.loads(done.stdout)["suites"]["questions"]["recovered"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_run_killed_before_its_first_files_are_there_can_be_begun_again(project, tmp_path, count):
    words = ["run", "tiny.yaml", "-o", tmp_path / "run"]
    assert killed(lambda: opdcl(*words, cwd=project), "rename", count, tmp_path / "log")
    assert (tmp_path / "run").exists()
    opdcl(*words, "--dry-run", cwd=project, code=0)


def test_a_file_with_the_name_of_a_measured_suite_does_not_replace_its_results(finished, tmp_path):
    (tmp_path / "questions.jsonl").write_text('{"question": "Who?", "answer": "Nobody"}\n')
    before = (finished / "evals" / "recovered" / "questions.json").read_bytes()
    again = ("eval", finished, "--domain", "questions.jsonl", "--dry-run")
    done = opdcl(*again, cwd=tmp_path, code=2)
    assert "this run has measured the suite 'questions' on" in done.stderr
    assert "--data NAME=questions.jsonl" in done.stderr
    forced = opdcl(*again, "--force", cwd=tmp_path, code=0)
    assert "rows of the fine-tune" not in forced.stdout  # they have been learned already
    assert (finished / "evals" / "recovered" / "questions.json").read_bytes() == before


def test_a_truncated_checkpoint_falls_back_to_the_one_before(finished, project):
    shutil.copytree(finished, project / "cut")
    stage = project / "cut" / "stages" / "02-recover"
    shutil.rmtree(stage / "adapter")
    forget(RunDir(project / "cut"), stage)
    alter(stage / "stage.json", status="running")
    last, before = sorted(stage.glob("trainer/checkpoint-*"), key=lambda p: -int(p.name.split("-")[1]))
    weights = next(last.rglob("adapter_model.safetensors"))
    os.truncate(weights, weights.stat().st_size // 2)
    again = opdcl("run", "tiny.yaml", "-o", "cut", cwd=project, code=0)
    assert f"{last.name} is damaged and ignored" in again.stderr
    assert f"resuming from step {before.name.split('-')[1]} of 8" in again.stderr
    made, expected = (
        p / "stages" / "02-recover" / "adapter" / "adapter_model.safetensors"
        for p in (project / "cut", finished)
    )
    assert made.read_bytes() == expected.read_bytes()
