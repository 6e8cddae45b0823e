"""Special tokens of model families: what is learned of a conversation, and what ends an answer."""

import pytest
from helpers.families import FAMILIES, make_tokenizer, save, scripted, spell, written
from helpers.learning import encode_example

from opdcl.config.model import ModelConfig
from opdcl.data.chat import check_turn_end, encode_prompt
from opdcl.data.formats import check_row
from opdcl.model.load import declared_eos_ids, load_tokenizer

MESSAGES = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Four."},
]
ROW = check_row({"messages": MESSAGES}, "r:1")

# The sequences of the conversation, with what is learned between ⟦ and ⟧. Qwen3 puts an empty thought before
# the last answer only, so an earlier one stands apart; gpt-oss ends earlier answers otherwise.
QWEN3_ASKED = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
LEARNED = {
    "qwen3": (
        QWEN3_ASKED + "Two.<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦Four.<|im_end|>⟧",
        QWEN3_ASKED + "<think>\n\n</think>\n\n⟦Two.<|im_end|>⟧",
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 1 May 2025\n\nAdd.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Two.<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Four.<|eot_id|>⟧",
    ),
    "gemma3": (
        "<bos><start_of_turn>user\nAdd.\n\n1+1?<end_of_turn>\n<start_of_turn>model\n⟦Two.<end_of_turn>⟧\n"
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n⟦Four.<end_of_turn>⟧",
    ),
    "gpt-oss": (
        "<|start|>developer<|message|># Instructions\n\nAdd.\n\n<|end|><|start|>user<|message|>1+1?<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Two.⟧<|end|><|start|>user<|message|>2+2?<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Four.<|return|>⟧",
    ),
}
VARIABLES = {"llama3": {"date_string": "1 May 2025"}}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = save(FAMILIES[request.param], tmp_path_factory.mktemp("model"))
    config = ModelConfig(id=str(folder), chat_template_kwargs=VARIABLES.get(request.param, {}))
    return request.param, config, load_tokenizer(config)


def bracketed(tokenizer, encoded):
    """Return the tokens of a row with a bracket where learning begins and ends."""
    pieces, before = [], 0
    for token, learned in zip(spell(tokenizer, encoded.ids), encoded.learned, strict=True):
        pieces += ["⟦"] * (learned > before) + ["⟧"] * (learned < before) + [token]
        before = learned
    return pieces + ["⟧"] * before


def test_each_answer_is_learned_with_the_token_that_ends_it(family):
    name, _, tokenizer = family
    sequences = encode_example(ROW, tokenizer, 500)
    texts = []
    for encoded in sequences:
        tokens = bracketed(tokenizer, encoded)
        if name == "gpt-oss":  # its system message holds the date of today
            tokens = tokens[tokens.index("<|end|>") + 1 :]
        texts.append("".join(tokens))
    assert tuple(texts) == LEARNED[name]
    prompt = encode_prompt(ROW, tokenizer, 500)
    assert sequences[0].ids[: len(prompt)] == prompt
    assert all(sequences[0].learned[len(prompt) :])


def test_every_token_that_ends_an_answer_stops_sampling(family):
    name, config, tokenizer = family
    ids = encode_prompt(ROW, tokenizer, 500)
    for end in FAMILIES[name].ends:
        backbone = scripted(tokenizer, FAMILIES[name], ids, f"Four.{end}\nmore")
        assert backbone.eos_ids == declared_eos_ids(config, tokenizer)
        rollout = written(backbone, ids, 9)
        assert spell(tokenizer, rollout.completion_ids) == [*"Four.", end]
        assert rollout.finished
    check_turn_end(tokenizer, backbone.eos_ids)


def test_the_end_of_a_thought_does_not_stop_gpt_oss():
    tokenizer = make_tokenizer(FAMILIES["gpt-oss"])
    ids = encode_prompt(ROW, tokenizer, 500)
    text = "<|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>4.<|return|>"
    backbone = scripted(tokenizer, FAMILIES["gpt-oss"], ids, text + "<|start|>")
    rollout = written(backbone, ids)
    assert "".join(spell(tokenizer, rollout.completion_ids)) == text
