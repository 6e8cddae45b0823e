"""How answers are written: whether they end, their length, repetition and script."""

import numpy as np
import pytest
from scipy.stats import t as student

from opdcl.repetition import repetition
from opdcl.results import ratios
from opdcl.results.measurements import OF_ANSWERS, MeasuredSuite, States, response_values, script_of
from opdcl.results.ratios import MARGINS, ResponseTest

ENGLISH, GERMAN, RUSSIAN, CHINESE = "Keep it short.", "Fasse dich kurz.", "Пиши коротко.", "请简短回答。"


def suite_of(**answers):
    """Return a suite from state -> answers, or rows that lack some fields."""
    rows = {
        state: [
            {"doc_id": i, "prompt": f"{ENGLISH} {i}", "scores": {}}
            | (answer if isinstance(answer, dict) else {"response": answer})
            for i, answer in enumerate(texts)
        ]
        for state, texts in answers.items()
    }
    return MeasuredSuite("instructions", "retention", "strict", {}, rows, 0)


def column(name: str, *answers, state: str = "base", **more):
    """Return a column of base's answers, or of those of another state beside it."""
    found = suite_of(base=answers, **more).column(state, name)
    return None if found is None else found.tolist()


def test_repetition_is_that_of_the_recovery_s_health_on_words_or_characters():
    looping = "we met and we talked " * 5
    # 25 words have 22 4-grams, of which only the first 5 are new.
    shares = column("repetition", looping, "one two three four five")
    assert shares == pytest.approx([17 / 22, 0])
    assert shares[0] == pytest.approx(repetition([looping.split()]))
    # A script without spaces is read by character.
    assert column("repetition", "一二三四五六七八" * 2, "一二三四五六七八") == pytest.approx([5 / 13, 0])


@pytest.mark.parametrize(
    ("text", "script"),
    [
        (ENGLISH, "LATIN"),
        (GERMAN, "LATIN"),
        (RUSSIAN, "CYRILLIC"),
        (CHINESE, "CJK"),
        ("ひらがなとカタカナと漢字", "CJK"),
        ("a Пиши", "CYRILLIC"),
        ("12 %, 34!", ""),
        ("", ""),
    ],
)
def test_the_script_is_that_of_most_letters(text, script):
    assert script_of(text) == script


def test_an_answer_may_be_in_the_script_of_the_prompt_or_of_base_s_answer():
    base, recovered = [ENGLISH, CHINESE, ENGLISH, ENGLISH], [RUSSIAN, CHINESE, GERMAN, "1, 2, 3"]
    assert column("script", *base) == [1, 1, 1, 1]
    assert column("script", *base, state="recovered", recovered=recovered) == [0, 1, 1, 1]


def test_what_rows_do_not_tell_is_left_out():
    old = {"response": ENGLISH, "tokens": 4}
    whole = old | {"ended": True}
    assert set(response_values(suite_of(base=[whole, whole]), "base")) == {*OF_ANSWERS}
    assert column("ended", whole, old) is None
    # Where likelihoods were compared, the response is a choice.
    assert column("distinct", whole | {"likelihoods": [0.0, -1.0]}) is None
    assert response_values(suite_of(base=[{}]), "base") == {}
    assert response_values(suite_of(base=[whole]), "tuned") == {}


def pair(base, recovered):
    """Return a suite whose answers of the two states end as listed, each in English."""
    states = {"base": base, "recovered": recovered}
    rows = {s: [{"response": ENGLISH, "ended": bool(e)} for e in ended] for s, ended in states.items()}
    return suite_of(**rows)


def share(passed, n=2000):
    return [i < round(passed * n) for i in range(n)]


@pytest.mark.parametrize(
    ("ended", "shown", "different"),
    [(0.48, True, False), (0.46, True, True), (0.50, True, True), (0.42, False, True), (0.60, False, True)],
)
def test_like_base_means_within_the_margin_on_both_sides(ended, shown, different):
    test = ratios.compared_with_base([pair(share(0.48), share(ended))])["ended"]
    assert (test.shown, test.different) == (shown, different)
    assert (test.base, test.recovered) == (pytest.approx(0.48), pytest.approx(ended))
    assert test.low < ended - 0.48 < test.high


def test_the_margins_are_five_points_and_a_tenth_of_the_length():
    assert MARGINS == {"ended": 0.05, "repetition": 0.05, "tokens": 0.10}
    # Of 2000 pairs, the interval of a gap of 4 points reaches to 4.9, that of 4.4 points to 5.3.
    for sign in (1, -1):
        ends = (0.48 + sign * gap for gap in (0.04, 0.044))
        tests = [ratios.compared_with_base([pair(share(0.48), share(e))])["ended"] for e in ends]
        assert [test.shown for test in tests] == [True, False]


def lengths(factor, n=600, noise=0.0):
    """Return per-prompt lengths of base, and of a model whose answers are `factor` times as long."""
    rng = np.random.default_rng(0)
    base = rng.gamma(2, 40, n)
    return base, base * factor * np.exp(rng.normal(0, noise, n) - noise**2 / 2)


@pytest.mark.parametrize(
    ("factor", "noise", "shown", "different"),
    [
        (1.0, 0.3, True, False),
        (0.95, 0.1, True, True),
        (0.76, 0.3, False, True),
        (1.24, 0.3, False, True),
        (1.0, 2.0, False, False),
    ],
)
def test_a_length_is_compared_as_a_share_of_base_s(factor, noise, shown, different):
    base, recovered = lengths(factor, noise=noise)
    test = ratios.equivalence("tokens", base, recovered)
    assert (test.shown, test.different) == (shown, different)
    assert test.value == pytest.approx(recovered.mean() / base.mean() - 1, abs=1e-6)
    # Two one-sided tests by their definition: both ends of the margin are rejected at 2.5 %.
    for end in (-0.10, 0.10):
        gap = recovered - (1 + end) * base
        t = gap.mean() / (gap.std(ddof=1) / len(gap) ** 0.5)
        rejected = -np.sign(end) * t > student.ppf(0.975, len(gap) - 1)
        assert rejected == (test.low > end if end < 0 else test.high < end)


def test_answers_of_two_models_are_alike_no_more_often_than_one_in_forty_at_the_margin():
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(1000):
        base = rng.gamma(2, 40, 400)
        recovered = base * 0.9 * np.exp(rng.normal(0, 0.3, 400) - 0.045)
        found += ratios.equivalence("tokens", base, recovered).shown
    assert found / 1000 < 0.045


def test_several_seeds_are_pooled_and_a_seed_without_the_measure_leaves_it_out():
    same, worse = pair(share(0.5), share(0.5)), pair(share(0.5), share(0.3))
    pooled = ratios.compared_with_base([same, worse])["ended"]
    assert pooled.recovered == pytest.approx(0.4)
    for row in worse.rows["recovered"]:
        del row["ended"]
    assert ratios.compared_with_base([same, worse])["ended"] is None
    assert ratios.compared_with_base([]) == {"ended": None, "repetition": None, "tokens": None}


def written(shown):
    return ResponseTest(0.0, -0.1, 0.1, base=0.5, recovered=0.5, margin=0.05, shown=shown, different=False)


@pytest.mark.parametrize("shown", [True, False])
def test_only_what_is_shown_to_write_alike_is_recovered(shown):
    assert ratios.alike({"ended": written(shown), "repetition": None, "tokens": written(True)}) == shown
    passed = (np.arange(1000) < 800).astype(float)
    tuned = np.zeros(1000)
    states = States(passed, tuned, passed)
    expected = "recovered" if shown else "partly recovered"
    assert ratios.findings(states, None, shown).retention_status == expected
    assert ratios.findings(states._replace(recovered=tuned), None, shown).retention_status == "not shown"
