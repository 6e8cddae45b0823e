"""Check each teacher on the embedded model: what theory predicts, and the number that shows it.

    python benchmarks/teachers.py ADAPTER        # a tuned adapter from a fine-tune on the handbook; minutes

Losses and KL are in nats per token, over completions to handbook questions, sampled by a student that has
moved away from tuned.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import head, parser_of, store

from opdcl.config.model import ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.config.teacher import TeacherSection
from opdcl.data.prompts import encode_stream, read_recovery_source
from opdcl.data.rows import Row
from opdcl.model.accept import load_backbone
from opdcl.model.backbone import Backbone
from opdcl.sampling.sample import sample
from opdcl.train.external_teachers import make_teacher
from opdcl.train.losses import GradedTokens, token_losses
from opdcl.train.teachers import EmaTeacher, Teacher
from opdcl.words import Loss, Prompt, Rollout

CONTEXT = "{prompt}\n\nThe answer is: {answer}"
PROMPTS = 24


def main() -> None:
    parser = parser_of(__file__, __doc__)
    parser.add_argument("adapter", type=Path)
    options = parser.parse_args()
    backbone = load_backbone(ModelConfig())
    for state in ("student", "tuned", "mean"):
        backbone.load_adapter(options.adapter, state, trainable=state == "student")
    torch.manual_seed(0)
    with torch.no_grad():  # a student that has moved away from tuned
        for layer in backbone.adapted_layers():
            weight = layer.lora_B["student"].weight
            weight.mul_(0.7).add_(2e-3 * torch.randn_like(weight))
    rows = [row(*claim) for claim in measure(backbone)]
    about = {"dtype": str(backbone.causal_lm.dtype), "prompts": PROMPTS}
    store(options.out, head() | about | {"rows": rows})
    if not all(row["holds"] for row in rows):
        sys.exit("a teacher does not do what theory predicts")


def row(teacher: str, claim: str, words: str, value: float | list[float], holds: bool) -> dict[str, Any]:
    found = words.format(" / ".join(f"{v:.3f}" for v in value) if isinstance(value, list) else value)
    print(f"{'ok    ' if holds else 'FAILED'} {teacher}: {claim}: {found}")
    return {"teacher": teacher, "claim": claim, "value": value, "found": found, "holds": bool(holds)}


def measure(backbone: Backbone) -> Iterator[tuple]:
    """Yield each claim: teacher, claim, words for the value, the value, and whether the claim holds."""
    section = {"kind": "base", "context": CONTEXT}
    teachers = {"domain_teacher": "shown", "teachers": {"shown": section}}
    config = RecoverConfig(domain="handbook", rollouts=8, validation_prompts=PROMPTS, **teachers)
    source, room = read_recovery_source(config), backbone.context_length
    prompts = encode_stream(config, source, "domain", backbone.tokenizer, room)
    how = {"max_new_tokens": 16, "eos_ids": backbone.eos_ids, "temperature": 1.0, "seed": 1}
    with backbone.merged("student") as model:
        rollouts = sample(model, [Prompt(p.ids) for p in prompts.held_out], **how)
    live, tuned, base = (Teacher(backbone, state) for state in ("student", "tuned", "base"))

    def kl(teacher, of=live, texts=rollouts, shown=None) -> float:
        return float(graded(of, teacher, texts, shown or texts).kl.mean())

    def far(one, other) -> float:
        return float((one.states(rollouts) - other.states(rollouts)).abs().max())

    small, states = "KL {:.1e}", "states differ by {:.1e}"
    x = kl(Teacher(backbone, "student"))
    yield "live", "without a context it has nothing to teach", small, x, x == 0
    x = kl(tuned)
    yield "tuned", "differs from the student", "KL {:.3f}", x, x > 0.01
    mean = EmaTeacher(backbone, "mean", 0.0)
    mean.after_step()
    x = far(mean, tuned)
    yield "ema, rate 0", "equals the frozen teacher", states, x, x == 0
    mean.rate = 1.0
    mean.after_step()
    x = kl(mean)
    yield "ema, rate 1", "equals the live teacher", small, x, x < 1e-6
    with tempfile.TemporaryDirectory() as folder:
        plain = load_backbone(ModelConfig())
        plain.causal_lm.save_pretrained(folder)
        plain.tokenizer.save_pretrained(folder)
        dtype = str(backbone.causal_lm.dtype).removeprefix("torch.")
        other = make_teacher(TeacherSection(kind="model", model={"id": folder, "dtype": dtype}), backbone)
    x = far(other, base)
    claim = "base's weights, loaded separately, equal the teacher with the adapter off"
    yield "model", claim, states, x, x < 1e-3

    shown, words = golden(backbone, source.rows["domain"], prompts.held_out), "loss on gold answers {}"
    gold = [replace(r, prompt=Prompt(r.prompt_ids)) for r in shown]
    xs = [loss(base, gold), loss(base, shown)]
    yield "base, shown the answer", "finds it more likely", words, xs, xs[1] < xs[0]
    xs = [loss(tuned, texts) for texts in (gold, shown)]
    claim = "already knew it: little to gain"
    yield "tuned, shown the answer", claim, words, xs, abs(xs[1] - xs[0]) < 0.3
    xs = [kl(base, tuned, gold), kl(base, tuned, gold, shown)]
    claim, words = "pulls less against what tuned has learned", "KL of tuned to it on gold answers {}"
    yield "base, shown the answer", claim, words, xs, xs[1] < xs[0]


def graded(student: Teacher, teacher: Teacher, rollouts: list[Rollout], shown: list[Rollout]):
    """Compare the two, the teacher on the same completions, `shown` with what it sees."""
    tokens = torch.tensor([t for r in rollouts for t in r.completion_ids])
    sides = student.distribution(rollouts), teacher.distribution(shown)
    return token_losses(*sides, GradedTokens(tokens, *torch.zeros(2, len(tokens))), Loss())


def loss(teacher: Teacher, gold: list[Rollout]) -> float:
    """Return the teacher's own mean loss on gold answers."""
    return -float(graded(teacher, teacher, gold, gold).logprob.mean())


def golden(backbone: Backbone, rows: list[Row], prompts: list[Prompt]) -> list[Rollout]:
    """Return the held-out questions with their correct answers instead of sampled ones."""
    answers, end = [rows[p.number].answer for p in prompts], backbone.tokenizer.eos_token_id
    ids = [backbone.tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in answers]
    return [Rollout(p, [*i, end], [], True) for p, i in zip(prompts, ids, strict=True)]


if __name__ == "__main__":
    main()
