"""Each teacher has the properties that theory predicts, measured on a two-layer model."""

import json
from dataclasses import replace

import pytest
import torch
from helpers.recovering import Silent, log_probs, recover_rows, short_recovery, whole_and_resumed
from helpers.teaching import ROLLOUTS, SHOWN, encode, specialist, states, taught
from helpers.tiny import save_model

from opdcl.config.recover import RecoverConfig
from opdcl.config.teacher import TeacherSection
from opdcl.errors import UsageError
from opdcl.model.check_model import check_same_tokenizer, differences
from opdcl.model.distributions import HiddenStates
from opdcl.model.lora import adapter_weights
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.stage import StageDir
from opdcl.train.external_teachers import make_teacher
from opdcl.train.losses import ScoredTokens, token_losses
from opdcl.train.teachers import EmaTeacher, Teacher, teacher_here
from opdcl.words import Loss


def test_an_ema_of_rate_one_is_the_student_and_of_rate_zero_is_frozen(adapted):
    live, frozen = states(Teacher(adapted, "student")), states(Teacher(adapted, "tuned"))
    fixed = EmaTeacher(adapted, "general", 0.0)
    fixed.after_step()
    assert torch.equal(states(fixed), frozen)
    assert not fixed.is_dynamic
    EmaTeacher(adapted, "general", 1.0).after_step()
    torch.testing.assert_close(states(Teacher(adapted, "general")), live, atol=1e-5, rtol=1e-5)
    assert float((live - frozen).abs().max()) > 0.01


def test_an_ema_equals_the_mean_by_hand(adapted):
    ema = EmaTeacher(adapted, "general", 0.25)
    layer = adapted.adapted_layers()[0]
    before, student = (layer.lora_B[name].weight.clone() for name in ("general", "student"))
    ema.after_step()
    torch.testing.assert_close(layer.lora_B["general"].weight, 0.75 * before + 0.25 * student)
    assert not layer.lora_B["general"].weight.requires_grad


def test_a_wider_model_grades_with_its_own_logits(adapted, tiny_model, tmp_path):
    save_model(tmp_path / "wide", tiny_model, "llama", hidden_size=64, intermediate_size=96)
    section = TeacherSection(kind="model", model={"id": str(tmp_path / "wide"), "dtype": "float32"})
    wide = make_teacher(section, adapted)
    student = Teacher(adapted, "student")
    tokens = torch.tensor([t for r in ROLLOUTS for t in r.completion_ids])
    graded_tokens = ScoredTokens(tokens, *torch.zeros(2, len(tokens)))
    sides = student.distribution(ROLLOUTS), wide.distribution(ROLLOUTS)
    result = token_losses(*sides, graded_tokens, Loss())
    expected = []
    for r in ROLLOUTS:
        log_p, log_q = (log_probs(model, r) for model in (adapted.causal_lm, wide.model))
        expected.append((log_p.exp() * (log_p - log_q)).sum(-1))
    torch.testing.assert_close(result.kl, torch.cat(expected), atol=1e-3, rtol=1e-4)


def test_a_live_teacher_without_context_has_nothing_to_teach(adapted):
    with pytest.raises(ValueError, match="teaches nothing"):
        TeacherSection(kind="live")
    student = states(Teacher(adapted, "student"))
    # These prompts have no context, so it sees what the student sees.
    assert torch.equal(states(teacher_here(TeacherSection(kind="live", **SHOWN), adapted)), student)


IN_CONTEXT = [replace(r, prompt=replace(r.prompt, context=[*r.prompt_ids, 77, 78])) for r in ROLLOUTS]


@pytest.mark.parametrize(
    ("section", "frozen", "expected"),
    [
        ({"kind": "live", **SHOWN}, "tuned", "tuned"),
        ({"kind": "ema"}, "tuned", "tuned"),
        ({"kind": "base"}, "tuned", "base"),
    ],
    ids=lambda x: x.get("kind") if isinstance(x, dict) else x,
)
def test_a_frozen_copy_keeps_its_context(adapted, section, frozen, expected):
    copy = teacher_here(TeacherSection(**section), adapted).frozen_copy(frozen)
    assert not copy.is_dynamic
    shown = states(copy, IN_CONTEXT)
    assert torch.equal(shown, states(Teacher(adapted, expected), IN_CONTEXT))
    assert not torch.allclose(shown, states(Teacher(adapted, expected)), atol=1e-3)


def test_only_the_teacher_sees_the_answer(backbone, answered):
    config = RecoverConfig(
        rollouts=8, domain=str(answered / "domain.jsonl"), **taught({"kind": "base", **SHOWN})
    )
    prompts = encode(config, "domain", backbone).train
    assert len(prompts) == 8
    decode = backbone.tokenizer.decode
    for i, prompt in enumerate(prompts):
        assert f"Code {i}" not in decode(prompt.ids)
        assert f"room {i}? (The answer is: Code {i})" in decode(prompt.context)


def test_a_context_refuses_a_row_without_an_answer(backbone, tuned):
    config = RecoverConfig(
        rollouts=8, domain=str(tuned / "domain.jsonl"), **taught({"kind": "base", **SHOWN})
    )
    with pytest.raises(UsageError, match=r"domain\.jsonl:1 has no answer"):
        encode(config, "domain", backbone)


@pytest.mark.parametrize("context", ["{prompt}", "{answer}", ""])
def test_a_context_needs_prompt_and_answer(context):
    with pytest.raises(ValueError, match="context needs"):
        TeacherSection(kind="base", context=context)


TEACHERS = [
    {"kind": "ema", **SHOWN},
    {"kind": "live", **SHOWN},
    {"kind": "base", **SHOWN},
    {"kind": "model"},
    {"kind": "adapter"},
    {"kind": "routed"},
]


@pytest.mark.parametrize("teacher", TEACHERS, ids=lambda t: t["kind"])
def test_every_teacher_trains_and_resumes_to_the_same_bits(backbone, answered, teacher, tiny_model):
    if teacher["kind"] == "model":
        teacher = teacher | {"model": {"id": str(tiny_model), "dtype": "float32"}}
    if teacher["kind"] == "adapter":
        teacher = teacher | {"adapter": str(answered / "tuned")}
    named = {}
    if teacher["kind"] == "routed":
        teacher = {"kind": "tuned"}
        named = {
            "mean": {"kind": "ema", **SHOWN, "prompts": str(specialist(answered, "mean"))},
            "other": {
                "kind": "model",
                "model": {"id": str(tiny_model), "dtype": "float32"},
                "prompts": str(specialist(answered, "other")),
            },
        }

    config = short_recovery(
        answered,
        domain_teacher="own",
        teachers={"own": teacher, **named},
        steps=8,
        lmbda=0.5,
        validate_every=4,
        keep="last",
    )
    whole, cut = whole_and_resumed(backbone, answered, config, stop=5)
    runs = (whole, cut)
    measured, again = ([r["validation"] for r in read_jsonl(s.metrics) if "validation" in r] for s in runs)
    assert measured == again
    assert (whole.adapter / "adapter_model.safetensors").read_bytes() != (
        answered / "tuned" / "adapter_model.safetensors"
    ).read_bytes()
    assert {r["stream"] for r in read_jsonl(whole.metrics) if "stream" in r} == {"general", "domain"}


def test_a_general_teacher_that_follows_the_student_is_refused():
    with pytest.raises(ValueError, match="equals the student at the start"):
        RecoverConfig(**taught({"kind": "ema"}, "general"))


def test_rows_beyond_the_shared_vocabulary_do_not_count():
    torch.manual_seed(1)
    student, teacher, weight = torch.randn(5, 6), torch.randn(5, 6), torch.randn(9, 6)
    tokens = ScoredTokens(torch.randint(9, (5,)), *torch.zeros(2, 5))
    padded = torch.cat([weight, torch.randn(3, 6)])
    same, other = (
        token_losses(HiddenStates(student, weight), HiddenStates(teacher, w), tokens, Loss()).kl
        for w in (weight, padded)
    )
    torch.testing.assert_close(same, other)


def test_the_same_tokenizer_agrees_with_itself(backbone):
    assert differences(backbone.tokenizer, backbone.tokenizer) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.add_tokens(["<new>"]), "added tokens differ: <new>"),
        (lambda t: setattr(t, "eos_token", "<|endoftext|>"), "eos_token_id is 2 and 0"),
        (
            lambda t: setattr(t, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}"),
            "the chat template writes",
        ),
        (
            lambda t: setattr(
                t.backend_tokenizer, "normalizer", __import__("tokenizers").normalizers.Lowercase()
            ),
            "becomes",
        ),
    ],
)
def test_another_tokenizer_is_refused_with_its_differences(backbone, change, message):
    import copy

    other = copy.deepcopy(backbone.tokenizer)
    change(other)
    with pytest.raises(UsageError, match="teacher big has another tokenizer") as caught:
        check_same_tokenizer(backbone.tokenizer, other, "teacher big")
    assert message in caught.value.message
    assert "GOLD" in caught.value.hint


def test_a_teacher_with_other_end_of_sequence_ids_is_refused(adapted, tiny_model, tmp_path):
    import shutil

    shutil.copytree(tiny_model, tmp_path / "other")
    (tmp_path / "other" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    with pytest.raises(UsageError, match=r"ends answers with ids \[2, 7\]"):
        make_teacher(
            TeacherSection(kind="model", model={"id": str(tmp_path / "other"), "dtype": "float32"}), adapted
        )


@pytest.mark.parametrize("start", [0.4, 1.0])
def test_an_average_begins_where_the_student_does(backbone, tuned, start):
    average = {"domain_teacher": "average", "teachers": {"average": {"kind": "ema"}}}
    config = short_recovery(
        tuned, start=start, steps=2, learning_rate=1e-9, lmbda=0.0, health=False, **average
    )
    recover_rows(config, backbone, tuned / "tuned", StageDir(tuned / "out"), Silent())
    for layer in backbone.adapted_layers("domain"):
        average, whole = (adapter_weights(layer, state)[1].norm() for state in ("domain", "tuned"))
        assert float(average / whole) == pytest.approx(start, rel=1e-4)
