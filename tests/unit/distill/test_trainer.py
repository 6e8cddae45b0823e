"""What recovery promises about gradients, states and the base, on a two-layer model."""

import dataclasses

import pytest
import torch
from helpers.recovering import PROMPT, make_trainer

from opdcl.config.finetune import LoraSection
from opdcl.distill.trainer import micro_batches
from opdcl.errors import OpdclError, UsageError
from opdcl.model.forward import answer_ids, answer_states
from opdcl.sampling import decode
from opdcl.sampling.rollout import Rollout
from opdcl.training import save_adapter

ROLLOUTS = [Rollout([*PROMPT, 7 * i + 3], list(range(50 + i, 53 + 3 * i)), [], True) for i in range(6)]


@pytest.fixture
def trainer(backbone, tmp_path):
    """A recovery trainer whose student differs from its tuned teacher, which differs from base."""

    def moved(seed):
        backbone.new_adapter(LoraSection(r=4, alpha=8), seed)
        generator = torch.Generator().manual_seed(seed)
        for name, p in backbone.peft.named_parameters():
            if "lora_B" in name:
                p.data = torch.randn(p.shape, generator=generator) * 0.3
        save_adapter(backbone, tmp_path / f"adapter{seed}")

    moved(1)
    moved(2)
    backbone.drop_adapters()
    backbone.load_adapter(tmp_path / "adapter1", "student", trainable=True)
    backbone.load_adapter(tmp_path / "adapter2", "tuned")
    return make_trainer(backbone, tmp_path)


def gradient(trainer, stream="general", tokens=10_000, rollouts=ROLLOUTS):
    trainer.micro_batch_tokens = tokens
    trainer.model.zero_grad()
    trainer.model.train()
    sums = trainer.grade(rollouts, stream, learn=True)
    grads = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    return sums["kl"] / sums["tokens"], torch.cat(grads)


@pytest.mark.parametrize("tokens", [1, 20, 40])
def test_micro_batches_change_neither_loss_nor_gradient(trainer, tokens):
    loss, grad = gradient(trainer)
    split_loss, split_grad = gradient(trainer, tokens=tokens)
    assert split_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(split_grad, grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("stream", "teacher"), [("general", "base"), ("domain", "tuned")])
def test_loss_equals_a_plain_computation_of_each_teacher(trainer, stream, teacher):
    loss, _ = gradient(trainer, stream)
    total, count = 0.0, 0
    for rollout in ROLLOUTS:
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        with torch.no_grad():
            student = trainer.backbone.causal_lm(ids).logits[0].log_softmax(-1)
            with trainer.backbone.state(teacher) as model:
                other = model(ids).logits[0].log_softmax(-1)
        part = slice(len(rollout.prompt_ids) - 1, ids.shape[1] - 1)
        total += float((student[part].exp() * (student[part] - other[part])).sum())
        count += len(rollout.completion_ids)
    assert total / count > 1e-4
    assert loss == pytest.approx(total / count, rel=1e-4)


def test_a_student_equal_to_its_teacher_has_nothing_to_learn(backbone, tuned):
    """Rounding differs from CPU to CPU, so loss and gradient are compared with those under a teacher that differs."""
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


def test_sampling_and_grading_leave_the_base_bit_identical(trainer):
    before = trainer.backbone.fingerprint()
    for step in range(4):
        trainer.rollouts_of(step)
        gradient(trainer, trainer.steps[step].stream)
    assert trainer.backbone.fingerprint() == before


def test_merged_weights_answer_as_the_adapter_does(trainer):
    ids = torch.tensor([PROMPT])
    for state in ("student", "tuned", "base"):
        with torch.no_grad():
            with trainer.backbone.state(state) as model:
                plain = model(ids).logits
            with trainer.backbone.merged(state) as model:
                merged = model(ids).logits
        torch.testing.assert_close(merged, plain, atol=1e-4, rtol=1e-4)


def test_sampling_ahead_takes_the_prompts_of_the_same_stream(backbone, tmp_path):
    backbone.new_adapter(LoraSection(r=4, alpha=8), 0)
    trainer = make_trainer(backbone, tmp_path, sample_ahead=2)
    streams = [s.stream for s in trainer.steps]
    assert streams == ["general", "general", "general", "domain"]
    trainer.rollouts_of(0)
    assert set(trainer._ahead) == {1}
    prompts = [r.prompt_ids for r in trainer.rollouts_of(3)]
    assert prompts == [trainer.prompts["domain"][i] for i in trainer.steps[3].prompts]


def test_what_is_left_unfinished_is_learned_from_once_with_later_steps_of_its_stream(
    backbone, tmp_path, monkeypatch
):
    monkeypatch.setattr(decode, "WORTH_LEAVING", 2)
    backbone.new_adapter(LoraSection(r=4, alpha=8), 0)
    backbone.eos_ids = list(range(0, backbone.causal_lm.config.vocab_size, 6))
    settings = {
        "steps": 12,
        "rollouts": 24,
        "sample_ahead": 2,
        "max_new_tokens": 30,
        "general_per_domain": 2,
        "domain_rollouts": 2,
    }
    trainer = make_trainer(backbone, tmp_path, **settings)
    seen, sizes = [], []
    for index, step in enumerate(trainer.steps):
        if index == 6:  # a checkpoint in the middle brings back what was left
            assert trainer._unfinished["general"]
            trainer.create_optimizer_and_scheduler(12)
            trainer._save_checkpoint(trainer.model, None)
            trainer._ahead, trainer._unfinished = {}, {}
            trainer.restore(tmp_path / "t" / "checkpoint-0")
        rollouts = trainer.rollouts_of(index)
        assert rollouts
        assert all(r.finished or len(r.completion_ids) == 30 for r in rollouts)
        if step.stream == "general":
            seen += rollouts
            sizes.append(len(rollouts))
    assert min(sizes) < 24  # some were left
    assert len(seen) == len(set(map(id, seen))) == 24 * 8
    assert not any(trainer._unfinished.values())


def test_a_checkpoint_that_another_version_wrote_is_told_as_such(backbone, tmp_path):
    backbone.new_adapter(LoraSection(r=4, alpha=8), 0)
    trainer = make_trainer(backbone, tmp_path)
    (tmp_path / "rollouts.json").write_text('{"0": []}')  # what was sampled ahead, and nothing else
    with pytest.raises(UsageError, match="another version of opdcl wrote"):
        trainer.restore(tmp_path)


@pytest.mark.parametrize(
    ("settings", "may"),
    [({}, 3), ({"sample_ahead": 1}, 0), ({"oversample": 2.0}, 0), ({"rollouts": 2}, 0), ({"lmbda": 0.0}, 0)],
)
def test_when_completions_may_be_left(backbone, tmp_path, monkeypatch, settings, may):
    backbone.new_adapter(LoraSection(r=4, alpha=8), 0)
    trainer = make_trainer(backbone, tmp_path, **{"rollouts": 24, "sample_ahead": 2, "steps": 12, **settings})
    asked = []
    plain = trainer.sample

    def sample(*args):
        asked.append(args[6])
        return plain(*args)

    monkeypatch.setattr(trainer, "sample", sample)
    trainer.rollouts_of(0)
    trainer.rollouts_of(10)  # no later step of its stream is there to go on with them
    assert asked == [may, 0]


def test_micro_batches_hold_every_rollout_once_within_bounds():
    batches = micro_batches(ROLLOUTS, 40)
    assert sorted(map(id, (r for b in batches for r in b))) == sorted(map(id, ROLLOUTS))
    for batch in batches:
        width = max(len(r.prompt_ids) + len(r.completion_ids) for r in batch)
        assert len(batch) == 1 or len(batch) * width <= 40


def test_one_long_sequence_makes_no_padding_of_the_others():
    long, short = Rollout([1] * 5, [7] * 95), [Rollout([1] * 5, [7] * n) for n in (50, 30, 20, 20, 19)]
    batches = micro_batches([*short, long], 10_000)
    assert [[len(r.completion_ids) for r in b] for b in batches] == [[95, 50], [30, 20, 20, 19]]


def test_the_shared_prefix_changes_neither_states_nor_gradient(backbone):
    model = backbone.new_adapter(LoraSection(r=4, alpha=8), 0)
    sequences = [
        (r.prompt_ids + r.completion_ids, [False] * 5 + [True] * len(r.completion_ids)) for r in ROLLOUTS
    ]
    results = []
    for share in (True, False):
        model.zero_grad()
        states = answer_states(backbone.causal_lm, sequences, share)
        states.square().sum().backward()
        results.append(
            (states.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        )
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)
    assert len(results[0][0]) == len(answer_ids(sequences, torch.device("cpu")))


def test_shrinking_scales_what_the_adapter_adds(trainer):
    student = {k: v.clone() for k, v in student_delta(trainer).items()}
    trainer.backbone.shrink(0.25)
    for name, delta in student_delta(trainer).items():
        torch.testing.assert_close(delta, 0.25 * student[name])


def student_delta(trainer):
    layers = trainer.backbone.adapted_layers()
    return {str(i): layer.get_delta_weight("student") for i, layer in enumerate(layers)}


@pytest.mark.parametrize("tokens", [40, 10])
def test_teacher_states_kept_from_before_give_the_same_grade(trainer, tokens):
    """Also where the micro-batches have become smaller since."""
    trainer.micro_batch_tokens = 40
    kept = trainer.opinions(ROLLOUTS, trainer.teachers["general"])
    fresh = trainer.grade(ROLLOUTS, "general", learn=False)
    assert fresh["kl"] > 0
    trainer.micro_batch_tokens = tokens
    again = trainer.grade(ROLLOUTS, "general", learn=False, opinions=kept)
    assert again == pytest.approx(fresh, rel=1e-5)


def sampled(trainer):
    trainer._fresh = True
    return trainer.sample([[*PROMPT, 9]] * 3, "general", seed=0)


def test_sampler_and_trainer_agree_about_what_was_just_sampled(trainer):
    assert trainer.grade(sampled(trainer), "general", learn=True)["mismatched"] == 0


def test_a_token_whose_probability_the_sampler_saw_otherwise_is_left_out_and_counted(trainer):
    rollouts = sampled(trainer)
    whole = trainer.grade(rollouts, "general", learn=True)["loss"]
    rollouts[1].logprobs[2] += 0.6  # within a factor of two
    assert trainer.grade(rollouts, "general", learn=True)["loss"] == pytest.approx(whole)
    rollouts[1].logprobs[2] += 0.2
    masked = trainer.grade(rollouts, "general", learn=True)
    assert masked["mismatched"] == 1
    assert masked["loss"] < whole
    trainer._fresh = False  # sampled ahead of time: the student has moved since, and that is no fault
    assert trainer.grade(rollouts, "general", learn=True)["loss"] == pytest.approx(whole)


@pytest.mark.parametrize(
    "fault", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")]
)
def test_out_of_memory_halves_the_micro_batch_and_changes_no_gradient(trainer, memory_for, fault):
    inputs = [{"step": 0}]
    whole = step_gradient(trainer, inputs)
    assert trainer.micro_batch_tokens == 2048
    memory_for(1, fault)
    halved = step_gradient(trainer, inputs)
    assert float((halved - whole).norm()) < 1e-3 * float(whole.norm())
    assert trainer.micro_batch_tokens < 32


def step_gradient(trainer, inputs):
    trainer._ahead.clear()
    trainer.model.zero_grad()
    trainer.training_step(trainer.model, inputs)
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def test_a_sequence_too_long_for_memory_is_an_error_with_a_hint(trainer, memory_for):
    memory_for(0, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(OpdclError, match="does not fit") as caught:
        trainer.training_step(trainer.model, [{"step": 0}])
    assert "max_new_tokens" in caught.value.hint


def test_of_more_samples_those_are_kept_about_which_teacher_and_student_differ_most(trainer):
    rollouts = sampled(trainer)
    rollouts += [
        dataclasses.replace(r, logprobs=[x - 5 for x in r.logprobs]) for r in rollouts
    ]  # as if sampled by somebody else
    gaps = []
    for r in rollouts:
        with torch.no_grad(), trainer.backbone.state("base") as model:
            logits = model(torch.tensor([r.prompt_ids + r.completion_ids])).logits[
                0, len(r.prompt_ids) - 1 : -1
            ]
        theirs = logits.log_softmax(-1).gather(-1, torch.tensor(r.completion_ids)[:, None])[:, 0]
        gaps.append(float((theirs - torch.tensor(r.logprobs)).abs().mean()))
    kept = trainer._largest_gap(rollouts, "general", 3)
    widest = sorted(range(len(gaps)), key=gaps.__getitem__)[-3:]
    assert [id(r) for r in kept] == [id(rollouts[i]) for i in sorted(widest)]
    assert trainer._largest_gap(rollouts, "general", len(rollouts)) == rollouts
