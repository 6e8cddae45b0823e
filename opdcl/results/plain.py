"""Turn results into plain data for JSON. The fields of their types are the keys of the files."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from opdcl.results.status import HEADLINE_ROLES, STATES

if TYPE_CHECKING:
    from opdcl.results.intervals import Estimate


class ByState(dict[str, "Estimate"]):
    """State -> estimate, without the states that are not measured: empty in JSON."""

    names: ClassVar[tuple[str, ...]] = STATES


class ByRole(dict[str, "Estimate"]):
    """Role -> estimate on the headline suite, without those that are not measured: empty in JSON."""

    names: ClassVar[tuple[str, ...]] = HEADLINE_ROLES


class Spread:
    """Results whose fields stand beside those of what holds them."""


def as_json(value: Any) -> Any:
    """Return a result as dictionaries, lists and numbers."""
    if isinstance(value, ByState | ByRole):
        return {name: as_json(value.get(name, {})) for name in value.names}
    if isinstance(value, dict):
        return {name: as_json(content) for name, content in value.items()}
    if isinstance(value, list):
        return [as_json(content) for content in value]
    if not is_dataclass(value):
        return value
    data: dict[str, Any] = {}
    for name, content in vars(value).items():
        plain = as_json(content)
        if isinstance(content, ByState | ByRole | Spread):
            data |= plain
        else:
            data[name] = plain
    return data
