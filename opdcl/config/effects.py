"""Find the settings that are set and have no effect, by the table `unused` of each section."""

from __future__ import annotations

from opdcl.config.section import Section


def without_effect(section: Section) -> dict[str, str]:
    """Return the settings of a section, and of those in it, that have no effect, and why, by key.

    A setting at its default is not among them: stored runs name all settings.
    """
    found: dict[str, str] = {}
    for keys, has_no_effect, reason in section.unused:
        for key in keys.split():
            if key not in found and has_no_effect(section) and _differs(section, key):
                found[key] = reason
    for name, value in section:
        parts = {name: value}
        if isinstance(value, dict):
            parts = {f"{name}.{key}": part for key, part in value.items()}
        for place, part in parts.items():
            if isinstance(part, Section) and place not in found:
                found |= {f"{place}.{key}": reason for key, reason in without_effect(part).items()}
    return found


def _differs(section: Section, key: str) -> bool:
    """Return whether a setting, of a section or of one in it, differs from its default."""
    inner, _, name = key.rpartition(".")
    holder = getattr(section, inner) if inner else section
    return holder is not None and bool(getattr(holder, name) != type(holder).model_fields[name].default)
