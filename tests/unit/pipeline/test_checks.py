"""The dry run refuses what the run refuses, with the same words; a try that made nothing blocks nothing."""

import json
import shutil

import pytest
from helpers.command import opdcl, sets
from helpers.tiny import make_project

from opdcl.config.model import LoraSection, ModelConfig
from opdcl.errors import UsageError
from opdcl.pipeline.checks import check_targets
from opdcl.rundir.files import read_json, read_jsonl, write_atomic, write_json
from opdcl.rundir.layout import RunDir

SMALL = sets("finetune.epochs=1 recover=null eval=null")


@pytest.fixture
def project(tiny_model, tmp_path):
    return make_project(tmp_path, tiny_model)


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


LONG = [{"question": "Who?", "answer": "word " * count} for count in (1, 300, 2, 400)]

SUMS = [{"question": f"What is {i} + 1?", "answer": f"{'One more. ' * 15}\n#### {i + 1}"} for i in range(8)]

# Settings, the content of rows.jsonl if it is not the usual one, and what the error must say.
REFUSED = {
    "long rows": (["finetune.max_length=99"], lines(*LONG), "2 rows are longer than 99 tokens (first: "),
    "empty answers": ([], lines(LONG[0], {"question": "Who?", "answer": ""}), "1 row has no answer to learn"),
    "half of the targets": (["finetune.lora.target_modules=[q_proj, nope]"], "", "'nope' matches no linear"),
    "long prompts": (["recover.max_new_tokens=500"], "", "and the context leaves room for 12"),
    "one prompt": (["recover.general=[one.jsonl]"], "", "the general stream has one prompt"),
    "long answers": (["eval.max_new_tokens=2000"], "", "exceed the context of 512"),
    "a long question": (
        ["eval.data.questions=long.jsonl"],
        "",
        "long.jsonl:2: a prompt of 1238 tokens and an answer of 12 exceed the context of 512\n"
        "hint: shorten the prompt or take it out",
    ),
    # A question alone has 43 tokens; with five examples before it, each a turn, it has 502.
    "long examples": (
        ["eval.retention=[gsm8k]", "eval.data.gsm8k=sums.jsonl", "eval.max_new_tokens=200"],
        "",
        "exceed the context of 512\nhint: set eval.max_new_tokens to ",
    ),
    "a suite without answers": (["eval.data.questions=prompts.jsonl"], "", "has no question and answer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_dry_run_refuses_what_the_run_refuses_with_the_same_words(project, case):
    settings, rows, message = REFUSED[case]
    (project / "one.jsonl").write_text(lines({"prompt": "Only this."}))
    (project / "sums.jsonl").write_text(lines(*SUMS))
    long = {"question": "Why? " * 400, "answer": "So."}
    (project / "long.jsonl").write_text(lines({"question": "Who?", "answer": "Ada."}, long))
    if rows:
        (project / "rows.jsonl").write_text(rows)
    words = ["run", "tiny.yaml", "-o", "out", *(w for s in settings for w in ("--set", s))]
    dry, real = opdcl(*words, "--dry-run", cwd=project), opdcl(*words, cwd=project)
    assert message in dry.stderr
    assert (dry.returncode, dry.stderr) == (real.returncode, real.stderr)
    assert dry.returncode == 2
    assert not (project / "out").exists()


def test_a_recovery_without_any_prompts_is_refused(tuned):
    settings = ("--set", "recover.general=null", "--set", "recover.general_per_domain=0")
    refused = opdcl("recover", "tuned", *settings, "-o", "run", cwd=tuned, code=2)
    assert "recovery has no prompts" in refused.stderr
    assert not (tuned / "run").exists()


def test_a_model_without_a_chat_template_is_refused_by_the_dry_run_too(project, tiny_model):
    shutil.copytree(tiny_model, project / "bare")
    (project / "bare" / "chat_template.jinja").unlink()
    dry = opdcl("run", "tiny.yaml", "-o", "out", "--base", "bare", "--dry-run", cwd=project, code=2)
    assert "has no chat template" in dry.stderr


def test_a_fixed_row_is_all_that_a_refused_first_try_needs(project):
    rows = (project / "rows.jsonl").read_text()
    (project / "rows.jsonl").write_text(rows + lines(LONG[3]))
    words = ["run", "tiny.yaml", "-o", "out", *SMALL, "--set", "finetune.max_length=99"]
    assert opdcl(*words, cwd=project).returncode == 2
    (project / "rows.jsonl").write_text(rows)
    assert opdcl(*words, cwd=project).returncode == 0


def test_rows_that_cannot_be_learned_are_left_out_and_counted_by_run_and_dry_run(project):
    good = (project / "rows.jsonl").read_text()
    bad = '{"question": "Who?", "answer": true}\n{"question": "cut o\n[1]\n{"anwser": "x"}\n'
    (project / "rows.jsonl").write_text(f"{bad}{good}")
    words = ["run", "tiny.yaml", "-o", "out", *SMALL]
    refused = opdcl(*words, cwd=project, code=2)
    assert "rows.jsonl:1: answer is true or false, not text" in refused.stderr
    assert "--set finetune.bad_rows=skip leaves such rows out" in refused.stderr
    words += ["--set", "finetune.bad_rows=skip"]
    told = f"4 rows cannot be used (first: {project}/rows.jsonl:1: answer is true or false, not text)"
    plan = json.loads(opdcl(*words, "--dry-run", "--json", cwd=project).stdout)
    assert any(note.startswith(told) for note in plan["notes"])
    assert (plan["data"]["rows"], plan["data"]["used"]) == (16, 12)
    done = opdcl(*words, cwd=project, code=0)
    assert told.replace(f"{project}/", "") in " ".join(done.stderr.split())
    # A suite on the same file asks all of its rows or none.
    suite = opdcl(*words, "--set", "eval={retention: [own], data: {own: rows.jsonl}}", cwd=project, code=2)
    assert "rows.jsonl:1: answer is true or false, not text" in suite.stderr
    (project / "rows.jsonl").write_text(bad)
    empty = opdcl(*words, cwd=project, code=2)
    assert "rows.jsonl has no row that can be used; the first: " in empty.stderr


def test_run_and_dry_run_name_what_a_folder_of_documents_leaves_out(project):
    (project / "docs" / ".git").mkdir(parents=True)
    (project / "docs" / "page.md").write_text("The flag is green.")
    (project / "docs" / "picture.png").write_bytes(b"")
    words = ["run", "tiny.yaml", "-o", "out", *SMALL, "--set", "finetune.data=docs"]
    told = f"{project}/docs: 2 left out: .git/, picture.png"
    assert told in json.loads(opdcl(*words, "--dry-run", "--json", cwd=project).stdout)["notes"]
    done = opdcl(*words, cwd=project, code=0)
    assert told.replace(f"{project}/", "") in done.stderr


def test_a_first_try_that_made_nothing_is_replaced_with_what_it_recorded(project):
    run = RunDir(project / "out")
    stage = run.stage(1, "finetune")
    write_json(run.config, {"workflow": {"name": "tiny"}, "origins": {}})
    write_json(run.manifest, {"base": {"id": "other", "fingerprint_before": "x"}, "commands": ["opdcl try"]})
    write_json(stage.record, {"status": "running", "fingerprint": "of other rows", "inputs": {"epochs": 9}})
    write_atomic(stage.metrics, '{"step": 777, "loss": 1.0}\n')
    opdcl("run", "tiny.yaml", "-o", "out", *SMALL, cwd=project, code=0)
    assert 777 not in [row["step"] for row in read_jsonl(stage.metrics)]
    assert len(read_json(run.manifest)["commands"]) == 1


def test_damaged_metrics_are_found_before_the_evaluation_that_the_report_would_follow(project):
    assert opdcl("run", "tiny.yaml", "-o", "out", *SMALL, cwd=project).returncode == 0
    metrics = RunDir(project / "out").stage(1, "finetune").metrics
    write_atomic(metrics, "garbage\n" + metrics.read_text())
    words = ["run", "tiny.yaml", "-o", "out", *SMALL[:-2]]
    dry, real = opdcl(*words, "--dry-run", cwd=project), opdcl(*words, cwd=project)
    assert f"{metrics.name} has changed since opdcl wrote it" in dry.stderr
    assert (dry.returncode, dry.stderr) == (real.returncode, real.stderr)
    assert not RunDir(project / "out").evals.exists()


@pytest.mark.parametrize(
    ("targets", "unmatched"),
    [
        ("all-linear", ""),
        (["q_proj", "mlp.down_proj"], ""),
        (r".*\.(q|v)_proj", ""),
        (["q_proj", "proj"], "'proj'"),
        (["self_attn"], "'self_attn'"),
        ("q_proj", "'q_proj'"),
        (".*head", "'.*head'"),
    ],
)
def test_each_target_must_match_a_linear_layer(tiny_model, targets, unmatched):
    model = ModelConfig(id=str(tiny_model))
    if not unmatched:
        check_targets(model, LoraSection(target_modules=targets))
        return
    with pytest.raises(UsageError) as caught:
        check_targets(model, LoraSection(target_modules=targets))
    assert f"{unmatched} matches no linear layer" in caught.value.message
    assert "down_proj" in caught.value.hint


def test_expected_answers_longer_than_the_cut_are_told_with_the_number_that_is_enough(project):
    texts = ["word " * 40, "So.", "word " * 60]
    rows = [{"question": f"Why {i}?", "answer": text.strip()} for i, text in enumerate(texts)]
    (project / "long.jsonl").write_text(lines(*rows))

    def notes(most: int) -> list[str]:
        words = sets("eval.domain=[long] eval.data.long=long.jsonl", f"eval.max_new_tokens={most}")
        words += ["-o", "out", "--dry-run", "--json"]
        all_notes = json.loads(opdcl("run", "tiny.yaml", *words, cwd=project).stdout)["notes"]
        return [note for note in all_notes if "expected answers" in note]

    (said,) = notes(8)
    assert "2 of 3 expected answers of suite 'long' are longer than the 8 tokens" in said
    enough = int(said.rpartition("--set eval.max_new_tokens=")[2])
    assert notes(enough) == []
    assert "1 of 3 expected answers" in notes(enough - 1)[0]
