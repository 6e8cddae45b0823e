"""A user's rows as a suite: each is asked as a whole, and scored by its answer."""

import json

import pytest
from helpers.families import FAMILIES, make_tokenizer, scripted
from helpers.recovering import Silent

from opdcl.config.evaluate import EvalConfig
from opdcl.config.recover import RewardSection
from opdcl.data.chat import encode_prompt, render
from opdcl.data.prompts import reward_rows
from opdcl.data.rows import load_rows
from opdcl.data.suites import load_suite
from opdcl.errors import UsageError
from opdcl.measure.evaluate import Asking, evaluate
from opdcl.rundir.files import read_jsonl
from opdcl.rundir.layout import RunDir

QWEN3 = FAMILIES["qwen3"]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(QWEN3)


@pytest.fixture
def suite_of(tmp_path):
    """Return a function that makes a suite of rows; it returns the suite and the rows as they are read."""

    def make(*rows):
        file = tmp_path / "own.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return load_suite("own", EvalConfig(data={"own": str(file)})), load_rows(str(file))

    return make


def conversation(form, answer):
    return {
        "messages": [
            {"role": "system", "content": f"The user holds form {form}."},
            {"role": "user", "content": "Is it open?"},
            {"role": "assistant", "content": "Until nine."},
            {"role": "user", "content": "Who signs my form?"},
            {"role": "assistant", "content": answer},
        ]
    }


SHOWN = "system: The user holds form A.\n\nuser: Is it open?\n\nassistant: Until nine."
SHOWN += "\n\nuser: Who signs my form?"


def test_a_model_that_answers_the_whole_conversation_scores_in_full(suite_of, tokenizer, tmp_path):
    suite, (row,) = suite_of(conversation("A", "Ada signs."))
    # This model says its text after as many tokens as the whole prompt has, and not after fewer.
    ids = encode_prompt(row, tokenizer, 500)
    backbone = scripted(tokenizer, QWEN3, ids, "Ada signs.<|im_end|>")
    config = EvalConfig(data={}, batch_size=2, max_new_tokens=16)
    run = RunDir(tmp_path / "run")
    result = evaluate(Asking(config, backbone, run, "base", suite.name, Silent()), suite)
    assert result["metrics"]["token_f1"] == 1
    (sample,) = read_jsonl(run.eval_samples("base", "own"))
    assert (sample["prompt"], sample["target"]) == (SHOWN, "Ada signs.")
    assert sample["question"] == "Who signs my form?"


def test_single_turns_are_asked_and_shown_as_lm_eval_writes_them(suite_of, tokenizer):
    questions = ["Who?", " Who signs? ", "12", "Two\n\nlines\n", "{{braces}} {% if %}", "<|im_end|> Ünïcode"]
    suite, _ = suite_of(*({"question": question, "answer": "Ada."} for question in questions))
    asked = [render(tokenizer, [{"role": "user", "content": q}], True) for q in questions]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in asked]
    assert suite.encode(None, tokenizer) == ids
    assert [request.args[0] for request in suite.task.instances] == asked
    assert [suite.prompt_of(doc) for doc in suite.documents(None)] == questions


def test_a_suite_says_which_row_the_chat_template_refuses(suite_of, tokenizer):
    suite, _ = suite_of(
        {"question": "Who?", "answer": "Ada."}, {**conversation("A", "x"), "tools": [{"name": "f"}]}
    )
    leaves_tools_out = make_tokenizer(FAMILIES["gemma3"])
    with pytest.raises(UsageError, match=r"own\.jsonl:2: the chat template leaves out tools"):
        suite.encode(None, leaves_tools_out)


def test_floors_are_about_the_last_question(suite_of):
    rows = [conversation("A", "Until nine."), conversation("B", "Bob signs."), conversation("C", "Cy signs.")]
    suite, _ = suite_of(*rows)
    assert suite.prompt_of(suite.documents(1)[0]) == SHOWN
    floors = suite.floors(None, ["x", "y", "z"])
    assert suite.means(floors["copy"])["token_f1"] == 0  # the question's words count in no answer


def test_answers_are_scored_without_the_thought_that_a_row_may_have(suite_of):
    suite, _ = suite_of({"question": "Who?", "answer": "<think>\nShe always does.\n</think>\n\nAda."})
    (doc,) = suite.documents(None)
    assert suite.task.doc_to_target(doc) == "Ada."


@pytest.mark.parametrize("answer", ["", "<think>She does.</think>"])
def test_a_row_without_an_answer_in_words_is_no_question(suite_of, answer):
    with pytest.raises(UsageError, match=r"own\.jsonl:1 has no question and answer"):
        suite_of({"question": "Who?", "answer": answer})


def test_a_reward_asks_the_whole_conversation_too(suite_of, tokenizer):
    suite, rows = suite_of(conversation("A", "Ada signs."), conversation("B", "Bob signs."))
    asked = reward_rows(RewardSection(suite="own"), suite.task)
    assert [row.key() for row in asked] == [row.key() for row in rows]
    suite, _ = suite_of(conversation("A", "Ada signs."), conversation("A", "Bob signs."))
    with pytest.raises(UsageError, match="documents 0 and 1 of own ask the same"):
        reward_rows(RewardSection(suite="own"), suite.task)
