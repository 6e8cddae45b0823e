"""The time left of a recovery, against a naive simulation that does every step of the schedule."""

import pytest

from opdcl.config.recover import RecoverConfig
from opdcl.distill.prompts import Prompts
from opdcl.distill.work import BETWEEN, RecoveryWork
from opdcl.model.costs import Costs, sized
from opdcl.sampling.rollout import Prompt

ANSWER = {"general": 100, "domain": 8}  # tokens
PROMPT = {"general": 50, "domain": 30}
LEARN = {"general": 0.004, "domain": 0.006}  # seconds per token
STEP, WRITE, READ, MEASURE = 0.05, 0.002, 0.001, 0.0015
LIMIT = {"general": 128, "domain": 12}


def config(**settings):
    options = {
        "start": 1,
        "lmbda": 0,
        "steps": 24,
        "rollouts": 8,
        "domain_rollouts": 16,
        "general_per_domain": 1,
    }
    options |= {
        "validate_every": 6,
        "validation_prompts": 3,
        "max_new_tokens": 128,
        "domain_max_new_tokens": 12,
    }
    return RecoverConfig(**{"domain": "facts"} | options | settings)


def work(settings, costs=None, **options):
    streams = {
        stream: Prompts([Prompt([1] * PROMPT[stream])] * 40, [Prompt([1] * PROMPT[stream])] * 3)
        for stream in ("general", "domain")
    }
    return RecoveryWork.of(settings, costs or Costs(known(settings)), streams, **options)


def known(settings):
    """Return what the simulated machine would have measured."""
    units = {"step": STEP, "write": WRITE, "read": READ, "measure": MEASURE}
    for stream, keep, source in (("general", 8, "everyday"), ("domain", 16, settings.domain)):
        tokens = keep * (PROMPT[stream] + ANSWER[stream])
        units[sized(f"learn {stream}", tokens)] = LEARN[stream]
        units[f"answer {source} {LIMIT[stream]}"] = ANSWER[stream]
    return units


def decode(stream: str, rows: int) -> float:
    """Return the seconds in which the simulated machine writes answers that all have the same length."""
    return (
        rows * PROMPT[stream] * READ
        + min(LIMIT[stream], spread(stream, rows)) * STEP
        + rows * ANSWER[stream] * WRITE
    )


def spread(stream: str, rows: int) -> float:
    import math

    return ANSWER[stream] * (1 + math.log(rows))


def simulate(settings, first: int, steps, sampled: int) -> float:
    """Return the seconds from step `first` to the end: sample when nothing is there, learn, validate."""
    there = {"general": sampled, "domain": sampled}
    seconds = 0.0
    for index in range(len(steps)):
        stream = steps[index].stream
        keep = len(steps[index].prompts)
        if not there[stream]:
            later = sum(step.stream == stream for step in steps[index:])
            there[stream] = min(later, max(settings.sample_ahead, 96 // keep))
            if index >= first:
                seconds += decode(stream, there[stream] * keep)
        there[stream] -= 1
        if index < first:
            continue
        seconds += keep * (PROMPT[stream] + ANSWER[stream]) * LEARN[stream]
        if (index + 1) % settings.validate_every == 0 or index + 1 == len(steps):
            seconds += sum(3 * (PROMPT[s] + ANSWER[s]) * MEASURE for s in PROMPT)
            # The student writes answers of its own, which base and the student read.
            seconds += decode("general", 3) + 2 * 3 * (PROMPT["general"] + ANSWER["general"]) * MEASURE
    return seconds


@pytest.mark.parametrize("first", [0, 3, 4, 11, 22, 24])
@pytest.mark.parametrize("steps", [24, 25])
def test_the_time_left_counts_both_streams_the_batches_to_sample_and_the_validations(first, steps):
    settings = config(steps=steps)
    recovery = work(settings, dynamic=())
    there, ahead = {"general": 0, "domain": 0}, set()
    for index in range(first):  # what the queue holds at that step
        stream = recovery.steps[index].stream
        if index not in ahead:
            same = [i for i in range(index, steps) if recovery.steps[i].stream == stream]
            ahead |= set(same[: max(3, 96 // len(recovery.steps[index].prompts))])
        ahead -= {index}
        there[stream] += 1
    recovery.ahead = ahead
    truth = simulate(settings, first, recovery.steps, 0)
    assert recovery.costs.seconds(recovery.left(first)) == pytest.approx(truth)


def test_three_steps_of_which_one_samples_do_not_tell_the_time_by_their_mean():
    settings = config(steps=48)
    recovery = work(settings, dynamic=())
    whole = simulate(settings, 0, recovery.steps, 0)
    recovery.ahead = {i for i in range(3, 48) if i < 24 and recovery.steps[i].stream == "general"} | {
        3,
        5,
        7,
        9,
        11,
    }
    left = simulate(settings, 3, recovery.steps, 0)
    by_mean = (whole - left) / 3 * 45
    estimate = recovery.costs.seconds(recovery.left(3))
    assert estimate == pytest.approx(left)
    assert by_mean > 1.5 * left


def test_a_teacher_that_changes_writes_fewer_steps_ahead_so_sampling_takes_longer():
    settings = config(validate_every=24)
    frozen, live = (work(settings, dynamic=dynamic) for dynamic in ((), ("general", "domain")))
    assert live.left(0)["step"] > 2 * frozen.left(0)["step"]


def test_a_stage_has_more_work_before_its_first_step_and_less_when_it_resumes():
    recovery = work(config(), dynamic=())
    seconds = recovery.costs.seconds
    whole, left, resumed = (seconds(recovery.whole()), seconds(recovery.left(0)), seconds(recovery.whole(12)))
    # Three held-out texts per stream are written, and read by both teachers and tuned.
    first = sum(decode(s, 3) + 3 * 3 * (PROMPT[s] + ANSWER[s]) * MEASURE for s in PROMPT)
    assert whole == pytest.approx(left + first)
    assert seconds(recovery.left(12)) < resumed < whole


def test_scaling_an_adapter_is_measurements_only():
    options = {"method": "interpolate", "domain": "facts", "validation_prompts": 3, "max_new_tokens": 128}
    settings = RecoverConfig(**options, domain_max_new_tokens=12)
    recovery = work(settings, dynamic=())
    tokens = sum(3 * (PROMPT[s] + ANSWER[s]) for s in PROMPT)
    assert recovery.whole()["measure"] == pytest.approx((3 + len(BETWEEN)) * tokens)


def test_nothing_is_said_as_long_as_the_length_of_an_answer_is_unknown():
    recovery = work(config(), Costs({"step": STEP, "write": WRITE, "read": READ}), dynamic=())
    assert recovery.left(3) is None
    assert recovery.whole() is None
