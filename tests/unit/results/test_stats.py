"""The statistics behind the verdict, against numbers worked out by hand and against their own definitions."""

import numpy as np
import pytest
from scipy.stats import t as student

from opdcl.results import intervals, ratios
from opdcl.results.intervals import Estimate, median, sources
from opdcl.results.measurements import States
from opdcl.results.status import NoRatio

N = 40


def answers(passed: int, n: int) -> np.ndarray:
    """Return n scores, the first `passed` of them 1."""
    return (np.arange(n) < passed).astype(float)


def flipped(scores: np.ndarray, gained: int, lost: int) -> np.ndarray:
    """Return the scores with the first `gained` failures passed and the first `lost` passes failed."""
    changed = scores.copy()
    changed[np.flatnonzero(scores == 0)[:gained]] = 1
    changed[np.flatnonzero(scores == 1)[:lost]] = 0
    return changed


def triple(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each score three times, and the clusters of the copies."""
    return np.repeat(scores, 3), np.repeat(np.arange(len(scores)), 3)


def near(a, b):
    return vars(a) == pytest.approx(vars(b), abs=1e-9)


# One mean.


def test_a_score_has_wilsons_interval():
    # Wilson (1927) with the variance of a sample, whose divisor is n - 1, and Student's t.
    p, n = 0.3, 200
    k = student.ppf(0.975, n - 1) ** 2 / (n - 1)
    half = np.sqrt(k * p * (1 - p) + k**2 / 4) / (1 + k)
    estimate = intervals.mean(answers(60, n))
    assert estimate.value == pytest.approx(p)
    assert (estimate.low, estimate.high) == pytest.approx(
        ((p + k / 2) / (1 + k) - half, (p + k / 2) / (1 + k) + half)
    )


@pytest.mark.parametrize("passed", [0, 50])
def test_only_failures_or_only_passes_have_wilsons_interval_too(passed):
    square = student.ppf(0.975, 49) ** 2
    width = square / (50 + square)
    estimate = intervals.mean(answers(passed, 50))
    assert (estimate.low, estimate.high) == pytest.approx((0, width) if passed == 0 else (1 - width, 1))


def test_failures_of_a_cluster_count_once():
    scores, clusters = triple(np.zeros(50))
    assert intervals.mean(scores, clusters) == intervals.mean(np.zeros(50))


def test_passes_spread_evenly_over_clusters_leave_the_uncertainty_of_independent_ones():
    # Each cluster has one pass and one failure, so its mean never varies.
    square = student.ppf(0.975, 19) ** 2 / 40
    estimate = intervals.mean(np.tile([1.0, 0.0], 20), np.repeat(np.arange(20), 2))
    assert estimate.high - estimate.low == pytest.approx(np.sqrt(square / (1 + square)))


def test_numbers_that_are_no_scores_have_students_interval():
    lengths = np.array([3.0, 5, 10, 2])
    half = student.ppf(0.975, 3) * lengths.std(ddof=1) / 2
    assert vars(intervals.mean(lengths)) == pytest.approx({"value": 5, "low": 5 - half, "high": 5 + half})


def test_three_wordings_of_a_fact_are_worth_one():
    fact = answers(30, 80)
    scores, clusters = triple(fact)
    assert near(intervals.mean(scores, clusters), intervals.mean(fact))
    apart = intervals.mean(scores)
    assert apart.high - apart.low < 0.6 * (intervals.mean(fact).high - intervals.mean(fact).low)


def test_clusters_of_different_sizes_follow_the_formula():
    scores, clusters = np.array([1.0, 0, 0, 1, 1, 2, 4]), np.array(["a", "a", "b", "b", "b", "c", "d"])
    residuals = np.array([1 - 2 * 9 / 7, 2 - 3 * 9 / 7, 2 - 9 / 7, 4 - 9 / 7])
    half = student.ppf(0.975, 3) * np.sqrt((residuals**2).sum() / 49 * 4 / 3)
    estimate = intervals.mean(scores, clusters)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((9 / 7, 9 / 7 - half, 9 / 7 + half))


def test_clustered_mean_counts_parts_and_keeps_prompts_together():
    parts = [[1.0, 1.0, 1.0], [0.0], [1.0, 0.0]] * 20
    estimate = intervals.clustered_mean(parts)
    assert estimate.value == pytest.approx(4 / 6)
    as_if_independent = intervals.mean(np.concatenate([np.array(p) for p in parts]))
    assert estimate.high - estimate.low > as_if_independent.high - as_if_independent.low
    doubled = intervals.clustered_mean([*parts, *parts], np.tile(np.arange(60), 2))
    assert near(doubled, estimate)


def test_clustered_mean_of_single_parts_is_the_mean():
    scores = answers(12, 40)
    assert intervals.clustered_mean([[s] for s in scores]) == intervals.mean(scores)


def test_the_prompts_of_two_suites_are_independent():
    scores = 10 * np.random.default_rng(0).random(200)
    one, two = intervals.mean(scores), intervals.mean_over([scores, scores])
    assert two.high - two.low == pytest.approx((one.high - one.low) / np.sqrt(2))
    three, clusters = triple(scores)
    assert near(intervals.mean_over([three, scores], [clusters, None]), two)


# Differences.


def test_pairing_narrows_the_interval_of_a_difference():
    easy_and_hard = np.random.default_rng(5).random(100)
    paired = intervals.difference(easy_and_hard + 0.1, easy_and_hard)
    shuffled = intervals.difference(easy_and_hard + 0.1, easy_and_hard[::-1])
    assert paired.value == pytest.approx(0.1)
    assert paired.high - paired.low < 1e-9 < shuffled.high - shuffled.low


def test_a_difference_of_passes_has_the_interval_worked_out_by_hand():
    # 14 gained and 4 lost among 100, and one imagined prompt of each kind.
    base = answers(50, 100)
    seen = (18 - 100 * 0.1**2) / 99 / 100
    half = student.ppf(0.975, 99) * np.sqrt(seen + 2 / 100**2)
    change = intervals.difference(flipped(base, 14, 4), base)
    assert (change.value, change.low, change.high) == pytest.approx((0.1, 0.1 - half, 0.1 + half))


def test_six_prompts_with_equal_answers_do_not_prove_two_models_equal():
    change = intervals.difference(answers(3, 6), answers(3, 6))
    assert change.low < -0.3 < 0.3 < change.high
    assert intervals.difference(answers(1, 1), answers(0, 1)).low == -1


def test_copies_of_prompts_add_nothing_to_a_difference_and_little_against_chance_agreement():
    a, b = 9 * np.random.default_rng(2).random((2, 60))
    (three_a, clusters), (three_b, _) = triple(a), triple(b)
    assert near(intervals.difference(three_a, three_b, clusters), intervals.difference(a, b))


def test_mcnemar_equals_the_binomial_worked_out_by_hand():
    # 1 prompt only a passes, 7 only b: p = 2 * (C(8,0) + C(8,1)) / 2^8 = 18 / 256.
    a = np.array([1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0])
    b = np.array([0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0])
    assert ratios.mcnemar(a, b) == pytest.approx(18 / 256)
    assert ratios.mcnemar(b, a) == pytest.approx(18 / 256)


def test_mcnemar_of_a_model_with_itself_is_one():
    assert ratios.mcnemar(answers(5, 10), answers(5, 10)) == 1.0


def test_mcnemar_exchanges_the_models_in_whole_clusters():
    a, b = np.array([1, 0, 0, 0, 0, 0, 0, 0]), np.array([0, 1, 1, 1, 1, 1, 1, 1])
    (three_a, clusters), (three_b, _) = triple(a), triple(b)
    assert ratios.mcnemar(three_a, three_b, clusters) == pytest.approx(ratios.mcnemar(a, b))
    assert ratios.mcnemar(three_a, three_b) < 0.01 < ratios.mcnemar(a, b)
    # Sums of 2 and 1 in two clusters: of the four exchanges +-2 +-1, two are as far from zero as 3.
    assert ratios.mcnemar(np.ones(3), np.zeros(3), np.array([0, 0, 1])) == pytest.approx(0.5)


def test_a_detectable_difference_is_found_four_times_in_five():
    rng = np.random.default_rng(0)
    a, b = (rng.random((2, 400)) < 0.5).astype(float)
    smallest = ratios.detectable_difference(a, b)
    # The difference of two independent coins has a standard error of sqrt(2 * 0.25 / n).
    assert smallest == pytest.approx(2.81 * np.sqrt(0.5 / 400), rel=0.06)
    chances = np.array([[0.5 + smallest / 2], [0.5 - smallest / 2]])
    found = [
        intervals.difference(*(rng.random((2, 400)) < chances).astype(float)).low > 0 for _ in range(1000)
    ]
    assert 0.76 < np.mean(found) < 0.84


def test_seeds_that_differ_hide_a_difference():
    rng = np.random.default_rng(1)
    a, b = (rng.random((3, 400)) < 0.5).astype(float), (rng.random((3, 400)) < 0.5).astype(float)
    apart = np.stack([answers(k, 400) for k in (120, 200, 280)])
    assert ratios.detectable_difference(apart, b) > 3 * ratios.detectable_difference(a[0], b[0])


def test_models_that_agree_can_hide_a_small_difference_all_the_same():
    # With no difference seen among 60 prompts, one of 10 points could have gone unseen: 2.8 standard errors.
    needed = (student.ppf(0.975, 59) + student.ppf(0.8, 59)) ** 2
    assert ratios.detectable_difference(answers(9, 60), answers(9, 60)) == pytest.approx(
        needed / (60 + needed)
    )
    assert ratios.detectable_difference(answers(9, 60), answers(9, 60)) > ratios.SMALLEST_DROP
    assert ratios.detectable_difference(answers(9, 90), answers(9, 90)) < ratios.SMALLEST_DROP


# R and D.


def test_recovering_everything_is_one_nothing_is_zero_and_half_is_a_half():
    base, tuned = answers(80, 100), answers(20, 100)
    for recovered, share in ((base, 1), (tuned, 0), (answers(50, 100), 0.5)):
        r = ratios.recovery(States(base, tuned, recovered))
        assert r is not None
        assert r.value == pytest.approx(share)
        assert r.low < share < r.high


def test_a_ratio_contains_what_the_difference_cannot_exclude():
    rng = np.random.default_rng(3)
    whole = rng.normal(0.5, 0.5, 300)
    part = 0.6 * whole + rng.normal(0, 0.3, 300)
    estimate = intervals.ratio(part, whole)
    assert estimate is not None
    # Fieller (1954): at either end, part - r * whole is just as far from zero as its half-width.
    low, high = (intervals.difference(part, end * whole) for end in (estimate.low, estimate.high))
    assert (low.low, high.high) == pytest.approx((0, 0), abs=1e-9)


def test_a_ratio_over_a_whole_that_may_be_zero_is_none():
    whole = np.random.default_rng(3).normal(0.01, 1, 100)
    assert intervals.ratio(whole, whole) is None
    assert intervals.ratio(np.ones(5), -np.ones(5)) is None


def test_r_starts_from_the_floor_where_tuned_lies_below_it():
    base, tuned, recovered, floor = (answers(k, 200) for k in (100, 10, 80, 40))
    states = States(base, tuned, recovered, floor)
    r, raw = ratios.recovery(states), ratios.recovery(states, raw=True)
    assert r is not None
    assert raw is not None
    assert (r.value, raw.value) == pytest.approx(((80 - 40) / (100 - 40), (80 - 10) / (100 - 10)))
    above = ratios.recovery(States(base, floor, recovered, tuned))
    assert above is not None
    assert above.value == pytest.approx(r.value)


def test_the_floor_scores_as_it_does_and_not_as_recovered():
    # A text without content that reaches the floor recovers nothing.
    base, tuned, floor = (answers(k, 200) for k in (100, 10, 40))
    r = ratios.recovery(States(base, tuned, floor, floor))
    assert r is not None
    assert r.value == pytest.approx(0)


def test_domain_retention_is_one_for_tuned_and_zero_for_base():
    base, tuned = answers(20, 100), answers(80, 100)
    kept, gone = (ratios.domain_retention(States(base, tuned, x)) for x in (tuned, base))
    assert kept is not None
    assert gone is not None
    assert (kept.value, gone.value) == pytest.approx((1, 0))


def test_no_domain_retention_without_a_domain_gain():
    states = States(answers(50, 100), answers(50, 100), answers(90, 100))
    assert ratios.domain_retention(states) is None


def test_there_is_no_ratio_to_a_gain_that_may_be_zero():
    """Its interval would be unbounded, however certain the numerator is."""
    part = np.tile([2.9, 3.1], 10)
    uncertain, certain = np.tile([5, -4], 10), np.tile([0.6, 0.4], 10)
    assert intervals.difference(part, np.zeros(20)).low > 0 > intervals.difference(uncertain, 0 * part).low
    assert intervals.ratio(part, uncertain) is None
    bounded = intervals.ratio(part, certain)
    assert bounded.low < 6 < bounded.high


# Verdicts.


def test_a_drop_of_six_points_on_541_prompts_is_forgetting_without_a_ratio():
    base = answers(97, 541)
    tuned = flipped(base, 20, 61)  # 41 fewer passes: 7.6 points
    recovered = flipped(base, 20, 33)
    result = ratios.findings(States(base, tuned, recovered), None)
    assert result.retention_status == "partly recovered"
    assert (result.recovery, result.recovery_raw) == (None, None)
    assert result.no_recovery_because == "the drop is too small for a ratio"
    assert ratios.findings(States(base, tuned, tuned), None).retention_status == "not shown"


def test_a_drop_of_33_points_on_six_prompts_is_too_few_prompts():
    states = States(answers(4, 6), answers(2, 6), answers(4, 6))
    assert ratios.status_of(states) == "too few prompts"
    assert ratios.recovery(states) is None
    assert ratios.why_no_recovery(states) == "too few prompts"


@pytest.mark.parametrize("passed", [(320, 80), (320, 318), (24, 20), (6, 1)])
def test_the_loss_is_judged_by_one_rule_before_a_recovery_and_after_it(passed):
    n = 400 if passed[0] == 320 else 40 if passed[0] == 24 else 7
    base, tuned = (answers(k, n) for k in passed)
    before, after = (ratios.status_of(States(base, tuned, end)) for end in (None, base))
    assert after == ("recovered" if before == "lost" else before)


def test_nothing_was_forgotten_only_where_ten_points_would_have_been_found():
    many, few = answers(150, 300), answers(30, 60)
    assert ratios.status_of(States(many, flipped(many, 8, 9), many)) == "no measurable forgetting"
    assert ratios.status_of(States(few, flipped(few, 8, 9), few)) == "too few prompts"


def test_three_wordings_of_too_few_facts_stay_too_few():
    facts = answers(20, 40)
    (base, clusters), (tuned, _) = triple(facts), triple(flipped(facts, 3, 3))
    assert ratios.status_of(States(base, tuned, base, clusters=clusters)) == "too few prompts"


@pytest.mark.parametrize(
    ("floor", "status"),
    [(10, "recovered"), (40, "recovered"), (41, "no headroom"), (80, "no headroom"), (90, "no headroom")],
)
def test_a_floor_above_half_of_bases_score_leaves_no_headroom(floor, status):
    base, tuned = answers(80, 100), answers(20, 100)
    assert ratios.status_of(States(base, tuned, base, answers(floor, 100))) == status


def test_a_base_that_is_not_measurably_above_the_floor_leaves_no_headroom():
    states = States(answers(2, 100), answers(0, 100), answers(2, 100), answers(0, 100))
    result = ratios.findings(states, None)
    assert (result.retention_status, result.recovery, result.recovery_raw) == ("no headroom", None, None)
    assert result.no_recovery_because == "base is not well above the floor"


def test_a_base_whose_score_is_well_above_the_floor_needs_more_prompts_to_show_it():
    # All of base's passes are lost: with one seed per model, 2 of 8 are too few for McNemar's test too.
    few, many = (States(*(answers(k * n, 8 * n) for k in (2, 0, 2, 1))) for n in (1, 100))
    assert (ratios.status_of(few), ratios.status_of(many)) == ("too few prompts", "recovered")
    result = ratios.findings(few, None)
    assert (result.recovery, result.recovery_raw) == (None, None)
    assert result.no_recovery_because == "base is not shown to be above the floor"
    # A significant drop gives no R either, because the score that it starts from may be no skill.
    lost = States(answers(8, 8), answers(0, 8), answers(8, 8), answers(4, 8))
    assert ratios.forgot(lost)
    assert ratios.findings(lost, None).retention_status == "too few prompts"
    assert ratios.findings(lost, None).recovery_raw is None


@pytest.mark.parametrize("n", [1, 100])
def test_a_base_at_the_floor_is_not_called_too_few_prompts(n):
    states = States(*(answers(k * n, 8 * n) for k in (2, 0, 2, 2)))
    assert ratios.status_of(states) == "no headroom"


def test_more_prompts_settle_whether_base_is_above_the_floor():
    rng = np.random.default_rng(0)

    def shares(floor: float, n: int) -> dict[str | None, float]:
        draws = ([(rng.random(n) < p).astype(float) for p in (0.6, 0.1, 0.6, floor)] for _ in range(300))
        faults = [ratios.headroom_fault(States(*scores)) for scores in draws]
        return {fault: faults.count(fault) / 300 for fault in (None, *NoRatio)}

    assert shares(0.1, 10)[NoRatio.FLOOR_TOO_NEAR] > 0.2
    assert shares(0.1, 100)[None] > 0.99
    assert shares(0.6, 8)[NoRatio.FLOOR_TOO_HIGH] > 0.8
    assert shares(0.6, 100)[NoRatio.FLOOR_TOO_HIGH] > 0.99


@pytest.mark.parametrize(
    ("recovered", "status"),
    [(800, "recovered"), (500, "partly recovered"), (200, "not shown"), (100, "not shown")],
)
def test_the_status_follows_from_how_much_came_back(recovered, status):
    states = States(answers(800, 1000), answers(200, 1000), answers(recovered, 1000))
    assert ratios.status_of(states) == status


@pytest.mark.parametrize(("gap", "status"), [(0.034, "recovered"), (0.036, "partly recovered")])
def test_recovered_means_less_than_three_and_a_half_points_below_base(gap, status):
    base = np.full(10_000, 0.8)
    assert ratios.status_of(States(base, base - 0.6, base - gap)) == status


def test_few_prompts_cannot_show_full_recovery_although_p_is_large():
    # 23 against 24 of 30 passes, on different prompts: no difference is visible, and none is excluded.
    base, tuned = answers(24, 30), answers(4, 30)
    recovered = np.roll(answers(23, 30), 4)
    assert ratios.mcnemar(recovered, base) > 0.5
    assert ratios.status_of(States(base, tuned, recovered)) == "partly recovered"


def test_a_gain_whose_interval_contains_zero_is_not_a_recovery():
    base, tuned = answers(80, 100), answers(20, 100)
    recovered = np.roll(answers(22, 100), 50)
    assert intervals.difference(recovered, tuned).value > 0
    assert ratios.status_of(States(base, tuned, recovered)) == "not shown"


def test_one_seed_needs_mcnemars_test_too():
    # 6 of 40 prompts lost and none gained: p = 2 / 2^6. With one gained and seven lost, p = 18 / 256.
    base = answers(30, 40)
    assert ratios.forgot(States(base, flipped(base, 0, 6), base))
    tuned = flipped(base, 1, 7)
    assert ratios.mcnemar(base, tuned) == pytest.approx(18 / 256)
    assert not ratios.forgot(States(base, tuned, base))
    # 5 of 6 lost: the interval excludes zero, and p = 2 / 2^5 does not.
    base, tuned = answers(6, 6), answers(1, 6)
    assert intervals.difference(base, tuned).low > 0
    assert ratios.status_of(States(base, tuned, base)) == "too few prompts"


def test_non_inferiority_states_its_bound():
    base = answers(150, 308)
    recovered = flipped(base, 30, 30)
    shown = ratios.non_inferiority(recovered, base)
    gap = intervals.difference(recovered, base)
    assert (shown.shown, shown.at_most, shown.margin) == (False, round(-gap.low, 6), 0.035)
    assert ratios.non_inferiority(recovered, base, margin=0.06).shown


def test_without_results_nothing_is_measured():
    result = dict(vars(ratios.findings(None, None)))
    statuses = {key: result.pop(key) for key in ("status", "retention_status", "domain_status")}
    assert set(statuses.values()) == {result.pop("no_recovery_because")} == {"not measured"}
    assert set(result.values()) == {None}


# Several seeds.


def test_three_seeds_have_the_interval_of_three():
    # Each seed has one number on all prompts, so all variance lies between the seeds.
    seeds = np.array([2.0, 4, 9])
    half = student.ppf(0.975, 2) * seeds.std(ddof=1) / np.sqrt(3)
    estimate = intervals.mean(np.repeat(seeds[:, None], 30, axis=1))
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((5, 5 - half, 5 + half))


def test_the_widths_of_prompts_and_seeds_add_up_as_squares():
    easy, seeds = np.random.default_rng(0).normal(0, 5, 50), np.array([2.0, 4, 9])
    together = intervals.mean(easy + seeds[:, None])
    parts = [intervals.mean(easy), intervals.mean(np.repeat(seeds[:, None], 50, axis=1))]
    squares = sum((part.high - part.low) ** 2 for part in parts)
    assert together.high - together.low == pytest.approx(np.sqrt(squares))


def test_the_luck_of_single_answers_is_counted_once():
    # Independent numbers: the mean of 3 * 400 of them, whichever way they are arranged.
    rng = np.random.default_rng(0)
    widths = [(e := intervals.mean(rng.normal(5, 1, (3, 400)))).high - e.low for _ in range(300)]
    assert np.median(widths) == pytest.approx(2 * 1.96 / np.sqrt(1200), rel=0.1)


@pytest.mark.parametrize("copies", [1, 2, 5])
def test_seeds_that_agree_add_no_certainty(copies):
    # A hard prompt is hard for every seed: five copies of the answers are still answers to n prompts.
    rng = np.random.default_rng(4)
    one = States(*((rng.random(N) < p).astype(float) for p in (0.9, 0.2, 0.7)))
    several = States(*(np.tile(x, (copies, 1)) for x in one[:3]))
    assert near(
        intervals.difference(several.tuned, several.recovered), intervals.difference(one.tuned, one.recovered)
    )
    assert near(ratios.recovery(several), ratios.recovery(one))
    assert ratios.status_of(several) == ratios.status_of(one)
    lengths = rng.normal(50, 9, N)
    assert near(intervals.mean(np.tile(lengths, (copies, 1))), intervals.mean(lengths))


def test_failures_only_have_the_same_interval_over_seeds_as_over_one():
    assert intervals.mean(np.zeros((3, 20))) == intervals.mean(np.zeros(20))
    assert intervals.mean(np.ones((3, 20))) == intervals.mean(np.ones(20))


def test_a_ratio_over_seeds_divides_the_means():
    # R of the seeds: 0.4, 0.5 and 0.6, over the same loss.
    whole = np.full((3, 30), 4.0)
    estimate = intervals.ratio(whole * np.array([[0.4], [0.5], [0.6]]), whole)
    half = student.ppf(0.975, 2) * 0.1 / np.sqrt(3)
    assert vars(estimate) == pytest.approx({"value": 0.5, "low": 0.5 - half, "high": 0.5 + half})


def test_equal_numbers_of_seeds_are_paired_and_different_ones_are_not():
    two, three = (np.repeat(np.array(x)[:, None], 30, axis=1) for x in ([2, 6], [2, 2, 6]))
    paired = intervals.difference(two, two)
    assert (paired.value, paired.low, paired.high) == pytest.approx((0, 0, 0))
    apart = intervals.difference(two, three)
    sources = [
        (student.ppf(0.975, n - 1) ** 2 * x.mean(1).var(ddof=1) / n) for n, x in ((2, two), (3, three))
    ]
    assert apart.value == pytest.approx(4 - 10 / 3)
    assert apart.high - apart.value == pytest.approx(np.sqrt(sum(sources)))


def test_a_seed_without_a_loss_widens_the_interval_until_no_ratio_is_left():
    base, lost, none = (answers(k, 200) for k in (160, 40, 150))
    three = np.stack([base] * 3)
    assert ratios.recovery(States(three, np.stack([lost] * 3), three)) is not None
    assert ratios.recovery(States(three, np.stack([lost, lost, none]), three)) is None


def test_the_variance_between_seeds_is_that_of_a_two_way_analysis_of_variance():
    rng = np.random.default_rng(5)
    for seeds, prompts in ((2, 6), (3, 40), (5, 12)):
        scores = rng.normal(0, 1, (seeds, 1)) + rng.normal(0, 2, prompts) + rng.normal(0, 3, (seeds, prompts))
        rows, columns = scores.mean(1, keepdims=True), scores.mean(0, keepdims=True)
        of_seeds = prompts * ((rows - scores.mean()) ** 2).sum() / (seeds - 1)
        rest = ((scores - rows - columns + scores.mean()) ** 2).sum() / ((seeds - 1) * (prompts - 1))
        _, (variance, freedom) = sources([([scores], None)], clipped=False)
        assert (variance, freedom) == (pytest.approx((of_seeds - rest) / (seeds * prompts)), seeds - 1)


def test_forgetting_is_tested_in_whole_clusters():
    # Three wordings of each fact: 18 losses against 3 gains, and yet only 6 facts against one.
    fact = answers(30, 40)
    (base, clusters), (tuned, _) = triple(fact), triple(flipped(fact, 1, 6))
    assert ratios.mcnemar(base, tuned) < 0.01
    assert ratios.mcnemar(base, tuned, clusters) == pytest.approx(ratios.mcnemar(fact, flipped(fact, 1, 6)))
    lost = States(np.ones(18), np.repeat([0.0, 1], [15, 3]), np.ones(18), None, np.arange(18) // 3)
    assert intervals.difference(lost.base, lost.tuned, lost.clusters).low > 0
    assert ratios.mcnemar(lost.base, lost.tuned) < 0.05
    # Five facts of six: p = 2 / 2^5.
    assert not ratios.forgot(lost)


def test_the_interval_of_a_median_lies_where_order_statistics_put_it():
    """Of 100 independent numbers, the binomial puts 95 % between the 40th and the 61st."""
    numbers = np.random.default_rng(0).permutation(np.arange(1.0, 101.0))
    found = median(numbers)
    assert found.value == 50.5
    assert found.low == pytest.approx(40, abs=1)
    assert found.high == pytest.approx(61, abs=1)
    stretched = median(np.exp(numbers / 10))
    assert np.log([stretched.low, stretched.high]) * 10 == pytest.approx([found.low, found.high])


def test_the_median_of_equal_numbers_is_sure_and_clusters_widen_it():
    assert median(np.full(30, 0.2)) == Estimate(0.2, 0.2, 0.2)
    numbers = np.arange(60.0)
    alone, clustered = median(numbers), median(numbers, np.arange(60) // 6)
    assert clustered.high - clustered.low > 1.5 * (alone.high - alone.low)


def test_the_interval_of_a_median_holds_it_nineteen_times_in_twenty():
    draws = np.random.default_rng(1).lognormal(size=(400, 40))
    held = [found.low <= 1.0 <= found.high for found in map(median, draws)]
    assert 0.92 < np.mean(held) <= 0.99
