"""Completions to grade, the prompts of further teachers, and what a teacher makes of both."""

import json

from helpers.recovering import PROMPT, learned, make_trainer
from opdcl.data.prompts import encode_stream, read_recovery_source
from opdcl.words import Prompt, Rollout

ROLLOUTS = [Rollout(Prompt([*PROMPT, i + 3]), list(range(50 + i, 53 + 3 * i)), [], True) for i in range(4)]
SHOWN = {"context": "{prompt} (The answer is: {answer})"}


def encode(config, stream, backbone):
    source = read_recovery_source(config)
    return encode_stream(config, source, stream, backbone.tokenizer, backbone.context_length)


def taught(teacher, stream="domain"):
    """Return the settings of a recovery in which a stream has this teacher."""
    return {f"{stream}_teacher": "own", "teachers": {"own": teacher}}


def states(teacher, rollouts=ROLLOUTS):
    return teacher.states(rollouts)


def graded(backbone, folder, teacher, rollouts=ROLLOUTS):
    """Grade and learn from the rollouts, with one teacher or several by name; return sums and gradient."""
    trainer = make_trainer(backbone, folder, weighting="tokens")
    trainer.learner.teachers["domain"] = teacher if isinstance(teacher, dict) else {"": teacher}
    return learned(trainer, rollouts, "domain")


def specialist(folder, name):
    """Write the questions of one teacher; return their file."""
    asked = f"What does {name} say of room {{}}?"
    rows = [json.dumps({"question": asked.format(i), "answer": f"{name} {i}"}) for i in range(4)]
    (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return folder / f"{name}.jsonl"
