"""Gradients, sampling and selection of a recovery step, and the untouched base, on a two-layer model."""

import pytest
import torch
from helpers.near import ROUNDING, flat, relative_error
from helpers.recovering import PROMPT, learned, log_probs, make_trainer, write_tuned

from opdcl.config.model import LoraSection
from opdcl.errors import OpdclError, UsageError
from opdcl.model.forward import Pass, answer_ids, answer_states
from opdcl.words import Loss, Prompt, Rollout

ROLLOUTS = [Rollout(Prompt([*PROMPT, i + 3]), list(range(50 + i, 53 + 3 * i)), [], True) for i in range(6)]


@pytest.fixture
def trainer(backbone, tmp_path):
    """A recovery trainer whose student differs from its tuned teacher, which differs from base."""
    for seed in (1, 2):
        write_tuned(backbone, tmp_path / f"adapter{seed}", seed)
    backbone.drop_adapters()
    backbone.load_adapter(tmp_path / "adapter1", "student", trainable=True)
    backbone.load_adapter(tmp_path / "adapter2", "tuned")
    return make_trainer(backbone, tmp_path)


def gradient(trainer, stream="general", tokens=10_000):
    trainer.learner.micro_batch_tokens = tokens
    trainer.model.train()
    sums, gradient = learned(trainer, ROLLOUTS, stream)
    return sums["kl"] / sums["tokens"], gradient


@pytest.mark.parametrize("tokens", [1, 20, 40])
def test_micro_batches_change_neither_loss_nor_gradient(trainer, tokens):
    loss, grad = gradient(trainer)
    split_loss, split_grad = gradient(trainer, tokens=tokens)
    assert split_loss == pytest.approx(loss, rel=1e-4)
    assert relative_error(split_grad, grad) < ROUNDING


@pytest.mark.parametrize(("stream", "teacher"), [("general", "base"), ("domain", "tuned")])
def test_loss_equals_a_plain_computation_of_each_teacher(trainer, stream, teacher):
    loss, _ = gradient(trainer, stream)
    total, count = 0.0, 0
    for rollout in ROLLOUTS:
        student = log_probs(trainer.learner.backbone.causal_lm, rollout)
        with trainer.learner.backbone.state(teacher) as model:
            other = log_probs(model, rollout)
        total += float((student.exp() * (student - other)).sum())
        count += len(rollout.completion_ids)
    assert total / count > 1e-4
    assert loss == pytest.approx(total / count, rel=1e-4)


def test_a_student_equal_to_its_teacher_has_nothing_to_learn(backbone, tuned):
    """Rounding differs from CPU to CPU, so the scale is loss and gradient under a teacher that differs."""
    backbone.drop_adapters()
    backbone.load_adapter(tuned / "tuned", "student", trainable=True)
    backbone.load_adapter(tuned / "tuned", "tuned")
    trainer = make_trainer(backbone, tuned)
    loss, grad = gradient(trainer, "domain")
    other_loss, other_grad = gradient(trainer, "general")
    assert abs(loss) < 1e-4 * other_loss
    assert float(grad.norm()) < 1e-4 * float(other_grad.norm())


def test_only_the_student_is_trainable_and_gets_a_gradient(trainer):
    gradient(trainer, "domain")
    for name, parameter in trainer.model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name and ".student." in name), name
        assert (parameter.grad is not None) == parameter.requires_grad, name


@pytest.mark.parametrize(
    "stored",
    [
        '{"0": []}',  # completions sampled ahead, and nothing else
        '{"ahead": {"0": [{"prompt_ids": [1], "completion_ids": [5]}]}, "unfinished": {}}',
        '{"ahead": {}, "unfinished": {}, "drawn": {}, "unasked": 0}',
    ],
)
def test_a_checkpoint_of_another_version_is_refused_with_a_reason(backbone, tmp_path, stored):
    backbone.new_adapter(LoraSection(r=4, alpha=8), 0)
    trainer = make_trainer(backbone, tmp_path)
    (tmp_path / "rollouts.json").write_text(stored)
    with pytest.raises(UsageError, match="another version of opdcl wrote"):
        trainer.queue.restore(tmp_path)


@pytest.mark.parametrize("way", [Pass.BY_LENGTH, Pass.BEHIND_PREFIX])
def test_the_shared_prefix_changes_neither_states_nor_gradient(way, backbone, monkeypatch):
    model = backbone.new_adapter(LoraSection(r=4, alpha=8), 0)
    examples = [rollout.to_example() for rollout in ROLLOUTS]
    results = []
    for one in (way, Pass.PADDED):
        model.zero_grad()
        monkeypatch.setattr("opdcl.model.forward.pick_pass", lambda *given, one=one: one)
        states = answer_states(backbone.causal_lm, examples)
        # The final norm makes a sum of squares constant, whose gradient is only rounding.
        (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
        results.append((states.detach(), flat(p.grad for p in model.parameters() if p.grad is not None)))
    for shared, plain in zip(*results, strict=True):
        assert relative_error(shared, plain) < ROUNDING
    assert len(results[0][0]) == len(answer_ids(examples, torch.device("cpu")))


@pytest.mark.parametrize("tokens", [40, 10])
def test_stored_teacher_distributions_give_the_same_grade(trainer, tokens):
    """Also if the micro-batches have become smaller since."""
    learner = trainer.learner
    learner.micro_batch_tokens = 40
    graded = learner.score(ROLLOUTS, Loss(), learner.teachers["general"])
    direct = trainer.learn(ROLLOUTS, "general")
    assert direct["kl"] > 0
    del direct["loss"]
    learner.micro_batch_tokens = tokens
    measured = learner.measure(graded)
    assert measured.pop("answer_kl") > 0  # which learning does not need
    assert measured == pytest.approx(direct, rel=1e-4)


def sampled(trainer):
    return trainer.queue.student.complete([Prompt([*PROMPT, 9])] * 3, max_new_tokens=6, seed=0)


def test_a_token_with_another_probability_in_the_sampler_is_left_out_and_counted(trainer):
    rollouts = sampled(trainer)
    whole = trainer.learn(rollouts, "general", fresh=True)["loss"]
    rollouts[1].logprobs[2] += 0.6  # within a factor of two
    assert trainer.learn(rollouts, "general", fresh=True)["loss"] == pytest.approx(whole)
    rollouts[1].logprobs[2] += 0.2
    masked = trainer.learn(rollouts, "general", fresh=True)
    assert masked["mismatched"] == 1
    assert masked["loss"] < whole
    # If it was sampled ahead, the student has moved since, and a difference is no fault.
    assert trainer.learn(rollouts, "general")["loss"] == pytest.approx(whole)


def test_a_sequence_too_long_for_memory_is_an_error_with_a_hint(trainer, memory_for):
    memory_for(0, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(OpdclError, match="does not fit") as caught:
        trainer.learner.learn(trainer.queue.take(0))
    assert "max_new_tokens" in caught.value.hint
