"""One message of a conversation, as trainers and data sets write it: its role, text, thought and tool calls.

What a message holds is kept, refused, or named as unread. The caller adds the row's place to an error.
"""

from __future__ import annotations

import json
from typing import Any

from opdcl.data.values import Fields, as_flag, from_json_text, is_missing, number_as_text, without_nulls
from opdcl.errors import UsageError

MAX_ROW_CHARS = 200_000

FIELDS_HINT = (
    "a row has messages, prompt (and completion), question (and answer), instruction (and output), "
    "conversations, or text; --columns question=NAME,answer=NAME names other columns"
)

Message = dict[str, Any]

# What a speaker is called -> the role in the chat template.
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user"}
ROLES |= dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bing", "bard"), "assistant")
ROLES["tool"] = "tool"
FOREIGN_TOOLS = ("function", "function_call", "tool_call", "observation", "tool_response")
AS_OPENAI = "write tool calls as OpenAI does: tool_calls in the assistant's message, results with role tool"

# Names of the thought before an answer: templates read one of them, so each is given all.
THOUGHT = ("reasoning_content", "thinking", "reasoning")

# Names of what is no text, in a message or beside it.
PICTURES = ("images", "image", "videos", "video", "audios", "audio")
ONLY_TEXT = "only text can be learned"

# Whether a turn is learned, as trainers name it; all of the assistant's turns are.
LEARNED = ("weight", "loss", "train", "trainable", "training")

ROLE_KEYS, CONTENT_KEYS = ("role", "from"), ("content", "value")
RESULT_KEYS = ("name", "tool_call_id")

# Kinds of values in JSON, in words.
KINDS = {
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
    return ROLES.get(name, name) if isinstance(name, str) else name


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
    role = role_of(turn)
    if role in FOREIGN_TOOLS:
        raise UsageError(f"a message has the role {role!r}", AS_OPENAI)
    if role not in ROLES.values():
        raise UsageError(f"message role {role!r}", f"roles are {', '.join(ROLES)}")
    fields = Fields(turn)
    fields.read.update(ROLE_KEYS, CONTENT_KEYS, LEARNED)
    _refuse_lost(fields, role)
    content = content_of(turn)
    more: Message = {}
    if role == "tool":
        for key in RESULT_KEYS:
            if fields.has(key):
                more[key] = checked_text(str(fields.take(key)), key)
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
    for key in LEARNED if role == "assistant" else ():
        value = fields.take(key)
        if fields.has(key) and not as_flag(value):
            shown = json.dumps(value) if isinstance(value, str | int | float) else kind_of(value)
            hint = "every assistant turn is learned alike: remove the turn, or this key"
            raise UsageError(f"a message has {key} {shown}", hint)


def _thought(fields: Fields) -> str:
    """Return the thought of a message, whatever it is called; "" if it has none."""
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
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else kind_of(part)
        raise UsageError(f"a message holds a part of type {kind}", ONLY_TEXT)
    return checked_text(part.get("text"), "text")


def _call(call: Message) -> Message:
    """Return a tool call with its arguments as an object, which OpenAI writes as JSON text."""
    function = from_json_text(call.get("function", call))
    name, arguments = None, None
    if isinstance(function, dict):
        name, arguments = function.get("name"), from_json_text(function.get("arguments"))
    if not isinstance(arguments, dict) or not isinstance(name, str) or not name:
        raise UsageError("a tool call has no name or no object of arguments", AS_OPENAI)
    (arguments,) = read_objects([arguments], "arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def read_tools(value: Any) -> list[Message] | None:
    """Return the tools that a row offers, or None; some files hold them, or parts of them, as JSON text."""
    tools = read_objects(value, "tools")
    for tool in tools:
        part: Any = tool
        for key in ("function", "parameters", "properties"):
            if isinstance(part, dict) and key in part:
                decoded = from_json_text(part[key])
                part[key] = decoded
                part = decoded
    return read_objects(tools, "tools") or None


def read_objects(value: Any, field: str) -> list[Message]:
    """Return a list of objects without nulls, which some files hold as JSON text; an empty one if missing."""
    entries = [] if is_missing(value) else from_json_text(value)
    if isinstance(entries, list):
        entries = [from_json_text(entry) for entry in entries]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{field} is not made of objects", AS_OPENAI)
    try:
        entries = without_nulls(entries)
        text = json.dumps(entries, ensure_ascii=False, default=str)
    except RecursionError as fault:
        raise UsageError(f"{field} is nested too deeply", AS_OPENAI) from fault
    checked_text(text, field)
    return entries


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in words."""
    return KINDS.get(type(value), type(value).__name__)


def checked_text(value: Any, name: str, may_be_empty: bool = False) -> str:
    """Return a value that must be text, and that a tokenizer can read.

    Raises:
        UsageError: It is something else, blank, too long, or holds half a character.
    """
    if not isinstance(value, str):
        raise UsageError(f"{name} is {kind_of(value)}, not text", FIELDS_HINT)
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
