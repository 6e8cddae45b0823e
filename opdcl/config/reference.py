"""The schema as a table: every key with its default and meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from opdcl.config.workflow import Workflow


def describe_fields(
    section: type[BaseModel] = Workflow, prefix: str = "", default_section: BaseModel | None = None
) -> list[list[str]]:
    """Return key, default and meaning of every field; defaults are those of `default_section` where there is
    one."""
    rows = []
    for name, field in section.model_fields.items():
        default = getattr(default_section, name) if default_section else field.default
        if inner := section_of(field.annotation):
            rows += describe_fields(
                inner, f"{prefix}{name}.", default if isinstance(default, BaseModel) else None
            )
        else:
            default = "required" if default is PydanticUndefined else str(default)
            rows.append([f"{prefix}{name}", default, " ".join((field.description or "").split())])
    return rows


def section_of(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def schema_path(path: Sequence[int | str]) -> tuple[list[str], list[str]]:
    """Return the setting that an error's location names, and the field names of the innermost section.

    Pydantic appends the tried types of a union, such as `literal['auto']`, which name no setting.
    """
    section: type[BaseModel] | None = Workflow
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
    return keys, list(section.model_fields) if section else []
