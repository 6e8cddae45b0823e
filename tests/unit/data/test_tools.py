"""Rows with tools: what is learned of calls and of the answers after them, and what base is asked."""

import json
from dataclasses import replace

import pytest
from helpers.families import FAMILIES, make_tokenizer
from helpers.learning import encode_example

from opdcl.config.workflow import Workflow
from opdcl.data.chat import encode_prompt
from opdcl.data.formats import check_row
from opdcl.errors import UsageError
from opdcl.pipeline.job import Job
from opdcl.rundir.layout import RunDir

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "rain",
            "description": "Is it raining?",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": '{"city": "Bergen"}'}}
ASKED = {"role": "user", "content": "Bergen?"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "yes"}
MESSAGES = [ASKED, CALLS, RESULT, {"role": "assistant", "content": "Rain."}]
ROW = {"tools": TOOLS, "messages": MESSAGES}

QWEN_CALL = '<tool_call>\n{"name": "rain", "arguments": {"city": "Bergen"}}\n</tool_call><|im_end|>'
QWEN_ASKED = "<|im_start|>user\nBergen?<|im_end|>\n<|im_start|>assistant\n"
QWEN_RESULT = "\n<|im_start|>user\n<tool_response>\nyes\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"


def row(**changes):
    return check_row({**ROW, **changes}, "r:1")


def bracketed(tokenizer, encoded):
    """Return the text of a sequence, with what is learned between ⟦ and ⟧."""
    text, before = "", 0
    for i, learned in zip(encoded.ids, encoded.learned, strict=True):
        text += "⟦" * (learned > before) + "⟧" * (learned < before) + tokenizer.decode([i])
        before = learned
    return text + "⟧" * before


def test_qwen3_learns_the_call_and_the_answer_after_the_result():
    """Its template drops the empty thought before a call once the result is there: the call stands alone."""
    tokenizer = make_tokenizer(FAMILIES["qwen3"])
    whole, call = (bracketed(tokenizer, e) for e in encode_example(row(), tokenizer, 900))
    tools, _, after = whole.partition("<|im_end|>\n")
    assert json.dumps(TOOLS[0]) in tools
    assert after == f"{QWEN_ASKED}{QWEN_CALL}{QWEN_RESULT}{NO_THOUGHT}⟦Rain.<|im_end|>⟧"
    assert call == f"{tools}<|im_end|>\n{QWEN_ASKED}{NO_THOUGHT}⟦{QWEN_CALL}⟧"


def test_qwen3_learns_a_call_with_its_thought_in_place():
    tokenizer = make_tokenizer(FAMILIES["qwen3"])
    thinking = [ASKED, {**CALLS, "reasoning_content": "Look."}, RESULT]
    thinking += [{**MESSAGES[3], "reasoning_content": "So."}]
    taught = row(messages=thinking, chat_template_kwargs={"enable_thinking": True})
    (whole,) = (bracketed(tokenizer, e) for e in encode_example(taught, tokenizer, 900))
    assert whole.endswith(
        f"{QWEN_ASKED}⟦<think>\nLook.\n</think>\n\n{QWEN_CALL}⟧{QWEN_RESULT}"
        "⟦<think>\nSo.\n</think>\n\nRain.<|im_end|>⟧"
    )


def test_gpt_oss_learns_both_in_their_channels():
    tokenizer = make_tokenizer(FAMILIES["gpt-oss"])
    (whole,) = (bracketed(tokenizer, e) for e in encode_example(row(), tokenizer, 5000))
    assert whole.endswith(
        "<|start|>user<|message|>Bergen?<|end|>"
        "<|start|>assistant⟦ to=functions.rain<|channel|>commentary json<|message|>"
        '{"city": "Bergen"}<|call|>⟧'
        '<|start|>functions.rain to=assistant<|channel|>commentary<|message|>"yes"<|end|>'
        "<|start|>assistant⟦<|channel|>final<|message|>Rain.<|return|>⟧"
    )


@pytest.mark.parametrize("family", ["qwen3", "llama3", "gpt-oss"])
def test_base_is_asked_for_the_call_with_the_tools_that_training_shows(family):
    """And for the answer with the call and its result."""
    tokenizer = make_tokenizer(FAMILIES[family])
    whole, *apart = encode_example(row(), tokenizer, 5000)
    call = (apart or [whole])[0]
    asked = encode_prompt(row(messages=[ASKED]), tokenizer, 5000)
    assert call.ids[: len(asked)] == asked
    assert call.learned[: len(asked) + 1] == [0] * len(asked) + [1]
    answered = encode_prompt(row(), tokenizer, 5000)
    assert whole.ids[: len(answered)] == answered
    assert whole.learned[len(answered)] == 1
    assert encode_prompt(replace(row(messages=[ASKED]), tools=None), tokenizer, 5000) != asked


def test_recovery_asks_for_each_call_and_for_the_answer_after_the_result(tmp_path):
    again = [*MESSAGES[:3], {**CALLS, "tool_calls": [CALL]}, *MESSAGES[2:]]
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, "messages": again}))
    path = str(tmp_path / "rows.jsonl")
    workflow = Workflow.model_validate({"recover": {"general": [path], "domain": path}})
    recovery = Job(workflow, RunDir(tmp_path)).recovery
    tokenizer = make_tokenizer(FAMILIES["qwen3"])
    endings = [QWEN_ASKED, QWEN_CALL + QWEN_RESULT, QWEN_CALL + QWEN_RESULT]
    for stream in ("general", "domain"):
        asked = [tokenizer.decode(encode_prompt(r, tokenizer, 5000)) for r in recovery.rows[stream]]
        assert len(asked) == 3
        for prompt, ending in zip(asked, endings, strict=True):
            assert json.dumps(TOOLS[0]) in prompt
            assert prompt.endswith(ending + NO_THOUGHT)


def test_a_row_may_end_with_a_call():
    tokenizer = make_tokenizer(FAMILIES["qwen3"])
    (only,) = encode_example(row(messages=[ASKED, CALLS]), tokenizer, 900)
    assert bracketed(tokenizer, only).endswith(f"{NO_THOUGHT}⟦{QWEN_CALL}⟧")


@pytest.mark.parametrize(("changes", "lost"), [({}, "tools"), ({"tools": None}, "tool_calls")])
def test_a_template_that_leaves_out_tools_or_calls_is_refused(changes, lost, loaded):
    taught = row(**changes)
    for encode in (encode_example, encode_prompt):
        with pytest.raises(UsageError, match=f"r:1: the chat template leaves out {lost}"):
            encode(taught, loaded.tokenizer, 900)


@pytest.mark.parametrize("field", ["input", "parameters"])
def test_arguments_that_stand_elsewhere_are_missed(field):
    calls = [{"id": "1", "function": {"name": "rain", field: {"hours": 3}}}]
    taught = row(messages=[ASKED, {**CALLS, "tool_calls": calls}])
    with pytest.raises(UsageError, match="leaves out tool_calls of message 2"):
        encode_example(taught, make_tokenizer(FAMILIES["qwen3"]), 900)
