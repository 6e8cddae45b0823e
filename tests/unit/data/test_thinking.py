"""Thinking with Qwen3's chat template: what training, sampling and evaluation see, token by token."""

import pytest
from helpers.families import FAMILIES, make_tokenizer, save, scripted, spell, template, written
from helpers.learning import encode_example
from helpers.recovering import Silent
from lm_eval.api.instance import Instance

from opdcl.config.evaluate import EvalConfig
from opdcl.config.load import load
from opdcl.config.model import ModelConfig
from opdcl.data.chat import answer_text, encode_prompt, render, render_request
from opdcl.data.formats import check_row
from opdcl.errors import UsageError
from opdcl.measure.evaluate import Asking, write_answers
from opdcl.model.load import load_tokenizer
from opdcl.rundir.layout import RunDir

QWEN3, GPT_OSS = FAMILIES["qwen3"], FAMILIES["gpt-oss"]
ASKED = ["<|im_start|>", *"user\n2+2?", "<|im_end|>", "\n", "<|im_start|>", *"assistant\n"]
NO_THOUGHT = ["<think>", "\n\n", "</think>", "\n\n"]
THOUGHT = ["<think>", "\n", *"Add.", "\n", "</think>", "\n\n"]
ANSWER = ["4", ".", "<|im_end|>"]

QUESTION = {"role": "user", "content": "2+2?"}
THINKING = {"enable_thinking": True}


def row(answer="4.", **more):
    own = {key: more.pop(key) for key in ("reasoning_content", "thinking") if key in more}
    return check_row({"messages": [QUESTION, {"role": "assistant", "content": answer, **own}], **more}, "r:1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(QWEN3, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module", params=[False, True], ids=["off", "on"])
def case(request, folder):
    """Return the tokenizer as a run loads it, the tokens of the prompt, and those that the row teaches."""
    tokenizer = load_tokenizer(
        ModelConfig(id=str(folder), chat_template_kwargs=THINKING if request.param else {})
    )
    if request.param:
        return tokenizer, row(reasoning_content="Add."), ASKED, [*THOUGHT, *ANSWER]
    return tokenizer, row(), [*ASKED, *NO_THOUGHT], ANSWER


def test_training_learns_what_the_prompt_leads_to(case):
    tokenizer, taught, prompt, learned = case
    (encoded,) = encode_example(taught, tokenizer, 500)
    assert spell(tokenizer, encoded.ids) == [*prompt, *learned]
    assert encoded.learned == [0] * len(prompt) + [1] * len(learned)


def test_sampling_starts_where_training_does_and_stops_after_the_answer(case):
    tokenizer, taught, prompt, learned = case
    ids = encode_prompt(taught, tokenizer, 500)
    assert spell(tokenizer, ids) == prompt
    backbone = scripted(tokenizer, QWEN3, ids, "".join(learned) + "\n<|im_start|>user")
    rollout = written(backbone, ids)
    assert spell(tokenizer, rollout.completion_ids) == learned
    assert rollout.finished


def evaluated(tokenizer, text, tmp_path, tokens=500, until=(), **settings):
    """Return the prompt that an evaluation shows, and the answer that its scorer sees."""
    ids = encode_prompt(row(), tokenizer, 500)
    backbone = scripted(tokenizer, QWEN3, ids, text)
    shown = render_request(tokenizer, [QUESTION])
    options = {"until": list(until), "max_gen_toks": min(tokens, backbone.context_length - len(ids))}
    config, run = EvalConfig(batch_size=2, **settings), RunDir(tmp_path)
    asking = Asking(config, backbone, run, "base", "suite", Silent())
    (answer,) = write_answers(asking, [Instance("generate_until", {}, (shown, options), 0)])
    return tokenizer(shown, add_special_tokens=False)["input_ids"], answer


def test_evaluation_shows_the_same_prompt_and_scores_the_answer_alone(case, tmp_path):
    tokenizer, _, prompt, learned = case
    shown, answer = evaluated(tokenizer, "".join(learned), tmp_path)
    assert spell(tokenizer, shown) == prompt
    assert (answer["response"], answer["tokens"], answer["ended"]) == ("4.", len(learned), True)


@pytest.mark.parametrize(
    ("answer", "limits", "scored", "ended"),
    [
        ("4.", {"tokens": 6}, "", False),  # a thought that never ends is no answer
        ("4.", {"tokens": 6, "thought_tokens": len(THOUGHT)}, "4.", True),
        ("4.\n\nQ:", {"until": ["\n\n"]}, "4.", True),  # a stop string in a thought does not cut
    ],
)
def test_a_thought_needs_room_and_is_not_cut(answer, limits, scored, ended, folder, tmp_path):
    tokenizer = load_tokenizer(ModelConfig(id=str(folder), chat_template_kwargs=THINKING))
    _, found = evaluated(tokenizer, "".join([*THOUGHT, answer, "<|im_end|>"]), tmp_path, **limits)
    assert (found["response"], found["ended"]) == (scored, ended)


FINAL = "<|channel|>final<|message|>4.<|return|>"
ANALYSIS = "<|channel|>analysis<|message|>2+2"


@pytest.mark.parametrize(
    ("family", "opened", "text", "answer"),
    [
        (QWEN3, "", "4. See </think>.", "4. See </think>."),
        (QWEN3, "", "\n<think>2+2</think>\n\n4.<|im_end|>", "4."),
        (QWEN3, "", "2+2\n</think>\n\n4.<|im_end|>", "4."),
        (QWEN3, "", "<think></think>a</think>b", "a</think>b"),
        (QWEN3, "", "<think>2+2", ""),
        (QWEN3, "<think>\n", "2+2\n</think>\n\n4.<|im_end|>", "4."),
        (QWEN3, "<think>\n", "2+2", ""),
        (QWEN3, "<think>\n\n</think>\n\n", "4.<|im_end|>", "4."),
        (GPT_OSS, "", f"{ANALYSIS}<|end|><|start|>assistant{FINAL}", "4."),
        (GPT_OSS, "", FINAL, "4."),
        (GPT_OSS, "", ANALYSIS, ""),
        (GPT_OSS, "", "<|channel|>commentary to=functions.add<|message|>{}<|call|>", ""),
    ],
)
def test_the_thought_is_taken_off(family, opened, text, answer):
    tokenizer = make_tokenizer(family)
    asks = "<|im_start|>assistant\n" if family is QWEN3 else "<|start|>assistant"
    prompt, completion = (tokenizer(part)["input_ids"] for part in (asks + opened, text))
    assert answer_text(tokenizer, prompt, completion) == answer


@pytest.mark.parametrize("taught", [row(thinking="Add."), row("<think>\nAdd.\n</think>\n\n4.")])
def test_a_thought_is_learned_wherever_a_row_holds_it(taught, folder):
    tokenizer = load_tokenizer(ModelConfig(id=str(folder), chat_template_kwargs=THINKING))
    assert encode_example(taught, tokenizer, 500) == encode_example(
        row(reasoning_content="Add."), tokenizer, 500
    )


def test_the_thought_of_gpt_oss_is_learned_with_its_channel():
    tokenizer = make_tokenizer(GPT_OSS)
    (encoded,) = encode_example(row(reasoning_content="Add."), tokenizer, 500)
    pairs = zip(encoded.ids, encoded.learned, strict=True)
    assert tokenizer.decode([i for i, learned in pairs if learned]) == (
        "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant<|channel|>final<|message|>4.<|return|>"
    )


def test_a_row_sets_variables_of_its_own(folder):
    tokenizer = load_tokenizer(ModelConfig(id=str(folder), chat_template_kwargs=THINKING))
    mixed = row(chat_template_kwargs={"enable_thinking": False})
    (encoded,) = encode_example(mixed, tokenizer, 500)
    assert spell(tokenizer, encode_prompt(mixed, tokenizer, 500)) == [*ASKED, *NO_THOUGHT]
    assert sum(encoded.learned) == len(ANSWER)
    with pytest.raises(UsageError, match="r:1: the chat template has no variable 'thinking' to set"):
        encode_prompt(row(chat_template_kwargs={"thinking": True}), tokenizer, 500)


@pytest.mark.parametrize("taught", [row(reasoning_content="Add."), row("<think>\nAdd.\n</think>\n\n4.")])
def test_a_thought_that_could_never_be_sampled_is_refused(taught, folder):
    tokenizer = load_tokenizer(ModelConfig(id=str(folder)))
    with pytest.raises(
        UsageError, match="r:1: with this chat template no prompt leads to its answer"
    ) as fault:
        encode_example(taught, tokenizer, 500)
    assert "enable_thinking=true" in fault.value.hint


def test_what_is_set_holds_for_those_who_load_the_saved_tokenizer(folder, tmp_path):
    """In other programs as a default, which they can still override."""
    kwargs = {"enable_thinking": False}
    tokenizer = load_tokenizer(ModelConfig(id=str(folder), chat_template_kwargs=kwargs))
    tokenizer.save_pretrained(tmp_path)
    save(QWEN3, tmp_path / "whole")
    (tmp_path / "chat_template.jinja").replace(tmp_path / "whole" / "chat_template.jinja")
    saved = load_tokenizer(ModelConfig(id=str(tmp_path / "whole")))
    options = {"tokenize": False, "add_generation_prompt": True}
    assert saved.apply_chat_template([QUESTION], **options) == "".join([*ASKED, *NO_THOUGHT])
    assert saved.apply_chat_template([QUESTION], enable_thinking=True, **options) == "".join(ASKED)
    assert render(saved, [QUESTION], True) == "".join([*ASKED, *NO_THOUGHT])


def test_a_template_of_ones_own_takes_the_place_of_the_models(folder, tmp_path):
    (tmp_path / "mine.jinja").write_text(template("gemma3.jinja"))
    by_file = load([], [f"model.id={folder}", f"model.chat_template={tmp_path / 'mine.jinja'}"])[0].model
    assert by_file == ModelConfig(id=str(folder), chat_template=template("gemma3.jinja"))
    assert render(load_tokenizer(by_file), [QUESTION], True) == (
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n"
    )


def test_a_variable_that_the_template_does_not_have_is_refused(folder):
    for name in ("think", "messages"):
        with pytest.raises(UsageError, match=f"has no variable '{name}' to set"):
            load_tokenizer(ModelConfig(id=str(folder), chat_template_kwargs={name: True}))


def test_thinking_is_off_whatever_the_templates_own_default(folder):
    own = (
        "{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}"
        "{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    for kwargs, shown in (({}, "False"), (THINKING, "True")):
        config = ModelConfig(id=str(folder), chat_template=own, chat_template_kwargs=kwargs)
        assert render(load_tokenizer(config), [QUESTION], True) == f"{shown}2+2?"


def test_a_malformed_template_is_a_users_error(folder):
    tokenizer = load_tokenizer(ModelConfig(id=str(folder), chat_template="{% for %}"))
    with pytest.raises(UsageError, match="r:1: the chat template refuses this conversation"):
        encode_prompt(row(), tokenizer, 500)
