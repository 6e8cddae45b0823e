"""Rows as token ids: what is learned, how plain text ends, and one way to render prompts."""

import copy

import pytest

from opdcl.data.chat import encode_prompt, render
from opdcl.data.learned import encode_example
from opdcl.data.rows import Row
from opdcl.errors import UsageError

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# As templates do that show how many questions there were, or drop the thoughts of earlier answers.
COUNTS_QUESTIONS = "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}\n" + TURNS + ASK
THINKS = "{% if enable_thinking is not defined or enable_thinking %}Think!\n{% endif %}" + TURNS + ASK

CONVERSATION = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First"},
    {"role": "user", "content": "Two?"},
]


@pytest.fixture
def tokenizer(loaded):
    return copy.deepcopy(loaded.tokenizer)


def learned(row, tokenizer):
    """Return what each sequence of a row teaches."""
    texts = []
    for encoded in encode_example(row, tokenizer, 500):
        pairs = zip(encoded.input_ids, encoded.completion_mask, strict=True)
        texts.append(tokenizer.decode([i for i, is_learned in pairs if is_learned]))
    return texts


def test_plain_text_is_learned_whole_and_ends_the_sequence(tokenizer):
    text = "The station was built on the hill in 1931, and the lift came later."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = encode_example(Row([], None, text, "here:1"), tokenizer, 6)
    assert [i for piece in pieces for i in piece.input_ids] == [*ids, tokenizer.eos_token_id]
    assert max(len(piece.input_ids) for piece in pieces) == 6
    assert all(piece.completion_mask == [1] * len(piece.input_ids) for piece in pieces)


def test_every_answer_of_a_conversation_is_learned(tokenizer):
    row = Row(CONVERSATION, "Second", None, "here:1")
    assert learned(row, tokenizer) == ["First<|im_end|>Second<|im_end|>"]


def test_an_answer_whose_prompt_the_template_rewrites_later_is_learned_on_its_own(tokenizer):
    tokenizer.chat_template = COUNTS_QUESTIONS
    row = Row(CONVERSATION, "Second", None, "here:1")
    assert learned(row, tokenizer) == ["Second<|im_end|>", "First<|im_end|>"]


def test_a_template_that_can_think_is_told_not_to(tokenizer):
    tokenizer.chat_template = THINKS
    row = Row(CONVERSATION, None, None, "here:1")
    assert "Think!" not in tokenizer.decode(encode_prompt(row, tokenizer, 500))
    assert "Think!" not in render(tokenizer, CONVERSATION, True, tokenize=False)


def test_a_prompt_longer_than_its_limit_is_refused_with_its_place(tokenizer):
    row = Row(CONVERSATION, "Second", None, "here:1")
    prompt = encode_prompt(row, tokenizer, 500)
    assert encode_prompt(row, tokenizer, len(prompt)) == prompt
    with pytest.raises(UsageError, match=f"here:1: the prompt has {len(prompt)} tokens"):
        encode_prompt(row, tokenizer, len(prompt) - 1)
