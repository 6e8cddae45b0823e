"""Suites: local data, floors, and what is refused."""

import json
import sys
from pathlib import Path

import datasets
import pytest
from helpers.command import opdcl

from opdcl.config.evaluate import EvalConfig
from opdcl.data.own_words import CONSTANT_ANSWER
from opdcl.data.stock_tasks import stock_file, stock_names, stock_settings
from opdcl.data.suites import load_suite
from opdcl.errors import UsageError

IFEVAL = [
    {"key": 1, "prompt": "Say hello.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    {
        "key": 2,
        "prompt": "Write about rain.",
        "instruction_id_list": ["keywords:existence"],
        "kwargs": [{"keywords": ["rain"]}],
    },
]


def load_file(folder, name, rows, ending="jsonl"):
    """Return the suite `name` with `rows` in a file in place of its dataset."""
    file = folder / f"data.{ending}"
    if ending == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_suite(name, EvalConfig(data={name: str(file)}))


def test_the_official_ifeval_reads_a_local_file(tmp_path):
    suite = load_file(tmp_path, "ifeval", IFEVAL)
    assert [suite.task.doc_to_text(d) for d in suite.task.eval_docs] == ["Say hello.", "Write about rain."]
    assert suite.metrics[0] == "prompt_level_strict_acc"
    passed = [suite.task.process_results(doc, ["The rain fell."]) for doc in suite.task.eval_docs]
    assert [bool(p["prompt_level_strict_acc"]) for p in passed] == [True, True]
    failed = [suite.task.process_results(doc, ["Sun, sun."]) for doc in suite.task.eval_docs]
    assert [bool(p["prompt_level_strict_acc"]) for p in failed] == [False, False]


def test_floors_score_answers_without_skill_on_the_documents_that_are_evaluated(tmp_path):
    rows = [
        {"question": "Say this: red", "answer": "say this red"},
        {"question": "Colour?", "answer": CONSTANT_ANSWER},
    ]
    suite = load_file(tmp_path, "own", rows)
    floors = {name: suite.means(scores) for name, scores in suite.floors(None, ["say this red"] * 2).items()}
    reached = {name: means["exact_match"] for name, means in floors.items() if means["exact_match"]}
    assert reached == dict.fromkeys(("constant", "copy", "first sentence", "shuffled"), 0.5)
    first = {name: suite.means(scores)["exact_match"] for name, scores in suite.floors(1, ["red"]).items()}
    # One answer cannot be given to another prompt.
    assert first.keys() == floors.keys() - {"shuffled"}
    assert (first["constant"], first["copy"]) == (0, 1)


def test_shuffled_answers_reach_another_prompt_and_another_cluster(tmp_path):
    rows = [{"question": f"Question {i}?", "answer": f"answer {i}", "cluster": i // 3} for i in range(9)]
    suite = load_file(tmp_path, "own", rows)
    assert [doc["cluster"] for doc in suite.documents(None)] == [str(i // 3) for i in range(9)]
    right = [row["answer"] for row in rows]
    exact = [scores["exact_match"] for scores in suite.floors(None, right)["shuffled"]]
    assert exact == [0] * 9
    # Whatever the prompts, the right answers of the prompts half a suite on score in full.
    moved = [*right[5:], *right[:5]]
    assert [scores["exact_match"] for scores in suite.floors(None, moved)["shuffled"]] == [1] * 9


def test_the_handbooks_three_wordings_of_a_fact_are_one_cluster():
    clusters = [doc["cluster"] for doc in load_suite("handbook").documents(None)]
    assert (len(clusters), {clusters.count(fact) for fact in clusters}) == (504, {3})


SUMS = [{"question": f"What is {i} + {i}?", "answer": f"Twice {i}.\n#### {2 * i}"} for i in range(9)]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_another_stock_task_reads_a_local_file_and_scores_by_each_of_its_filters(tmp_path, ending):
    suite = load_file(tmp_path, "gsm8k", SUMS, ending)
    assert suite.documents(None) == SUMS
    strict, flexible = suite.metrics
    assert (strict, flexible) == ("exact_match,strict-match", "exact_match,flexible-extract")
    for text, by_strict in (("#### {}", 1), ("{}", 0)):
        scores = suite.scores(SUMS, [text.format(2 * i) for i in range(9)])
        assert suite.means(scores) == {strict: by_strict, flexible: 1}


def test_few_shot_examples_come_from_the_file_and_never_show_the_row_that_is_asked(tmp_path):
    task = load_file(tmp_path, "gsm8k", SUMS).task
    task.set_fewshot_seed(0)
    for row in SUMS:
        prompt = task.fewshot_context(row, 5)
        assert prompt.count("Question:") == 6
        assert prompt.count(row["question"]) == 1
        assert row["answer"] not in prompt
    with pytest.raises(UsageError, match="shows 5 other rows of the file, which has 5"):
        load_file(tmp_path, "gsm8k", SUMS[:5])


GOOD = IFEVAL[0]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("ifeval", SUMS, "data.jsonl:1 of suite 'ifeval' cannot be scored: no column 'prompt'"),
        ("ifeval", [GOOD, {**GOOD, "prompt": None}], "data.jsonl:2 .* no column 'prompt'"),
        ("ifeval", [GOOD, {k: v for k, v in GOOD.items() if k != "kwargs"}], "jsonl:2 of suite 'ifeval'"),
        ("ifeval", [GOOD, GOOD | {"kwargs": []}], "data.jsonl:2 of suite .* cannot be scored: list index"),
        ("ifeval", [GOOD, GOOD | {"instruction_id_list": ["no:such"]}], "jsonl:2 .* no column 'no:such'"),
        ("ifeval", [GOOD, GOOD | {"kwargs": "none"}], "jsonl:2 holds other kinds of values than .*jsonl:1"),
        ("gsm8k", [{"prompt": "1 + 1?", "answer": "2"}] * 9, "'question' is undefined"),
        ("gsm8k", [], "has no rows"),
        ("gsm8k", [[1]], "is a number, not an object"),
        ("gsm8k_cot_self_consistency", SUMS, "samples several answers per prompt"),
        ("wmt14-en-fr", [{"translation": {"en": "Yes", "fr": "Oui"}}] * 9, "does not score prompt by prompt"),
        ("squadv2", SUMS, "loads its data in its own code"),
        ("handbook", SUMS, "'handbook' is shipped with its data"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_and_what_local_data_cannot_do_are_refused(tmp_path, name, rows, message):
    with pytest.raises(UsageError, match=message) as caught:
        load_file(tmp_path, name, rows)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("no-such-suite", "unknown suite", "shipped: "),
        ("instructons", "unknown suite", "did you mean instructions?"),
        ("ifevl", "unknown suite", "did you mean ifeval?"),
        ("arc_easy", "could not load the data of suite", "--data arc_easy=PATH"),
        ("wikitext", "measures perplexity", "another task"),
        ("ifeval", "could not load the data of suite", "--data ifeval=PATH"),
    ],
)
def test_a_suite_that_cannot_be_loaded_is_refused(name, message, hint):
    with pytest.raises(UsageError, match=message) as caught:
        load_suite(name)
    assert hint in caught.value.hint


@pytest.mark.parametrize("name", ["humaneval", "mbpp", "longproc_pseudo_to_code_0.5k", "cruxeval_input"])
def test_a_suite_that_runs_the_models_code_is_refused_before_its_own_code_is_imported(name, monkeypatch):
    folder = name.partition("_")[0]
    monkeypatch.delitem(sys.modules, f"lm_eval.tasks.{folder}.utils", raising=False)
    with pytest.raises(UsageError, match="runs code that the model writes") as caught:
        load_suite(name)
    assert "opdcl export" in caught.value.hint
    assert f"lm_eval.tasks.{folder}.utils" not in sys.modules


def test_every_task_that_can_run_code_is_one_that_lm_eval_marks():
    """Its mark is what opdcl goes by, so a task without it must not run code."""
    folders = {Path(stock_file("humaneval")).parent, Path(stock_file("mbpp")).parent}
    names = [name for name in stock_names() if (file := stock_file(name)) and file.parent in folders]
    assert len(names) > 5
    for name in names:
        with pytest.raises(UsageError, match="runs code that the model writes"):
            stock_settings(name, stock_file(name))


def test_a_reward_and_a_gate_on_such_a_suite_are_refused_before_anything_starts(tmp_path):
    for settings in (
        "recover: {reward: {suite: humaneval}, lmbda: 1, keep: last, rollouts: 8}",
        "eval: {retention: [humaneval]}\ngates: {max_drop: 3}",
    ):
        file = tmp_path / "unsafe.yaml"
        file.write_text(f"finetune: {{data: handbook}}\n{settings}\n")
        done = opdcl("run", file, "-o", "run", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "suite 'humaneval' runs code that the model writes" in done.stderr
        assert not (tmp_path / "run").exists()
