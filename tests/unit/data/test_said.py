"""Whatever messages say is in what a chat template writes, or the row is refused with the message's role.

Shown for all templates that TRL and transformers bring, role by role and position by position.
"""

import ast
import functools
import json
import re
from importlib.resources import files

import pytest
from helpers.command import opdcl
from helpers.families import tokenizer_of
from unit.data.test_learned import NAMES, TOOL, with_thinking

from opdcl.data import examples
from opdcl.data.chat import encode_prompt, render_request
from opdcl.data.formats import check_row
from opdcl.errors import UsageError


def in_transformers():
    """Return the chat templates that stand in the code of transformers, by file and line."""
    found = {}
    for file in sorted(files("transformers").joinpath("models").rglob("processing_*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "{%" in text else ():
            value = getattr(node, "value", None)
            if isinstance(node, ast.Constant) and "{%" in str(value) and "in messages" in str(value):
                found[f"{file.name}:{node.lineno}"] = value
    return found


THEIRS = in_transformers()
TEMPLATES = [*NAMES, *THEIRS]
ROLES = ("system", "user", "user twice", "assistant", "assistant twice", "thought")
ROLES += ("text beside a call", "call", "second call", "tool")
POSITIONS = ("first", "middle", "last")

# How a refusal reads: by the template's own words, by the role of the message, or as an answer that no prompt
# leads to.
NAMED = re.compile(
    r"r:1: (the chat template (refuses this conversation|leaves out .*"
    r"(message \d+ \((system|user|assistant|tool)\)|tools))|with this chat template no prompt)"
)


@functools.cache
def tokenizer_for(name, thinking=False):
    if name not in THEIRS:
        tokenizer = tokenizer_of(name)
        tokenizer.chat_template = with_thinking(name) if thinking else tokenizer.chat_template
    else:
        tokenizer = tokenizer_of(NAMES[0])
        tokenizer.chat_template = THEIRS[name]
    return tokenizer


def conversation(role, position):
    """Return a row of three exchanges with a part of this role in one of them, and what its messages say."""
    turns, words = [], []

    def say(role, **more):
        words.append(f"word{len(words)}")
        turns.append({"role": role, "content": words[-1], **more})

    for place in POSITIONS:
        here = place == position
        if here and role == "system":
            say("system")
        say("user")
        if here and role == "user twice":
            say("user")
        if here and role in ("call", "second call", "text beside a call", "tool"):
            cities = ["bergen", "oslo"][: 1 + (role == "second call")]
            calls = []
            for city in cities:
                function = {"name": "rain", "arguments": json.dumps({"city": city})}
                calls.append({"id": f"{city:x<9}", "type": "function", "function": function})
            words.extend(cities)
            if role == "text beside a call":
                say("assistant", tool_calls=calls)
            else:
                turns.append({"role": "assistant", "content": None, "tool_calls": calls})
            for call in calls:
                say("tool", tool_call_id=call["id"])
        say("assistant", **({"reasoning_content": "thinks"} if here and role == "thought" else {}))
        if here and role == "assistant twice":
            say("assistant")
    tools = {"tools": [TOOL]} if any("tool_calls" in turn for turn in turns) else {}
    words += ["thinks"] if role == "thought" else []
    return check_row({"messages": turns, **tools}, "r:1"), words


def outcome(name, role, position):
    """Return whether all that a row says is learned or asked with a template.

    It is kept, refused, or LOST; or else "noted": a fine-tune counts the rows of which it learns a part.
    """
    row, words = conversation(role, position)
    tokenizer = tokenizer_for(name, thinking=role == "thought")
    for encode in (examples.encode_row, encode_prompt):
        try:
            encoded = encode(row, tokenizer, 100_000)
        except UsageError as fault:
            return "refused" if NAMED.match(fault.message) and fault.hint else f"LOST: {fault.message}"
        ids, whole = (encoded, True) if encode is encode_prompt else (encoded.sequences, encoded.whole)
        if not whole:
            return "noted"
        ids = [i for one in ids for i in getattr(one, "ids", [one])]
        written = tokenizer.decode(ids)
        # A prompt has neither the answer, nor thoughts of before, nor needs it.
        needed = words if encode is not encode_prompt else words[: words.index(row.prompt[-1]["content"]) + 1]
        if any(not re.search(rf"{word}(?!\d)", written) for word in needed):
            return "LOST"
    return "kept"


# Those that TRL has patched to mark what the assistant says are one more of a kind each.
PATCHED = [name for name in NAMES if name.endswith("_training.jinja")]
UNPATCHED = [name for name in TEMPLATES if name not in PATCHED]


@pytest.mark.parametrize(
    "names", [UNPATCHED, pytest.param(PATCHED, marks=pytest.mark.nightly)], ids=["own", "patched"]
)
def test_no_template_leaves_out_what_a_message_says_without_a_word(names):
    assert len(TEMPLATES) > 41
    for role in ROLES:
        found = {(name, place): outcome(name, role, place) for name in names for place in POSITIONS}
        assert not [case for case in found.items() if case[1] not in ("kept", "refused", "noted")], role
        assert "kept" in found.values(), role


OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ m.role }}\n{{ TEXT }}<|im_end|>\n"
# Templates that leave out a part of what messages say, and what they are refused for.
LOSING = {
    "no system message": ("{% if m.role != 'system' %}" + TURN + "{% endif %}", "message 1 (system)"),
    "the first question alone": ("{% if loop.index < 4 %}" + TURN + "{% endif %}", "message 4 (user)"),
    "the beginning": (TURN.replace("TEXT", "m.content[:9]"), "message 1 (system)"),
    "the end": (TURN.replace("TEXT", "m.content.split('so: ')[-1]"), "message 2 (user)"),
    "its blanks": (TURN.replace("TEXT", "m.content | trim"), ""),
    "as JSON": (TURN.replace("TEXT", "m.content | tojson"), ""),
}
TALK = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": ' what is "a", so: a?\n'},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "user"},
    {"role": "assistant", "content": "n"},
]


@pytest.mark.parametrize("name", LOSING)
def test_short_texts_that_stand_elsewhere_too_and_parts_of_texts_are_missed(name):
    """The letter "a" stands in every prompt, whatever the template leaves out."""
    body, lost = LOSING[name]
    tokenizer = tokenizer_of("qwen2_5.jinja")
    body = body.replace("TEXT", "m.content")
    tokenizer.chat_template = "{% for m in messages %}" + body + "{% endfor %}" + OPEN
    row = check_row({"messages": TALK}, "r:1")
    if lost:
        with pytest.raises(UsageError, match=re.escape(f"r:1: the chat template leaves out {lost}")):
            encode_prompt(row, tokenizer, 500)
    else:
        assert "so: a?" in tokenizer.decode(encode_prompt(row, tokenizer, 500))


def test_a_second_call_that_gpt_oss_does_not_write_is_refused():
    row, _ = conversation("second call", "last")
    with pytest.raises(UsageError, match=r"leaves out tool_calls of message 6 \(assistant\)"):
        encode_prompt(row, tokenizer_of("gptoss.jinja"), 10_000)


def test_prompts_of_suites_are_held_to_the_same():
    tokenizer = tokenizer_of("qwen2_5.jinja")
    tokenizer.chat_template = (
        "{% for m in messages %}" + LOSING["no system message"][0] + "{% endfor %}" + OPEN
    )
    tokenizer.chat_template = tokenizer.chat_template.replace("TEXT", "m.content")
    with pytest.raises(UsageError, match=r"leaves out message 1 \(system\)"):
        render_request(tokenizer, TALK[:2])
    assert render_request(tokenizer, TALK[1:2]).count("so: a?") == 1


@pytest.mark.parametrize("setting", ["recover.system", "eval.system"])
def test_a_system_prompt_that_the_template_leaves_out_is_refused_before_a_run(setting, tiny_folder):
    body = LOSING["no system message"][0].replace("TEXT", "m.content")
    (tiny_folder / "deaf.jinja").write_text("{% for m in messages %}" + body + "{% endfor %}" + OPEN)
    options = ("--dry-run", "--set", "model.chat_template=deaf.jinja")
    opdcl("run", "tiny.yaml", *options, code=0)
    shown = opdcl("run", "tiny.yaml", *options, "--set", f"{setting}=Be brief.", code=2)
    assert "the chat template leaves out message 1 (system)" in " ".join(shown.stderr.split())
