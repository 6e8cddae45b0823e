"""Trackers: a real run writes to each installed one, the test reads it back; a failing one does no harm."""

import importlib.util
import json
import sqlite3
from pathlib import Path

import pytest
from helpers.command import opdcl, opdcl_process
from helpers.tiny import make_project

SMALL = ("--set", "recover.steps=3", "--set", "finetune.epochs=1", "--set", "recover.validate_every=3")


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("track")
    make_project(folder, tiny_model)
    return folder


def installed(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def run(folder, name, **env):
    words = ("run", "tiny.yaml", *SMALL, "--set", f"track=[{name}]", "-o", name, "--json")
    done = opdcl_process(*words, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    return json.loads(done.stdout)


def losses(folder, name, stage):
    (found,) = (folder / name / "stages").glob(f"*-{stage}")
    rows = [json.loads(line) for line in (found / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def family(folder):
    """Two runs by one command, tracked by TensorBoard; the command is repeated when all is done."""
    (folder / "arms.yaml").write_text("arms:\n  one: {recover: {steps: 2}}\n  two: {recover: {steps: 3}}\n")
    for _ in range(2):
        sets = ("finetune.epochs=1", "recover.validate_every=2", "eval.limit=2", "track=[tensorboard]")
        sets += ("eval.closeness=null", "eval.domain=[]")
        words = [word for pair in sets for word in ("--set", pair)]
        done = opdcl("run", "tiny.yaml", "arms.yaml", *words, "-o", "family", cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder / "family"


def events(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tracking" / "tensorboard"))
    found.Reload()
    return found


def test_tensorboard_holds_both_stages_the_scores_and_the_verdict(family):
    found, summary = events(family / "one"), json.loads(opdcl("report", "one", "--json", cwd=family).stdout)
    tuned, recovered = (found.Scalars(f"train/{stage}/loss") for stage in ("finetune", "recover"))
    assert [round(e.value, 4) for e in tuned] == [round(x, 4) for x in losses(family, "one", "finetune")]
    assert [round(e.value, 4) for e in recovered] == [round(x, 4) for x in losses(family, "one", "recover")]
    assert [e.step for e in recovered] == [tuned[-1].step + i for i in (1, 2)]
    (score,) = found.Scalars("eval/instructions/recovered")
    assert score.value == pytest.approx(summary["suites"]["instructions"]["recovered"]["value"])
    words = {
        tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in found.Tags()["tensors"]
        if "eval" in tag
    }
    assert summary["verdict"] in words["eval/verdict/text_summary"]
    assert "## Scores" in words["eval/report/text_summary"]
    assert "train/recover/validation/general_kl" in found.Tags()["scalars"]


def test_each_run_is_logged_once_to_its_own_folder(family):
    for name, steps in (("one", 2), ("two", 3)):
        assert len(events(family / name).Scalars("train/recover/loss")) == steps


@installed("trackio")
def test_trackio_stores_them_on_this_machine(folder):
    summary = run(folder, "trackio", TRACKIO_DIR=str(folder / "kept"))
    (file,) = [f for f in (folder / "kept").rglob("*.db") if f.stat().st_size]
    rows = [
        json.loads(text)
        for (text,) in sqlite3.connect(file).execute("select metrics from metrics order by id")
    ]
    found = [row["train/recover/loss"] for row in rows if "train/recover/loss" in row]
    assert found == pytest.approx(losses(folder, "trackio", "recover"))
    assert any(row.get("eval/verdict") == summary["verdict"] for row in rows)
    assert any("eval/instructions/recovered" in row for row in rows)


@installed("mlflow")
def test_mlflow_stores_them_in_its_own_folder(folder, monkeypatch):
    summary = run(
        folder, "mlflow", MLFLOW_TRACKING_URI=f"file:{folder}/store", MLFLOW_ALLOW_FILE_STORE="true"
    )
    # The full package has databases; the slim one has not.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri(f"file:{folder}/store")
    (one,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    client = mlflow.tracking.MlflowClient()
    found = [m.value for m in client.get_metric_history(one.info.run_id, "train/recover/loss")]
    assert found == pytest.approx(losses(folder, "mlflow", "recover"))
    assert one.data.metrics["eval/instructions/recovered"] == pytest.approx(
        summary["suites"]["instructions"]["recovered"]["value"]
    )


@installed("wandb")
def test_wandb_writes_its_offline_run(folder):
    run(folder, "wandb", WANDB_MODE="offline")
    assert list((folder / "wandb").rglob("*.wandb"))


def test_a_failing_tracker_is_named_and_the_run_continues(folder):
    first = ("--set", "recover=null", "--set", "eval=null", "-o", "failing")
    assert opdcl("run", "tiny.yaml", *SMALL[2:4], *first, cwd=folder).returncode == 0
    (folder / "failing" / "tracking").write_text("a file where a folder should be")
    then = ("--set", "eval=null", "--set", "track=[tensorboard]", "-o", "failing")
    done = opdcl("run", "tiny.yaml", *SMALL, *then, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tracker tensorboard failed") == 1
    assert (folder / "failing" / "stages" / "02-recover" / "adapter").exists()


def test_an_unavailable_tracker_is_refused_before_anything_runs(folder, tmp_path):
    missing = [name for name in ("trackio", "wandb", "mlflow") if importlib.util.find_spec(name) is None]
    if missing:
        done = opdcl("run", "tiny.yaml", "--set", f"track=[{missing[0]}]", "-o", "missing", cwd=folder)
        assert done.returncode == 4
        assert f"pip install {missing[0]}" in done.stderr
    unknown = opdcl("run", "tiny.yaml", "--set", "track=[paper]", "-o", "missing", cwd=folder)
    assert unknown.returncode == 2
    assert not Path(folder / "missing").exists()
