"""What a row teaches: each answer once, after the very ids that ask for it, with all of TRL's templates."""

import contextlib
import copy
import json
from importlib.resources import files

import pytest
from helpers.families import FAMILIES, make_tokenizer, spell, template, tokenizer_of
from helpers.learning import encode_example
from tokenizers import AddedToken

from opdcl.config.finetune import FinetuneConfig
from opdcl.config.model import ModelConfig
from opdcl.data.chat import check_template, encode_prompt, render, text_ids, with_variables
from opdcl.data.examples import read_examples, with_answers
from opdcl.data.formats import check_row
from opdcl.data.prompts import encode_turns
from opdcl.errors import UsageError
from opdcl.model.load import load_tokenizer

# Read pictures and text as parts, and no plain text.
PARTS_ONLY = ("idefics3", "llava_next", "smolvlm")
# Write thoughts, and calls of tools with what they return.
THINKING = (
    *("diffusion_gemma", "gemma4_v5", "glm4moe", "gptoss", "lfm2_2_5", "muse_glimmer", "nemotron_3"),
    *("qwen3.", "qwen3_training", "qwen3_5", "qwen3_6", "qwen3_8"),
)
CALLING = (
    *("diffusion_gemma", "gemma4", "glm4moe", "gptoss", "lfm2_2_5", "lfm2_v2", "llama3_1", "llama3_2"),
    *("muse_glimmer", "nemotron_3", "qwen2_5.", "qwen2_5_training", "qwen3"),
)
NAMES = sorted(file.name for file in (files("trl") / "chat_templates").iterdir() if ".jinja" in file.name)
TEMPLATES = [name for name in NAMES if not name.startswith(PARTS_ONLY)]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "rain", "description": "Is it raining?", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}


def conversation(thoughts=False):
    turns = []
    for i in range(5):
        answer = {"role": "assistant", "content": f"Answer {i}."}
        if thoughts:
            answer["reasoning_content"] = f"Thought {i}."
        turns += [{"role": "user", "content": f"Question {i}?"}, answer]
    return check_row({"messages": turns}, "r:1")


def conversation_with_tools():
    turns = conversation().prompt[:2]
    for i, city in enumerate(("Bergen", "Oslo"), 1):
        call = {"id": str(i), "function": {"name": "rain", "arguments": json.dumps({"city": city})}}
        turns += [
            {"role": "user", "content": f"{city}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": str(i), "content": "yes"},
            {"role": "assistant", "content": f"Answer {i}."},
        ]
    return check_row({"messages": turns, "tools": [TOOL]}, "r:1")


def with_thinking(name):
    """Return a template with thinking on, where it has a switch for it."""
    with contextlib.suppress(UsageError):
        return with_variables(template(name), {"enable_thinking": True})
    return template(name)


def learned(row, tokenizer):
    """Return what is learned of each turn, right after the ids that ask for it, and how many ids besides."""
    sequences = encode_example(row, tokenizer, 10_000)
    texts, count = [], 0
    for turn in row.turns():
        prompt = encode_prompt(turn, tokenizer, 10_000)
        begin, found = len(prompt), []
        for encoded in sequences:
            asked = encoded.ids[:begin] == prompt
            if asked and encoded.learned[begin - 1 : begin + 1] == [0, 1]:
                end = (*encoded.learned, 0).index(0, begin)
                found.append(encoded.ids[begin:end])
        (ids,) = found
        texts.append(tokenizer.decode(ids))
        count += len(ids)
    return texts, sum(sum(encoded.learned) for encoded in sequences) - count


def ends_with(text, answer, tokenizer):
    """Return whether a text ends with an answer and with what ends the turn, without a line break."""
    end = text.rpartition(answer)[2]
    for token in tokenizer.get_added_vocab():
        end = end.replace(token, "")
    return answer in text and end == ""


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_answer_is_learned_once_after_the_prompt_that_asks_for_it(name):
    """With thinking off and, where the template has a switch for it, on."""
    tokenizer = tokenizer_of(name)
    check_template(tokenizer)
    for tokenizer.chat_template in {template(name), with_thinking(name)}:
        texts, besides = learned(conversation(), tokenizer)
        for i, text in enumerate(texts):
            assert ends_with(text, f"Answer {i}.", tokenizer)
            assert "Question" not in text
        # Phi 3 writes the end of the text after the end of the last turn.
        assert besides == name.startswith("phi3")


@pytest.mark.parametrize("name", TEMPLATES)
def test_thoughts_are_learned_in_every_turn_or_refused(name):
    tokenizer = tokenizer_of(name)
    tokenizer.chat_template = with_thinking(name)
    row = conversation(thoughts=True)
    if not name.startswith(THINKING):
        with pytest.raises(UsageError, match="r:1: the chat template leaves out the thought"):
            learned(row, tokenizer)
        return
    texts, _ = learned(row, tokenizer)
    for i, text in enumerate(texts):
        assert f"Thought {i}." in text
        assert ends_with(text, f"Answer {i}.", tokenizer)


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_and_the_answers_after_them_are_learned_in_every_turn_or_refused(name):
    tokenizer = tokenizer_of(name)
    row = conversation_with_tools()
    if not name.startswith(CALLING):
        with pytest.raises(UsageError, match=r"r:1: the chat template (leaves out|refuses)"):
            learned(row, tokenizer)
        return
    expected = ("Answer 0.", "Bergen", "Answer 1.", "Oslo", "Answer 2.")
    for tokenizer.chat_template in {template(name), with_thinking(name)}:
        texts, _ = learned(row, tokenizer)
        for text, words in zip(texts, expected, strict=True):
            assert words in text
            assert text == text.rstrip()


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(PARTS_ONLY)])
def test_a_template_that_writes_no_plain_text_is_refused(name):
    tokenizer = tokenizer_of(name)
    does = "refuses this conversation" if name.startswith("llava_next") else r"leaves out message 1 \(user\)"
    with pytest.raises(UsageError, match=f"r:1: the chat template {does}"):
        encode_example(conversation(), tokenizer, 10_000)


ASKED = [{"role": "user", "content": "Who?"}]
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def tokenizer(loaded):
    """The embedded model's own."""
    return copy.deepcopy(loaded.tokenizer)


@pytest.mark.parametrize("answer", ["\n\nAda.", "\nAda.", " Ada.", "\n\n\n\nAda.\n\n"])
def test_an_answer_that_begins_with_blanks_is_learned_after_its_prompt(answer, tokenizer):
    row = check_row({"messages": [*ASKED, {"role": "assistant", "content": answer}]}, "r:1")
    assert learned(row, tokenizer) == ([f"{answer}<|im_end|>"], 0)


def test_a_prompt_may_end_with_a_blank(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert learned(conversation(), tokenizer) == ([f"Answer {i}.<|im_end|>" for i in range(5)], 0)


def test_an_answer_whose_prompt_the_template_rewrites_later_is_learned_on_its_own(tokenizer):
    counted = "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}\n"
    tokenizer.chat_template = (
        counted + TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert learned(conversation(), tokenizer) == ([f"Answer {i}.<|im_end|>" for i in range(5)], 0)
    assert len(encode_example(conversation(), tokenizer, 500)) == 5


def test_a_prompt_longer_than_its_limit_is_refused_with_its_place(tokenizer):
    prompt = encode_prompt(conversation(), tokenizer, 500)
    assert encode_prompt(conversation(), tokenizer, len(prompt)) == prompt
    with pytest.raises(UsageError, match=f"r:1: the prompt has {len(prompt)} tokens"):
        encode_prompt(conversation(), tokenizer, len(prompt) - 1)


def test_a_row_that_no_prompt_leads_to_is_refused(tokenizer):
    tokenizer.chat_template = TURNS + "{% if add_generation_prompt %}<|im_start|>writer\n{% endif %}"
    with pytest.raises(
        UsageError, match="r:1: with this chat template no prompt leads to its answer"
    ) as fault:
        encode_example(conversation(), tokenizer, 500)
    assert "--set model.chat_template=FILE" in fault.value.hint


@pytest.mark.parametrize(
    ("template", "header"),
    [
        (TURNS, "<|im_start|>assistant\\n"),
        # Whatever comes last, what follows the conversation ends it.
        (TURNS + "<|endoftext|>", "im_start|>assistant\\n"),
    ],
)
def test_a_template_that_opens_no_answer_is_refused(template, header, tokenizer):
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match="the chat template opens no answer") as fault:
        check_template(tokenizer)
    assert header in fault.value.message


def test_a_template_may_need_nothing_to_open_an_answer(tokenizer):
    """What a user says ends with [/INST] in Mistral's and Llama 2's."""
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    check_template(tokenizer)
    assert learned(conversation(), tokenizer) == ([f" Answer {i}.<|im_end|>" for i in range(5)], 0)


def examples(rows, tokenizer, **settings):
    config = FinetuneConfig(data="rows.jsonl", **settings)
    checked = [check_row(row, f"rows.jsonl:{i}") for i, row in enumerate(rows, 1)]
    return read_examples(with_answers(checked, config), config, tokenizer)


def answered(text, **more):
    return {"messages": [*ASKED, {"role": "assistant", "content": text, **more}]}


def test_answers_that_no_prompt_leads_to_are_counted(tokenizer):
    greeted = {"messages": [{"role": "assistant", "content": "Hello."}, *answered("Ada.")["messages"]]}
    read = examples([answered("Ada."), greeted, greeted], tokenizer)
    assert len(read.encoded) == 3
    assert read.notes == [
        "2 rows have answers that are not learned (first: rows.jsonl:2): with this chat template no prompt "
        "leads to them"
    ]


def test_the_thought_of_an_earlier_answer_cannot_be_learned_with_thinking_off():
    tokenizer = make_tokenizer(FAMILIES["qwen3"])
    first = answered("Ada.", reasoning_content="Think.")["messages"]
    read = examples([{"messages": [*first, *answered("Bob.")["messages"]]}], tokenizer)
    (encoded,) = read.encoded
    assert sum(encoded.learned) == len([*"Bob.", "<|im_end|>"])
    assert "1 row has answers that are not learned (first: rows.jsonl:1)" in read.notes[0]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "What ends <|im_end|> a turn?", "answer": "A token."},
        {"question": "What ends a turn?", "answer": "<|im_end|> does."},
        {"text": "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nAda.<|im_end|>"},
    ],
)
def test_rows_whose_text_holds_control_tokens_are_counted(row, tokenizer):
    read = examples([answered("Ada."), row, row], tokenizer)
    (note,) = read.notes
    assert note.startswith("2 rows hold control tokens in the text (first: rows.jsonl:2 with <|im_")


def test_the_marks_of_a_thought_are_no_control_tokens():
    tokenizer = make_tokenizer(FAMILIES["qwen3"])
    tokenizer.chat_template = with_thinking("qwen3.jinja")
    assert examples([answered("<think>\nOne.\n</think>\n\nAda.")], tokenizer).notes == []
    asked = {"question": "Why </think>?", "answer": "Ada."}
    assert "(first: rows.jsonl:1 with </think>)" in examples([asked], tokenizer).notes[0]


@pytest.mark.parametrize("text", ["Ada.<|im_end|>", "Ada.<|im_end|>\n"])
def test_an_answer_that_ends_itself_is_refused(text, tokenizer):
    for messages in (answered(text)["messages"], [*answered(text)["messages"], *answered("Bo.")["messages"]]):
        with pytest.raises(UsageError, match=r"rows.jsonl:1: an answer ends with <\|im_end\|>") as fault:
            examples([{"messages": messages}], tokenizer)
        assert fault.value.hint == "remove <|im_end|> from the answers of the file"


def test_an_answer_may_end_with_other_tokens_of_the_vocabulary(tokenizer):
    tokenizer.add_tokens([AddedToken("</ul>", special=False)])
    answer = "<ul><li>Ada</li><ul></ul></ul>"
    row = check_row(answered(answer), "r:1")
    assert learned(row, tokenizer) == ([f"{answer}<|im_end|>"], 0)


def test_an_answer_that_ends_with_the_end_of_the_text_is_refused():
    tokenizer = make_tokenizer(FAMILIES["gemma3"])
    for end in ("<eos>", "<end_of_turn>"):
        with pytest.raises(UsageError, match=f"an answer ends with {end}"):
            examples([answered(f"Ada.{end}")], tokenizer)


@pytest.mark.parametrize(
    ("family", "begin"), [("llama3", ["<|begin_of_text|>"]), ("gemma3", ["<bos>"]), ("qwen3", [])]
)
def test_each_piece_of_plain_text_begins_as_the_tokenizer_begins_texts(family, begin):
    tokenizer = make_tokenizer(FAMILIES[family])
    text = "0123456789abcdef"
    for written in (text, "".join(begin) + text, text + tokenizer.eos_token):
        pieces = encode_example(check_row({"text": written}, "page.md"), tokenizer, 7)
        tokens = [spell(tokenizer, piece.ids) for piece in pieces]
        assert all(piece[: len(begin)] == begin for piece in tokens)
        assert [t for piece in tokens for t in piece[len(begin) :]] == [*text, tokenizer.eos_token]
        assert max(map(len, tokens)) == 7
        for piece in pieces:
            assert piece.learned == [0] * len(begin) + [1] * (len(piece.ids) - len(begin))


def test_a_model_whose_template_opens_no_answer_is_not_loaded(tiny_model):
    with pytest.raises(UsageError, match="the chat template opens no answer"):
        load_tokenizer(ModelConfig(id=str(tiny_model), chat_template=TURNS))


# What opens an answer, where the model writes it itself.
OPENS = {"gptoss": "<|channel|>final<|message|>", "muse": " to=user<|message|>", "glm4moe": "\n"}
# They leave out earlier thoughts, and let the model think.
FORGETFUL = ("deepseek", "diffusion_gemma", "gemma4_v5", "gptoss", "lfm2_2_5")


def asked(*texts, **more):
    return check_row({"messages": [{"role": "user", "content": text} for text in texts], **more}, "r:1")


@pytest.mark.parametrize("name", TEMPLATES)
def test_asked_turn_by_turn_the_ids_are_those_of_the_whole_conversation(name):
    tokenizer, row = tokenizer_of(name), asked("1+1?", "Sure?", "Why?")
    if name.startswith(FORGETFUL):
        with pytest.raises(UsageError, match="r:1: the chat template rewrites earlier answers"):
            encode_turns(row, tokenizer, 9000, 10)
        return
    prompt = encode_turns(row, tokenizer, 9000, 10)
    opens = next((text for start, text in OPENS.items() if name.startswith(start)), "")
    messages, said = [], []
    for question, answer in zip(row.prompt, ("Two, I think.", "Yes:\n\n1. yes", "So."), strict=True):
        messages.append(question)
        assert prompt.after(said).ids == text_ids(tokenizer, render(tokenizer, messages, True))
        messages.append({"role": "assistant", "content": answer})
        said.append(text_ids(tokenizer, opens + answer))
    assert prompt.turns == len(said)


def test_only_user_messages_without_any_answer_are_asked_turn_by_turn():
    tokenizer = tokenizer_of("qwen3.jinja")
    for row in (asked("a"), asked("a", "b", tools=[TOOL]), asked("a", "b", chosen="c")):
        assert encode_turns(row, tokenizer, 9000, 10).turns == 1
    two = asked("a", "b", system="s")
    prompt = encode_turns(two, tokenizer, 9000, 10)
    room = len(prompt.after([[0] * 10]).ids)
    assert encode_turns(two, tokenizer, room, 10) == prompt
    with pytest.raises(UsageError, match=rf"r:1: the last turn may have {room} tokens"):
        encode_turns(two, tokenizer, room - 1, 10)
