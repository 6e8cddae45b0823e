"""How answers are written: read as lm-eval reads it; what lm-eval cannot do, or we cannot, is refused."""

import pytest

from opdcl.data.stock_tasks import Answering, answering_of
from opdcl.data.suites import cut_at
from opdcl.errors import UsageError

SAMPLED = {"until": [], "do_sample": True, "temperature": 0.7, "max_gen_toks": 8}
GREEDY = SAMPLED | {"do_sample": False}


def test_the_temperature_is_that_of_the_task():
    assert answering_of(SAMPLED).temperature == 0.7
    assert answering_of({"temperature": 0.7}).temperature == 0.7  # lm-eval samples
    assert answering_of(GREEDY).temperature == answering_of({"temperature": 0}).temperature == 0
    assert answering_of({}) == answering_of(None) == Answering([], 256, 0.0)


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.1}])
def test_what_cuts_draws_off_is_refused_where_answers_are_drawn(option):
    with pytest.raises(UsageError, match=f"suite 'mine' samples with {next(iter(option))}: .* not supported"):
        answering_of(SAMPLED | option, "mine")
    assert answering_of(GREEDY | option) == answering_of(GREEDY)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 4}, "decodes with num_beams: 4"),
        ({"repetition_penalty": 1.3}, "decodes with repetition_penalty: 1.3"),
        ({"max_length": 300}, "decodes with max_length: 300"),
        ({"no_such_option": 1}, "decodes with no_such_option: 1"),
        ({"do_sample": True}, "samples at temperature 0"),
        ({"do_sample": True, "temperature": -1}, "samples at temperature -1"),
        ({"do_sample": "yes"}, "do_sample: 'yes'"),
        ({"temperature": "warm"}, "cannot read"),
        ({"temperature": float("nan"), "do_sample": True}, "samples at temperature nan"),
        ({"until": None}, "one is empty or no text"),
        ({"until": [5]}, "one is empty or no text"),
        ({"until": ["", "\n"]}, "one is empty or no text"),
        ({"max_gen_toks": 0}, "leaves no room"),
        ({"max_tokens": "many"}, "cannot read"),
    ],
)
def test_what_we_cannot_do_as_lm_eval_does_is_refused(options, words):
    with pytest.raises(UsageError, match=words) as caught:
        answering_of(options)
    assert caught.value.hint


def test_an_answer_is_cut_as_lm_eval_cuts_it():
    from lm_eval.models.utils import postprocess_generated_text

    for stops in (["b", "ab"], ["ab", "b"], ["c"], [], ["xa", "a"], ["bc", "x"]):
        assert cut_at("xxabcab", stops) == postprocess_generated_text("xxabcab", stops, None)
