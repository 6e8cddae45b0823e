"""Costs per unit of work, against simulated machines whose every second is known."""

import random

import pytest

from opdcl.model.costs import Costs, decoding, sized, total

STEP, WRITE, READ = 0.040, 0.0015, 0.002  # seconds of the simulated machine


def simulate(costs: Costs, lengths: list[int]) -> float:
    """Decode answers of these lengths together on the simulated machine; return the seconds."""
    spent = 0.0
    for step in range(1, max(lengths)):
        rows = sum(length > step for length in lengths)
        costs.decoded(1, rows, STEP + WRITE * rows)
        spent += STEP + WRITE * rows
    return spent


def answers(count: int, mean: float, limit: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [min(limit, 1 + int(draw.expovariate(1 / mean))) for _ in range(count)]


def test_the_two_parts_of_a_decoding_step_are_told_apart():
    costs = Costs()
    simulate(costs, answers(40, 30, 128))
    units = costs.measured()
    assert units["step"] == pytest.approx(STEP)
    assert units["write"] == pytest.approx(WRITE)


def test_steps_of_one_size_are_split_by_what_reading_a_token_costs():
    costs = Costs()
    costs.add("read", 1000, 1.0)
    for _ in range(20):
        costs.decoded(1, 10, 0.05)
    units = costs.measured()
    assert units["write"] == pytest.approx(0.001)
    assert units["step"] + 10 * units["write"] == pytest.approx(0.05)


@pytest.mark.parametrize(("count", "mean"), [(6, 30), (40, 12), (200, 60), (320, 400)])
def test_a_few_short_answers_tell_what_many_long_ones_take(count, mean):
    costs = Costs({"read": 0.0})
    simulate(costs, answers(8, 20, 40))
    lengths = answers(count, mean, 256, seed=1)
    work = decoding([50] * count, sum(lengths) / count, 256, 320)
    # Greedy batches of 320: the simulated machine decodes them at once.
    assert costs.seconds(work) == pytest.approx(simulate(Costs(), lengths), rel=0.35)


def test_more_answers_than_fit_take_several_batches():
    one, two = (decoding([10] * count, 20, 64, 100) for count in (100, 200))
    assert two == pytest.approx({kind: 2 * amount for kind, amount in one.items()})


def test_what_is_measured_replaces_what_earlier_runs_knew_and_that_replaces_guesses():
    costs = Costs({"train ~64": 3.0})
    costs.guesses |= {"train ~64": 9.0, "step": 5.0}
    assert costs.unit("train ~64") == 3.0
    assert costs.unit("step") == 5.0
    assert costs.unit("step", guess=False) is None
    costs.add("train ~64", 4, 2.0)
    assert costs.unit("train ~64", guess=False) == 0.5


def test_work_of_an_unknown_kind_has_no_time_unless_a_similar_kind_is_known():
    costs = Costs()
    work = {"learn general ~256": 100.0}
    assert costs.seconds(work) is None
    costs.add("train ~1024", 100, 2.0)
    assert costs.seconds(work) == pytest.approx(3 * 2.0)
    assert costs.seconds(work, guess=False) is None
    costs.add("learn domain ~64", 100, 4.0)
    assert costs.seconds(work) == pytest.approx(4.0)
    costs.add("learn general ~64", 100, 5.0)
    assert costs.seconds(work) == pytest.approx(5.0)
    assert Costs().seconds({"learn general ~256": 0.0}) == 0


def test_portions_of_like_size_are_one_kind():
    assert sized("train", 700) == sized("train", 1500) == "train ~1024"
    assert sized("train", 100) != sized("train", 1000)


def test_a_timed_block_leaves_out_what_is_timed_within_it():
    costs = Costs()
    with costs.timed("learn", 1):
        costs.add("read", 1, 1000.0)
    assert costs.unit("learn") < 0 or costs.unit("learn") < 1


def rest(lengths: list[int], at: int, limit: int, mean: float | None) -> tuple[dict | None, float]:
    """Return the estimated and the true time left at a decoding step."""
    costs = Costs({"step": STEP, "write": WRITE})
    running = [length for length in lengths if length > at]
    costs.running = limit - at, len(running)
    work = costs.rest_of_batch([n for n in lengths if n <= at], len(lengths), limit, mean)
    truth = sum(STEP + WRITE * sum(n > step for n in lengths) for step in range(at, max(lengths)))
    return None if work is None else costs.seconds(work), truth


def narrow(count: int, seed: int = 0) -> list[int]:
    """Return answers that are all of about one length, far below the limit."""
    draw = random.Random(seed)
    return [max(1, round(draw.gauss(40, 6))) for _ in range(count)]


@pytest.mark.parametrize("at", [1, 10, 25])
@pytest.mark.parametrize("lengths", [answers(100, 40, 256), narrow(100), answers(200, 200, 256)])
def test_the_rest_of_a_batch_is_known_from_the_expected_length(lengths, at):
    estimate, truth = rest(lengths, at, 256, sum(lengths) / len(lengths))
    # The few longest answers decide about the truth, and their mean does not tell how long they are.
    assert truth / 3 < estimate < truth * 3


def test_the_last_and_longest_answers_are_not_counted_like_the_first():
    lengths = answers(100, 60, 256)
    at = sorted(lengths)[49]
    by_count = sum(STEP + WRITE * sum(n > step for n in lengths) for step in range(at))
    estimate, truth = rest(lengths, at, 256, None)
    assert abs(estimate - truth) < abs(by_count - truth)
    assert truth / 1.5 < estimate < truth * 1.5


def test_without_an_expected_length_nothing_is_said_until_three_answers_have_ended():
    assert rest([5, 6, 50, 50], 10, 64, None)[0] is None
    assert rest([5, 6, 7, 50], 10, 64, None)[0] > 0
    assert rest([5, 6, 7], 10, 64, None)[0] == 0


def test_work_adds_up_by_kind():
    assert total({"a": 1.0, "b": 2.0}, {}, {"b": 3.0}) == {"a": 1.0, "b": 5.0}


def test_noise_does_not_make_rows_free():
    costs = Costs()
    costs.add("read", 1000, 2.0)
    for rows, seconds in ((20, 0.5), (2, 0.6)) * 5:  # the small batch was slower, by chance
        costs.decoded(1, rows, seconds)
    assert costs.measured()["write"] == pytest.approx(0.002)
