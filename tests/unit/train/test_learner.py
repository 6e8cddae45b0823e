"""What a step logs, how completions are cut into micro-batches, and which weight each token has."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.near import ROUNDING, relative_error
from helpers.recovering import PROMPT, learned, log_probs, make_trainer, write_tuned

from opdcl.train.learner import kl_by_teacher, micro_batches
from opdcl.train.recover import step_metrics
from opdcl.train.teachers import Teacher
from opdcl.words import Batch, Loss, Prompt, Rollout, Stream

ROLLOUTS = [Rollout(Prompt([*PROMPT, i + 3]), list(range(50 + i, 53 + 3 * i)), [], i != 1) for i in range(3)]
TOKENS = 3 + 5 + 7


@pytest.fixture
def trainer(backbone, tmp_path):
    """Return a function that makes a trainer with these settings, whose student differs from base."""

    def make(**settings):
        backbone.drop_adapters()
        write_tuned(backbone, tmp_path / "tuned")
        backbone.load_adapter(tmp_path / "tuned", "tuned")
        return make_trainer(backbone, tmp_path, **settings)

    return make


def log_distributions(trainer, state):
    """Return log-probabilities before each completion token, one sequence at a time."""
    with trainer.learner.backbone.state(state) as model:
        return torch.cat([log_probs(model, rollout) for rollout in ROLLOUTS])


def test_a_step_logs_means_per_token_and_per_completion():
    rollouts = [
        Rollout(Prompt([1]), [7, 7, 7, 7, 7, 7], [], False, reward=0.5, advantage=0.0),
        Rollout(Prompt([1]), [5, 6], [], True, reward=1.0, advantage=1.0),
        Rollout(Prompt([1]), [8], [], True, reward=0.7, advantage=-1.0),
    ]
    sums = {"kl": 4.5, "student_entropy": 18.0, "teacher_entropy": 2.25, "mismatched": 1, "tokens": 9}
    sums |= {"kl/a": 3.0, "tokens/a": 6}
    stream = Stream("general", "p", "student", "base", Loss(), 1.0)
    examples = [rollout.to_example() for rollout in rollouts]
    metrics = step_metrics(Batch(stream, examples, "student", True), sums)
    assert metrics == {
        "mismatch": 1 / 9,
        "reward": pytest.approx(2.2 / 3),
        "reward_tied": 1 / 3,
        "kl/a": 0.5,
        "kl": 0.5,
        "student_entropy": 2.0,
        "teacher_entropy": 0.25,
        "mean_length": 3.0,
        "truncated": 1 / 3,
        "repetition": pytest.approx(2 / 3),  # of three groups of four tokens, two repeat the first
    }
    for rollout in rollouts:
        rollout.reward = None
    plain = step_metrics(Batch(stream, examples, "teacher"), sums)
    assert metrics.keys() - plain.keys() == {"mismatch", "reward", "reward_tied"}


@pytest.mark.parametrize(
    ("lengths", "tokens", "batches"),
    [
        ([10, 10, 10], 30, [[0, 1, 2]]),
        ([10, 10, 10], 29, [[0, 1], [2]]),
        ([4, 10, 5], 100, [[1, 2], [0]]),  # a batch is never more than half padding
        ([55, 35, 25, 25, 24, 100], 10_000, [[5, 0], [1, 2, 3, 4]]),  # nor is that of one long sequence
        ([50, 10], 20, [[0], [1]]),  # one that is too long runs alone
    ],
)
def test_micro_batches_by_hand(lengths, tokens, batches):
    assert micro_batches(dict(enumerate(lengths)), tokens) == batches


def test_packed_micro_batches_hold_as_many_tokens_as_they_may():
    lengths = {0: 4, 1: 10, 2: 5, 3: 1}
    assert micro_batches(lengths, 15, padded=False) == [[1, 2], [0, 3]]
    assert micro_batches(lengths, 100, padded=False) == [[1, 2, 0, 3]]
    assert micro_batches(lengths, 3, padded=False) == [[1], [2], [0], [3]]


def test_measured_sums_equal_a_plain_computation(trainer):
    ours = trainer()
    ours.learner.backbone.eos_ids = [2, 9, 17]  # some models end a turn in several ways
    graded = ours.learner.score(ROLLOUTS, Loss(), ours.learner.teachers["general"])
    sums = ours.learner.measure(graded, endings=True)
    log_p, log_q = (log_distributions(ours, state) for state in ("student", "base"))
    p, q = log_p.exp(), log_q.exp()
    ends = list(ours.learner.backbone.eos_ids)
    answers = (p * (log_p - log_q)).sum(-1).split([len(rollout.completion_ids) for rollout in ROLLOUTS])
    expected = {
        "answer_kl": sum(float(answer.mean()) for answer in answers),
        "kl": float((p * (log_p - log_q)).sum()),
        "student_entropy": float(-(p * log_p).sum()),
        "teacher_entropy": float(-(q * log_q).sum()),
        "ends": float(q[:, ends].sum()),
        "missed_ends": float((q[:, ends].sum(-1) - p[:, ends].sum(-1)).clamp(min=0).sum()),
        "tokens": TOKENS,
    }
    assert sums == pytest.approx(expected, rel=1e-3)
    assert "ends" not in ours.learner.measure(graded)


def test_the_kl_to_a_named_teacher_is_that_of_its_own_completions(trainer):
    learner = trainer().learner
    one, named, other = ROLLOUTS
    base, tuned = (Teacher(learner.backbone, state) for state in ("base", "tuned"))
    alone = learner.measure(learner.score([named], Loss(), {"": base}))["kl"]
    named = replace(named, prompt=Prompt(named.prompt_ids, "a"))
    graded = learner.score([one, named, other], Loss(), {"": tuned, "a": base})
    assert kl_by_teacher(learner.measure(graded)) == {"a": pytest.approx(alone / 5, rel=1e-4)}


def reference_weights(weighting):
    """Return the weight of each token of `ROLLOUTS` by a plain loop over tokens."""
    lengths = [len(r.completion_ids) for r in ROLLOUTS]
    weights = []
    for rollout, length in zip(ROLLOUTS, lengths, strict=True):
        plain = [1.0] * length
        if weighting == "edges":
            plain = [1 + 4 * math.exp(-i / 4) for i in range(length)]
            plain[-1] += 4 if rollout.finished else 0
        share = length if weighting == "tokens" else TOKENS / len(lengths)
        weights += [w / sum(plain) * share for w in plain]
    return weights


@pytest.mark.parametrize("weighting", ["tokens", "answers", "edges"])
@pytest.mark.parametrize("micro_batch_tokens", [2048, 16])
def test_tokens_share_the_loss_as_the_weighting_says(trainer, weighting, micro_batch_tokens):
    ours = trainer(weighting=weighting, micro_batch_tokens=micro_batch_tokens)
    log_p, log_q = (log_distributions(ours, state) for state in ("student", "base"))
    kl = (log_q.exp() * (log_q - log_p)).sum(-1).tolist()
    sums, _ = learned(ours, ROLLOUTS, "general")
    expected = sum(w * x for w, x in zip(reference_weights(weighting), kl, strict=True))
    assert sums["loss"] == pytest.approx(expected, rel=1e-4)
    plain, _ = learned(trainer(), ROLLOUTS, "general")
    assert sums["kl"] == pytest.approx(plain["kl"], rel=1e-4)  # progress is unweighted


def test_a_mean_over_twice_the_same_completions_is_the_same_step(trainer):
    ours = trainer()
    once, gradient = learned(ours, ROLLOUTS, "general")
    twice, same = learned(ours, [*ROLLOUTS, *ROLLOUTS], "general")
    assert twice["loss"] == pytest.approx(2 * once["loss"], rel=1e-4)
    assert relative_error(same, gradient) < ROUNDING


@pytest.mark.parametrize(("author", "reverse"), [("student", 0.25), ("teacher", 0.0), ("rows", 0.0)])
def test_reverse_kl_weighs_in_where_the_student_wrote_and_nowhere_else(trainer, author, reverse):
    ours = trainer(weighting="tokens", on_policy={"reverse": 0.25})
    log_p, log_q = (log_distributions(ours, state) for state in ("student", "base"))
    forward = float((log_q.exp() * (log_q - log_p)).sum())
    backward = float((log_p.exp() * (log_p - log_q)).sum())
    examples = [rollout.to_example() for rollout in ROLLOUTS]
    sums = ours.learner.learn(Batch(ours.queue.streams["general"], examples, author))
    assert sums["loss"] == pytest.approx((1 - reverse) * forward + reverse * backward, rel=1e-4)
