"""The rollout queue: whose settings bound a completion, what seeds it, and when a row writes it."""

import pytest
from helpers.recovering import PROMPT, make_trainer, short_recovery, train, whole_and_resumed

from opdcl.config.finetune import LoraSection
from opdcl.config.recover import RecoverConfig
from opdcl.distill.prompts import encode_stream, read_recovery_source
from opdcl.distill.rollout_queue import RolloutQueue
from opdcl.distill.teachers import Teacher
from opdcl.errors import UsageError
from opdcl.sampling import decode
from opdcl.training import save_adapter


@pytest.fixture
def queue(backbone, tmp_path):
    """Return a function that makes the queue of a trainer with these settings."""

    def make(**settings):
        backbone.new_adapter(LoraSection(r=4, alpha=8), 0)
        save_adapter(backbone, tmp_path / "tuned")
        backbone.load_adapter(tmp_path / "tuned", "tuned")
        backbone.eos_ids = []  # so that every completion runs to its limit
        return make_trainer(backbone, tmp_path, sample_ahead=1, **settings).queue

    return make


def test_domain_completions_have_a_limit_of_their_own(queue):
    steps = queue(general_per_domain=1, max_new_tokens=6, domain_max_new_tokens=3)
    general, domain = (steps.take(i).rollouts for i in range(2))
    assert {len(r.completion_ids) for r in general} == {6}
    assert {len(r.completion_ids) for r in domain} == {3}


def test_the_seed_and_the_step_decide_what_is_sampled(queue):
    def completions(seed):
        steps = queue(seed=seed)
        return [[r.completion_ids for r in steps.take(i).rollouts] for i in range(2)]

    first = completions(1)
    assert first == completions(1)
    assert first != completions(2)
    assert first[0] != first[1]


def test_what_a_teacher_writes_in_its_context_belongs_to_the_plain_prompt(queue, backbone):
    steps, prompt, shown = queue(), [*PROMPT, 9], [*PROMPT, 9, 33, 34]
    author = Teacher(backbone, "base", {tuple(prompt): shown})
    (rollout,) = steps.sample([prompt], "general", 1, author)
    assert rollout.prompt_ids == prompt
    assert (
        rollout.completion_ids
        == steps.sample([shown], "general", 1, Teacher(backbone, "base"))[0].completion_ids
    )


def test_only_what_the_current_weights_sampled_is_fresh(queue):
    ahead = queue(general_per_domain=3)
    ahead.config = ahead.config.model_copy(update={"sample_ahead": 2})
    assert [ahead.take(i).fresh for i in range(3)] == [True, False, True]


def test_a_completion_that_earlier_weights_began_is_not_fresh(backbone, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "WORTH_LEAVING", 2)
    backbone.new_adapter(LoraSection(r=4, alpha=8), 0)
    backbone.eos_ids = list(range(0, backbone.causal_lm.config.vocab_size, 6))
    settings = {"steps": 3, "rollouts": 24, "sample_ahead": 2, "max_new_tokens": 30}
    steps = make_trainer(backbone, tmp_path, **settings).queue
    first, second, third = (steps.take(i) for i in range(3))
    assert len(first.rollouts) + len(second.rollouts) < 48  # some stayed unfinished
    assert len(third.rollouts) > 24
    assert (first.fresh, second.fresh, third.fresh) == (True, False, False)


def test_a_frozen_teacher_samples_a_full_batch_ahead_and_nothing_of_it_is_fresh(queue, monkeypatch):
    steps = queue(steps=98, rollouts=1, lmbda=0.0, general_per_domain=98)
    sizes, plain = [], steps.sample

    def sample(prompts, *args, **kwargs):
        sizes.append(len(prompts))
        return plain(prompts, *args, **kwargs)

    monkeypatch.setattr(steps, "sample", sample)
    assert not any(steps.take(i).fresh for i in range(98))
    assert sizes == [96, 2]


END = 2


@pytest.fixture
def with_answers(queue, backbone):
    """Return a function that makes a queue of teachers' texts, given the answers of the domain's rows."""

    def make(answers, **settings):
        steps = queue(lmbda=0.0, domain_texts="rows", general_per_domain=1, **settings)
        backbone.eos_ids = [END]
        given = steps.prompts, steps.student, steps.teachers, steps.selection
        return RolloutQueue(steps.config, steps.steps, *given, answers)

    return make


def test_rows_write_the_answers_of_domain_steps_and_no_others(with_answers):
    answers = {i: [9, 10 + i, END] for i in range(3)}
    steps = with_answers(answers)
    general, domain = (steps.take(i).rollouts for i in range(2))
    assert [(r.completion_ids, r.finished) for r in domain] == [
        (answers[p], True) for p in steps.steps[1].prompts
    ]
    assert [r.prompt_ids for r in domain] == [steps.prompts["domain"][p] for p in steps.steps[1].prompts]
    assert all(len(r.completion_ids) == 6 or r.finished for r in general)
    assert not any(r.completion_ids in answers.values() for r in general)


def test_a_rows_answer_is_learned_up_to_the_first_end_and_to_the_limit(with_answers):
    steps = with_answers({0: [9, END, 10, END], 1: [9] * 8 + [END], 2: [9, 10]}, domain_max_new_tokens=3)
    assert steps.answers == {0: [9, END], 1: [9, 9, 9]}  # the third neither ends nor reaches the limit


def test_the_teacher_writes_where_a_row_has_no_answer(with_answers, monkeypatch):
    steps = with_answers({0: [9, END]}, rollouts=3)
    asked, plain = [], steps.sample

    def sample(prompts, stream, **options):
        asked.append((stream, len(prompts), options["author"]))
        return plain(prompts, stream, **options)

    monkeypatch.setattr(steps, "sample", sample)
    steps.take(0)
    taken = steps.take(1).rollouts
    assert sorted(steps.steps[1].prompts) == [0, 1, 2]
    by_prompt = dict(zip(steps.steps[1].prompts, taken, strict=True))
    assert by_prompt[0].completion_ids == [9, END]
    assert all(by_prompt[p].logprobs for p in (1, 2))  # sampled
    assert asked[1][1:] == (4, steps.teachers["domain"])  # two steps, each with two of its three prompts


def test_nothing_is_sampled_where_every_row_has_an_answer(with_answers, monkeypatch):
    steps = with_answers({i: [9, END] for i in range(3)})
    monkeypatch.setattr(steps.teachers["domain"], "complete", None)
    assert [steps.take(i).fresh for i in range(4)] == [False] * 4


def test_domain_steps_on_the_rows_own_answers_resume_to_the_same_bits(backbone, answered):
    config = short_recovery(answered, domain_texts="rows", save_steps=2)
    whole, _ = whole_and_resumed(backbone, answered, config, stop=3)
    teacher_writes = config.model_copy(update={"domain_texts": "teacher"})
    other = train(backbone, answered, "other", teacher_writes)
    weights = [(s.adapter / "adapter_model.safetensors").read_bytes() for s in (whole, other)]
    assert weights[0] != weights[1]


def test_rows_that_are_to_write_need_answers(tuned, loaded):
    (tuned / "domain.jsonl").write_text('{"question": "One?"}\n{"question": "Two?"}\n')
    config = short_recovery(tuned, domain_texts="rows")
    with pytest.raises(UsageError, match="no domain prompt has an answer"):
        encode_stream(config, read_recovery_source(config), "domain", loaded.tokenizer, 500)


def test_a_loss_of_the_sampled_token_needs_sampled_answers():
    with pytest.raises(ValueError, match="policy_gradient needs sampled answers"):
        RecoverConfig(domain_texts="rows", loss={"kind": "policy_gradient"})
