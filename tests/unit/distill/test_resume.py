"""A recovery resumes to the same bits whatever is left of the files outside its checkpoint."""

import json
import os
import shutil

import pytest
from helpers.recovering import short_recovery, train, whole_and_resumed

from opdcl.distill.teachers import Teacher
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.hashes import seal
from opdcl.training import RECORDS


def empty(stage):
    stage.metrics.write_text("")


def missing(stage):
    stage.metrics.unlink()


def without_validations(stage):
    lines = [line for line in stage.metrics.read_text().splitlines(True) if "validation" not in line]
    stage.metrics.write_text("".join(lines))


def cut_off(stage):
    os.truncate(stage.metrics, stage.metrics.stat().st_size // 2)


def other_best(stage):
    """The best adapter so far has changed by one bit."""
    weights = stage.best / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def no_best(stage):
    shutil.rmtree(stage.best)


def other_answers(stage):
    """The teachers' answers to held-out prompts have become those to other prompts."""
    rows = read_jsonl(stage.held_out)
    stage.held_out.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))


def no_answers(stage):
    stage.held_out.unlink()


def of_an_earlier_version(stage):
    """The checkpoint has no answers of the teachers, so they answer again."""
    for checkpoint in stage.checkpoints():
        (checkpoint / RECORDS / stage.held_out.name).unlink()
        seal(checkpoint)


@pytest.mark.parametrize(
    "lost",
    [
        other_answers,
        no_answers,
        of_an_earlier_version,
        empty,
        missing,
        without_validations,
        cut_off,
        other_best,
        no_best,
    ],
)
def test_what_decides_is_in_the_checkpoint(backbone, tuned, lost):
    # The adapter before the first step stays the best one, so it is not written again.
    config = short_recovery(tuned, lmbda=1.0, save_steps=2)
    whole, resumed = whole_and_resumed(backbone, tuned, config, 5, lost)
    best = [(stage.best / "adapter_model.safetensors").read_bytes() for stage in (whole, resumed)]
    assert best[0] == best[1]


def test_samples_repeat_if_the_stream_changes_at_the_interrupt(backbone, tuned):
    """The samples of a domain step are the completions of the general step before it."""
    settings = {"steps": 4, "validate_every": 2, "save_steps": 1, "general_per_domain": 1}
    whole, _ = whole_and_resumed(backbone, tuned, short_recovery(tuned, lmbda=1.0, **settings), 2)
    assert read_jsonl(whole.samples)


def test_the_teachers_answer_the_held_out_prompts_once(backbone, tuned, monkeypatch):
    asked = []

    def complete(teacher, prompts, **options):
        asked.append(teacher.state)
        return answer(teacher, prompts, **options)

    answer = Teacher.complete
    monkeypatch.setattr(Teacher, "complete", complete)
    # All steps are the student's, so that its teachers write nothing but held-out answers.
    config = short_recovery(tuned, lmbda=1.0, on_policy={"domain": True}, save_steps=2)
    train(backbone, tuned, "stage", config, 3)
    before = set(asked)
    asked.clear()
    train(backbone, tuned, "stage", config)
    assert before == {"base", "tuned", "student"}
    assert set(asked) == {"student"}
