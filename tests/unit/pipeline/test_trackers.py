"""Trackers are fed from a run's files: every step once, also after a resume."""

import json
import os
from contextlib import closing

import pytest

from opdcl.pipeline.trackers import Tracking
from opdcl.rundir.files import write_atomic
from opdcl.rundir.layout import RunDir


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path / "run")


def write_metrics(run, *steps):
    stage = run.stage(2, "recover")
    rows = [
        {"step": step, "loss": step / 10, "stream": "general", "validation": {"kl": 0.5}} for step in steps
    ]
    write_atomic(stage.metrics, "".join(json.dumps(row) + "\n" for row in rows))
    return stage


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, round(event.value, 4)) for event in events.Scalars(tag)]


def test_a_run_that_resumes_from_an_older_checkpoint_sends_each_step_once(run):
    notes = []
    with closing(Tracking(["tensorboard"], run, notes.append)) as trackers:
        trackers.follow(write_metrics(run, 1, 2, 3), 100)
    with closing(Tracking(["tensorboard"], run, notes.append)) as trackers:
        for steps in ([1, 2], [1, 2, 3], [1, 2, 3, 4]):  # step 3 was logged after the last checkpoint
            trackers.follow(write_metrics(run, *steps), 100)
        trackers.finish(104, {"suite/recovered": 0.75}, {"verdict": "recovered"})
    folder = run.path / "tracking" / "tensorboard"
    assert scalars(folder, "train/recover/loss") == [(101, 0.1), (102, 0.2), (103, 0.3), (104, 0.4)]
    assert scalars(folder, "train/recover/validation/kl")[-1] == (104, 0.5)
    assert scalars(folder, "eval/suite/recovered") == [(104, 0.75)]
    assert notes == []


def test_metrics_that_were_read_are_not_read_again(run):
    """Otherwise each step of a long stage would cost more than the one before."""
    with closing(Tracking(["tensorboard"], run, pytest.fail)) as trackers:
        stage = write_metrics(run, 1, 2)
        trackers.follow(stage, 0)
        read = stage.metrics.stat().st_size
        with open(stage.metrics, "r+b") as file:
            file.write(b"x" * (read - 1))  # who reads this again, fails
            file.seek(read)
            file.write(b'{"step": 3, "loss": 0.3}\n{"step": 4, "lo')
        trackers.follow(stage, 0)
        with open(stage.metrics, "ab") as file:
            file.write(b'ss": 0.4}\n')
        trackers.follow(stage, 0)
    loss = scalars(run.path / "tracking" / "tensorboard", "train/recover/loss")
    assert loss == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]


def test_a_tracker_writes_where_the_user_says_and_leaves_the_environment_as_it_was(
    run, tmp_path, monkeypatch
):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "mine"))
    before = dict(os.environ)
    with closing(Tracking(["tensorboard"], run, pytest.fail)) as trackers:
        trackers.follow(write_metrics(run, 1), 0)
    assert scalars(tmp_path / "mine", "train/recover/loss") == [(1, 0.1)]
    assert dict(os.environ) == before


def test_a_tracker_that_fails_later_is_dropped_with_one_note(run, monkeypatch):
    from transformers.integrations import TensorBoardCallback

    def fail(*_, **__):
        raise OSError("disk full")

    notes = []
    with closing(Tracking(["tensorboard"], run, notes.append)) as trackers:
        monkeypatch.setattr(TensorBoardCallback, "on_log", fail)
        trackers.follow(write_metrics(run, 1, 2), 0)
        trackers.finish(2, {"suite/recovered": 0.75}, {})
    assert notes == ["tracker tensorboard failed and is dropped: OSError: disk full"]
