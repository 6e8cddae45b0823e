"""The formats of rows, as trainers and data sets write them: each becomes a conversation or plain text.

`CONVERSATIONS` and `PAIRS` are all of them; an error names the row's file and line. What a row holds is kept,
refused, or named in `Row.unread`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from opdcl.data.messages import (
    FIELDS_HINT,
    ONLY_TEXT,
    PICTURES,
    Message,
    are_messages,
    checked_text,
    content_of,
    kind_of,
    read_message,
    read_objects,
    read_tools,
    role_of,
    unread_keys,
)
from opdcl.data.values import from_json_text, is_missing, is_no, is_yes, number_as_text
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
    `reply` is what the answer's message holds besides its text: a thought, tool calls. `tools` are the tools
    that the model may call, `variables` those that the row sets in the chat template, `columns` its fields,
    and `unread` those fields, of the row and of its messages, that hold something and are not read.
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

    def turns(self) -> list[Row]:
        """Return a row for each answer in the conversation, in order; this one comes last."""
        pairs = enumerate(pairwise(message["role"] for message in self.prompt), 1)
        answered = [i for i, roles in pairs if roles in (("user", "assistant"), ("tool", "assistant"))]
        return [*(self._turn(i) for i in answered), self]

    def _turn(self, index: int) -> Row:
        message = dict(self.prompt[index])
        del message["role"]
        return replace(self, prompt=self.prompt[:index], answer=message.pop("content"), reply=message)

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


def _spoken(message: Message) -> str:
    """Return the text of a message with its tool calls."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    calls = [f"{one['name']}({json.dumps(one['arguments'], ensure_ascii=False)})" for one in functions]
    return " ".join(filter(None, [message["content"], *calls]))


@dataclass(frozen=True)
class Pair:
    """A format with one field for the prompt and one for the answer.

    `more` continues the prompt; `beside` does so too, unless the prompt quotes it already.
    """

    name: str
    prompt: str
    answers: tuple[str, ...]
    more: tuple[str, ...] = ()
    beside: tuple[str, ...] = ("context",)


# The first format whose field a row has, is the row's. `chosen` is the better answer of a preference row.
CONVERSATIONS = {"messages": "OpenAI messages", "conversations": "ShareGPT"}
PAIRS = (
    Pair("prompt and completion", "prompt", ("completion", "response", "chosen")),
    Pair("question and answer", "question", ("answer", "response", "chosen")),
    Pair("alpaca", "instruction", ("output", "response", "chosen"), more=("input", "context"), beside=()),
    Pair("query and response", "query", ("response",)),
    # Also alpaca without an instruction.
    Pair("input and output", "input", ("output", "response", "chosen")),
)
SYSTEM = ("system", "system_prompt")
COLUMNS = {*CONVERSATIONS, "text"}.union(*((pair.prompt, *pair.answers) for pair in PAIRS))

# Fields that decide which format a row has.
DECIDING = {*CONVERSATIONS, *(pair.prompt for pair in PAIRS), "chosen", "text"}
# Fields that have a place in a conversation only.
OF_CONVERSATIONS = (*SYSTEM, "history", "context", "tools", "chat_template_kwargs")
# Fields that are about a row of any format.
ABOUT = ("teacher", "cluster", "group")


def check_row(row: Any, where: str) -> Row:
    """Return a row of any format as a `Row`.

    Raises:
        UsageError: It has no known format, or a part of it is malformed or would be lost.
    """
    if not isinstance(row, dict):
        raise UsageError(f"{where} is {kind_of(row)}, not an object", FIELDS_HINT)
    # Without null and NaN; a blank text may be an answer that is to be complained of.
    given = {key: value for key, value in row.items() if isinstance(value, str) or not is_missing(value)}
    read = _conversation(given, where) or _pair(given, where) or _text(given, where)
    if read is None:
        content = f"has only {listed(row)}" if row else "is empty"
        raise UsageError(f"{where} {content}", did_you_mean(row) + FIELDS_HINT)
    if pictures := [key for key in PICTURES if not is_missing(given.get(key))]:
        raise UsageError(f"{where} has {pictures[0]}, which is no text", ONLY_TEXT)
    _refuse_bad_answer(given, read, where)
    _refuse_lost(given, read, where)
    teacher, cluster, group = (given.get(key, "") for key in ABOUT)
    teacher = checked_text(teacher, "teacher", where) if teacher != "" else ""
    cluster = checked_text(str(cluster), "cluster", where, may_be_empty=True)
    (variables,) = read_objects([given.get("chat_template_kwargs") or {}], "chat_template_kwargs", where)
    return replace(
        read,
        teacher=teacher,
        cluster=cluster,
        group=str(group),
        tools=read_tools(given.get("tools"), where),
        variables=variables,
        columns=tuple(map(str, row)),
        unread=(*_unread_columns(given, read), *read.unread),
    )


def did_you_mean(columns: Collection[str]) -> str:
    """Return a hint on the first column whose name looks like a misspelling of ours, or ""."""
    unknown = [str(column) for column in columns if column not in COLUMNS][:MOST_COMPARED]
    free = COLUMNS - {*columns}
    meant = {column: nearest(column.lower(), free, 0.8) for column in unknown}
    return next((f"did you mean {near} instead of {column}? " for column, near in meant.items() if near), "")


def _text(row: dict, where: str) -> Row | None:
    if "text" not in row:
        return None
    text = checked_text(number_as_text(row["text"]), "text", where)
    return Row([], None, text, where, format="text", columns=("text",))


def _conversation(row: dict, where: str) -> Row | None:
    """Return a row that is a list of messages; its `columns` are the fields that were read."""
    for key, name in CONVERSATIONS.items():
        if not is_missing(row.get(key)):
            turns = _list(row[key], key, where)
            answer = _chosen(row, turns)
            columns = (key, "chosen", "rejected") if answer else (key,)
            return _turns(_whole(row, [*turns, *answer], where), where, name, columns)
    chosen = _messages_in(row.get("chosen"))
    if isinstance(chosen, list) and any(role_of(turn) == "user" for turn in chosen):
        name = "preference, the chosen conversation"
        return _turns(_whole(row, chosen, where), where, name, ("chosen", "rejected"))
    return None


def _pair(row: dict, where: str) -> Row | None:
    """Return a row with a field for its prompt and one for its answer; its `columns` are what was read."""
    pairs = [pair for pair in PAIRS if pair.prompt in row]
    if not pairs:
        return None
    pair = next((pair for pair in pairs if not is_missing(row[pair.prompt])), pairs[0])
    given = [name for name in pair.answers if name in row]
    filled = [name for name in given if not is_missing(row[name])]
    field = (*filled, *given, *pair.answers)[0]
    asked, answer = _messages_in(row[pair.prompt]), number_as_text(row.get(field))
    columns = [pair.prompt, field]
    if isinstance(asked, list):
        answer = _messages_in(answer)
    else:
        columns += pair.more
        asked = [{"role": "user", "content": _asked_text(row, pair, where)}]
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    turns = [*asked, *_list([] if answer is None else answer, field, where)]
    name = pair.name
    if field == "chosen":
        name, columns = f"{pair.name}, the chosen answer", [*columns, "rejected"]
    return _turns(_whole(row, turns, where), where, name, tuple(columns))


def _asked_text(row: dict, pair: Pair, where: str) -> str:
    """Return a prompt that is text, with what continues it."""
    prompt = checked_text(number_as_text(row[pair.prompt]), pair.prompt, where)
    texts = [prompt]
    for name in (*pair.more, *pair.beside):
        if is_missing(row.get(name)):
            continue
        text = checked_text(number_as_text(row[name]), name, where)
        if name in pair.more or text not in prompt:
            texts.append(text)
    return "\n\n".join(texts)


def _whole(row: dict, turns: list[Any], where: str) -> list[Any]:
    """Return the turns after those that other fields put before them: a system message, and `history`."""
    systems = {name: row[name] for name in SYSTEM if not is_missing(row.get(name))}
    if turns and role_of(turns[0]) == "system":
        first, turns = turns[0], turns[1:]
        systems["the conversation"] = content_of(first, where)
    elif systems:
        name, text = next(iter(systems.items()))
        first = {"role": "system", "content": checked_text(text, name, where)}
    else:
        return [*_history(row, where), *turns]
    if len({text.strip() if isinstance(text, str) else None for text in systems.values()}) > 1:
        message = f"{where}: {' and '.join(systems)} have different system messages"
        raise UsageError(message, "keep the one that the model is to be shown")
    return [first, *_history(row, where), *turns]


def _history(row: dict, where: str) -> list[Message]:
    """Return the turns of `history`, which has a pair of texts for each earlier exchange."""
    turns = []
    for exchange in _list(row.get("history") or [], "history", where):
        if not (isinstance(exchange, list) and len(exchange) == 2):
            raise UsageError(f"{where}: history is not a list of pairs", "a pair is [question, answer]")
        question, answer = exchange
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns


def _chosen(row: dict, turns: list[Any]) -> list[Any]:
    """Return the chosen answer to a conversation that ends with the user; none where it has its answer."""
    chosen = _messages_in(row.get("chosen"))
    if is_missing(chosen) or not turns or role_of(turns[-1]) == "assistant":
        return []
    if isinstance(chosen, str):
        return [{"role": "assistant", "content": chosen}]
    return chosen if isinstance(chosen, list) else [chosen]


def _turns(turns: list[Any], where: str, name: str, columns: tuple[str, ...]) -> Row:
    """Return a conversation as a row; its last assistant turn is the answer."""
    messages = [read_message(turn, where, is_last=turn is turns[-1]) for turn in turns]
    if not any(message["role"] == "user" for message in messages):
        raise UsageError(f"{where}: no user message", FIELDS_HINT)
    keys = dict.fromkeys(f"{columns[0]}.{key}" for turn in turns for key in unread_keys(turn))
    answer: str | None = None
    reply: dict[str, Any] = {}
    if messages[-1]["role"] == "assistant":
        *messages, last = messages
        answer = last["content"]
        reply = {key: value for key, value in last.items() if key not in ("role", "content")}
    columns = (*columns, *OF_CONVERSATIONS)
    return Row(messages, answer, None, where, format=name, reply=reply, columns=columns, unread=tuple(keys))


def _messages_in(value: Any) -> Any:
    """Return the messages that a text holds as JSON, and any other value as it is."""
    decoded = from_json_text(value)
    if are_messages(decoded):
        return decoded
    return decoded if are_messages([decoded]) else value


def _refuse_bad_answer(row: dict, read: Row, where: str) -> None:
    """Refuse an answer that is marked as a bad one, as data sets of preferences do."""
    label = row.get("label")
    if is_no(label) and (read.answer or read.reply):
        hint = "leave out the rows whose label is false; if label says something else, rename the column"
        raise UsageError(f"{where}: its answer is marked as a bad one (label: {json.dumps(label)})", hint)


def _refuse_lost(row: dict, read: Row, where: str) -> None:
    """Refuse a row whose prompt would lack what the row has beside it."""
    lost = []
    if read.text is not None:
        lost = [name for name in OF_CONVERSATIONS if not is_missing(row.get(name))]
        hint = "text is learned as it is: write a conversation as messages, or remove the column"
    elif not is_missing(context := number_as_text(row.get("context"))):
        shown = isinstance(context, str) and any(context in message["content"] for message in read.prompt)
        lost = [] if shown else ["context"]
        hint = "write it into a message, or remove the column"
    if lost:
        raise UsageError(f"{where}: {lost[0]} would not be shown to the model", hint)


def _unread_columns(row: dict, read: Row) -> list[str]:
    """Return the columns that hold something and are not read."""
    known = {*read.columns, *ABOUT}
    if is_yes(row.get("label")) and (read.answer or read.reply):
        known.add("label")
    return [str(name) for name, value in row.items() if name not in known and not is_missing(value)]


def _list(value: Any, field: str, where: str) -> list[Any]:
    """Return a list, which some files hold as JSON text, as they do its entries."""
    value = from_json_text(value)
    if isinstance(value, list):
        return [from_json_text(entry) for entry in value]
    wanted = "a list" if field in (*CONVERSATIONS, "history") else "text"
    raise UsageError(f"{where}: {field} is {kind_of(value)}, not {wanted}", FIELDS_HINT)
