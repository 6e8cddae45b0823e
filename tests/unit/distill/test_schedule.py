"""The schedule: which stream, whose completions, and which prompts each step learns from."""

from collections import Counter

import pytest

from opdcl.config.recover import RecoverConfig
from opdcl.distill.schedule import plan_steps


def schedule(general=20, domain=20, **settings):
    return plan_steps(RecoverConfig(**{"lmbda": 1.0, "rollouts": 4} | settings), general, domain)


def test_a_domain_step_follows_each_run_of_general_steps():
    streams = [step.stream[0] for step in schedule(steps=9, general_per_domain=2)]
    assert "".join(streams) == "ggdggdggd"
    assert {step.stream for step in schedule(steps=3, general_per_domain=0)} == {"domain"}


def test_without_domain_prompts_every_step_is_general():
    assert {step.stream for step in schedule(steps=9, domain=0)} == {"general"}


def test_each_stream_goes_through_all_its_prompts_before_it_repeats_one():
    steps = schedule(general=8, domain=6, steps=24, general_per_domain=1, domain_rollouts=3)
    for stream, count in (("general", 8), ("domain", 6)):
        prompts = [p for step in steps if step.stream == stream for p in step.prompts]
        epochs = [prompts[i : i + count] for i in range(0, len(prompts), count)]
        assert all(set(Counter(epoch).values()) == {1} for epoch in epochs)
        assert {len(epoch) for epoch in epochs} == {count}
        assert len({tuple(epoch) for epoch in epochs}) > 1


def test_domain_steps_have_a_size_of_their_own():
    steps = schedule(steps=4, general_per_domain=1, domain_rollouts=2)
    assert [(len(s.prompts), s.keep) for s in steps] == [(4, 4), (2, 2)] * 2
    assert {(len(s.prompts), s.keep) for s in schedule(steps=4)} == {(4, 4)}


def test_the_seed_orders_the_prompts():
    assert schedule(steps=8, seed=1) == schedule(steps=8, seed=1) != schedule(steps=8, seed=2)
    general, domain = (
        [p for step in schedule(steps=10, general_per_domain=1) if step.stream == s for p in step.prompts]
        for s in ("general", "domain")
    )
    assert general != domain  # each stream has an order of its own


@pytest.mark.parametrize(("lmbda", "warm_up"), [(0.0, 12), (0.33, 8), (0.5, 6), (1.0, 0)])
def test_the_teachers_write_the_first_steps_and_the_student_the_last(lmbda, warm_up):
    steps = schedule(steps=12, general_per_domain=1, lmbda=lmbda)
    assert [step.on_policy for step in steps] == [False] * warm_up + [True] * (12 - warm_up)


@pytest.mark.parametrize(
    ("steps", "lmbda", "on_policy"),
    [(1, 0.15, 0), (2, 0.15, 1), (3, 0.15, 1), (6, 0.01, 1), (6, 0.0, 0), (10, 0.15, 2), (30, 0.15, 5)],
)
def test_a_share_above_zero_is_at_least_one_step_and_halves_are_rounded_up(steps, lmbda, on_policy):
    planned = schedule(steps=steps, general_per_domain=1, lmbda=lmbda)
    assert [step.on_policy for step in planned] == [False] * (steps - on_policy) + [True] * on_policy


def test_the_student_can_leave_the_domain_to_its_teacher():
    steps = schedule(steps=8, general_per_domain=1, lmbda=0.5, on_policy={"domain": False})
    assert [step.on_policy for step in steps if step.stream == "general"] == [False, False, True, True]
    assert not any(step.on_policy for step in steps if step.stream == "domain")


def test_imitation_has_no_on_policy_phase():
    assert not any(step.on_policy for step in schedule(steps=8, method="replay", lmbda=0.15))


def test_whole_groups_of_rewarded_completions_are_drawn_in_excess():
    reward = {"suite": "instructions_train", "group": 2, "oversample": 1.5}
    steps = schedule(steps=6, general_per_domain=2, lmbda=1.0, reward=reward, keep="last")
    assert [len(s.prompts) for s in steps] == [6, 6, 4, 6, 6, 4]
    assert {s.keep for s in steps} == {4}


def test_a_rewarded_prompt_is_completed_by_a_whole_group():
    reward = {"suite": "instructions_train", "group": 4}
    steps = schedule(steps=4, general_per_domain=1, rollouts=8, reward=reward, keep="last")
    general, domain = steps[0], steps[1]
    assert sorted(Counter(general.prompts).values()) == [4, 4]
    assert len(set(domain.prompts)) == 8
