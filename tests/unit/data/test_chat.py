"""Rows as token ids: what is learned, how plain text ends, and one way to render prompts."""

import copy

import pytest

from opdcl.data.chat import encode_prompt, render, user_turn
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


# Template -> what stands before a user's first words, and what ends them.
FAMILIES = {
    "ChatML": (TURNS + ASK, "<|im_start|>user\n", "<|im_end|>"),
    "ChatML with a system turn": (
        "<|im_start|>system\nBe brief.<|im_end|>\n" + TURNS + ASK,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>",
    ),
    "Llama 3": (
        "<|begin|>{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content }}<|eot|>"
        "{% endfor %}",
        "<|begin|><|header|>user<|/header|>\n\n",
        "<|eot|>",
    ),
    "Gemma": (
        "<|begin|>{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<|begin|><start_of_turn>user\n",
        "<end_of_turn>",
    ),
    "Mistral": ("<|begin|>[INST] {{ messages[0].content }} [/INST]", "<|begin|>[INST]", "[/INST]"),
    "DeepSeek": ("<|begin|><|User|>{{ messages[0].content }}<|Bot|>", "<|begin|><|User|>", "<|Bot|>"),
}
MARKUP = (
    "<|begin|> <|header|> <|/header|> <|eot|> <start_of_turn> <end_of_turn> [INST] [/INST] <|User|> <|Bot|>"
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_user_turn_is_found_in_the_templates_of_several_families(family, tokenizer):
    template, opening, end = FAMILIES[family]
    tokenizer.add_tokens([*MARKUP.split(), "   "], special_tokens=False)
    tokenizer.bos_token = "<|begin|>"
    tokenizer.chat_template = template
    turn = user_turn(tokenizer)
    assert tokenizer.decode(turn.opening) == opening
    assert tokenizer.decode([turn.end]) == end
    assert turn.end in turn.markup
    assert tokenizer.convert_tokens_to_ids("   ") not in turn.markup
    # As a prompt that the user has written is encoded.
    asked = encode_prompt(Row([{"role": "user", "content": "Who?"}], None, None, "here:1"), tokenizer, 500)
    assert asked[: len(turn.opening)] == turn.opening


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}<|im_end|>",  # nothing before it
        "<|begin|>{{ messages[0].content }}<|im_end|>",  # any text begins so
        "### User: {{ messages[0].content }}\n### Assistant:",  # nothing but text behind it
        "<|im_start|>user\n{{ messages[0].content | upper }}<|im_end|>",  # other words
    ],
)
def test_a_template_in_which_no_user_turn_can_be_written_is_refused(template, tokenizer):
    tokenizer.add_tokens(["<|begin|>"], special_tokens=True)
    tokenizer.bos_token = "<|begin|>"
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match="no markup around a user turn") as refused:
        user_turn(tokenizer)
    assert "--prompts everyday" in refused.value.hint
