"""Several teachers of one student: each prompt has a route to the teacher that grades it."""

import json
from dataclasses import replace

import pytest
import torch
from helpers.near import ROUNDING, relative_error
from helpers.recovering import SHORT, Silent, learned, log_probs, make_trainer, recover_rows
from helpers.teaching import ROLLOUTS, SHOWN, encode, graded, specialist

from opdcl.config.recover import RecoverConfig
from opdcl.config.teacher import TeacherSection
from opdcl.errors import UsageError
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.stage import StageDir
from opdcl.train.checkpoints import save_adapter
from opdcl.train.external_teachers import make_teacher
from opdcl.train.teachers import Teacher


def routed(*indices):
    """Return the completions, of which these have teacher `a`."""
    return [
        replace(r, prompt=replace(r.prompt, teacher="a")) if i in indices else r
        for i, r in enumerate(ROLLOUTS)
    ]


def test_a_route_to_one_teacher_is_that_teacher(adapted, tmp_path):
    alone, gradient = graded(adapted, tmp_path, Teacher(adapted, "tuned"))
    teachers = {"": Teacher(adapted, "base"), "a": Teacher(adapted, "tuned")}
    sums, same = graded(adapted, tmp_path, teachers, routed(0, 1, 2, 3))
    assert {k: v for k, v in sums.items() if "/" not in k} == alone
    assert torch.equal(same, gradient)


def test_each_prompt_is_graded_by_its_own_teacher(adapted, tmp_path, tiny_model):
    """The sums equal those of the parts, each graded by its own teacher; one of these is a second model."""
    section = TeacherSection(kind="model", model={"id": str(tiny_model), "dtype": "float32"})
    other = make_teacher(section, adapted)
    teachers = {"": Teacher(adapted, "tuned"), "a": other}
    sums, gradient = graded(adapted, tmp_path, teachers, routed(1, 3))
    parts = {"a": (other, [1, 3]), "": (Teacher(adapted, "tuned"), [0, 2])}
    expected, slope, tokens = {}, 0, sum(len(r.completion_ids) for r in ROLLOUTS)
    for name, (teacher, indices) in parts.items():
        trainer = make_trainer(adapted, tmp_path, weighting="tokens")
        trainer.learner.teachers["domain"] = {"": teacher}
        part, its_gradient = learned(trainer, [ROLLOUTS[i] for i in indices], "domain")
        expected[name] = part["kl"]
        slope = slope + its_gradient * part["tokens"] / tokens
    assert sums["kl/a"] == pytest.approx(expected["a"], rel=1e-4)
    assert sums["kl"] == pytest.approx(expected["a"] + expected[""], rel=1e-4)
    assert relative_error(gradient, slope) < ROUNDING


def test_each_teacher_completes_its_own_prompts(adapted, tmp_path):
    trainer = make_trainer(adapted, tmp_path)
    prompts = [r.prompt for r in routed(1, 3)]
    own = {"base": [prompts[0], prompts[2]], "tuned": [prompts[1], prompts[3]]}
    by = {s: Teacher(adapted, s).complete(asked, max_new_tokens=6, seed=1) for s, asked in own.items()}
    teachers = {"": Teacher(adapted, "base"), "a": Teacher(adapted, "tuned")}
    written = [talk[0] for talk in trainer.queue.teachers_answers(prompts, "domain", 1, teachers)]
    expected = [by["base"][0], by["tuned"][0], by["base"][1], by["tuned"][1]]
    assert [r.completion_ids for r in written] == [r.completion_ids for r in expected]
    assert [r.prompt for r in written] == prompts


def test_rows_name_teachers_and_teachers_add_prompts(backbone, answered):
    rows = [
        {"prompt": "Where is room 1?", "teacher": "a"},
        {"prompt": "Where is room 2?"},
        {"prompt": "Where is room 3?", "teacher": ""},
    ]
    (answered / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    teachers = {
        "a": {"kind": "base"},
        "b": {"kind": "base", **SHOWN, "prompts": str(specialist(answered, "b"))},
    }
    config = RecoverConfig(rollouts=8, domain=str(answered / "mixed.jsonl"), teachers=teachers)
    found = encode(config, "domain", backbone)
    assert [p.teacher for p in found.train] == ["a", "", "", "b", "b", "b", "b"]
    assert [p.context is not None for p in found.train] == [False] * 3 + [True] * 4
    (answered / "built-in.jsonl").write_text(
        json.dumps(rows[0] | {"teacher": "base"}) + "\n" + json.dumps(rows[1])
    )
    found = encode(RecoverConfig(rollouts=8, domain=str(answered / "built-in.jsonl")), "domain", backbone)
    assert [p.teacher for p in found.train] == ["base", ""]
    with pytest.raises(UsageError, match=r"mixed\.jsonl:1 names an unknown teacher 'a'"):
        encode(RecoverConfig(rollouts=8, domain=str(answered / "mixed.jsonl")), "domain", backbone)
    (answered / "mixed.jsonl").write_text("\n".join(json.dumps({**rows[0], "teacher": t}) for t in "ab"))
    with pytest.raises(UsageError, match=r"mixed\.jsonl:2 has no answer"):
        encode(config, "domain", backbone)
    (answered / "mixed.jsonl").write_text(
        "\n".join(json.dumps({**rows[0], "teacher": t, "completion": "There"}) for t in "ab")
    )
    same = encode(config, "domain", backbone).train[:2]
    assert same[0].ids == same[1].ids
    assert [(p.teacher, p.context is not None) for p in same] == [("a", False), ("b", True)]


def test_a_general_prompt_near_the_domain_can_be_given_to_tuned(backbone, answered):
    rows = [{"prompt": f"When does water boil in town {n}?", "teacher": "tuned"} for n in range(3)]
    rows += [{"prompt": f"Write a line about {n}."} for n in range(3)]
    (answered / "near.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = encode(RecoverConfig(rollouts=8, general=str(answered / "near.jsonl")), "general", backbone)
    assert sorted(p.teacher for p in found.train + found.held_out) == ["", "", "", "tuned", "tuned", "tuned"]


def test_one_student_learns_from_two_specialists_and_its_distance_to_each_is_reported(backbone, answered):
    """Forward KL on the specialists' own completions: success does not depend on the student's samples."""
    for name, seed in (("left", 1), ("right", 2)):
        backbone.load_adapter(answered / "tuned", "student", trainable=True)
        torch.manual_seed(seed)
        with torch.no_grad():
            for layer in backbone.adapted_layers():
                layer.lora_B["student"].weight.copy_(0.05 * torch.randn_like(layer.lora_B["student"].weight))
        save_adapter(backbone, answered / name)
        backbone.drop_adapters()
    teachers = {
        name: {"kind": "adapter", "adapter": str(answered / name), "prompts": str(specialist(answered, name))}
        for name in ("left", "right")
    }
    longer = SHORT | {"steps": 40, "rollouts": 8, "validate_every": 20, "validation_prompts": 4}
    settings = longer | {"general_per_domain": 0, "loss": {"kind": "forward_kl"}, "health": False}
    config = RecoverConfig(teachers=teachers, **settings)
    out = StageDir(answered / "one")
    recover_rows(config, backbone, answered / "left", out, Silent())
    first, *_, last = (r["validation"] for r in read_jsonl(out.metrics) if "validation" in r)
    assert {k for k in first if "domain_kl" in k} == {"domain_kl", "domain_kl/left", "domain_kl/right"}
    assert first["domain_kl/left"] < 1e-4 * first["domain_kl/right"]
    assert last["domain_kl/right"] < 0.85 * first["domain_kl/right"]
    assert last["domain_kl"] < 0.95 * first["domain_kl"]
    assert any("kl/left" in r for r in read_jsonl(out.metrics))
    backbone.drop_adapters()
    backbone.load_adapter(answered / "left", "student")
    backbone.load_adapter(answered / "right", "right")
    assert first["domain_kl/right"] == pytest.approx(plain_kl(backbone, config, "right"), rel=1e-3)


def plain_kl(backbone, config, name):
    """Return the mean KL per token, student to specialist, on the specialist's held-out completions."""
    prompts = encode(config, "domain", backbone)
    own = [p for p in prompts.held_out if p.teacher == name]
    seed = config.seed + 7
    written = Teacher(backbone, name).complete(own, max_new_tokens=config.max_new_tokens, seed=seed)
    kl = []
    for rollout in written:
        log_p = log_probs(backbone.causal_lm, rollout)
        with backbone.state(name) as model:
            log_q = log_probs(model, rollout)
        kl.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return float(torch.cat(kl).mean())


def test_held_out_prompts_come_from_every_source(backbone, answered):
    rows = [json.dumps({"prompt": f"Where is room {i}?"}) for i in range(31)]
    (answered / "many.jsonl").write_text("\n".join(rows))
    teachers = {"a": {"kind": "base", "prompts": str(specialist(answered, "a"))}}
    config = RecoverConfig(
        domain=str(answered / "many.jsonl"),
        general=[str(answered / "general.jsonl")],
        teachers=teachers,
        validation_prompts=16,
    )
    found = encode(config, "domain", backbone)
    assert len(found.held_out) == 16
    assert 1 <= sum(p.teacher == "a" for p in found.held_out) <= 3
    general = encode(config, "general", backbone)
    assert len(general.train) + len(general.held_out) == 8
