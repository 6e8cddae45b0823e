"""Seals detect damaged files; `verify` detects changed adapters, foreign results and missing answers."""

import pytest

from opdcl.rundir.files import write_atomic, write_json
from opdcl.rundir.hashes import ADAPTER, SEAL, adapter_hash, damage, seal
from opdcl.rundir.layout import STAGE_OF, RunDir
from opdcl.rundir.seals import seal_new, verify


@pytest.mark.parametrize("tenth", range(10))
def test_a_seal_detects_a_truncated_file(tmp_path, tenth):
    content = bytes(range(256)) * 10
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "weights").write_bytes(content)
    seal(tmp_path)
    assert damage(tmp_path) == ""
    (tmp_path / "deep" / "weights").write_bytes(content[: 256 * tenth])
    assert damage(tmp_path) == "deep/weights has changed"


def test_a_seal_detects_a_missing_file_and_a_missing_or_broken_seal(tmp_path):
    (tmp_path / "weights").write_bytes(b"x")
    assert "seal" in damage(tmp_path)
    seal(tmp_path)
    (tmp_path / "weights").unlink()
    assert damage(tmp_path) == "weights is missing"
    (tmp_path / SEAL).write_text('{"weights": ')
    assert "seal" in damage(tmp_path)


@pytest.fixture
def run(tmp_path):
    """A finished run with two adapters and a result with two answers for each state."""
    run = RunDir(tmp_path / "run")
    write_json(run.config, {"workflow": {}, "origins": {}})
    write_json(run.manifest, {"base": {"fingerprint_before": "b", "fingerprint_after": "b"}})
    hashes = {"base": None}
    for number, (state, name) in enumerate(STAGE_OF.items(), 1):
        stage = run.stage(number, name)
        write_atomic(stage.adapter / ADAPTER, f"weights of {state}")
        hashes[state] = adapter_hash(stage.adapter)
        write_json(stage.record, {"status": "done", "fingerprint": "f", "adapter_sha256": hashes[state]})
    for state, digest in hashes.items():
        write_json(run.eval_result(state, "suite"), result(state, digest))
        write_atomic(run.eval_samples(state, "suite"), '{"doc_id": 0}\n{"doc_id": 1}\n')
    seal_new(run)
    return run


def seal_again(run):
    """Seal a run as it is now, as nothing but a test does."""
    (run.path / SEAL).unlink()
    seal_new(run)


def result(state, digest):
    result = {"state": state, "metric": "acc", "metrics": {"acc": 0.5}, "n": 2}
    return result | {"model": {"adapter_sha256": digest}}


def failures(run):
    return {finding.what: finding.finding for finding in verify(run) if not finding.ok}


def test_an_intact_run_passes_every_check(run):
    findings = verify(run)
    assert all(finding.ok for finding in findings)
    checked = {finding.what for finding in findings}
    assert checked >= {
        "config.json",
        "stages/02-recover/adapter/adapter_model.safetensors",
        "evals/tuned/suite.samples.jsonl",
        "adapter of 01-finetune",
        "result recovered/suite",
        "base weights",
    }


def test_the_seal_of_a_run_covers_its_adapters(run):
    (run.find_stage("recover").adapter / ADAPTER).write_text("other weights")
    assert failures(run)["stages/02-recover/adapter/adapter_model.safetensors"] == "has changed"
    (run.find_stage("recover").adapter / ADAPTER).unlink()
    assert failures(run)["stages/02-recover/adapter/adapter_model.safetensors"] == "is missing"


def test_an_adapter_other_than_the_recorded_one_fails_even_if_it_is_sealed(run):
    (run.find_stage("finetune").adapter / ADAPTER).write_text("other weights")
    seal_again(run)
    assert failures(run) == {
        "adapter of 01-finetune": "not the adapter that its stage recorded",
        "result tuned/suite": "measured with another adapter",
    }


def test_records_that_contradict_each_other_fail_even_if_they_are_sealed(run):
    write_json(run.eval_result("recovered", "suite"), result("recovered", "0" * 64))
    run.eval_samples("base", "suite").write_text('{"doc_id": 0}\n')
    write_json(run.manifest, {"base": {"fingerprint_before": "b", "fingerprint_after": "c"}})
    seal_again(run)
    assert failures(run) == {
        "result recovered/suite": "measured with another adapter",
        "answers base/suite": "1 answers for n = 2",
        "base weights": "changed during the run",
    }


def test_a_run_without_a_seal_fails(run):
    (run.path / SEAL).unlink()
    assert list(failures(run)) == [SEAL]
