"""The columns of rows, as trainers and data sets name them: each row becomes a conversation or plain text.

`CONVERSATIONS` and `PAIRS` are all of them; an error names the row's file and line. What a row holds is kept,
refused, or named in `Row.unread`. File formats, such as CSV and Parquet, are in `data/files.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from opdcl.data.messages import (
    FIELDS_HINT,
    ONLY_TEXT,
    PICTURES,
    Fields,
    Message,
    are_messages,
    as_flag,
    checked_text,
    content_of,
    from_json_text,
    json_kind,
    number_as_text,
    read_message,
    read_objects,
    read_tools,
    role_of,
)
from opdcl.errors import UsageError, listed, nearest

# Columns of a row whose names are compared with ours to find a misspelt one.
MOST_COMPARED = 50

# The field of a suite's document that holds a packed row.
PACKED_ROW = "opdcl_row"


@dataclass(frozen=True)
class Row:
    """One checked row: a conversation that ends with the user and its answer if any, or plain text.

    `where` names its file and line, `teacher` the teacher of completions on it ("": the stream's own),
    `cluster` the fact or person that it is about, if several rows are, `group` the kind of prompt, and
    `format` how it was written.
    `reply` is the rest of the answer's message: a thought, tool calls. `tools` are the tools
    that the model may call, `variables` those that the row sets in the chat template, `columns` its fields,
    `unread` those fields, of the row and of its messages, that hold something and are not read, and `renamed`
    those of ours that it has under other names.
    """

    prompt: list[Message]
    answer: str | None
    text: str | None
    where: str
    teacher: str = ""
    cluster: str = ""
    group: str = ""
    format: str = ""
    reply: dict[str, Any] = field(default_factory=dict)
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = field(default=(), repr=False)
    unread: tuple[str, ...] = field(default=(), repr=False)
    renamed: tuple[str, ...] = field(default=(), repr=False)

    def turns(self) -> list[Row]:
        """Return a row for each answer in the conversation, in order; this one comes last."""
        rows = []
        for index, message in enumerate(self.prompt):
            follows_question = index > 0 and self.prompt[index - 1]["role"] in ("user", "tool")
            if message["role"] == "assistant" and follows_question:
                reply = {key: value for key, value in message.items() if key not in ("role", "content")}
                answered = replace(self, prompt=self.prompt[:index], answer=message["content"], reply=reply)
                rows.append(answered)
        return [*rows, self]

    @property
    def later_turns(self) -> int:
        """How many turns follow the first, each after the model's own answer: it has only user messages."""
        asked = [message["role"] for message in self.prompt if message["role"] != "system"]
        is_open = {*asked} == {"user"} and not (self.answer or self.reply or self.tools)
        return len(asked) - 1 if is_open else 0

    @property
    def system(self) -> str | None:
        """The system message of its conversation."""
        has_one = bool(self.prompt) and self.prompt[0]["role"] == "system"
        return self.prompt[0]["content"] if has_one else None

    def with_system(self, text: str | None) -> Row:
        """Return the row with this system message, unless it has one or is no conversation."""
        if not text or not self.prompt or self.system:
            return self
        return replace(self, prompt=[{"role": "system", "content": text}, *self.prompt])

    def key(self) -> str:
        """Return a text that two rows share only if a model is shown the same."""
        return repr([self.prompt, self.tools, self.variables])

    def shown(self) -> str:
        """Return the prompt for a reader: the text of a single turn, or each turn with its role."""
        if len(self.prompt) == 1:
            return str(self.prompt[0]["content"])
        return "\n\n".join(f"{message['role']}: {_spoken(message)}" for message in self.prompt)

    def packed(self) -> str:
        """Return all that a model is shown of the row as JSON text, which `unpacked` reads."""
        return json.dumps([self.where, self.prompt, self.tools, self.variables], ensure_ascii=False)

    @classmethod
    def unpacked(cls, text: str) -> Row:
        """Return the prompt that `packed` has written, as a row without an answer."""
        where, prompt, tools, variables = json.loads(text)
        return cls(prompt, None, None, where, tools=tools, variables=variables)

    def with_context(self, context: str, answer: str, feedback: str = "") -> Row:
        """Return the row with its last message replaced by `context`, whose placeholders are filled in."""
        *before, last = self.prompt
        values = {"{prompt}": last["content"], "{answer}": answer, "{feedback}": feedback}
        content = re.sub(r"\{(?:prompt|answer|feedback)\}", lambda m: values[m[0]], context)
        return replace(self, prompt=[*before, {**last, "content": content}])


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: its file and line, what is wrong with it, and what to do."""

    place: str
    problem: str
    hint: str

    @property
    def message(self) -> str:
        return f"{self.place}: {self.problem}"

    def error(self) -> UsageError:
        return UsageError(self.message, self.hint)


def _spoken(message: Message) -> str:
    """Return the text of a message with its tool calls."""
    texts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", []):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        texts.append(f"{call['function']['name']}({arguments})")
    return " ".join(texts)


@dataclass(frozen=True)
class Pair:
    """A format with one field for the prompt and one for the answer.

    `more` continues the prompt. In other formats, `context` does so, unless the prompt quotes it already.
    """

    name: str
    prompt: str
    answers: tuple[str, ...]
    more: tuple[str, ...] = ()


# The first format whose field a row has, is the row's. `chosen` is the better answer of a preference row.
CONVERSATIONS = {"messages": "OpenAI messages", "conversations": "ShareGPT"}
PAIRS = (
    Pair("prompt and completion", "prompt", ("completion", "response", "chosen")),
    Pair("question and answer", "question", ("answer", "response", "chosen")),
    Pair("alpaca", "instruction", ("output", "response", "chosen"), more=("input", "context")),
    Pair("query and response", "query", ("response",)),
    # Also alpaca without an instruction.
    Pair("input and output", "input", ("output", "response", "chosen")),
)
SYSTEM = ("system", "system_prompt")
KNOWN_COLUMNS = {*CONVERSATIONS, "text"}.union(*((pair.prompt, *pair.answers) for pair in PAIRS))

# Fields that decide which format a row has.
DECIDING = {*CONVERSATIONS, *(pair.prompt for pair in PAIRS), "chosen", "text"}
# Fields that have a place in a conversation only.
OF_CONVERSATIONS = (*SYSTEM, "history", "context", "tools", "chat_template_kwargs")


def check_row(row: Any, where: str) -> Row:
    """Return a row of any format as a `Row`.

    Raises:
        UsageError: It has no known format, or a part of it is malformed or would be lost. The caller says
            where.
    """
    if not isinstance(row, dict):
        raise UsageError(f"the row is {json_kind(row)}, not an object", FIELDS_HINT)
    fields = Fields(row)
    fields.read.update(("cluster", "group"))
    read = _conversation(fields) or _pair(fields) or _text(fields)
    if read is None:
        content = f"has only {listed(row)}" if row else "is empty"
        raise UsageError(f"the row {content}", did_you_mean(row) + FIELDS_HINT)
    for name in PICTURES:
        if fields.has(name):
            raise UsageError(f"the row has {name}, which is no text", ONLY_TEXT)
    if read.answer or read.reply:
        _refuse_bad_answer(fields)
    teacher = fields.take("teacher")
    cluster = str(fields.given.get("cluster", ""))
    variables = fields.take("chat_template_kwargs") or {}
    return replace(
        read,
        where=where,
        teacher=checked_text(teacher, "teacher") if teacher not in (None, "") else "",
        cluster=checked_text(cluster, "cluster", may_be_empty=True),
        group=str(fields.given.get("group", "")),
        tools=read_tools(fields.take("tools")),
        variables=read_objects([variables], "chat_template_kwargs")[0],
        columns=tuple(map(str, row)),
        unread=(*fields.unread(), *read.unread),
    )


def did_you_mean(columns: Collection[str]) -> str:
    """Return a hint on the first column whose name looks like a misspelling of ours, or ""."""
    unknown = [str(column) for column in columns if column not in KNOWN_COLUMNS]
    for column in unknown[:MOST_COMPARED]:
        meant = nearest(column.lower(), KNOWN_COLUMNS - {*columns}, 0.8)
        if meant:
            return f"did you mean {meant} instead of {column}? "
    return ""


def _text_in(fields: Fields, name: str) -> str:
    return checked_text(number_as_text(fields.take(name)), name)


def _text(fields: Fields) -> Row | None:
    if "text" not in fields.given:
        return None
    for name in OF_CONVERSATIONS:
        if fields.has(name):
            hint = "text is learned as it is: write a conversation as messages, or remove the column"
            raise UsageError(f"{name} would not be shown to the model", hint)
    return Row([], None, _text_in(fields, "text"), "", format="text")


def _conversation(fields: Fields) -> Row | None:
    """Return a row that is a list of messages."""
    for key, name in CONVERSATIONS.items():
        if fields.has(key):
            turns = _list(fields.take(key), key)
            if fields.has("chosen") and turns and role_of(turns[-1]) != "assistant":
                turns += _answer(_messages_in(_take_chosen(fields)), "chosen")
            return _row(fields, turns, name, key)
    chosen = _messages_in(fields.given.get("chosen"))
    if isinstance(chosen, list) and any(role_of(turn) == "user" for turn in chosen):
        _take_chosen(fields)
        return _row(fields, chosen, "preference, the chosen conversation", "chosen")
    return None


def _pair(fields: Fields) -> Row | None:
    """Return a row with a field for its prompt and one for its answer."""
    pairs = [pair for pair in PAIRS if pair.prompt in fields.given]
    if not pairs:
        return None
    pair = next((pair for pair in pairs if fields.has(pair.prompt)), pairs[0])
    # A blank answer counts only if there is no other one.
    answers = [name for name in pair.answers if name in fields.given]
    answers.sort(key=lambda name: not fields.has(name))
    field = answers[0] if answers else pair.answers[0]
    answer = _take_chosen(fields) if field == "chosen" else fields.take(field)
    turns = _messages_in(fields.take(pair.prompt))
    if isinstance(turns, list):
        answer = _messages_in(answer)
    else:
        turns = [{"role": "user", "content": _asked_text(fields, pair)}]
    name = f"{pair.name}, the chosen answer" if field == "chosen" else pair.name
    return _row(fields, [*turns, *_answer(number_as_text(answer), field)], name, pair.prompt)


def _take_chosen(fields: Fields) -> Any:
    """Return the better answer of a preference row, whose other one is left out on purpose."""
    fields.take("rejected")
    return fields.take("chosen")


def _asked_text(fields: Fields, pair: Pair) -> str:
    """Return a prompt that is text, with what continues it."""
    prompt = _text_in(fields, pair.prompt)
    texts = [prompt]
    for name in pair.more or ("context",):
        if fields.has(name):
            text = _text_in(fields, name)
            if name in pair.more or text not in prompt:
                texts.append(text)
    return "\n\n".join(texts)


def _answer(value: Any, field: str) -> list[Any]:
    """Return an answer as messages: a text, one message, or several; none without an answer."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return [value] if are_messages([value]) else _list(value, field)


def _row(fields: Fields, turns: list[Any], form: str, key: str) -> Row:
    """Return the conversation in the field `key` as a row; its last assistant turn is the answer."""
    turns = _whole(fields, turns)
    messages, unread = [], []
    for turn in turns:
        message, keys = read_message(turn, is_last=turn is turns[-1])
        messages.append(message)
        unread += [f"{key}.{name}" for name in keys]
    if not any(message["role"] == "user" for message in messages):
        raise UsageError("no user message", FIELDS_HINT)
    answer: str | None = None
    reply: Message = {}
    if messages[-1]["role"] == "assistant":
        reply = messages.pop()
        del reply["role"]
        answer = reply.pop("content")
    if fields.has("context"):
        context = number_as_text(fields.take("context"))
        if not any(str(context) in message["content"] for message in messages):
            hint = "write it into a message, or remove the column"
            raise UsageError("context would not be shown to the model", hint)
    return Row(messages, answer, None, "", format=form, reply=reply, unread=(*dict.fromkeys(unread),))


def _whole(fields: Fields, turns: list[Any]) -> list[Any]:
    """Return the turns after those that other fields put before them: a system message, and `history`."""
    systems = {name: _text_in(fields, name) for name in SYSTEM if fields.has(name)}
    first = [{"role": "system", "content": text} for text in systems.values()][:1]
    if turns and role_of(turns[0]) == "system":
        first, turns = turns[:1], turns[1:]
        systems["the conversation"] = str(content_of(first[0]))
    if len({text.strip() for text in systems.values()}) > 1:
        message = f"{' and '.join(systems)} have different system messages"
        raise UsageError(message, "keep the one that the model is to be shown")
    return [*first, *_history(fields), *turns]


def _history(fields: Fields) -> list[Message]:
    """Return the turns of `history`, which has a pair of texts for each earlier exchange."""
    turns = []
    for exchange in _list(fields.take("history") or [], "history"):
        if not (isinstance(exchange, list) and len(exchange) == 2):
            raise UsageError("history is not a list of pairs", "a pair is [question, answer]")
        question, answer = exchange
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns


def _messages_in(value: Any) -> Any:
    """Return the messages, or the one message, that a text holds as JSON, and any other value unchanged."""
    decoded = from_json_text(value)
    return decoded if are_messages(decoded) or are_messages([decoded]) else value


def _refuse_bad_answer(fields: Fields) -> None:
    """Refuse an answer that is marked as a bad one, as data sets of preferences do."""
    label = fields.given.get("label")
    says = as_flag(label)
    if says:
        fields.read.add("label")
    if says is False:
        hint = "leave out the rows whose label is false; if label says something else, rename the column"
        message = f"its answer is marked as a bad one (label: {json.dumps(label)})"
        raise UsageError(message, hint)


def _list(value: Any, field: str) -> list[Any]:
    """Return a list, which some files hold as JSON text, as they do its entries."""
    value = from_json_text(value)
    if isinstance(value, list):
        return [from_json_text(entry) for entry in value]
    wanted = "a list" if field in (*CONVERSATIONS, "history") else "text"
    raise UsageError(f"{field} is {json_kind(value)}, not {wanted}", FIELDS_HINT)
