"""An interrupted evaluation reuses an answer only where everything that made it is still the same."""

import json

import pytest
from helpers.recovering import Counting, Silent, forget_texts, write_tuned
from lm_eval.api.instance import Instance

from opdcl.config.evaluate import EvalConfig
from opdcl.data.own_words import CONSTANT_ANSWER
from opdcl.data.suites import load_suite
from opdcl.errors import UsageError
from opdcl.measure import relevance
from opdcl.measure.ask import counter
from opdcl.measure.evaluate import Asking, evaluate, max_answer_tokens, write_answers
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir
from opdcl.train.answer_cache import texts_folder
from opdcl.words import Prompt, Rollout

QUESTIONS = [f"What is the code of room {i}?" for i in range(6)]


@pytest.fixture
def measure(backbone, tmp_path):
    """Return a function that measures base or an adapter; it returns the rows and the number of batches."""

    def run(name="run", questions=QUESTIONS, stop=None, adapter=None, answer="seven", until=(), **settings):
        rows = [{"question": q, "answer": answer} for q in questions]
        (tmp_path / "q.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        data = {"q": str(tmp_path / "q.jsonl")}
        limits = {"max_new_tokens": 6, "batch_size": 2, **settings}
        config = EvalConfig(retention=[], domain=["q"], data=data, **limits)
        backbone.drop_adapters()
        if adapter:
            backbone.load_adapter(adapter, "student")
        counting, out = Counting(stop), RunDir(tmp_path / name)
        forget_texts()
        suite = load_suite("q", config)
        suite.task.config.generation_kwargs["until"] = [*until]
        try:
            evaluate(Asking(config, backbone, out, "state", "q", counting, adapter), suite)
        except KeyboardInterrupt:
            assert stop
        return read_jsonl(out.eval_samples("state", "q")), len(counting.counts)

    return run


def test_an_interrupted_evaluation_samples_no_answer_twice(measure):
    clean, batches = measure("clean")
    assert measure(stop=2) == ([], 2)
    resumed, more = measure()
    assert resumed == clean
    assert (batches, more) == (3, 2)


def test_a_suite_that_asks_more_or_scores_otherwise_needs_no_answer_again(measure):
    clean, _ = measure("clean")
    assert measure(questions=QUESTIONS[:4])[1] == 2
    more, batches = measure()
    assert (more, batches) == (clean, 1)
    again, batches = measure(answer="eight")
    assert batches == 0
    assert [row["response"] for row in again] == [row["response"] for row in clean]
    assert {row["target"] for row in again} == {"eight"}
    assert measure(max_new_tokens=5)[1] == 3


def test_answers_of_a_changed_file_are_not_given_to_its_new_questions(measure):
    measure(stop=2)
    changed = ["Who has the key?", "Where is the red door?", *QUESTIONS[:2], "Which way is out?"]
    resumed, _ = measure(questions=changed)
    assert resumed == measure("clean", questions=changed)[0]


def test_answers_made_in_another_way_are_sampled_again(measure):
    measure(stop=2)
    assert measure(batch_size=3) == measure("clean", batch_size=3)


def test_answers_of_another_adapter_or_base_are_not_reused(measure, backbone, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for seed, folder in enumerate((one, two)):
        write_tuned(backbone, folder, seed)
    measure(stop=2, adapter=one)
    resumed, _ = measure(adapter=two)
    assert resumed == measure("clean", adapter=two)[0]
    assert resumed != measure("other", adapter=one)[0]
    measure("base", stop=2)
    backbone.causal_lm.model.layers[0].mlp.up_proj.weight.data.normal_()
    assert measure("base")[0] == measure("changed")[0]


def test_an_answer_that_a_stop_string_has_cut_is_not_kept_where_the_stop_strings_are_others(measure):
    whole, _ = measure("clean")
    cut, _ = measure(until=["e", "a", "i", "o", " "])
    assert sum(len(row["response"]) for row in cut) < sum(len(row["response"]) for row in whole)
    corrected, batches = measure()
    assert corrected == whole
    assert batches == 3
    assert measure()[1] == 0


def test_another_run_of_base_samples_nothing_and_is_equal_to_the_bit(backbone, tmp_path, monkeypatch):
    for least in ("LEAST_RELEVANCE", "LEAST_COHERENCE"):
        monkeypatch.setattr(relevance, least, -100.0)
    config, suite = EvalConfig(limit=6, max_new_tokens=8, batch_size=6), load_suite("instructions")
    suite.scores = lambda docs, texts: [{"passed": True, "inst_level_strict_acc": [True]} for _ in texts]
    suite.metrics = ["passed"]

    def measured(name):
        run = RunDir(tmp_path / name)
        result = evaluate(Asking(config, backbone, run, "base", suite.name, Silent()), suite)
        kept = {file.name: file.read_bytes() for file in texts_folder().glob("*.json")}
        return (result["floor"], read_jsonl(run.eval_samples("base", suite.name))), kept

    forget_texts()
    first, kept = measured("first")
    assert len(kept) > 8  # answers, and what base finds of them and of each floor
    assert measured("second") == (first, kept)
    forget_texts()
    assert measured("anew") == (first, kept)


def test_a_prompt_that_occurs_twice_has_one_answer(measure):
    rows, _ = measure(questions=[QUESTIONS[0], QUESTIONS[1], QUESTIONS[0]])
    assert len(rows) == 3
    assert rows[0]["response"] == rows[2]["response"]
    assert rows[0]["tokens"] > 0


def test_a_stop_string_ends_an_answer_that_the_token_limit_would_cut(backbone, tmp_path):
    asking = Asking(EvalConfig(batch_size=2), backbone, RunDir(tmp_path), "base", "q", Silent())

    def ask(*stops):
        options = [{"until": until, "max_gen_toks": 8} for until in stops]
        return write_answers(asking, [Instance("generate_until", {}, (QUESTIONS[0], o), 0) for o in options])

    (answer,) = ask([])
    whole = answer["response"]
    assert not answer["ended"]
    assert len(whole) > 6
    stop = whole[3:6]
    answers = ask([], [stop], ["is not there", stop], ["is not there"])
    cut = whole[: whole.index(stop)]
    assert [answer["response"] for answer in answers] == [whole, cut, cut, whole]
    assert [answer["ended"] for answer in answers] == [False, True, True, False]
    assert [answer["tokens"] for answer in answers] == [8, 8, 8, 8]


def test_a_task_with_several_filters_has_one_row_per_prompt_with_the_whole_response(backbone, tmp_path):
    rows = [{"question": f"What is {i} + {i}?", "answer": f"#### {2 * i}"} for i in range(7)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"gsm8k": str(tmp_path / "sums.jsonl")}
    config = EvalConfig(retention=["gsm8k"], data=data, max_new_tokens=6, batch_size=4)
    suite, run = load_suite("gsm8k", config), RunDir(tmp_path / "run")
    assert len(suite.task._filters) == 2
    result = evaluate(Asking(config, backbone, run, "base", suite.name, Silent()), suite)
    samples = read_jsonl(run.eval_samples("base", "gsm8k"))
    assert [row["target"] for row in samples] == [row["answer"] for row in rows]
    # A filter leaves "[invalid]" of an answer without a number.
    assert "[invalid]" not in {row["response"] for row in samples}
    strict, flexible = "exact_match,strict-match", "exact_match,flexible-extract"
    assert (result["n"], result["metric"], [*result["metrics"]]) == (7, strict, [strict, flexible])
    # Without "####" the one finds nothing, and the other the last number.
    answers = [f"{i} and {i} is {2 * i}" for i in range(7)]
    assert suite.means(suite.scores(suite.documents(None), answers)) == {strict: 0, flexible: 1}


def test_each_row_has_the_score_of_the_best_answer_without_content(backbone, tmp_path):
    rows = [{"question": f"Say {i}", "answer": CONSTANT_ANSWER} for i in range(3)] + [
        {"question": "Say so", "answer": "so"}
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EvalConfig(domain=["q"], data={"q": str(tmp_path / "q.jsonl")}, max_new_tokens=4, batch_size=4)
    run = RunDir(tmp_path / "run")
    result = evaluate(Asking(config, backbone, run, "base", "q", Silent()), load_suite("q", config))
    means = {name: scores["token_f1"] for name, scores in result["floor"].items()}
    assert (max(means.values()), min(means.values())) == (means["constant"], 0) == (0.75, 0)
    assert [row["floor"] for row in read_jsonl(run.eval_samples("base", "q"))] == [1, 1, 1, 0]


def test_progress_counts_finished_answers_on_top_of_those_of_an_earlier_run():
    told = []
    report = Silent()
    report.progress = lambda done, total: told.append((done, total))
    count = counter(report.progress, 9, 3)
    count([Rollout(Prompt([1]), [5, 5]), Rollout(Prompt([2]), [5, 5])])
    count([Rollout(Prompt([3]), [5] * 4)])
    assert told == [(5, 9), (6, 9)]


def test_an_answer_has_the_shorter_of_both_limits_and_its_thought_if_the_context_has_room():
    assert max_answer_tokens(EvalConfig(), 100, 10, 512) == 100
    assert max_answer_tokens(EvalConfig(max_new_tokens=6), 100, 10, 16) == 6
    assert max_answer_tokens(EvalConfig(max_new_tokens=200, thought_tokens=50), 100, 10, 512) == 150
    with pytest.raises(UsageError, match="exceed the context of 15"):
        max_answer_tokens(EvalConfig(max_new_tokens=6), 100, 10, 15)
