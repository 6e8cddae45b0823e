"""The schedule: which stream, whose completions, and which prompts each step learns from."""

import math
from collections import Counter

import pytest

from opdcl.config.recover import RecoverConfig
from opdcl.data.prompts import prompts_drawn
from opdcl.train.rollouts import on_policy_steps, plan_steps, sampled_together


def schedule(general=20, domain=20, **settings):
    return plan_steps(RecoverConfig(**{"rollouts": 4} | settings), general, domain)


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
    assert [len(s.prompts) for s in steps] == [4, 2] * 2
    assert {len(s.prompts) for s in schedule(steps=4)} == {4}


@pytest.mark.parametrize(("general", "domain", "rows"), [(64, 64, 4), (64, 16, 16), (64, 4, 24), (16, 64, 4)])
def test_a_domain_step_of_short_answers_has_more_rows(general, domain, rows):
    """It has the tokens of a general step, but no more than six times its rows, and no fewer than those."""
    steps = schedule(steps=2, max_new_tokens=general, domain_max_new_tokens=domain)
    assert [len(s.prompts) for s in steps] == [4, rows]


@pytest.mark.parametrize(
    "settings", [{}, {"general_per_domain": 0}, {"general_per_domain": 2}, {"method": "general"}]
)
@pytest.mark.parametrize("domain", [0, 1])
def test_as_many_general_prompts_are_read_as_the_schedule_draws(settings, domain):
    config = RecoverConfig(steps=10, rollouts=4, **settings)
    steps = plan_steps(config, 1, 0 if config.method == "general" else domain)
    drawn = sum(len(step.prompts) for step in steps if step.stream == "general")
    assert prompts_drawn(config, bool(domain)) == drawn


def test_the_seed_orders_the_prompts():
    assert schedule(steps=8, seed=1) == schedule(steps=8, seed=1) != schedule(steps=8, seed=2)
    general, domain = (
        [p for step in schedule(steps=10, general_per_domain=1) if step.stream == s for p in step.prompts]
        for s in ("general", "domain")
    )
    assert general != domain  # each stream has an order of its own


def turns(stream="general", **settings):
    """Return who writes the steps of a stream: s, the student, or t, the teacher."""
    steps = [step for step in schedule(**settings) if step.stream == stream]
    return "".join("s" if step.on_policy else "t" for step in steps)


@pytest.mark.parametrize(
    ("lmbda", "expected"),
    [(0.0, "tttttt"), (0.33, "ttttss"), (0.5, "tttsss"), (0.67, "ttssss"), (1.0, "ssssss")],
)
def test_the_student_writes_the_last_general_steps(lmbda, expected):
    assert turns(steps=12, lmbda=lmbda) == expected


@pytest.mark.parametrize("steps", [1, 2, 7, 16, 97])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.15, 0.3, 0.5, 0.75, 0.99, 1.0])
def test_the_students_share_is_that_asked_for(steps, share):
    students = on_policy_steps(steps, share)
    count = sum(students)
    assert students == [False] * (steps - count) + [True] * count
    assert count == max(math.floor(share * steps + 0.5), share > 0 and steps > 1)


def test_both_streams_of_a_period_change_the_weights_together():
    for settings, domain, expected in (
        ({"steps": 5}, 9, [False, True, False, True, True]),
        ({"steps": 6, "general_per_domain": 2}, 9, [False, False, True] * 2),
        ({"steps": 3, "method": "general"}, 0, [True] * 3),
        (
            {"steps": 2, "general": None, "general_per_domain": 0, "on_policy": {"domain": True}},
            9,
            [True] * 2,
        ),
    ):
        steps = plan_steps(RecoverConfig(rollouts=4, **settings), 9, domain)
        assert [step.ends_period for step in steps] == expected


def test_what_base_writes_ahead_fills_a_batch():
    config = RecoverConfig(rollouts=4, steps=12, lmbda=0.0)
    assert sampled_together(config, plan_steps(config, 20, 20), 2, dynamic=False) == [2, 4, 6, 8, 10]
    config = RecoverConfig(rollouts=1, steps=200, lmbda=0.0, general_per_domain=200)
    assert len(sampled_together(config, plan_steps(config, 20, 20), 0, dynamic=False)) == 96


def test_the_students_rows_fill_a_batch_unless_a_number_of_steps_is_asked_for():
    for rows, asked, steps in ((8, "auto", 8), (24, "auto", 2), (99, "auto", 1), (8, 3, 3)):
        config = RecoverConfig(rollouts=rows, steps=40, lmbda=1.0, sample_ahead=asked)
        together = sampled_together(config, plan_steps(config, 20, 20), 2, dynamic=False)
        assert together == [*range(2, 2 + 2 * steps, 2)]


def test_the_student_writes_no_domain_answers_unasked_and_none_in_imitation():
    assert turns("domain", steps=8, lmbda=0.5) == "tttt"
    assert turns("domain", steps=8, lmbda=0.5, on_policy={"domain": True}) == "ttss"


def test_a_rewarded_prompt_is_completed_by_a_whole_group():
    reward = {"suite": "instructions_train", "group": 4}
    steps = schedule(steps=4, general_per_domain=1, rollouts=8, lmbda=1.0, reward=reward, keep="last")
    general, domain = steps[0], steps[1]
    assert general.on_policy
    assert [len(set(general.prompts[i : i + 4])) for i in (0, 4)] == [1, 1]
    assert len(set(domain.prompts)) == 8
