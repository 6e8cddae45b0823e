"""Tasks of lm-eval give what lm-eval's own command gives: prompts, stops, limits, answers and scores."""

import copy

import pytest
from helpers.recovering import Silent
from helpers.stock import STOCK, Recorder, run_by_lm_eval, write_stock

from opdcl.config.evaluate import EvalConfig
from opdcl.data.suites import load_suite
from opdcl.errors import UsageError
from opdcl.measure import evaluate as stage
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir

MOST = 12  # tokens of an answer
# What lm-eval would do and we do not, or whose scores are not those of single answers.
REFUSED = {
    "code2text_go": "decodes with num_beams: 10, which is not supported",
    "flores_ace_Arab-eng_Latn_prompt_1": "does not score prompt by prompt",
    "global_piqa_nonparallel_generation_acm_arab": "samples with top_p: 0.95, which is not supported",
    "crows_pairs_english": "no score that is good when high: less likelihood_diff",
}
# One of each kind: begun by the task, examples as turns, a system text, filters, choices, one text, refused.
ALWAYS = {
    *("arc_challenge_chat", "gsm8k", "bbh_cot_fewshot_navigate", "triviaqa"),
    *("mmlu_astronomy", "copa", "asdiv", "code2text_go"),
}
TASKS = [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.nightly) for name in STOCK]

# Other ways to write the same settings. A random model writes these letters often.
WAYS = {
    "a stop as text": {"until": "e", "max_gen_toks": 9},
    "stops that overlap, in lm-eval's order": {"until": ["a", "ea", "te", "e"], "max_new_tokens": 9},
    "a third name of the limit": {"until": ["o"], "max_tokens": 9},
    "no stop": {"until": [], "max_completion_tokens": 9},
    "no stop named, and two limits": {"max_tokens": 4, "max_new_tokens": 9},
    "no limit": {"until": ["e"], "temperature": 0},
    "a temperature without draws": {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "num_beams": 1},
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_gives_what_lm_evals_own_command_gives(name, backbone, tmp_path):
    file = write_stock(tmp_path, name)
    if name not in REFUSED:
        compare(name, file, backbone, tmp_path)
        return
    with pytest.raises(UsageError, match=REFUSED[name]) as caught:
        load_suite(name, EvalConfig(retention=[name], data={name: str(file)}), trusted=True)
    assert caught.value.hint


# One in three every day.
@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=[pytest.mark.nightly] * bool(i % 3)) for i, w in enumerate(WAYS)]
)
def test_all_ways_to_write_the_settings_of_answers_are_lm_evals(way, backbone, tmp_path):
    file = write_stock(tmp_path, "anagrams1", generation_kwargs=WAYS[way])
    compare("anagrams1", file, backbone, tmp_path)


def compare(name, file, backbone, folder):
    """Assert that base gives with us what it gives with lm-eval."""
    config = EvalConfig(retention=[name], data={name: str(file)}, batch_size=1, max_new_tokens=MOST)
    backbone.causal_lm.config.max_position_embeddings = 100_000
    suite, encode = load_suite(name, config, trusted=True), backbone.tokenizer
    lm = Recorder(copy.deepcopy(backbone.causal_lm), copy.deepcopy(encode), MOST)
    samples = run_by_lm_eval(lm, file, chat=suite.generative)["samples"][name]
    by_filter: dict[str, list] = {}
    for sample in samples:
        by_filter.setdefault(sample["filter"], []).append(sample)
    theirs = next(iter(by_filter.values()))
    run = RunDir(folder / "run")
    stage.evaluate(stage.Asking(config, backbone, run, "base", suite.name, Silent()), suite)
    ours = read_jsonl(run.eval_samples("base", name))
    asked = [arguments for sample in theirs for arguments in sample["arguments"]]
    if suite.generative:
        texts = [text for text, _ in asked]
        assert suite.encode(None, encode) == encode(texts, add_special_tokens=False)["input_ids"]
        assert lm.limits == {suite.answering.max_tokens}
        # lm-eval adds the end of an answer, at which we stop by its id.
        ends = [] if encode.eos_token in suite.answering.stops else [encode.eos_token]
        assert lm.stops == {(*suite.answering.stops, *ends)}
        assert [row["response"] for row in ours] == [sample["resps"][0][0] for sample in theirs]
    else:
        assert [request.args for request in suite.requests(None, encode)] == [*map(tuple, asked)]
        for row, sample in zip(ours, theirs, strict=True):
            likelihoods = [answer[0][0] for answer in sample["resps"]]
            assert row["likelihoods"] == pytest.approx(likelihoods, rel=1e-4)
    if suite.generative and len(by_filter) > 1:
        assert {metric.partition(",")[2] for metric in suite.metrics} == by_filter.keys()
    for metric in suite.metrics:
        plain, _, chain = metric.partition(",")
        expected = by_filter[chain] if chain else theirs
        assert [row["scores"][metric] for row in ours] == [sample[plain] for sample in expected]
