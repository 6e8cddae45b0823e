"""Turn rows into token ids through the model's chat template, and completions into answers.

Tokens that are no text are found here too: which a vocabulary has, and which rows hold them in their text.
"""

from __future__ import annotations

import bisect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from opdcl.data.formats import PACKED_ROW, Row
from opdcl.data.messages import THOUGHT, THOUGHTS, Message, split_thought
from opdcl.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The date that templates write which ask for today's: what Llama 3 writes where there is no clock. Prompts of
# all days are the same, so answers of different days can be compared, and runs repeat.
TODAY = datetime(2024, 7, 26)
CLOCK = "strftime_now"
DIRECTIVES = ["%-d", "%-m", *(f"%{letter}" for letter in "aAbBcdHIjmMpSUwWxXyYZ")]

# A conversation that shows how a template writes one.
PROBE = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "finis"}]

# What `render_whole` puts at both ends of a text.
MARK = "opdcl{}mark"

# How a template begins that `with_variables` returns, and its line on thinking.
DEFAULTS = "{#- defaults from model.chat_template_kwargs #}\n"
SETS_THINKING = "{%- set enable_thinking = enable_thinking | default("


def encode_prompt(row: Row, tokenizer: PreTrainedTokenizerBase, room: int) -> list[int]:
    """Return the ids of a prompt up to where the answer begins; raise a UsageError if they exceed `room`."""
    ids = text_ids(tokenizer, render_whole(row, tokenizer, row.prompt, generation=True))
    if len(ids) > room:
        message = f"{row.where}: the prompt has {len(ids)} tokens, and the context leaves room for {room}"
        raise UsageError(message, "shorten the prompt, or lower max_new_tokens")
    return ids


def request_ids(request: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the prompt of an lm-eval request: as lm-eval wrote it, or as a row is asked."""
    if PACKED_ROW in request.doc:
        return encode_prompt(Row.unpacked(request.doc[PACKED_ROW]), tokenizer, sys.maxsize)
    return text_ids(tokenizer, request.args[0])


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text, to which the tokenizer adds nothing."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a chat template whose prompts do not open the answer.

    Raises:
        UsageError: They do not.
    """
    try:
        written, prompt = render(tokenizer, PROBE, False), render(tokenizer, PROBE[:1], True)
        unopened = render(tokenizer, PROBE[:1], False)
    except UsageError:  # it wants other turns, as the rows may have them
        return
    # Some templates need none: what a user says ends with [/INST], and the answer follows.
    before = written.rpartition(PROBE[1]["content"])[0]
    header = before[same_length(prompt, before) :]
    if prompt == unopened and header.strip():
        fault = f"the chat template opens no answer: its prompts should end with {header!r}"
        hint = "write it where add_generation_prompt is true, or --set model.chat_template=FILE"
        raise UsageError(fault, hint)


def check_turn_end(tokenizer: PreTrainedTokenizerBase, eos_ids: list[int]) -> None:
    """Refuse a chat template that does not end answers with an end-of-sequence id, so stopping is learned."""
    text = render_whole(Row(PROBE, None, None, "a conversation of two turns"), tokenizer, PROBE)
    rest = text_ids(tokenizer, text.rpartition(PROBE[1]["content"])[2])
    if set(rest) & set(eos_ids):
        return
    ends = tokenizer.convert_ids_to_tokens(rest[:3])
    known = tokenizer.convert_ids_to_tokens(eos_ids)
    raise UsageError(
        f"the chat template ends an answer with {ends}, none of which is an end of sequence ({known})",
        "use the template and generation config that the checkpoint was trained with",
    )


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    generation: bool,
    row: Row | None = None,
    **further: Any,
) -> str:
    """Return messages as the chat template writes them, alike for training, sampling and evaluation.

    Unless `model.chat_template_kwargs` or the row says otherwise, thinking is switched off where there is a
    switch: base would spend its tokens on thoughts that the fine-tune's rows do not have, and the two would
    not be comparable. For the same reason, a template that asks for the date always gets the same one.

    Raises:
        UsageError: The template is malformed or refuses the conversation.
    """
    options: dict[str, Any] = {"tokenize": False, **further}
    template = str(tokenizer.chat_template)
    if not (template.startswith(DEFAULTS) and SETS_THINKING in template):
        options["enable_thinking"] = False
    if row:
        options |= row.variables | ({"tools": row.tools} if row.tools else {})
    if CLOCK in template:
        dated = on_one_day(tokenizer.get_chat_template(tools=row.tools if row else None))
        options = {"chat_template": dated, **options}
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=generation, **options))
    except Exception as fault:  # it may come from anywhere
        place = f"{row.where}: " if row else ""
        reason = f"{type(fault).__name__} {str(fault)[:200]}".removeprefix("TemplateError ")
        hint = "check the roles of its turns, or name another template: --set model.chat_template=FILE"
        raise UsageError(f"{place}the chat template refuses this conversation: {reason}", hint) from fault


def render_request(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], add_generation_prompt: bool = True
) -> str:
    """Return the text of a request of lm-eval: a prompt, or an answer that the task begins, left open.

    Raises:
        UsageError: The template refuses the messages, leaves out what one says, or does not end with what
            the task begins.
    """
    row, generation = Row(messages, None, None, "a prompt of a suite"), add_generation_prompt
    return render_whole(row, tokenizer, messages, generation, continue_final_message=not generation)


def on_one_day(template: str) -> str:
    """Return a chat template that finds `TODAY` on every day."""
    filters = [f"replace({part!r}, {TODAY.strftime(part)!r})" for part in DIRECTIVES]
    macro = f"{{%- macro {CLOCK}(format) -%}}{{{{ format | {' | '.join(filters)} }}}}{{%- endmacro -%}}"
    return macro + template


def note_on_clock(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a note on the date that a chat template gets as today's; "" if it asks for none."""
    if CLOCK not in str(tokenizer.chat_template):
        return ""
    day = TODAY.strftime("%d %B %Y")
    return f"the chat template asks for today's date: it gets {day} on every day, so that prompts are equal"


def with_variables(template: str, variables: Mapping[str, Any]) -> str:
    """Return a chat template with other defaults of its variables, which a caller can still override.

    They are written into the template, so every copy has them: an exported tokenizer, GGUF, a server.

    Raises:
        UsageError: The template has no such variable.
    """
    if not variables:
        return template
    check_variables(template, variables, "model.chat_template_kwargs")
    lines = [DEFAULTS]
    for name, value in variables.items():
        lines.append(f"{{%- set {name} = {name} | default({json.dumps(value, ensure_ascii=False)}) %}}\n")
    return "".join([*lines, template])


def check_variables(template: str, variables: Mapping[str, Any], where: str) -> None:
    """Refuse variables that a chat template does not read, or that are not the user's to set."""
    from jinja2 import Environment, TemplateError, meta

    # A tag of transformers' own, which marks what the assistant says.
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateError as fault:
        raise UsageError(f"{where}: the chat template is malformed: {fault}", "fix it") from fault
    known = meta.find_undeclared_variables(tree) - {"messages", "tools", "add_generation_prompt"}
    for name in variables:
        if name not in known:
            message = f"{where}: the chat template has no variable {name!r} to set"
            raise UsageError(message, f"it has {', '.join(sorted(known))}")


def answer_text(tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], completion_ids: list[int]) -> str:
    """Return the text of a completion without the thought before the answer; "" if the thought never ends.

    A template may open the thought itself, at the end of the prompt.
    """
    prompt, text = tokenizer.decode(prompt_ids[-8:]).rstrip(), tokenizer.decode(completion_ids)
    opened = next((opening for opening in THOUGHTS if prompt.endswith(opening)), "")
    thought, end, _ = split_thought(opened + text)
    if thought is None:
        return str(tokenizer.decode(completion_ids, skip_special_tokens=True))
    if not end:
        return ""
    counts = range(len(completion_ids) + 1)
    # The smallest number of tokens that contain the end of the thought.
    begin = bisect.bisect_left(counts, True, key=lambda n: end in tokenizer.decode(completion_ids[:n]))
    return str(tokenizer.decode(completion_ids[begin:], skip_special_tokens=True)).lstrip()


def render_whole(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    generation: bool = False,
    **more: Any,
) -> str:
    """Return messages of a row as `render`; nothing that they, or its tools, say may be left out.

    A second rendering has a mark at both ends of each text, so that one is found wherever the template puts
    it and however it writes it. Only thoughts before the last answer may be left out, as many templates do.

    Raises:
        UsageError: The chat template refuses the conversation, or leaves out a part of it.
    """
    if row.variables:
        check_variables(tokenizer.get_chat_template(tools=row.tools), row.variables, row.where)
    owners: list[str] = []
    around = partial(_marked, owners)
    tools, shown = [], []
    for tool in row.tools or []:
        function = tool["function"]
        texts = {key: around("tools", function[key]) for key in ("name", "description") if key in function}
        tools.append({**tool, "function": function | texts})
    for number, message in enumerate(messages, 1):
        owner, copy, content = f"message {number} ({message['role']})", {**message}, message["content"]
        thought, _, answer = split_thought(content) if message["role"] == "assistant" else (None, "", content)
        before = content.removesuffix(answer)
        if number == len(messages):
            before = before.replace(thought or "", around(f"the thought of {owner}", thought or ""), 1)
            own = around(f"the thought of {owner}", message.get(THOUGHT[0], ""))
            copy |= dict.fromkeys(THOUGHT, own) if own else {}
        if "tool_calls" in message:
            called = f"tool_calls of {owner}"
            copy["tool_calls"] = [
                {**call, "function": {key: around(called, part) for key, part in call["function"].items()}}
                for call in message["tool_calls"]
            ]
        shown.append(copy | {"content": before + around(owner, answer)})
    written = render(tokenizer, messages, generation, row, **more)
    with_marks = render(tokenizer, shown, generation, replace(row, tools=tools), **more)
    for number, owner in enumerate(owners):
        if with_marks.count(MARK.format(number)) < 2:
            hint = "choose a model whose template writes it, or --set model.chat_template=FILE"
            raise UsageError(f"{row.where}: the chat template leaves out {owner}", hint)
    return written


def _marked(owners: list[str], owner: str, value: Any) -> Any:
    """Return a value with marks at both ends of all its texts and names that are not blank, at any depth.

    The numbers of the marks are the places of their owner in `owners`.
    """
    if isinstance(value, list):
        return [_marked(owners, owner, part) for part in value]
    if isinstance(value, dict):
        return {_marked(owners, owner, key): _marked(owners, owner, part) for key, part in value.items()}
    if not isinstance(value, str) or not value.strip():
        return value
    mark = MARK.format(len(owners))
    owners.append(owner)
    return mark + value + mark


def same_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many ids, or characters, two sequences have in common before they differ."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same


def has_thought(message: Message) -> bool:
    """Return whether an answer comes with a thought, in a field of its own or in its text."""
    if message["role"] != "assistant":
        return False
    return THOUGHT[0] in message or split_thought(message["content"])[0] is not None


BLANKS = " \t\n\u2581"


@lru_cache(maxsize=4)
def markup(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of all tokens that are no text but were added to the vocabulary."""
    # Some vocabularies list runs of blanks beside their markup.
    added = tokenizer.get_added_vocab().items()
    return frozenset(i for token, i in added if token.strip(BLANKS))


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return an expression for the tokens that a model reads as structure wherever a text holds them.

    They are the special ones, and other added ones that the chat template writes.
    """
    names = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    template = str(tokenizer.chat_template)
    names |= {token for token in tokenizer.get_added_vocab() if token in template}
    longest_first = sorted(filter(lambda name: name.strip(BLANKS), names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def find_control(row: Row, control: re.Pattern[str]) -> list[str]:
    """Return the control tokens in the texts of a row, each once; a thought's own marks are none."""
    answer = {"role": "assistant", "content": row.answer or "", **row.reply}
    found: list[str] = []
    for message in [*row.prompt, answer, {"role": "text", "content": row.text or ""}]:
        texts = [message["content"], message.get(THOUGHT[0], "")]
        if message["role"] == "assistant":
            thought, _, texts[0] = split_thought(message["content"])
            texts.append(thought or "")
        found += control.findall("\0".join(texts))
    return [*dict.fromkeys(found)]
