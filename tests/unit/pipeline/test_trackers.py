"""Trackers are fed from a run's files."""

import json

import pytest

from opdcl.pipeline.trackers import Tracking
from opdcl.rundir.files import write_atomic
from opdcl.rundir.layout import RunDir


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path / "run")


def write_metrics(run, *steps):
    stage = run.stage(2, "recover")
    rows = [{"step": s, "loss": s / 10, "stream": "general", "validation": {"kl": 0.5}} for s in steps]
    write_atomic(stage.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    return stage


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def scalars(folder, tag):
    return [(event.step, round(event.value, 4)) for event in events(folder).Scalars(tag)]


def test_the_steps_of_a_stage_are_sent_as_they_come_and_then_the_scores(run):
    notes = []
    trackers = Tracking(["tensorboard"], run, notes.append)
    for steps in ([1, 2], [1, 2, 3, 4]):
        trackers.follow(write_metrics(run, *steps), 100)
    trackers.send({"eval/suite/recovered": 0.75, "eval/verdict": "recovered"}, 104)
    trackers.close()
    folder = run.path / "tracking" / "tensorboard"
    assert scalars(folder, "train/recover/loss") == [(101, 0.1), (102, 0.2), (103, 0.3), (104, 0.4)]
    assert scalars(folder, "train/recover/validation/kl")[-1] == (104, 0.5)
    assert scalars(folder, "eval/suite/recovered") == [(104, 0.75)]
    assert notes == []


def test_what_is_sent_is_numbers_with_those_of_base_from_the_start(run):
    trackers = Tracking(["tensorboard"], run, pytest.fail)
    start = {"step": 0, "validation": {"general_kl": 0.5}, "base": {"general_kl": 0.0, "tokens": 80}}
    row = start | {"start": {"alpha": 0.4, "validation": {"general_kl": 0.2}}, "author": "base"}
    stage = run.stage(2, "recover")
    write_atomic(stage.metrics, json.dumps(row) + "\n")
    trackers.follow(stage, 100)
    trackers.close()
    found = events(run.path / "tracking" / "tensorboard")
    names = ("validation/general_kl", "tuned/general_kl", "base/general_kl", "base/tokens")
    assert {*found.Tags()["scalars"]} == {f"train/recover/{name}" for name in names}
    sent = {}
    for name in ("validation", "tuned"):
        sent[name] = found.Scalars(f"train/recover/{name}/general_kl")[0].value
    assert sent == {"validation": pytest.approx(0.2), "tuned": pytest.approx(0.5)}
    assert found.Tags()["tensors"] == []
    assert [(e.step, e.value) for e in found.Scalars("train/recover/base/tokens")] == [(100, 80)]


def test_metrics_that_were_read_are_not_read_again(run):
    """Otherwise each step of a long stage would cost more than the one before."""
    trackers = Tracking(["tensorboard"], run, pytest.fail)
    stage = write_metrics(run, 1, 2)
    metrics = stage.metrics
    trackers.follow(stage, 0)
    read = metrics.stat().st_size
    with open(metrics, "r+b") as file:
        file.write(b"x" * (read - 1))  # who reads this again, fails
        file.seek(read)
        file.write(b'{"step": 3, "loss": 0.3}\n{"step": 4, "lo')
    trackers.follow(stage, 0)
    with open(metrics, "ab") as file:
        file.write(b'ss": 0.4}\n')
    trackers.follow(stage, 0)
    trackers.close()
    loss = scalars(run.path / "tracking" / "tensorboard", "train/recover/loss")
    assert loss == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]


def test_a_tracker_that_cannot_start_is_dropped_with_one_note(run):
    notes = []
    run.path.mkdir()
    (run.path / "tracking").write_text("a file where a folder should be")
    trackers = Tracking(["tensorboard"], run, notes.append)
    trackers.follow(write_metrics(run, 1, 2), 0)
    trackers.close()
    assert len(notes) == 1
    assert notes[0].startswith("tracker tensorboard failed and is dropped: ")


def test_a_tracker_that_fails_later_is_dropped_with_one_note(run, monkeypatch):
    from accelerate.tracking import TensorBoardTracker

    def fail(*_, **__):
        raise OSError("disk full")

    notes = []
    trackers = Tracking(["tensorboard"], run, notes.append)
    monkeypatch.setattr(TensorBoardTracker, "log", fail)
    trackers.follow(write_metrics(run, 1, 2), 0)
    trackers.send({"eval/suite/recovered": 0.75}, 2)
    trackers.close()
    assert notes == ["tracker tensorboard failed and is dropped: OSError: disk full"]
