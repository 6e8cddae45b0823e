"""Texts of frozen teachers whose prompts come again: drawn once, read once, and the same after a resume."""

import shutil

import pytest
import torch
from helpers.recovering import run, short_recovery, train, whole_and_resumed
from safetensors.torch import load_file

from opdcl.train.learner import STATES
from opdcl.train.teachers import Teacher

# Two domain steps an epoch, six epochs; general prompts come once.
SETTINGS = {"steps": 12, "lmbda": 0.0, "validate_every": 6, "health": False, "start": 1.0}


@pytest.fixture
def read(monkeypatch):
    """The completions that teachers read in steps of learning, by their state."""
    seen = {"base": [], "tuned": []}
    states = Teacher.states

    def counted(self, rollouts):
        seen[self.state] += [tuple(r.completion_ids) for r in rollouts if r.recurs]
        return states(self, rollouts)

    monkeypatch.setattr(Teacher, "states", counted)
    return seen


def losses(backbone, tuned):
    """Return the loss of each step of a new recovery."""
    shutil.rmtree(tuned / "out", ignore_errors=True)
    return [row["loss"] for row in run(backbone, tuned, **SETTINGS) if "loss" in row]


def test_a_teacher_reads_a_text_that_comes_again_once(backbone, tuned, read):
    rows = run(backbone, tuned, **SETTINGS)
    answers = sum(row["answers"] for row in rows if row.get("stream") == "domain")
    assert 0 < 2 * len(read["tuned"]) <= answers


@pytest.mark.parametrize("room", [0, 4_000])
def test_kept_states_change_no_loss(backbone, tuned, read, monkeypatch, room):
    """Also where only some of them fit."""
    kept = losses(backbone, tuned)
    of_kept = len(read["tuned"])
    monkeypatch.setattr("opdcl.train.recover.ROOM_IN_CHECKPOINTS", room)
    anew = losses(backbone, tuned)
    assert len(read["tuned"]) - of_kept > of_kept
    assert kept == pytest.approx(anew, rel=1e-3, abs=1e-5)


def test_other_states_than_the_teachers_would_be_seen_in_the_loss(backbone, tuned, monkeypatch):
    """A check of the tests above: with wrong states they fail."""
    right = losses(backbone, tuned)
    states = Teacher.states

    def wrong(self, rollouts):
        states_NH = states(self, rollouts)
        return states_NH.roll(1, 0) if self.state == "tuned" and rollouts[0].recurs else states_NH

    monkeypatch.setattr(Teacher, "states", wrong)
    assert losses(backbone, tuned) != pytest.approx(right, rel=1e-2)


def test_a_checkpoint_holds_the_states_bit_by_bit(backbone, tuned):
    out = train(backbone, tuned, "out", short_recovery(tuned, **SETTINGS))
    folders = sorted(out.checkpoints(), key=lambda f: f.stat().st_mtime)
    first, last = (load_file(folder / STATES) for folder in folders)
    assert first
    assert first.keys() <= last.keys()
    assert any(place.startswith("domain/") for place in last)
    assert all(torch.equal(first[place], last[place]) for place in first)


RARE = [(0, 7), (0, 9), (4_000, 9), (2**28, 7)]


@pytest.mark.parametrize(
    ("room", "stop"),
    [(4_000, 7), (2**28, 9), *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in RARE)],
)
def test_a_resume_is_exact_however_many_states_fit(backbone, tuned, monkeypatch, room, stop):
    monkeypatch.setattr("opdcl.train.recover.ROOM_IN_CHECKPOINTS", room)
    whole_and_resumed(backbone, tuned, short_recovery(tuned, **SETTINGS), stop)
