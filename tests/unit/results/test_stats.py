"""The statistics behind the verdict, against numbers worked out by hand and against their own definitions."""

import numpy as np
import pytest

from opdcl.results import stats

N = 40


def answers(passed: int, n: int) -> np.ndarray:
    """Return n scores, the first `passed` of them 1."""
    return (np.arange(n) < passed).astype(float)


def simulated(n: int, base: float, tuned: float, recovered: float) -> list[np.ndarray]:
    """Return three models' passes on the same n prompts; harder prompts are harder for all."""
    difficulty = np.random.default_rng(7).random(n)
    noise = np.random.default_rng(8).normal(0, 0.05, (3, n))
    return [
        (difficulty + e < rate).astype(float) for rate, e in zip((base, tuned, recovered), noise, strict=True)
    ]


def test_mcnemar_equals_the_binomial_worked_out_by_hand():
    # 1 prompt only a passes, 7 only b: p = 2 * (C(8,0) + C(8,1)) / 2^8 = 18 / 256.
    a = np.array([1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0])
    b = np.array([0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0])
    assert stats.mcnemar(a, b) == pytest.approx(18 / 256)
    assert stats.mcnemar(b, a) == pytest.approx(18 / 256)


def test_mcnemar_of_a_model_with_itself_is_one():
    assert stats.mcnemar(answers(5, 10), answers(5, 10)) == 1.0


def test_mean_has_the_width_that_the_binomial_predicts():
    estimate = stats.mean(answers(60, 200))
    half = 1.96 * np.sqrt(0.3 * 0.7 / 200)
    assert estimate.value == pytest.approx(0.3)
    assert estimate.high - estimate.low == pytest.approx(2 * half, rel=0.06)


def test_a_95_percent_interval_covers_the_truth_about_95_times_in_100(monkeypatch):
    monkeypatch.setattr(stats, "RESAMPLES", 2000)
    draws = np.random.default_rng(3).random((80, 40)) < 0.4
    covered = sum(e.low <= 0.4 <= e.high for e in (stats.mean(row.astype(float)) for row in draws))
    assert 0.86 <= covered / 80 <= 1


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    scores = np.random.default_rng(0).random(80)
    assert stats.mean(scores, seed=1) == stats.mean(scores, seed=1)
    assert stats.mean(scores, seed=1) != stats.mean(scores, seed=2)


def test_pairing_narrows_the_interval_of_a_difference():
    easy_and_hard = np.random.default_rng(5).random(100)
    paired = stats.difference(easy_and_hard + 0.1, easy_and_hard)
    shuffled = stats.difference(easy_and_hard + 0.1, easy_and_hard[::-1])
    assert paired.value == pytest.approx(0.1)
    assert paired.high - paired.low < 1e-9 < shuffled.high - shuffled.low


def point(domain: int, retention: int, n: int = 20) -> tuple[np.ndarray, np.ndarray]:
    return answers(domain, n), answers(retention, n)


def test_the_distance_above_mixtures_equals_a_search_through_all_of_them():
    rivals = [point(0, 16), point(18, 1), point(12, 3), point(9, 12)]
    shares = np.array([s for s in np.ndindex(*[21] * 4) if sum(s) == 20]) / 20
    domain, retention = (shares @ [r[i].mean() for r in rivals] for i in (0, 1))
    for arm in (point(9, 14), point(15, 10), point(18, 0), point(3, 4), point(0, 20)):
        best = max(y for x, y in zip(domain, retention, strict=True) if x >= arm[0].mean() - 1e-9)
        assert stats.above_mixtures(arm, rivals).value == pytest.approx(arm[1].mean() - best, abs=0.02)


def test_no_rival_lies_above_the_mixtures_and_more_rivals_only_raise_them():
    rivals = [point(0, 16), point(18, 1), point(12, 3)]
    assert [stats.above_mixtures(r, rivals).value for r in rivals] == pytest.approx([0, 0, 0.05 * (3 - 6)])
    assert stats.upper_edge(rivals) == {0, 1}
    assert stats.upper_edge([*rivals[::-1], point(10, 9)]) == {1, 2, 3}
    arm = point(15, 14)
    assert (
        stats.above_mixtures(arm, rivals).value
        > stats.above_mixtures(arm, [*rivals, point(15, 13)]).value
        == pytest.approx(0.05)
    )


def test_an_arm_with_the_best_domain_score_is_compared_with_the_second_best():
    assert stats.above_mixtures(point(19, 5), [point(0, 16), point(18, 1)]).value == pytest.approx(0.2)


def test_with_one_rival_the_distance_is_the_paired_difference():
    arm, rival = point(12, 150, 200), point(12, 90, 200)
    assert vars(stats.above_mixtures(arm, [rival])) == pytest.approx(vars(stats.difference(arm[1], rival[1])))
    over_seeds = [(np.stack([x, x]), np.stack([y, y])) for x, y in (arm, rival)]
    assert stats.above_mixtures(over_seeds[0], over_seeds[1:]).value == pytest.approx(0.3)


def test_clustered_mean_counts_parts_and_resamples_whole_prompts():
    parts = [[1.0, 1.0, 1.0], [0.0], [1.0, 0.0]] * 20
    estimate = stats.clustered_mean(parts)
    assert estimate.value == pytest.approx(4 / 6)
    as_if_independent = stats.mean(np.concatenate([np.array(p) for p in parts]))
    assert estimate.high - estimate.low > as_if_independent.high - as_if_independent.low


def test_clustered_mean_of_single_parts_is_the_mean():
    scores = answers(12, 40)
    assert stats.clustered_mean([[s] for s in scores]) == stats.mean(scores)


def test_recovering_everything_is_one_nothing_is_zero_and_half_is_a_half():
    base, tuned = answers(80, 100), answers(20, 100)
    everything, nothing = stats.recovery(base, tuned, base), stats.recovery(base, tuned, tuned)
    assert everything is not None
    assert nothing is not None
    assert (everything.value, everything.low, everything.high) == pytest.approx((1, 1, 1))
    assert (nothing.value, nothing.low, nothing.high) == pytest.approx((0, 0, 0))
    half = stats.recovery(base, tuned, answers(50, 100))
    assert half is not None
    assert half.value == pytest.approx(0.5)
    assert half.low < 0.5 < half.high


def test_domain_retention_is_one_for_tuned_and_zero_for_base():
    base, tuned = answers(20, 100), answers(80, 100)
    kept, gone = stats.domain_retention(base, tuned, tuned), stats.domain_retention(base, tuned, base)
    assert kept is not None
    assert gone is not None
    assert kept.value == pytest.approx(1)
    assert gone.value == pytest.approx(0)


def test_no_domain_retention_without_a_domain_gain():
    assert stats.domain_retention(answers(50, 100), answers(50, 100), answers(90, 100)) is None


def test_a_six_point_gap_on_the_full_ifeval_gives_no_ratio():
    base, tuned, recovered = simulated(541, 0.30, 0.24, 0.30)
    assert stats.difference(base, tuned).value == pytest.approx(0.06, abs=0.02)
    assert stats.mcnemar(base, tuned) < 0.05  # significant, and still too small to divide by
    assert stats.recovery(base, tuned, recovered) is None
    assert stats.status_of(base, tuned, recovered) == "no measurable forgetting"


def test_a_large_drop_on_few_prompts_gives_no_ratio():
    # 5 of 10 to 3 of 10 is 20 points, on two prompts.
    assert stats.recovery(answers(5, 10), answers(3, 10), answers(5, 10)) is None


@pytest.mark.parametrize(
    ("recovered", "status"),
    [(80, "recovered"), (50, "partly recovered"), (20, "not shown"), (10, "not shown")],
)
def test_the_status_follows_from_how_much_came_back(recovered, status):
    assert stats.status_of(answers(80, 100), answers(20, 100), answers(recovered, 100)) == status


def test_few_prompts_cannot_show_full_recovery_although_p_is_large():
    # 23 against 24 of 30 passes, on different prompts: no difference is visible, and none is excluded.
    base, tuned = answers(24, 30), answers(4, 30)
    recovered = np.roll(answers(23, 30), 4)
    assert stats.mcnemar(recovered, base) > 0.5
    assert stats.status_of(base, tuned, recovered) == "partly recovered"


def test_a_detectable_difference_is_found_four_times_in_five():
    rng = np.random.default_rng(0)
    a, b = rng.random((2, 400)) < 0.5
    smallest = stats.detectable_difference(a, b)
    # The difference of two independent coins has a standard error of sqrt(2 * 0.25 / n).
    assert smallest == pytest.approx(2.8 * np.sqrt(0.5 / 400), rel=0.05)
    shifted = [
        (rng.random(400) < 0.5 + smallest / 2).astype(float) - (rng.random(400) < 0.5 - smallest / 2)
        for _ in range(500)
    ]
    detected = [abs(x.mean()) > 1.96 * x.std(ddof=1) / 20 for x in shifted]
    assert 0.74 < np.mean(detected) < 0.86


def test_more_seeds_detect_smaller_differences():
    rng = np.random.default_rng(1)
    a, b = (rng.random((3, 400)) < 0.5).astype(float), (rng.random((3, 400)) < 0.5).astype(float)
    assert stats.detectable_difference(a, b) < stats.detectable_difference(a[0], b[0])


@pytest.mark.parametrize(("gap", "status"), [(0.034, "recovered"), (0.036, "partly recovered")])
def test_recovered_means_less_than_three_and_a_half_points_below_base(gap, status):
    base = np.full(100, 0.8)
    assert stats.status_of(base, base - 0.6, base - gap) == status


def test_a_gain_whose_interval_contains_zero_is_not_a_recovery():
    base, tuned = answers(80, 100), answers(20, 100)
    recovered = np.roll(answers(22, 100), 50)
    assert stats.difference(recovered, tuned).value > 0
    assert stats.status_of(base, tuned, recovered) == "not shown"


@pytest.mark.parametrize("passed", [0, 50])
def test_a_mean_of_zero_or_one_has_wilsons_interval(passed):
    z = 1.959964
    estimate = stats.mean(answers(passed, 50))
    width = z**2 / (50 + z**2)
    assert (estimate.low, estimate.high) == pytest.approx(
        (0, width) if passed == 0 else (1 - width, 1), abs=1e-6
    )


def test_the_prompts_of_two_suites_are_drawn_independently():
    scores = np.random.default_rng(0).random(200)
    one, two = stats.mean(scores), stats.mean_over([scores, scores])
    assert two.high - two.low == pytest.approx((one.high - one.low) / np.sqrt(2), rel=0.05)
    # With constant rivals the distance is domain + retention - 1: exactly 0 if both had the same draws.
    rivals = [(np.zeros(200), np.ones(200)), (np.ones(200), np.zeros(200))]
    above = stats.above_mixtures((scores, 1 - scores), rivals)
    assert above.high - above.low == pytest.approx((one.high - one.low) * np.sqrt(2), rel=0.05)


# Several seeds.


def test_the_interval_of_two_constant_seeds_reaches_from_one_to_the_other():
    # Each seed has one score on all prompts, so a resample's mean is 0.2, 0.4 or 0.6, at 1 : 2 : 1.
    estimate = stats.mean(np.array([np.full(30, 0.2), np.full(30, 0.6)]))
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.4, 0.2, 0.6))


def test_the_interval_over_four_seeds_follows_the_binomial():
    # One seed of four is better by 0.4. It is drawn more than three times with p = 1/256, more than twice
    # with 13/256 and never with 81/256: the 97.5th percentile is three quarters of the way up, the 2.5th at
    # the bottom.
    estimate = stats.mean(np.array([[0.2] * 30] * 3 + [[0.6] * 30]))
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.3, 0.2, 0.5))


@pytest.mark.parametrize("copies", [1, 2, 5])
def test_seeds_that_agree_add_no_certainty(copies):
    # A hard prompt is hard for every seed: five copies of the answers are still answers to n prompts.
    base, tuned, recovered = (np.random.default_rng(i).random(N) < p for i, p in enumerate((0.9, 0.2, 0.7)))
    several = [np.tile(x.astype(float), (copies, 1)) for x in (base, tuned, recovered)]
    one = [x.astype(float) for x in (base, tuned, recovered)]

    def near(a, b):
        return vars(a) == pytest.approx(vars(b))

    assert near(stats.mean(several[0]), stats.mean(one[0]))
    assert near(stats.difference(*several[1:]), stats.difference(*one[1:]))
    assert near(stats.recovery(*several), stats.recovery(*one))
    assert stats.status_of(*several) == stats.status_of(*one)


def test_failures_only_have_the_same_interval_over_seeds_as_over_one():
    assert stats.mean(np.zeros((3, 20))) == stats.mean(np.zeros(20))
    assert stats.mean(np.ones((3, 20))) == stats.mean(np.ones(20))


def test_a_ratio_over_seeds_divides_the_means():
    # R of the seeds: 0.5 and 1.0, over the same loss.
    whole = np.full((2, 30), 0.4)
    estimate = stats.ratio(np.array([np.full(30, 0.2), np.full(30, 0.4)]), whole)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.75, 0.5, 1.0))


def test_equal_numbers_of_seeds_are_paired_and_different_ones_drawn_separately():
    low, high = np.full(30, 0.2), np.full(30, 0.6)
    paired = stats.difference(np.array([low, high]), np.array([low, high]))
    assert (paired.value, paired.low, paired.high) == pytest.approx((0, 0, 0))
    # Against one seed at 0.4 the two seeds draw -0.2, 0 or 0.2.
    apart = stats.difference(np.array([low, high]), np.full((1, 30), 0.4))
    assert (apart.value, apart.low, apart.high) == pytest.approx((0, -0.2, 0.2))
    # Three seeds at 0.2, 0.2 and 0.6 reach 0.2 to 0.6 themselves, so the difference reaches from -0.4 to 0.4.
    wide = stats.difference(np.array([low, high]), np.array([low, low, high]))
    assert (wide.value, wide.low, wide.high) == pytest.approx((0.4 - 1 / 3, -4 / 15, 0.4))


def test_one_seed_without_a_significant_loss_prevents_the_ratio():
    # 5 of 40 prompts lost are 12.5 points, but p = 2 / 2^5 in McNemar's test.
    base, lost, little = ((np.arange(N) < k).astype(float) for k in (32, 8, 27))
    assert stats.difference(np.array([base, base]), np.array([lost, little])).low > 0
    assert stats.recovery(np.array([base, base]), np.array([lost, little]), np.array([base, base])) is None
    assert stats.recovery(np.array([base, base]), np.array([lost, lost]), np.array([base, base])) is not None
