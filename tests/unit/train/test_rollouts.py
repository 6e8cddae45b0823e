"""The rollout queue: whose settings bound a completion, what seeds it, and when a row writes it."""

from itertools import chain

import pytest
from helpers.recovering import PROMPT, make_trainer

from opdcl.config.model import LoraSection
from opdcl.train.checkpoints import save_adapter
from opdcl.train.teachers import Teacher
from opdcl.words import Prompt


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
    steps, plain, shown = queue(), [*PROMPT, 9], [*PROMPT, 9, 33, 34]
    base, prompt = Teacher(backbone, "base"), Prompt(plain, context=shown)
    ((rollout,),) = steps.teachers_answers([prompt], "general", 1, {"": base})
    assert rollout.prompt == prompt
    ((same,),) = steps.teachers_answers([Prompt(shown)], "general", 1, {"": base})
    assert rollout.completion_ids == same.completion_ids


def test_the_student_does_not_see_its_teachers_context(queue):
    plain, written = [*PROMPT, 9], []
    for prompt in (Prompt(plain, context=[*PROMPT, 9, 33, 34]), Prompt(plain)):
        steps = queue()
        steps.prompts["general"] = [prompt] * 3
        written.append(steps.take(0).rollouts)
    with_context, without = written
    assert [r.completion_ids for r in with_context] == [r.completion_ids for r in without]
    assert all(r.prompt.context for r in with_context)


def test_what_is_graded_ahead_is_graded_by_its_own_teacher_in_its_context(queue, backbone):
    """Also while a teacher still writes, in its context, what is only then put after the plain prompt."""
    steps, asked = queue(), []
    base, other = Teacher(backbone, "base"), Teacher(backbone, "base")
    other.prefetch = lambda rollouts: asked.extend(r.prompt.shown for r in rollouts)
    steps.teachers["general"] = {"": base, "a": other}
    prompt = Prompt([*PROMPT, 9], "a", [*PROMPT, 9, 33])
    steps.prompts["general"] = [prompt] * 3
    steps.take(0)
    steps._generate("general", [prompt] * 2, 1, on_policy=False)
    assert asked == [prompt.context] * 4


def test_a_checkpoint_keeps_teacher_context_and_document_of_completions(queue, backbone, tmp_path):
    prompts = [Prompt([*PROMPT, i], "a", [*PROMPT, 33, i], i) for i in range(2)]
    steps = queue()
    teachers = {"a": Teacher(backbone, "base")}
    steps._ahead = {4: [*chain(*steps.teachers_answers(prompts, "general", 1, teachers))]}
    steps.save(tmp_path)
    resumed = queue()
    resumed.restore(tmp_path)
    assert resumed._ahead == steps._ahead


def test_only_what_the_current_weights_sampled_is_fresh(queue):
    ahead = queue(general_per_domain=3)
    ahead.config = ahead.config.model_copy(update={"sample_ahead": 2})
    assert [ahead.take(i).fresh for i in range(3)] == [True, False, True]


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 2.0])
def test_the_student_alone_writes_at_its_temperature_and_is_compared_with_the_trainer_at_1(
    queue, backbone, tmp_path, temperature
):
    settings = {"lmbda": 0.5, "general_per_domain": 4, "on_policy": {"temperature": temperature}}
    steps = queue(steps=5, **settings)
    by_base, *_, by_student = (steps.take(i) for i in range(4))
    for batch, state, expected in ((by_base, "base", 1.0), (by_student, "student", temperature)):
        prompts = [rollout.prompt for rollout in batch.rollouts]
        seed = steps._seed(0 if state == "base" else 3)
        again = Teacher(backbone, state).complete(prompts, max_new_tokens=6, seed=seed, temperature=expected)
        found = batch.rollouts[: len(again)]
        assert [r.completion_ids for r in found] == [r.completion_ids for r in again]
    assert by_student.author == "student"
    assert by_student.fresh == (temperature == 1)
    if temperature == 0:
        assert not by_student.rollouts[0].logprobs
    steps.save(tmp_path)
    resumed = queue(steps=5, **settings)
    resumed.restore(tmp_path)
    assert resumed.take(3).rollouts == by_student.rollouts


def test_a_frozen_teacher_answers_each_prompt_once(queue, backbone, tmp_path):
    """Over all epochs, and after a resume; a teacher that changes answers anew."""
    steps = queue(steps=6, rollouts=2, lmbda=0.0, general_per_domain=6)
    assert len(steps.prompts["general"]) == 3
    seen: dict[int, list] = {}
    for index in range(6):
        for number, rollout in zip(steps.steps[index].prompts, steps.take(index).rollouts, strict=True):
            assert rollout.prompt == steps.prompts["general"][number]
            seen.setdefault(number, []).append(rollout)
        if index == 1:
            steps.save(tmp_path)
    assert {number: len(texts) for number, texts in seen.items()} == {0: 4, 1: 4, 2: 4}
    assert all(text is texts[0] for texts in seen.values() for text in texts)
    resumed = queue(steps=6, rollouts=2, lmbda=0.0, general_per_domain=6)
    resumed.restore(tmp_path)
    for index in range(2, 6):
        assert resumed.take(index).rollouts == [seen[number][0] for number in steps.steps[index].prompts]
    moving = queue(steps=6, rollouts=2, lmbda=0.0, general_per_domain=6)
    moving.teachers["general"] = {"": Teacher(backbone, "student")}
    assert moving._is_dynamic("general")
