"""Two processes give the result of one: the same losses and answers; they stop, fail and resume together."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.command import ENV, OPDCL, ROOT, opdcl, opdcl_process
from safetensors.torch import load_file

from opdcl.rundir.files import read_json, read_jsonl
from opdcl.rundir.layout import RunDir, locked

# Two steps on the frozen teacher's completions, then some on the student's. Adam turns rounding of a gradient
# close to zero into a step of full size; a low rate keeps such steps small.
CHANGES = """
finetune.epochs=1 finetune.learning_rate=1e-3 recover.learning_rate=1e-4 recover.steps=4 recover.lmbda=0.5
eval.batch_size=2 eval.limit=3 eval.max_new_tokens=6 eval.closeness=null
"""
SETTINGS = [word for change in CHANGES.split() for word in ("--set", change)]
# Steps whose completions are the teacher's. The student's can differ: two processes sum a gradient in another
# order than one, and rounding moves a draw.
COMPARED_STEPS = 2
MEASURED = {"loss", "kl", "student_entropy", "teacher_entropy"}
MEASURED |= {"grad_norm", "adapter_norm", "mean_length", "truncated"}


@pytest.fixture(scope="module")
def alone(project) -> Path:
    opdcl("run", "tiny.yaml", "-o", "alone", *SETTINGS, cwd=project, code=0)
    return project / "alone"


def steps(run: Path, stage: str) -> list[dict]:
    return [row for row in read_jsonl(run / "stages" / stage / "metrics.jsonl") if "loss" in row]


def check_same_result(run: Path, alone: Path, scratch: Path) -> None:
    for stage, compared in (("01-finetune", None), ("02-recover", COMPARED_STEPS)):
        rows, expected = steps(run, stage), steps(alone, stage)
        numbers = list(range(1, len(expected) + 1))
        assert [row["step"] for row in rows] == [row["step"] for row in expected] == numbers
        for row, reference in list(zip(rows, expected, strict=True))[:compared]:
            assert row["tokens"] == reference["tokens"]
            assert row.keys() == reference.keys()
            for name in row.keys() & MEASURED:
                assert row[name] == pytest.approx(reference[name], rel=1e-3, abs=1e-4), (stage, name)
    # Tuned adapters are the same up to rounding; recovered ones differ once a token is drawn differently.
    weights, reference = (
        load_file(folder / "stages/01-finetune/adapter/adapter_model.safetensors") for folder in (run, alone)
    )
    assert weights.keys() == reference.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, reference[name], rtol=1e-3, atol=1e-4)
    for state in ("base", "tuned"):
        for suite in ("instructions", "questions"):
            file = f"evals/{state}/{suite}.samples.jsonl"
            answers, expected = read_jsonl(run / file), read_jsonl(alone / file)
            for row, reference in zip(answers, expected, strict=True):
                # A likelihood that was summed up in another order.
                assert row.pop("gain", None) == pytest.approx(reference.pop("gain", None), abs=1e-3)
                # The key names the adapter, whose weights are the same up to rounding.
                assert row.pop("key")
                assert reference.pop("key")
                # Each question once, in order, with the same answer.
                assert row == reference
    before, after = (read_json(folder / "manifest.json")["base"] for folder in (alone, run))
    assert before["fingerprint_before"] == after["fingerprint_after"]
    assert not list(scratch.glob("opdcl-*")), "a process left its copy behind"


def words_of(folder: Path) -> list[str]:
    return ["run", "tiny.yaml", "-o", str(folder / "run"), *SETTINGS]


def environment_of(folder: Path) -> dict[str, str]:
    """Return an environment in which temporary files lie in a folder of the test."""
    (folder / "scratch").mkdir(exist_ok=True)
    return ENV | {"TMPDIR": str(folder / "scratch"), "PYTHONPATH": str(ROOT)}


def start(project: Path, folder: Path, *more: str) -> subprocess.Popen:
    """Start a run in two processes."""
    words = [*OPDCL, *words_of(folder), *more, "--num-processes", "2"]
    return subprocess.Popen(words, cwd=project, env=environment_of(folder), stderr=subprocess.PIPE, text=True)


def wait_for_a_step(folder: Path, process: subprocess.Popen) -> None:
    metrics = folder / "run" / "stages" / "02-recover" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"loss"' in metrics.read_text(), process)


def test_a_run_interrupted_in_two_processes_is_finished_by_one_with_the_same_result(alone, project, tmp_path):
    started = start(project, tmp_path, "--set", "model.shard=true")
    wait_for(lambda: any((tmp_path / "run" / "evals").glob("*/*.json")), started)
    started.send_signal(signal.SIGINT)
    said = started.communicate(timeout=120)[1]
    assert started.returncode == 130, said
    assert said.count("2 processes, each with a part of the base") == 1
    assert "--num-processes 2" in said  # the command that resumes
    opdcl(*words_of(tmp_path), cwd=project, code=0)
    check_same_result(tmp_path / "run", alone, tmp_path / "scratch")


@pytest.mark.nightly
@pytest.mark.parametrize(("config", "part"), [("fsdp2", "a part of the"), ("data-parallel", "the whole")])
def test_an_interrupt_stops_all_processes_and_accelerate_resumes_them_to_the_same_result(
    alone, project, tmp_path, config, part
):
    started = start(project, tmp_path, *(["--set", "model.shard=true"] if config == "fsdp2" else []))
    wait_for_a_step(tmp_path, started)
    started.send_signal(signal.SIGINT)
    said = started.communicate(timeout=120)[1]
    assert started.returncode == 130, said
    assert said.count("checkpoint saved") == 1
    assert "--num-processes 2" in said  # the command that resumes
    assert not list((tmp_path / "scratch").glob("opdcl-*"))
    file = ROOT / "workflows" / "accelerate" / f"{config}.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "-m", "opdcl"]
    launch += words_of(tmp_path)
    environment = environment_of(tmp_path)
    done = subprocess.run(launch, cwd=project, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for line in ("recover: resuming from step", f"2 processes, each with {part} base"):
        assert done.stderr.count(line) == 1
    again = opdcl(*words_of(tmp_path), cwd=project)  # a single process finds nothing left to do
    assert "nothing to do: all stages are finished" in again.stderr
    check_same_result(tmp_path / "run", alone, tmp_path / "scratch")
    assert read_json(tmp_path / "run" / "manifest.json")["device"]["processes"] == 2


@pytest.mark.nightly
def test_when_one_process_dies_all_end_and_the_run_can_be_resumed(alone, project, tmp_path):
    shutil.copytree(alone, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "evals" / "tuned")
    more = ["--set", "eval.limit=40"]
    started = start(project, tmp_path, *more)
    wait_for(
        lambda: len(list((tmp_path / "scratch").glob("opdcl-*/opdcl-*/run/evals/*/.*.partial.jsonl"))) == 1,
        started,
    )
    os.kill(second_of(started.pid), signal.SIGKILL)
    said = started.communicate(timeout=60)[1]
    assert started.returncode not in (0, None)
    assert "another worker exited" in said
    assert not list((tmp_path / "scratch").glob("opdcl-*"))
    opdcl(*words_of(tmp_path), *more, cwd=project, code=0)  # one process takes over the answers of two
    rows = read_jsonl(tmp_path / "run/evals/tuned/instructions.samples.jsonl")
    assert [row["doc_id"] for row in rows] == list(range(40))


@pytest.mark.nightly
def test_workers_end_soon_after_their_launcher_is_killed_and_leave_nothing(project, tmp_path):
    started = start(project, tmp_path, "--set", "recover.steps=500")
    wait_for_a_step(tmp_path, started)
    workers = children_of(started.pid)
    assert len(workers) == 2
    started.kill()
    started.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker goes on without its launcher"
        time.sleep(0.2)
    assert not list((tmp_path / "scratch").glob("opdcl-*"))
    assert list((tmp_path / "run/stages/02-recover/trainer").glob("checkpoint-*")), "the step was saved"
    with locked(RunDir(tmp_path / "run")) as dead:  # free at once
        assert dead is None


def test_bad_input_is_reported_once(project, tmp_path):
    words = ("run", "tiny.yaml", "-o", tmp_path / "run")
    absent = ("--set", "finetune.data=absent.jsonl")
    done = opdcl_process(*words, "--num-processes", 2, *absent, cwd=project)
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert "absent.jsonl" in done.stderr
    assert not (tmp_path / "run").exists()
    opdcl("run", "tiny.yaml", "--num-processes", 0, cwd=project, code=2)
    environment = {"WORLD_SIZE": "2", "RANK": "0", "ACCELERATE_USE_DEEPSPEED": "true"}
    deep = opdcl(*words, cwd=project, env=environment, code=2)
    assert "model.shard" in deep.stderr


def wait_for(condition, process: subprocess.Popen) -> None:
    while not condition():
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)


def children_of(process: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def second_of(launcher: int) -> int:
    """Return the process id of the launcher's second process."""
    return next(c for c in children_of(launcher) if "RANK=1\0" in Path(f"/proc/{c}/environ").read_text())
