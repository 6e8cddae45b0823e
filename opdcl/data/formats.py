"""The formats of rows, as trainers and data sets write them: each becomes a conversation or plain text.

`CONVERSATIONS` and `PAIRS` are all of them; an error names the row's file and line.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from opdcl.errors import UsageError, listed, nearest

MAX_ROW_CHARS = 200_000
# Columns of a row whose names are compared with ours to find a misspelt one.
MOST_COMPARED = 50

FIELDS_HINT = (
    "a row has messages, prompt (and completion), question (and answer), instruction (and output), "
    "conversations, or text; --columns question=NAME,answer=NAME names other columns"
)

Message = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One checked row: a conversation that ends with the user and its answer if any, or plain text.

    `where` names its file and line, `teacher` the teacher of completions on it ("": the stream's own),
    `cluster` the fact or person that it is about, if several rows are, `group` the kind of prompt, and
    `format` how it was written.
    `reply` is what the answer's message holds besides its text: a thought, tool calls. `tools` are the tools
    that the model may call, `variables` those that the row sets in the chat template, `columns` its fields.
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

    def turns(self) -> list[Row]:
        """Return a row for each answer in the conversation, in order; this one comes last."""
        pairs = enumerate(pairwise(message["role"] for message in self.prompt), 1)
        answered = [i for i, roles in pairs if roles in (("user", "assistant"), ("tool", "assistant"))]
        return [*(self._turn(i) for i in answered), self]

    def _turn(self, index: int) -> Row:
        message = dict(self.prompt[index])
        del message["role"]
        return replace(self, prompt=self.prompt[:index], answer=message.pop("content"), reply=message)

    def with_context(self, context: str, answer: str, feedback: str = "") -> Row:
        """Return the row with its last message replaced by `context`, whose placeholders are filled in."""
        *before, last = self.prompt
        values = {"{prompt}": last["content"], "{answer}": answer, "{feedback}": feedback}
        content = re.sub(r"\{(?:prompt|answer|feedback)\}", lambda m: values[m[0]], context)
        return replace(self, prompt=[*before, {**last, "content": content}])


@dataclass(frozen=True)
class Pair:
    """A format with one field for the prompt and one for the answer; `more` continues the prompt."""

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
    Pair("input and output", "input", ("output", "chosen")),
)
SYSTEM = ("system", "system_prompt")
COLUMNS = {*CONVERSATIONS, "text"}.union(*((pair.prompt, *pair.answers) for pair in PAIRS))

# What a speaker is called -> the role in the chat template.
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user"}
ROLES |= dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bing", "bard"), "assistant")
ROLES["tool"] = "tool"
FOREIGN_TOOLS = ("function", "function_call", "tool_call", "observation", "tool_response")
AS_OPENAI = "write tool calls as OpenAI does: tool_calls in the assistant's message, results with role tool"

# Names of the thought before an answer: templates read one of them, so each is given all.
THOUGHT = ("reasoning_content", "thinking")


def check_row(row: Any, where: str) -> Row:
    """Return a row of any format as a `Row`.

    Raises:
        UsageError: It has no known format, or a part of it is malformed or would be lost.
    """
    if not isinstance(row, dict):
        raise UsageError(f"{where} is {kind_of(row)}, not an object", FIELDS_HINT)
    checked = _conversation(row, where) or _pair(row, where) or _text(row, where)
    if checked is None:
        content = f"has only {listed(row)}" if row else "is empty"
        raise UsageError(f"{where} {content}", did_you_mean(row) + FIELDS_HINT)
    # An empty cell of a CSV or Parquet file names no teacher.
    fields = ("teacher", "cluster", "group")
    teacher, cluster, group = ("" if row.get(key) is None else row[key] for key in fields)
    teacher = _string(teacher, "teacher", where) if teacher != "" else ""
    cluster = _string(str(cluster), "cluster", where, may_be_empty=True)
    tools = _objects(row.get("tools"), "tools", where) or None
    (variables,) = _objects([row.get("chat_template_kwargs") or {}], "chat_template_kwargs", where)
    variables = {key: value for key, value in variables.items() if value is not None}
    about = replace(checked, teacher=teacher, cluster=cluster, group=str(group))
    return replace(about, tools=tools, variables=variables, columns=tuple(map(str, row)))


def did_you_mean(columns: Collection[str]) -> str:
    """Return a hint on the first column whose name looks like a misspelling of ours, or ""."""
    unknown = [str(column) for column in columns if column not in COLUMNS][:MOST_COMPARED]
    free = COLUMNS - {*columns}
    meant = {column: nearest(column.lower(), free, 0.8) for column in unknown}
    return next((f"did you mean {near} instead of {column}? " for column, near in meant.items() if near), "")


def _text(row: dict, where: str) -> Row | None:
    if row.get("text") is None:
        return None
    return Row([], None, _string(row["text"], "text", where), where, format="text")


def _conversation(row: dict, where: str) -> Row | None:
    for key, name in CONVERSATIONS.items():
        if row.get(key):
            turns = _list(row[key], key, where)
            return _turns([*_before(row, where), *turns, *_chosen(row, turns)], where, name)
    chosen = row.get("chosen")
    if isinstance(chosen, list) and any(_role(turn) == "user" for turn in chosen):
        return _turns([*_before(row, where), *chosen], where, "preference, the chosen conversation")
    return None


def _pair(row: dict, where: str) -> Row | None:
    for pair in PAIRS:
        asked = row.get(pair.prompt)
        if asked is None:
            continue
        field = next((f for f in pair.answers if row.get(f) is not None), pair.answers[0])
        answer = row.get(field)
        if field == "completion" and row.get("label") is False:
            hint = "leave out the rows of a preference file whose label is false"
            raise UsageError(f"{where}: its completion is marked as a bad one", hint)
        if not isinstance(asked, list):
            more = [row[f] for f in pair.more if row.get(f)]
            texts = [_string(part, pair.prompt, where) for part in (asked, *more)]
            asked = [{"role": "user", "content": "\n\n".join(texts)}]
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        turns = [*_before(row, where), *asked, *_list([] if answer is None else answer, field, where)]
        return _turns(turns, where, f"{pair.name}, the chosen answer" if field == "chosen" else pair.name)
    return None


def _before(row: dict, where: str) -> list[Message]:
    """Return the turns that fields of their own put before a conversation: `system`, and `history`."""
    texts = [(field, row[field]) for field in SYSTEM if row.get(field)]
    turns = [{"role": "system", "content": _string(text, field, where)} for field, text in texts[:1]]
    for exchange in _list(row.get("history") or [], "history", where):
        if not (isinstance(exchange, list) and len(exchange) == 2):
            raise UsageError(f"{where}: history is not a list of pairs", "a pair is [question, answer]")
        question, answer = exchange
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return turns


def _chosen(row: dict, turns: list[Any]) -> list[Any]:
    """Return the chosen answer to a conversation that ends with the user; none where it has its answer."""
    chosen = row.get("chosen")
    if not chosen or _role(turns[-1]) == "assistant":
        return []
    if isinstance(chosen, str):
        return [{"role": "assistant", "content": chosen}]
    return chosen if isinstance(chosen, list) else [chosen]


def _turns(turns: list[Any], where: str, name: str) -> Row:
    """Return a conversation as a row; its last assistant turn is the answer."""
    messages = [_message(turn, where, is_last=turn is turns[-1]) for turn in turns]
    if not any(message["role"] == "user" for message in messages):
        raise UsageError(f"{where}: no user message", FIELDS_HINT)
    if messages[-1]["role"] == "assistant":
        reply = {k: v for k, v in messages[-1].items() if k not in ("role", "content")}
        return Row(messages[:-1], messages[-1]["content"], None, where, format=name, reply=reply)
    return Row(messages, None, None, where, format=name)


def _role(turn: Any) -> Any:
    """Return the role of a turn, or what it is called where that is unknown."""
    name = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return ROLES.get(name, name) if isinstance(name, str) else name


def _message(turn: Any, where: str, is_last: bool) -> Message:
    role = _role(turn)
    if role in FOREIGN_TOOLS:
        raise UsageError(f"{where}: a message has the role {role!r}", AS_OPENAI)
    if role not in ROLES.values():
        raise UsageError(f"{where}: message role {role!r}", f"roles are {', '.join(ROLES)}")
    if turn.get("function_call"):
        raise UsageError(f"{where}: a message has function_call", AS_OPENAI)
    if turn.get("weight") == 0:
        raise UsageError(f"{where}: a message has weight 0", "every assistant turn is learned: remove it")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    more: Message = {
        key: _string(str(turn[key]), key, where)
        for key in ("name", "tool_call_id")
        if role == "tool" and turn.get(key)
    }
    if calls := turn.get("tool_calls"):
        more["tool_calls"] = [_call(call, where) for call in _objects(calls, "tool_calls", where)]
    if thought := next((turn[key] for key in THOUGHT if turn.get(key)), None):
        more |= dict.fromkeys(THOUGHT, _string(thought, "a thought", where))
    # Whether an answer may be empty is for its use to say.
    may_be_empty = role == "tool" or (role == "assistant" and (is_last or bool(calls)))
    content = "" if content is None and calls else content
    return {"role": role, "content": _string(content, f"{role} content", where, may_be_empty), **more}


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, which OpenAI writes as JSON text."""
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, dict) else None
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        arguments = arguments if isinstance(arguments, dict) else json.loads(arguments)
    if not isinstance(arguments, dict) or not (function.get("name") and isinstance(function["name"], str)):
        raise UsageError(f"{where}: a tool call has no name or no object of arguments", AS_OPENAI)
    _objects([arguments], "arguments", where)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _objects(value: Any, field: str, where: str) -> list[dict[str, Any]]:
    """Return a list of objects, which some files hold as JSON text."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(value) if isinstance(value, str) and value else value or []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise UsageError(f"{where}: {field} is not made of objects", AS_OPENAI)
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError as fault:
        raise UsageError(f"{where}: {field} is nested too deeply", AS_OPENAI) from fault
    _string(text, field, where)
    return value


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else kind_of(part)
        raise UsageError(f"{where}: a message holds a part of type {kind}", "only text can be learned")
    return _string(part.get("text"), "text", where)


def _list(value: Any, field: str, where: str) -> list[Any]:
    if isinstance(value, list):
        return value
    wanted = "a list" if field in (*CONVERSATIONS, "history") else "text"
    raise UsageError(f"{where}: {field} is {kind_of(value)}, not {wanted}", FIELDS_HINT)


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in words."""
    kinds = {str: "text", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    kinds |= dict.fromkeys((int, float), "a number")
    return kinds.get(type(value), type(value).__name__)


def _string(value: Any, name: str, where: str, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {name} is {kind_of(value)}, not text", FIELDS_HINT)
    if not value.strip():
        if may_be_empty:
            return ""
        raise UsageError(f"{where}: {name} is empty", FIELDS_HINT)
    if any("\ud800" <= char <= "\udfff" for char in value):
        message = f"{where}: {name} holds half of a surrogate pair, which is not a character"
        raise UsageError(message, "write the text as UTF-8")
    if len(value) > MAX_ROW_CHARS:
        message = f"{where}: {name} has {len(value)} characters, at most {MAX_ROW_CHARS} are read"
        raise UsageError(message, "split the row")
    return value
