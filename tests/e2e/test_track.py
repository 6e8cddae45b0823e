"""Trackers: real runs write to each installed one; a failing one does no harm."""

import importlib.util
import json

import pytest
from helpers.command import opdcl, opdcl_process, sets
from helpers.tiny import make_project

from opdcl.rundir.files import read_jsonl

SMALL = ("--set", "recover.steps=3", "--set", "finetune.epochs=1", "--set", "recover.validate_every=3")


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    return make_project(tmp_path_factory.mktemp("track"), tiny_model)


def test_tensorboard_holds_each_run_once_with_its_stages_scores_and_verdict(folder):
    """Two runs by one command, which is repeated when all is done."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder / "arms.yaml").write_text("arms:\n  one: {recover: {steps: 2}}\n  two: {recover: {steps: 3}}\n")
    small = "finetune.epochs=1 recover.validate_every=2 eval.limit=2 eval.closeness=null eval.domain=[]"
    words = sets(small, "track=[tensorboard]")
    for _ in range(2):
        opdcl("run", "tiny.yaml", "arms.yaml", *words, "-o", "family", cwd=folder, code=0)
    for name, stages in (("two", ["02-recover"]), ("one", ["01-finetune", "02-recover"])):
        run = folder / "family" / name
        found = EventAccumulator(str(run / "tracking" / "tensorboard"))
        found.Reload()
        steps = []  # which are counted on from stage to stage
        for stage in stages:
            rows = [row for row in read_jsonl(run / "stages" / stage / "metrics.jsonl") if "loss" in row]
            told = found.Scalars(f"train/{stage[3:]}/loss")
            assert [round(e.value, 4) for e in told] == [round(row["loss"], 4) for row in rows]
            steps += [e.step for e in told]
        assert steps == [*range(steps[0], steps[0] + len(steps))]
    summary = json.loads(opdcl("report", run, "--json").stdout)
    (score,) = found.Scalars("eval/instructions/recovered")
    assert score.value == pytest.approx(summary["suites"]["instructions"]["recovered"]["value"])
    told = {
        tag: found.Tensors(f"eval/{tag}/text_summary")[0].tensor_proto.string_val[0].decode()
        for tag in ("verdict", "report")
    }
    assert summary["verdict"] in told["verdict"]
    assert "## Scores" in told["report"]
    assert "train/recover/validation/general_kl" in found.Tags()["scalars"]


@pytest.mark.parametrize(
    ("name", "variables", "file"),
    [
        ("trackio", {"TRACKIO_DIR": "kept"}, "kept/**/*.db"),
        ("mlflow", {"MLFLOW_TRACKING_URI": "file:s", "MLFLOW_ALLOW_FILE_STORE": "true"}, "s/**/*loss"),
        ("wandb", {"WANDB_MODE": "offline"}, "wandb/**/*.wandb"),
    ],
)
def test_a_tracker_that_is_installed_writes_its_own_files(folder, name, variables, file):
    pytest.importorskip(name)
    words = ("run", "tiny.yaml", *SMALL, "--set", f"track=[{name}]", "-o", name)
    done = opdcl_process(*words, cwd=folder, env=variables)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    assert [found for found in folder.glob(file) if found.stat().st_size]


def test_an_unavailable_tracker_is_refused_before_anything_runs(folder, tmp_path):
    missing = [name for name in ("trackio", "wandb", "mlflow") if importlib.util.find_spec(name) is None]
    if missing:
        done = opdcl(
            "run", "tiny.yaml", "--set", f"track=[{missing[0]}]", "-o", "missing", cwd=folder, code=4
        )
        assert f"pip install {missing[0]}" in done.stderr
    opdcl("run", "tiny.yaml", "--set", "track=[paper]", "-o", "missing", cwd=folder, code=2)
    assert not (folder / "missing").exists()
