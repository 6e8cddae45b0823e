"""Check each teacher on the embedded model: what theory predicts, and the number that shows it.

    python benchmarks/teachers.py ADAPTER        # a tuned adapter from a fine-tune on the handbook; minutes

Losses and KL are in nats per token, over completions to handbook questions, sampled by a student that has
moved away from tuned.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

from opdcl.config.model import ModelConfig
from opdcl.config.recover import RecoverConfig
from opdcl.config.teacher import LossSection, TeacherSection
from opdcl.distill.losses import token_losses
from opdcl.distill.make_teacher import make_teacher
from opdcl.distill.prompts import encode_stream, read_recovery_source
from opdcl.distill.teachers import EmaTeacher, RoutedTeacher, Teacher, TrustRegionTeacher
from opdcl.model.backbone import Backbone
from opdcl.rundir.environment import machine
from opdcl.sampling.rollout import Rollout
from opdcl.sampling.sample import sample

CONTEXT = "{prompt}\n\nThe answer is: {answer}"
PROMPTS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("teachers.json"))
    options = parser.parse_args()
    backbone = Backbone.load(ModelConfig())
    for state in ("student", "tuned", "mean"):
        backbone.load_adapter(options.adapter, state, trainable=state == "student")
    torch.manual_seed(0)
    with torch.no_grad():  # a student that has moved away from tuned
        for layer in backbone.adapted_layers():
            layer.lora_B["student"].weight.mul_(0.7).add_(
                2e-3 * torch.randn_like(layer.lora_B["student"].weight)
            )
    rows = list(measure(backbone))
    for row in rows:
        print(f"{'ok    ' if row['holds'] else 'FAILED'} {row['teacher']}: {row['claim']}: {row['found']}")
    record = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/teachers.py", *sys.argv[1:]]),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "dtype": str(backbone.causal_lm.dtype),
        "prompts": PROMPTS,
        "rows": rows,
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    if not all(row["holds"] for row in rows):
        sys.exit("a teacher does not do what theory predicts")


def measure(backbone: Backbone):
    """Yield one row per claim."""
    section = {"kind": "base", "context": CONTEXT}
    teachers = {"domain_teacher": "shown", "teachers": {"shown": section}}
    config = RecoverConfig(domain="handbook", validation_prompts=PROMPTS, **teachers)
    prompts = encode_stream(
        config, read_recovery_source(config), "domain", backbone.tokenizer, backbone.context_length
    )
    contexts = prompts.contexts[""]
    with backbone.merged("student") as model:
        rollouts = sample(
            model, prompts.held_out, max_new_tokens=16, eos_ids=backbone.eos_ids, temperature=1.0, seed=1
        )
    live, tuned, base = (Teacher(backbone, state) for state in ("student", "tuned", "base"))

    def kl(teacher, of=live, texts=rollouts):
        return float(graded(of, teacher, texts).kl.mean())

    def far(one, other):
        return float((one.states(rollouts) - other.states(rollouts)).abs().max())

    yield row(
        "live",
        "without a context it has nothing to teach",
        kl(Teacher(backbone, "student")),
        lambda x: x == 0,
        "KL {:.1e}",
    )
    yield row("tuned", "differs from the student", kl(tuned), lambda x: x > 0.01, "KL {:.3f}")
    mean = EmaTeacher(backbone, "mean", 0.0)
    mean.after_step(1)
    yield row(
        "ema, rate 0",
        "equals the frozen teacher",
        far(mean, tuned),
        lambda x: x == 0,
        "states differ by {:.1e}",
    )
    mean.rate = 1.0
    mean.after_step(1)
    yield row("ema, rate 1", "equals the live teacher", kl(mean), lambda x: x < 1e-6, "KL {:.1e}")
    for mix, end, name in ((0.0, base, "its reference"), (1.0, live, "the live teacher")):
        yield row(
            f"trust region, mix {mix:g}",
            f"equals {name}",
            far(TrustRegionTeacher(backbone, "base", mix), end),
            lambda x: x < 1e-4,
            "states differ by {:.1e}",
        )
    between = [kl(TrustRegionTeacher(backbone, "base", mix)) for mix in (0.0, 0.25, 0.5, 0.75, 1.0)]
    yield row(
        "trust region",
        "the closer to the student, the less there is to learn",
        between,
        lambda x: x == sorted(x, reverse=True),
        "KL at mix 0 to 1 {}",
    )
    routed = RoutedTeacher(base, {"one": tuned}, {tuple(r.prompt_ids): "one" for r in rollouts})
    (name, teacher, mine), *others = routed.split([r.prompt_ids for r in rollouts])
    same = abs(kl(teacher, texts=[rollouts[i] for i in mine]) - kl(tuned))
    yield row(
        "routed to a single teacher",
        "equals that teacher",
        same,
        lambda x: x < 1e-6 and name == "one" and not others,
        "KL differs by {:.1e}",
    )
    with tempfile.TemporaryDirectory() as folder:
        plain = Backbone.load(ModelConfig())
        plain.causal_lm.save_pretrained(folder)
        plain.tokenizer.save_pretrained(folder)
        dtype = str(backbone.causal_lm.dtype).removeprefix("torch.")
        other = make_teacher(TeacherSection(kind="model", model={"id": folder, "dtype": dtype}), backbone)
    yield row(
        "model",
        "base's weights, loaded separately, equal the teacher with the adapter off",
        far(other, base),
        lambda x: x < 1e-3,
        "states differ by {:.1e}",
    )
    gold = golden(backbone, prompts.held_out)
    told = Teacher(backbone, "base", contexts)
    knowing = [loss(Teacher(backbone, "tuned", c), gold) for c in (None, contexts)]
    yield row(
        "base, shown the answer",
        "finds it more likely",
        [loss(base, gold), loss(told, gold)],
        lambda x: x[1] < x[0],
        "loss on gold answers {}",
    )
    yield row(
        "tuned, shown the answer",
        "already knew it: little to gain",
        knowing,
        lambda x: abs(x[1] - x[0]) < 0.3,
        "loss on gold answers {}",
    )
    pull = [kl(base, tuned, gold), kl(told, tuned, gold)]
    yield row(
        "base, shown the answer",
        "pulls less against what tuned has learned",
        pull,
        lambda x: x[1] < x[0],
        "KL of tuned to it on gold answers {}",
    )


def row(teacher: str, claim: str, value, holds, words: str) -> dict:
    shown = " / ".join(f"{v:.3f}" for v in value) if isinstance(value, list) else value
    return {
        "teacher": teacher,
        "claim": claim,
        "value": value,
        "found": words.format(shown),
        "holds": bool(holds(value)),
    }


def graded(student: Teacher, teacher: Teacher, rollouts: list[Rollout]):
    tokens = torch.tensor([t for r in rollouts for t in r.completion_ids])
    return token_losses(
        student.states(rollouts),
        student.head_VH,
        teacher.distribution(rollouts),
        tokens,
        torch.zeros(len(tokens)),
        1.0,
        LossSection(),
    )


def loss(teacher: Teacher, gold: list[Rollout]) -> float:
    """Return the teacher's own mean loss on gold answers."""
    return -float(graded(teacher, teacher, gold).logprob.mean())


def golden(backbone: Backbone, prompts: list[list[int]]) -> list[Rollout]:
    """Return the held-out questions with their correct answers instead of sampled ones."""
    from opdcl.data.chat import encode_prompt
    from opdcl.data.rows import load_rows

    room = backbone.causal_lm.config.max_position_embeddings
    answers = {tuple(encode_prompt(r, backbone.tokenizer, room)): r.answer for r in load_rows("handbook")}
    ids = [backbone.tokenizer(answers[tuple(p)], add_special_tokens=False)["input_ids"] for p in prompts]
    return [
        Rollout(p, [*i, backbone.tokenizer.eos_token_id], [], True) for p, i in zip(prompts, ids, strict=True)
    ]


if __name__ == "__main__":
    main()
