"""The schema in words: a table of all keys, and validation errors with key, file, line and a hint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from opdcl.config.section import Section
from opdcl.config.workflow import Workflow
from opdcl.errors import UsageError, nearest

SCHEMA = "opdcl config schema  # lists every key with its values"

# Plain words, with the values of the error's context -> Pydantic's error types.
WORDS = {
    "an integer": "int_type int_parsing int_from_float",
    "a number": "float_type float_parsing",
    "a finite number": "finite_number",
    "true or false": "bool_type bool_parsing",
    "text": "string_type",
    "valid text": "string_unicode",
    "text that is not empty": "string_too_short",
    "{form}": "string_pattern_mismatch",
    "a list": "list_type",
    "a mapping": "dict_type",
    "a section of settings": "model_type model_attributes_type",
    "greater than {gt:.12g}": "greater_than",
    "at least {ge:.12g}": "greater_than_equal",
    "less than {lt:.12g}": "less_than",
    "at most {le:.12g}": "less_than_equal",
    "{expected}": "literal_error",
}


TYPES = {int: "integer", float: "number", str: "text", bool: "true | false", type(None): "null"}


def describe_fields(
    section: type[Section] = Workflow, prefix: str = "", default_section: Section | None = None
) -> list[list[str]]:
    """Return key, kind of value, default and meaning of every field; `default_section` has other defaults."""
    rows = []
    for name, field in section.model_fields.items():
        default = getattr(default_section, name) if default_section else field.default
        if inner := section_of(field.annotation):
            defaults = default if isinstance(default, Section) else None
            rows += describe_fields(inner, f"{prefix}{name}.", defaults)
        else:
            default = "required" if default is PydanticUndefined else as_yaml(default)
            meaning = " ".join((field.description or "").split())
            rows.append([f"{prefix}{name}", kind_of(field.annotation), default, meaning])
    return rows


def fields_below(prefix: str) -> list[list[str]]:
    """Return the fields of a section, or the one field of this name.

    Raises:
        UsageError: There is none.
    """
    fields = describe_fields()
    found = [row for row in fields if f"{row[0]}.".startswith(f"{prefix}.")]
    if not found and not (found := [row for row in fields if row[0].endswith(f".{prefix}")]):
        sections = {row[0].rpartition(".")[0] for row in fields} - {""}
        near = nearest(prefix, [*(row[0] for row in fields), *sections])
        hint = f"did you mean {near}?" if near else SCHEMA
        raise UsageError(f"no setting {prefix!r}", hint)
    return found


def as_yaml(value: Any) -> str:
    """Return a value as it is written in a workflow."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def kind_of(annotation: Any) -> str:
    """Return in words what values a setting takes, such as `integer | auto`."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Annotated:
        return kind_of(arguments[0])
    if origin is Literal:
        return " | ".join(map(as_yaml, arguments))
    if origin is list:
        return f"list of {kind_of(arguments[0])}"
    if origin is dict:
        return "mapping"
    if arguments:  # a union
        return " | ".join(dict.fromkeys(map(kind_of, arguments)))
    return TYPES[annotation]


def section_of(annotation: Any) -> type[Section] | None:
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)


def schema_path(path: Sequence[int | str]) -> tuple[list[str], type[Section] | None]:
    """Return the setting that an error's location names, and the innermost section.

    Pydantic appends the tried types of a union, such as `literal['auto']`, which name no setting.
    """
    section: type[Section] | None = Workflow
    keys: list[str] = []
    parts = list(path)
    while parts and section:
        keys.append(str(parts.pop(0)))
        field = section.model_fields.get(keys[-1])
        if field is None:
            break
        is_mapping = get_origin(field.annotation) is dict
        section = section_of(field.annotation)
        if is_mapping and parts:
            keys.append(str(parts.pop(0)))
    keys += [str(part) for part in parts if isinstance(part, int)]
    return keys, section


def explain(fault: ValidationError, origins: dict[str, str]) -> UsageError:
    """Return one error with a line for each wrong setting, in the order of the schema."""
    lines: dict[str, str] = {}
    hints: dict[str, str] = {}
    expected: dict[str, list[str]] = {}
    for error in fault.errors():
        key, section = error_key(error)
        where = _told_origin(key, origins)
        context = error.get("ctx", {})
        if error["type"] == "extra_forbidden":
            hints[key] = _hint_of_unknown(key, error["input"], section)
            # After a comma, --set would read as a second key.
            lines[key] = f"unknown key {key}{where}".replace(", --set", " (in --set)")
        elif error["type"] == "missing":
            lines[key] = f"{key} is required{where}"
        elif "key" in context:  # an error of ours
            hints[key] = context["hint"]
            lines[key] = f"{key} {error['msg']}{where}"
        elif words := next((words for words, types in WORDS.items() if error["type"] in types.split()), ""):
            is_address = "http" in context.get("pattern", "")
            form = "an http address" if is_address else "a name of letters, digits, hyphens and underscores"
            expected.setdefault(key, []).append(words.format(**context, form=form))
            kinds = " or ".join(dict.fromkeys(expected[key]))
            lines[key] = f"{key}: must be {kinds} (got {_brief(error['input'])}{where})"
            named = [row[3].partition(". ")[0].rstrip(".") for row in describe_fields() if row[0] == key]
            hints[key] = f"{named[0]} (opdcl config schema {key})" if named else ""
        else:
            message = error["msg"].removeprefix("Value error, ")
            got = "" if isinstance(error["input"], dict) else f"got {_brief(error['input'])}"
            details = f"{got}{where}".removeprefix(", ")
            # A rule about several sections has no key of its own.
            lines[key] = (f"{key}: " if key else "") + message + (f" ({details})" if details else "")
    if len(lines) == 1:
        return UsageError("".join(lines.values()), "".join(hints.values()) or SCHEMA)
    told = [line + (f"; {hints[key]}" if hints.get(key) else "") for key, line in lines.items()]
    return UsageError("\n".join(told), SCHEMA)


def explain_idle(idle: Mapping[str, str], origins: dict[str, str]) -> UsageError:
    """Return one error with a line for each setting that has no effect; `idle` says why, by key."""
    lines = [f"{key} has no effect {reason}{_told_origin(key, origins)}" for key, reason in idle.items()]
    return UsageError("\n".join(lines), "remove the setting" if len(lines) == 1 else "remove these settings")


def error_key(error: Any) -> tuple[str, type[Section] | None]:
    """Return the dotted key that an error is about, and its section."""
    keys, section = schema_path(error["loc"])
    if key := error.get("ctx", {}).get("key"):
        keys.append(key)
    return ".".join(keys), section


def origin_of(key: str, origins: Mapping[str, str]) -> str:
    """Return where a setting, or else the innermost section around it, was set; "" if nowhere."""
    while key and key not in origins:
        key = key.rpartition(".")[0]
    return origins.get(key, "")


def _told_origin(key: str, origins: Mapping[str, str]) -> str:
    origin = origin_of(key, origins)
    return f", {origin}" if origin else ""


def _hint_of_unknown(key: str, value: Any, innermost: type[Section] | None) -> str:
    """Say what replaces a key of earlier versions; or suggest the same key in another section, or a similar
    one in the same section."""
    section, _, name = key.rpartition(".")
    if innermost and name in innermost.former:
        return f"it is gone: {innermost.former[name][1]}"
    typed = f"{name}.{next(iter(value))}" if isinstance(value, dict) and value else name
    elsewhere = [k for k, *_ in describe_fields() if k.endswith(f".{typed}")]
    siblings = innermost.model_fields if innermost else ()
    if near := nearest(name, siblings, 0.5):
        near = f"{section}.{near}".strip(".")
    meant = " or ".join(elsewhere[:3]) or near
    return f"did you mean {meant}?" if meant else ""


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
