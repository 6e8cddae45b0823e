"""A recovery resumes to the same bits whatever is left of the files outside its checkpoint."""

import os
import shutil

from helpers.recovering import resumed_like, short_recovery, train


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


def test_what_decides_is_in_the_checkpoint(backbone, tuned):
    # The adapter before the first step stays the best one, so it is not written again.
    config = short_recovery(tuned, lmbda=1.0, health=False)
    whole = train(backbone, tuned, "whole", config)
    best = (whole.best / "adapter_model.safetensors").read_bytes()
    for lost in (empty, missing, without_validations, cut_off, other_best, no_best):
        resumed = resumed_like(whole, backbone, tuned, lost.__name__, config, 5, lost)
        assert (resumed.best / "adapter_model.safetensors").read_bytes() == best
