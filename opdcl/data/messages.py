"""One message of a conversation, as trainers and data sets write it: its role, text, thought and tool calls.

What a message holds is kept, refused, or named as unread. The caller adds the row's place to an error.
Fields are read alike from JSONL, CSV, Parquet and `datasets`, which write missing values, JSON in text,
numbers and *no* differently."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from datetime import date, time
from decimal import Decimal
from typing import Any

from opdcl.errors import UsageError, listed

FLAGS = {
    **dict.fromkeys(("true", "yes", "good", "1", "1.0"), True),
    **dict.fromkeys(("false", "no", "bad", "rejected", "0", "0.0", "-1", "-1.0"), False),
}


class Spelled(float):
    """A number of a JSON text, which is learned as it is spelled there: 0.10, 1e5."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has the key {name[:60]!r} twice")
    return found


# Reads a JSON text so that nothing is lost: no spelling of a number, no value of a key.
DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=Spelled, parse_int=lambda n: Spelled(n) if n == "-0" else int(n)
)


def is_missing(value: Any) -> bool:
    """Return whether a value stands for nothing: null, NaN, blank text, or an empty list or object."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or value in ([], {})


class Fields:
    """The fields of a row or a message but null and NaN; it remembers which of them were read.

    Blank text is kept, so that an empty answer can be reported.
    """

    def __init__(self, row: dict):
        self.given: dict[Any, Any] = {}
        for key, value in row.items():
            if isinstance(value, str) or not is_missing(value):
                self.given[key] = value
        self.read: set[str] = set()

    def has(self, name: str) -> bool:
        return not is_missing(self.given.get(name))

    def take(self, name: str) -> Any:
        self.read.add(name)
        return self.given.get(name)

    def unread(self) -> list[str]:
        """Return the fields that hold something and were not read."""
        return [str(name) for name in self.given if name not in self.read and self.has(name)]


def as_flag(value: Any) -> bool | None:
    """Return a flag that says yes or no in some way, also as text as in a CSV file; None for others."""
    return FLAGS.get(str(float(value) if isinstance(value, float) else value).strip().lower())


def from_json_text(value: Any) -> Any:
    """Return the list or object that a text holds as JSON; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        decoded = DECODER.decode(value)
    except (ValueError, RecursionError):
        return value
    return decoded


def number_as_text(value: Any) -> Any:
    """Return a finite number, date or time as a CSV file would write it, and any other value unchanged."""
    if isinstance(value, Spelled | Decimal | date | time):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return json.dumps(value) if isinstance(value, int) or math.isfinite(value) else value


def without_nulls(value: Any) -> Any:
    """Return a value without the fields of its objects that are null, at any depth.

    Parquet and `datasets` give every object of a column the fields of all others, filled with null. So a null
    and a missing field cannot be told apart, and count as the same in all files.

    Raises:
        RecursionError: It is nested too deeply.
    """
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    return value


MAX_ROW_CHARS = 200_000

FIELDS_HINT = (
    "a row has messages, prompt (and completion), question (and answer), instruction (and output), "
    "conversations, or text; --columns question=NAME,answer=NAME names other columns"
)

Message = dict[str, Any]

# What a speaker is called -> the role in the chat template.
SPEAKERS = {"system": "system", "developer": "system", "user": "user", "human": "user"}
SPEAKERS |= dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bing", "bard"), "assistant")
SPEAKERS["tool"] = "tool"
FOREIGN_TOOLS = ("function", "function_call", "tool_call", "observation", "tool_response")
AS_OPENAI = "write tool calls as OpenAI does: tool_calls in the assistant's message, results with role tool"

# Names of the thought before an answer: templates read one of them, so each is given all.
THOUGHT = ("reasoning_content", "thinking", "reasoning")

# What opens a thought in the text of an answer -> what ends it: Qwen3, DeepSeek R1 and others; gpt-oss, whose
# answer is a channel; Gemma 4.
THOUGHTS = {
    "<think>": "</think>",
    "<|channel|>": "<|channel|>final<|message|>",
    "<|channel>thought": "<channel|>",
}

# Fields that hold pictures, videos or sound, in a message or next to it.
PICTURES = ("images", "image", "videos", "video", "audios", "audio")
ONLY_TEXT = "only text can be learned"

# Whether a turn is learned, as trainers name it; all of the assistant's turns are.
LEARNED = ("weight", "loss", "loss_mask", "train", "trainable", "training", "learn", "learned")
# One that says the contrary.
MASKED = "mask"

ROLE_KEYS, CONTENT_KEYS = ("role", "from"), ("content", "value")
RESULT_KEYS = ("name", "tool_call_id")
RESULT_IN_MARKS = re.compile(
    r"\s*<tool_response>\s*((?:(?!</?tool_response>).)*?)\s*</tool_response>\s*", re.DOTALL
)
# Fields in which other formats keep the schema of a tool.
SCHEMAS = {"input_schema": "parameters", "inputSchema": "parameters"}
TOOLS_HINT = (
    'a tool is {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
)

# Kinds of values in JSON, in words.
JSON_KINDS = {
    str: "text",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    type(None): "null",
    int: "a number",
    float: "a number",
}


def role_of(turn: Any) -> Any:
    """Return the role of a turn, or what it is called where that is unknown."""
    name = _first(turn, ROLE_KEYS) if isinstance(turn, dict) else None
    return SPEAKERS.get(name, name) if isinstance(name, str) else name


def split_thought(text: str) -> tuple[str | None, str, str]:
    """Return the thought that an answer's text begins with, what ends it, and the answer behind it.

    The thought is None if there is none. If the prompt has opened it, only its end is there, at an edge of
    its line. The end is "" for a thought that never ends; then there is no answer.
    """
    for opening, end in THOUGHTS.items():
        mark = re.escape(end)
        if text.lstrip().startswith(opening) or re.search(rf"(?m)^[ \t]*{mark}|{mark}[ \t]*\n", text):
            thought, ending, answer = text.partition(end)
            return thought.lstrip().removeprefix(opening), ending, answer
    return None, "", text


def are_messages(value: Any) -> bool:
    """Return whether a value is a list of messages, as OpenAI or ShareGPT write them."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    as_openai = "role" in value and ("content" in value or "tool_calls" in value)
    as_sharegpt = "from" in value and "value" in value
    return as_openai or as_sharegpt


def read_message(turn: Any, is_last: bool) -> tuple[Message, list[str]]:
    """Return a message as chat templates read it, and those of its keys that hold something and are not read.

    Raises:
        UsageError: It is malformed, or a part of it would be lost.
    """
    if not isinstance(turn, dict):
        hint = 'say who speaks: {"role": "user", "content": "..."}'
        raise UsageError(f"a message is {json_kind(turn)}, not an object", hint)
    role = role_of(turn)
    if role in FOREIGN_TOOLS:
        raise UsageError(f"a message has the role {role!r}", AS_OPENAI)
    if role not in SPEAKERS.values():
        raise UsageError(f"message role {role!r}", f"roles are {', '.join(SPEAKERS)}")
    fields = Fields(turn)
    fields.read.update(ROLE_KEYS, CONTENT_KEYS, LEARNED, [MASKED])
    _refuse_lost(fields, role)
    content = content_of(turn)
    more: Message = {}
    if role == "tool":
        for key in RESULT_KEYS:
            if fields.has(key):
                more[key] = checked_text(str(fields.take(key)), key)
        # Without the marks of Hermes, which chat templates put around it themselves.
        if isinstance(content, str) and (marked := RESULT_IN_MARKS.fullmatch(content)):
            content = marked[1]
    calls = read_objects(fields.take("tool_calls"), "tool_calls")
    if calls:
        more["tool_calls"] = [_call(call) for call in calls]
        content = "" if content is None else content
    thought = _thought(fields)
    if thought:
        more |= dict.fromkeys(THOUGHT, thought)
    # Whether an answer may be empty is for its use to say.
    may_be_empty = role == "tool" or (role == "assistant" and (is_last or bool(calls)))
    text = checked_text(content, f"{role} content", may_be_empty)
    found, end, _ = split_thought(text) if role == "assistant" else (None, "", "")
    if found is not None and not end:
        raise UsageError(
            "a thought in an answer never ends", "end it before the answer, or leave out the row"
        )
    return {"role": role, "content": text, **more}, fields.unread()


def content_of(turn: Message) -> Any:
    """Return the text of a message, which may be written in parts."""
    content = _first(turn, CONTENT_KEYS)
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    return number_as_text(content)


def _refuse_lost(fields: Fields, role: str) -> None:
    """Refuse what a message says and no prompt or answer would show."""
    if fields.has("function_call"):
        raise UsageError("a message has function_call", AS_OPENAI)
    if fields.has("tools"):
        raise UsageError("a message has tools", "write tools beside messages, not in one of them")
    for key in PICTURES:
        if fields.has(key):
            raise UsageError(f"a message has {key}, which is no text", ONLY_TEXT)
    for key in (*LEARNED, MASKED) if role == "assistant" else ():
        value = fields.take(key)
        if fields.has(key) and as_flag(value) is not (key != MASKED):
            shown = json.dumps(value) if isinstance(value, str | int | float) else json_kind(value)
            hint = "every assistant turn is learned alike: remove the turn, or this key"
            raise UsageError(f"a message has {key} {shown}", hint)


def _thought(fields: Fields) -> str:
    """Return the thought of a message, by any of its names; "" if it has none."""
    given = [fields.take(key) for key in THOUGHT if fields.has(key)]
    thoughts = {checked_text(thought, "a thought") for thought in given}
    if len(thoughts) > 1:
        hint = f"keep one of {', '.join(THOUGHT)}"
        raise UsageError("a message has two different thoughts", hint)
    return thoughts.pop() if thoughts else ""


def _first(turn: Message, keys: tuple[str, ...]) -> Any:
    """Return the first value that is not missing; where all are, a blank text rather than null."""
    values = [turn[key] for key in keys if turn.get(key) is not None]
    values.sort(key=is_missing)
    return values[0] if values else None


def _part(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "output_text"):
        kind = part.get("type") if isinstance(part, dict) else json_kind(part)
        raise UsageError(f"a message holds a part of type {kind}", ONLY_TEXT)
    return checked_text(part.get("text"), "text")


def _call(call: Message) -> Message:
    """Return a tool call with its arguments as an object, which OpenAI writes as JSON text."""
    function = from_json_text(call.get("function", call))
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise UsageError("a tool call has no name", AS_OPENAI)
    given = function.get("arguments")
    if is_missing(given) or given == "null":
        given = {}
    if not isinstance(from_json_text(given), dict):
        raise UsageError(f"the arguments of {name} are {json_kind(given)}, not an object", AS_OPENAI)
    (arguments,) = read_objects([given], "arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def read_tools(value: Any) -> list[Message] | None:
    """Return the tools that a row offers, or None, as OpenAI writes them.

    Some files hold them, or parts of them, as JSON text. Functions alone, as OpenAI's older format, its
    Responses, Anthropic and MCP have them, are converted.

    Raises:
        UsageError: One is no function with a name.
    """
    tools = [_tool(tool) for tool in read_objects(value, "tools")]
    return read_objects(tools, "tools") or None


def _tool(given: Message) -> Message:
    tool = {"type": "function", **given}
    if "function" not in given:
        tool["function"] = {SCHEMAS.get(key, key): part for key, part in given.items() if key != "type"}
        tool = {key: tool[key] for key in ("type", "function")}
    part: Any = tool
    for key in ("function", "parameters", "properties"):
        if isinstance(part, dict) and key in part:
            decoded = from_json_text(part[key])
            part[key] = decoded
            part = decoded
    function = tool["function"]
    if tool["type"] != "function" or not isinstance(function, dict) or not function.get("name"):
        raise UsageError(f"a tool is no function with a name: it has {listed(given)}", TOOLS_HINT)
    return tool


def read_objects(value: Any, field: str) -> list[Message]:
    """Return a list of objects, which some files hold as JSON text; an empty one if missing.

    Nulls are left out, except in JSON text.
    """
    try:
        entries = [] if is_missing(value) else from_json_text(without_nulls(value))
        if isinstance(entries, list):
            entries = [from_json_text(entry) for entry in entries]
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise UsageError(f"{field} is not made of objects", AS_OPENAI)
        text = json.dumps(entries, ensure_ascii=False, default=str)
    except RecursionError as fault:
        raise UsageError(f"{field} is nested too deeply", AS_OPENAI) from fault
    checked_text(text, field)
    return entries


def json_kind(value: Any) -> str:
    """Return what a JSON value is, in words."""
    return JSON_KINDS.get(float if isinstance(value, float) else type(value), type(value).__name__)


def checked_text(value: Any, name: str, may_be_empty: bool = False) -> str:
    """Return a value that must be text, and that a tokenizer can read.

    Raises:
        UsageError: It is something else, blank, too long, or holds half a character.
    """
    if not isinstance(value, str):
        raise UsageError(f"{name} is {json_kind(value)}, not text", FIELDS_HINT)
    if not value.strip():
        if may_be_empty:
            return ""
        raise UsageError(f"{name} is empty", FIELDS_HINT)
    if any("\ud800" <= char <= "\udfff" for char in value):
        message = f"{name} holds half of a surrogate pair, which is not a character"
        raise UsageError(message, "write the text as UTF-8")
    if len(value) > MAX_ROW_CHARS:
        message = f"{name} has {len(value)} characters, at most {MAX_ROW_CHARS} are read"
        raise UsageError(message, "split the row")
    return value
