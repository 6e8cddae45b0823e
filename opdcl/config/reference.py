"""The schema as a table: every key with its default and meaning."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from opdcl.config.workflow import Workflow


def describe_fields(
    section: type[BaseModel] = Workflow, prefix: str = "", given: BaseModel | None = None
) -> list[list[str]]:
    """Return key, default and meaning of every field; of a section that is `given` by default, what it then holds."""
    rows = []
    for name, field in section.model_fields.items():
        inner, default = section_of(field.annotation), getattr(given, name) if given else field.default
        if inner:
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


def field_names(path: list[str]) -> list[str]:
    """Return the field names of the section at `path`."""
    section: type[BaseModel] | None = Workflow
    for key in path:
        field = section.model_fields.get(key) if section else None
        section = section_of(field.annotation) if field else None
    return list(section.model_fields) if section else []
