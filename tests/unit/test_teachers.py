"""Each teacher does what theory says of it, shown by a number, on a two-layer model."""

import json

import pytest
import torch
from recovering import Silent
from transformers import LlamaConfig, LlamaForCausalLM

from opdcl.config import ModelConfig, RecoverConfig, TeacherSection
from opdcl.distill.backbone import Backbone
from opdcl.distill.contract import check_same_tokenizer, differences
from opdcl.distill.divergence import token_losses
from opdcl.distill.rollouts import Rollout
from opdcl.distill.teachers import Ema, Teacher, TrustRegion, make_teacher
from opdcl.errors import UsageError
from opdcl.models import ModelRef
from opdcl.recover import encode_contexts, recover
from opdcl.rundir import StageDir, read_jsonl

PROMPT = [1, 520, 9690, 198]
ROLLOUTS = [Rollout([*PROMPT, 7 * i + 3], list(range(50 + i, 53 + 3 * i)), [], True) for i in range(4)]
SHOWN = {"context": "{prompt} (The answer is: {answer})"}


@pytest.fixture
def adapted(backbone, tuned):
    """A backbone with a student that has moved away from tuned, and a running mean that has not."""
    backbone.load_adapter(tuned / "tuned", "student", trainable=True)
    backbone.load_adapter(tuned / "tuned", "tuned")
    backbone.load_adapter(tuned / "tuned", "ema_general")
    move(backbone)
    return backbone


def move(backbone, by=0.05):
    torch.manual_seed(9)
    with torch.no_grad():
        for layer in backbone.adapted_layers():
            layer.lora_B["student"].weight.add_(by * torch.randn_like(layer.lora_B["student"].weight))


def states(teacher):
    return teacher.states(ROLLOUTS)


def test_an_ema_of_rate_one_is_the_student_and_of_rate_zero_stays(adapted):
    live, frozen = states(Teacher(adapted, "student")), states(Teacher(adapted, "tuned"))
    still = Ema(adapted, "ema_general", 0.0, 1)
    still.follow(1)
    assert torch.equal(states(still), frozen)
    assert not still.moves
    Ema(adapted, "ema_general", 1.0, 1).follow(1)
    torch.testing.assert_close(states(Teacher(adapted, "ema_general")), live, atol=1e-5, rtol=1e-5)
    assert float((live - frozen).abs().max()) > 0.01


def test_an_ema_is_the_mean_by_hand_and_moves_at_its_interval(adapted):
    ema = Ema(adapted, "ema_general", 0.25, 2)
    layer = adapted.adapted_layers()[0]
    before, student = (layer.lora_B[name].weight.clone() for name in ("ema_general", "student"))
    ema.follow(1)
    assert torch.equal(layer.lora_B["ema_general"].weight, before)
    ema.follow(2)
    torch.testing.assert_close(layer.lora_B["ema_general"].weight, 0.75 * before + 0.25 * student)
    assert not layer.lora_B["ema_general"].weight.requires_grad
    ema.begin()
    assert torch.equal(layer.lora_B["ema_general"].weight, student)


def test_an_ema_comes_back_from_a_checkpoint_exactly(adapted, tmp_path):
    ema = Ema(adapted, "ema_general", 0.3, 1)
    ema.follow(1)
    kept = states(ema)
    ema.save(tmp_path / "checkpoint")
    ema.follow(2)
    assert not torch.equal(states(ema), kept)
    ema.restore(tmp_path / "checkpoint")
    assert torch.equal(states(ema), kept)


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_a_trust_region_lies_between_reference_and_student(adapted, mix):
    ours = TrustRegion(adapted, "base", mix)
    head = ours.head_VH
    reference, student = (states(Teacher(adapted, name)) @ head.T for name in ("base", "student"))
    torch.testing.assert_close(states(ours) @ head.T, (1 - mix) * reference + mix * student, atol=1e-4, rtol=1e-4)


def test_a_separate_model_equal_to_base_is_the_adapter_off_teacher(adapted, tiny_model):
    other = make_teacher(TeacherSection(kind="model", model={"id": str(tiny_model), "dtype": "float32"}), adapted)
    base = Teacher(adapted, "base")
    torch.testing.assert_close(states(other), states(base), atol=1e-5, rtol=1e-5)
    assert torch.equal(other.head_VH, base.head_VH)
    assert not any(p.requires_grad for p in other.model.parameters())


def test_a_wider_model_grades_as_its_own_logits_say(adapted, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(adapted.tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                         initializer_range=0.5, bos_token_id=1, eos_token_id=2, pad_token_id=2, tie_word_embeddings=True)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "wide")
    adapted.tokenizer.save_pretrained(tmp_path / "wide")
    wide = make_teacher(TeacherSection(kind="model", model={"id": str(tmp_path / "wide"), "dtype": "float32"}), adapted)
    student = Teacher(adapted, "student")
    tokens = torch.tensor([t for r in ROLLOUTS for t in r.completion_ids])
    found = token_losses(states(student), states(wide), student.head_VH, tokens, torch.zeros(len(tokens)), teacher_weight_VH=wide.head_VH)
    expected = []
    for r in ROLLOUTS:
        ids = torch.tensor([r.prompt_ids + r.completion_ids])
        with torch.no_grad():
            log_p, log_q = (m(ids).logits[0, len(r.prompt_ids) - 1 : -1].log_softmax(-1) for m in (adapted.causal_lm, wide.model))
        expected.append((log_p.exp() * (log_p - log_q)).sum(-1))
    torch.testing.assert_close(found.kl, torch.cat(expected), atol=1e-3, rtol=1e-4)


def test_a_live_teacher_without_context_has_nothing_to_teach(adapted):
    with pytest.raises(ValueError, match="nothing to learn"):
        TeacherSection(kind="live")
    student = states(Teacher(adapted, "student"))
    assert torch.equal(states(make_teacher(TeacherSection(kind="live", **SHOWN), adapted)), student)  # it is shown nothing yet


@pytest.fixture
def answered(tuned):
    rows = [json.dumps({"question": f"What is the code of room {i}?", "answer": f"Code {i}"}) for i in range(8)]
    (tuned / "domain.jsonl").write_text("\n".join(rows))
    return tuned


def test_the_answer_is_shown_to_the_teacher_alone(backbone, answered):
    config = RecoverConfig(domain=str(answered / "domain.jsonl"), domain_teacher={"kind": "base", **SHOWN})
    contexts = encode_contexts(config, "domain", backbone)
    assert len(contexts) == 8
    decode = backbone.tokenizer.decode
    for i, (seen, shown) in enumerate(contexts.items()):
        assert f"Code {i}" not in decode(list(seen))
        assert f"room {i}? (The answer is: Code {i})" in decode(shown)


def test_a_row_without_an_answer_cannot_be_shown(backbone, tuned):
    config = RecoverConfig(domain=str(tuned / "domain.jsonl"), domain_teacher={"kind": "base", **SHOWN})
    with pytest.raises(UsageError, match=r"domain\.jsonl:1: no answer"):
        encode_contexts(config, "domain", backbone)


@pytest.mark.parametrize("context", ["{prompt}", "{answer}", ""])
def test_a_context_needs_prompt_and_answer(context):
    with pytest.raises(ValueError, match="context needs"):
        TeacherSection(kind="base", context=context)


TEACHERS = [
    {"kind": "ema", "rate": 0.5, **SHOWN}, {"kind": "live", **SHOWN, "skip_tokens": 1}, {"kind": "trust_region", "reference": "tuned", "mix": 0.2},
    {"kind": "base", **SHOWN}, {"kind": "model"},
]  # fmt: skip


@pytest.mark.parametrize("teacher", TEACHERS, ids=lambda t: t["kind"])
def test_every_teacher_trains_and_resumes_to_the_same_bits(backbone, answered, teacher, tiny_model):
    if teacher["kind"] == "model":
        teacher = teacher | {"model": {"id": str(tiny_model), "dtype": "float32"}}

    def train(name, stop=None):
        class StopAt(Silent):
            def progress(self, done, total, **values):
                if done == stop:
                    raise KeyboardInterrupt

        config = RecoverConfig(general=str(answered / "general.jsonl"), domain=str(answered / "domain.jsonl"), domain_teacher=teacher, steps=8,
                               lmbda=0.5, teacher_first=1, rollouts=4, max_new_tokens=6, validate_every=4, validation_prompts=2, learning_rate=5e-3, save_steps=3)  # fmt: skip
        out = StageDir(answered / name)
        fresh = Backbone(backbone.causal_lm, backbone.tokenizer)
        try:
            recover(config, fresh, ModelRef(ModelConfig(), answered / "tuned"), out, StopAt())
        except KeyboardInterrupt:
            assert stop
        finally:
            fresh.drop_adapters()
        return out

    whole = train("whole")
    train("cut", stop=5)
    cut = train("cut")
    one, other = ((s.adapter / "adapter_model.safetensors").read_bytes() for s in (whole, cut))
    assert one == other
    assert one != (answered / "tuned" / "adapter_model.safetensors").read_bytes()
    assert {r["stream"] for r in read_jsonl(whole.metrics) if "stream" in r} == {"general", "domain"}


def test_two_running_means_keep_to_themselves(backbone, answered):
    """Each stream has its own: of two that move at different rates one stays behind the other."""
    mean = {"kind": "ema", **SHOWN}
    config = RecoverConfig(general=str(answered / "domain.jsonl"), domain=str(answered / "domain.jsonl"), general_teacher=mean | {"rate": 1.0},
                           domain_teacher=mean | {"rate": 0.0}, steps=4, teacher_first=0, rollouts=4, max_new_tokens=6, validate_every=4,
                           validation_prompts=2, learning_rate=5e-3)  # fmt: skip
    recover(config, backbone, ModelRef(ModelConfig(), answered / "tuned"), StageDir(answered / "two"), Silent())
    layer = backbone.adapted_layers()[0]
    student, general, domain, fixed = (
        layer.lora_B[n].weight for n in ("student", "ema_general", "ema_domain", "tuned")
    )
    assert torch.allclose(general, student, atol=1e-7)
    assert torch.equal(domain, fixed)
    assert not torch.equal(student, fixed)


@pytest.mark.parametrize(
    "teacher", [{"kind": "tuned"}, {"kind": "ema"}, {"kind": "trust_region", "reference": "tuned"}]
)
def test_a_general_teacher_that_is_the_student_is_refused(teacher):
    with pytest.raises(ValueError, match="leads nowhere"):
        RecoverConfig(general_teacher=teacher)


def test_skipping_all_there_is_is_refused():
    with pytest.raises(ValueError, match="leaves nothing of 12 tokens"):
        RecoverConfig(domain_max_new_tokens=12, domain_teacher={"kind": "base", **SHOWN, "skip_tokens": 12})


def test_a_head_with_more_rows_grades_by_those_that_both_have():
    torch.manual_seed(1)
    student, teacher, weight = torch.randn(5, 6), torch.randn(5, 6), torch.randn(9, 6)
    tokens = torch.randint(9, (5,))
    padded = torch.cat([weight, torch.randn(3, 6)])
    same, other = (
        token_losses(student, teacher, weight, tokens, torch.zeros(5), teacher_weight_VH=w).kl for w in (weight, padded)
    )
    torch.testing.assert_close(same, other)


def test_the_same_tokenizer_agrees_with_itself(backbone):
    assert differences(backbone.tokenizer, backbone.tokenizer) == []


@pytest.mark.parametrize(("change", "said"), [
    (lambda t: t.add_tokens(["<new>"]), "added tokens differ: <new>"),
    (lambda t: setattr(t, "eos_token", "<|endoftext|>"), "eos_token_id is 2 and 0"),
    (lambda t: setattr(t, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}"), "the chat template writes"),
    (lambda t: setattr(t.backend_tokenizer, "normalizer", __import__("tokenizers").normalizers.Lowercase()), "becomes"),
])  # fmt: skip
def test_another_tokenizer_is_refused_with_what_differs(backbone, change, said):
    import copy

    other = copy.deepcopy(backbone.tokenizer)
    change(other)
    with pytest.raises(UsageError, match="teacher big has another tokenizer") as found:
        check_same_tokenizer(backbone.tokenizer, other, "big")
    assert said in found.value.message
    assert "GOLD" in found.value.hint


def test_a_teacher_that_ends_answers_otherwise_is_refused(adapted, tiny_model, tmp_path):
    import shutil

    shutil.copytree(tiny_model, tmp_path / "other")
    (tmp_path / "other" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    with pytest.raises(UsageError, match=r"ends answers with ids \[2, 7\]"):
        make_teacher(TeacherSection(kind="model", model={"id": str(tmp_path / "other"), "dtype": "float32"}), adapted)
