"""No file of a finished run changes without a word: before and after the same command is run again."""

import json
import os
import random
import shutil

import pytest
from helpers.command import opdcl

from opdcl.rundir.files import UNFINISHED
from opdcl.rundir.layout import RunDir
from opdcl.rundir.seals import verify

# Made from the others, and made again by `opdcl report`; or a log.
RENDERED = {"report.md", "report.html", ".lock"}

# One file of each kind.
KINDS = [
    "config.json",
    "workflow.yaml",
    "manifest.json",
    "seal.json",
    "stages/01-finetune/stage.json",
    "stages/02-recover/metrics.jsonl",
    "stages/02-recover/adapter/adapter_config.json",
    "evals/tuned/questions.json",
    "evals/tuned/questions.samples.jsonl",
]


@pytest.fixture
def run(finished, project):
    """A copy of the finished run, beside the files of its workflow."""
    shutil.rmtree(project / "damaged", ignore_errors=True)
    shutil.copytree(finished, project / "damaged")
    return RunDir(project / "damaged")


def decisive(folder):
    """Return the names of the files on which something depends."""
    files = [file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file()]
    return [str(f) for f in files if not (str(f) in RENDERED or "logs" in f.parts or f.name == "README.md")]


def flip_a_bit(file, place):
    content = bytearray(file.read_bytes())
    content[place % len(content)] ^= 1
    file.write_bytes(content)


def remove_a_byte(file, place):
    content = bytearray(file.read_bytes())
    del content[place % len(content)]
    file.write_bytes(content)


def is_intact(run):
    return all(finding.ok for finding in verify(run))


@pytest.mark.parametrize("damage", [flip_a_bit, remove_a_byte])
def test_one_bit_or_byte_in_any_file_is_noticed(run, finished, damage):
    chance, unnoticed = random.Random(0), []
    names = decisive(finished)
    assert set(KINDS) <= set(names)
    for name in names:
        damage(run.path / name, chance.randrange(10**9))
        if is_intact(run):
            unnoticed.append(name)
        shutil.copy(finished / name, run.path / name)
    assert unnoticed == []
    assert is_intact(run)


def test_the_same_command_does_not_accept_a_changed_file(run, project, finished):
    (project / "gates.yaml").write_text("gates: {max_drop: 100}")  # which all runs meet
    for name in KINDS:
        flip_a_bit(run.path / name, 10**6 // 7)
        changed, seal = (run.path / name).read_bytes(), run.seal.read_bytes()
        again = opdcl("run", "tiny.yaml", "-o", "damaged", cwd=project)
        assert (again.returncode, name in again.stderr) == (2, True), (name, again.stderr)
        assert "OPDCL_DEBUG" not in again.stderr
        assert ((run.path / name).read_bytes(), run.seal.read_bytes()) == (changed, seal)
        assert not is_intact(run)
        report = opdcl("report", "damaged", "--json", "--gates", "gates.yaml", cwd=project)
        faults = " ".join(json.loads(report.stdout)["faults"]) if report.stdout else report.stderr
        assert (report.returncode in (1, 2), name in faults) == (True, True), (name, faults)
        shutil.copy(finished / name, run.path / name)


def test_force_makes_again_what_changed_files_belong_to(run, project, finished):
    for name in ("evals/tuned/questions.samples.jsonl", "config.json", "evals/recovered/closeness.json"):
        flip_a_bit(run.path / name, 50)
    again = opdcl("run", "tiny.yaml", "-o", "damaged", "--force", cwd=project, code=0)
    assert "finetune: skipped" in again.stderr
    assert is_intact(run)
    for file in run.evals.rglob("*.samples.jsonl"):
        assert file.read_bytes() == (finished / file.relative_to(run.path)).read_bytes()


def test_a_run_that_lost_its_seal_is_not_sealed_again(run, project):
    run.seal.unlink()
    again = opdcl("run", "tiny.yaml", "-o", "damaged", cwd=project, code=2)
    assert "seal.json is missing" in again.stderr
    assert not run.seal.exists()


def test_a_file_that_was_added_is_noticed(run):
    shutil.copy(run.eval_result("base", "questions"), run.eval_result("base", "more"))
    assert next(f.what for f in verify(run) if not f.ok) == "evals/base/more.json"


def test_what_was_deleted_is_made_again_and_what_was_left_half_written_is_removed(run, project, finished):
    run.eval_result("tuned", "questions").unlink()
    stage = run.find_stage("recover").path
    (stage / f".stage.json{UNFINISHED}x1y2z3").write_text("{")
    (stage / f".adapter{UNFINISHED}abc").mkdir()
    (stage / f".adapter{UNFINISHED}abc" / "weights").write_text("half")
    opdcl("run", "tiny.yaml", "-o", "damaged", cwd=project, code=0)
    assert not list(stage.rglob(f"*{UNFINISHED}*"))
    assert is_intact(run)
    name = run.eval_samples("tuned", "questions").relative_to(run.path)
    assert (run.path / name).read_bytes() == (finished / name).read_bytes()


BROKEN = ["[[1]]", "{}", "[" * 100_000]
RECORDS = [name for name in KINDS if name.endswith(("json", "jsonl"))]


def test_a_record_that_makes_no_sense_is_named_in_one_sentence(run, project, finished):
    for number, name in enumerate(RECORDS):
        (run.path / name).write_text(BROKEN[number % len(BROKEN)])
        for words in (["verify", "damaged"], ["report", "damaged", "--json"], ["chat", "damaged", "Hello"]):
            done = opdcl(*words, cwd=project)
            said = done.stdout + done.stderr
            assert "OPDCL_DEBUG" not in said, (name, words, said)
            if words[0] == "verify":
                assert (name in said, done.returncode in (1, 2)) == (True, True), (name, said)
        shutil.copy(finished / name, run.path / name)


def test_a_folder_or_a_pipe_in_place_of_a_record_is_named(run, project):
    result = run.eval_result("tuned", "questions")
    for make in (os.mkdir, os.mkfifo):
        result.rmdir() if result.is_dir() else result.unlink()
        make(result)
        for words in (["verify", "damaged"], ["report", "damaged"], ["run", "tiny.yaml", "-o", "damaged"]):
            done = opdcl(*words, cwd=project)
            assert done.returncode in (1, 2), (words, done.stderr)
            assert "questions.json" in done.stdout + done.stderr
            assert "OPDCL_DEBUG" not in done.stderr
