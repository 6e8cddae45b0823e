"""How answers are written: whether they end, their length, repetition and script."""

import numpy as np
import pytest

from opdcl.repetition import repetition
from opdcl.results import writing
from opdcl.results.scores import Suite
from opdcl.results.writing import MARGINS, script_of

ENGLISH, GERMAN, RUSSIAN, CHINESE = "Keep it short.", "Fasse dich kurz.", "Пиши коротко.", "请简短回答。"


def suite_of(**answers):
    """Return a suite from state -> answers, or rows that lack some fields."""
    rows = {
        state: [
            {"doc_id": i, "prompt": ENGLISH, "scores": {}}
            | (answer if isinstance(answer, dict) else {"response": answer})
            for i, answer in enumerate(texts)
        ]
        for state, texts in answers.items()
    }
    return Suite("instructions", "retention", "strict", {}, rows, 0)


def test_repetition_is_that_of_the_recovery_s_health_on_words():
    looping = "we met and we talked " * 5
    share = writing.values(suite_of(base=[looping, "one two three four five"]), "base")["repetition"]
    # 25 words have 22 4-grams, of which only the first 5 are new.
    assert share == pytest.approx([17 / 22, 0])
    assert share[0] == pytest.approx(repetition([looping.split()]))


def test_a_script_without_spaces_is_read_by_character():
    (share,) = writing.values(suite_of(base=["一二三四五六七八" * 2]), "base")["repetition"]
    assert share == pytest.approx(5 / 13)
    (none,) = writing.values(suite_of(base=["一二三四五六七八"]), "base")["repetition"]
    assert none == 0


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
    suite = suite_of(
        base=[ENGLISH, CHINESE, ENGLISH, ENGLISH], recovered=[RUSSIAN, CHINESE, GERMAN, "1, 2, 3"]
    )
    assert writing.values(suite, "base")["script"].tolist() == [1, 1, 1, 1]
    assert writing.values(suite, "recovered")["script"].tolist() == [0, 1, 1, 1]


def test_what_old_rows_do_not_tell_is_left_out():
    row = {"response": ENGLISH, "tokens": 4}
    whole, old = row | {"ended": True}, row
    assert set(writing.values(suite_of(base=[whole, whole]), "base")) == {
        "ended",
        "tokens",
        "repetition",
        "script",
    }
    assert "ended" not in writing.values(suite_of(base=[whole, old]), "base")
    assert writing.values(suite_of(base=[{}]), "base") == {}
    assert writing.values(suite_of(base=[whole]), "tuned") == {}


def test_every_measure_has_its_mean_with_an_interval(few_resamples):
    rows = [{"response": ENGLISH, "tokens": 10 * i, "ended": i < 3} for i in range(4)]
    base = writing.estimates(suite_of(base=rows), 0)["base"]
    assert base["ended"]["value"] == 0.75
    assert base["tokens"]["value"] == 15
    assert all(e["low"] <= e["value"] <= e["high"] for e in base.values())
    assert base["ended"]["low"] < 0.75 < base["ended"]["high"]


def scores(ended, repetition, n=1000):
    """Return measures of `n` answers of which a share ended, and which all repeat themselves equally."""
    return {"ended": np.arange(n) < round(ended * n), "repetition": np.full(n, repetition)}


def as_floats(measures):
    return {name: np.asarray(x, float) for name, x in measures.items()}


@pytest.mark.parametrize(
    ("ended", "as_good", "worse"),
    [(0.48, True, False), (0.60, True, False), (0.46, True, True), (0.44, False, True), (0.18, False, True)],
)
def test_as_good_as_base_means_within_the_margin(few_resamples, ended, as_good, worse):
    test = writing.compared_with_base(as_floats(scores(0.48, 0.1)), as_floats(scores(ended, 0.1)), seed=0)[
        "cut"
    ]
    assert (test["as_good"], test["worse"]) == (as_good, worse)
    assert test["value"] == pytest.approx(0.48 - ended)
    assert (test["base"], test["recovered"]) == (pytest.approx(0.52), pytest.approx(1 - ended))


@pytest.mark.parametrize(("gap", "as_good"), [(0.049, True), (0.051, False)])
def test_the_margin_of_repetition_is_five_points(few_resamples, gap, as_good):
    base, recovered = scores(0.5, 0.1), scores(0.5, 0.1 + gap)
    tests = writing.compared_with_base(as_floats(base), as_floats(recovered), seed=0)
    assert tests["repetition"]["as_good"] is as_good
    assert tests["cut"]["as_good"]
    assert MARGINS == {"cut": 0.05, "repetition": 0.05}


def test_few_answers_do_not_show_that_recovered_is_as_good(few_resamples):
    # Equally many end, not always the same.
    base, recovered = ({"ended": np.array(pattern * 10, float)} for pattern in ([1, 0, 1, 0], [1, 0, 0, 1]))
    tests = writing.compared_with_base(base, recovered, seed=0)
    assert (tests["cut"]["value"], tests["cut"]["as_good"], tests["cut"]["worse"]) == (0, False, False)
    assert tests["repetition"] is None
