"""Read workflow files and `--set` overrides into a `Workflow`; every error names the file and line."""

from __future__ import annotations

import copy
import fnmatch
import io
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent

from opdcl.config.recover import split_share
from opdcl.config.reference import SCHEMA, error_key, explain, explain_idle
from opdcl.config.section import Section
from opdcl.config.shipped import (
    ENDINGS,
    ROLES,
    SHIPPED_DATA,
    find_workflow,
    is_task_file,
    name_own_tasks,
    split_part,
)
from opdcl.config.workflow import MACHINE, WITHOUT_MEANING, Workflow
from opdcl.errors import UsageError
from opdcl.sanitize import redact

# Takes a line for the user.
Note = Callable[[str], None]

MAX_BYTES = 1_000_000
DEEPEST = 50  # levels; a real workflow has six
QUOTE = "put it in quotes to make it text"

# Names of shipped models and data, which are not file names.
ALIASES = ("smollm2-135m", *SHIPPED_DATA)

DATA_ENDINGS = (
    *(".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst"),
    *(".txt", ".md", ".markdown", ".rst"),
)
FILE_ENDINGS = (*DATA_ENDINGS, ".gguf", ".jinja", *ENDINGS)

# Settings that may name a file. Relative paths start at the workflow file's folder, those of a command at the
# current one; a run stores them whole, so that later commands may be given in any folder.
PATH_FIELDS = (
    "*model.chat_template",
    *("model.id", "start", "finetune.data", "recover.general", "recover.domain", "eval.data.*"),
    "eval.closeness",
    "finetune.replay.prompts",
    *("recover.teachers.*.model.id", "recover.teachers.*.adapter", "recover.teachers.*.prompts"),
)

# Settings in whose place a file may be named. Its text is read here, where the user speaks, and nowhere else:
# in the settings of a run, which may come from somebody else, a name would open files of the user's.
TEMPLATE_FIELD, SYSTEM_FIELDS = "*model.chat_template", ("*recover.system", "*eval.system")


def load(
    sources: list[str],
    overrides: Sequence[str] = (),
    flags: dict[str, Any] | None = None,
    is_stored: Callable[[Path], bool] = lambda file: False,
    note: Note = lambda text: None,
) -> tuple[Workflow, dict[str, str]]:
    """Return the workflow and the origin of each set value (`"recover.steps" -> "quickstart.yaml:31"`).

    Precedence: defaults < first file < further files < `--set a.b=c` < named arguments. A file that
    `is_stored` in a run opens no other file: its texts are texts. `note` reports what `validate` leaves out.
    """
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    # Before the files: a forgotten = makes a value look like the name of a workflow.
    values = _read_overrides(overrides)
    for source in sources:
        file = find_workflow(source)
        _merge(tree, origins, _read(file), file, not is_stored(file))
    return _override(tree, origins, values, flags or {}, note)


def load_tree(
    tree: dict[str, Any],
    origins: dict[str, str],
    overrides: list[str],
    flags: dict[str, Any],
    stage: str,
    note: Note = lambda text: None,
) -> tuple[Workflow, dict[str, str]]:
    """Return the workflow of an earlier command with one stage added, overridden as in `load`."""
    values = _read_overrides(overrides)
    stored = {key: value for key, value in tree.items() if value is not None}
    stored[stage] = dict(stored.get(stage) or {})
    try:
        return _override(copy.deepcopy(stored), dict(origins), values, flags, note)
    except UsageError:
        # A run stores all settings. One that this version does not have is a former default and is left out,
        # unless somebody had set it and it had an influence on the result: then the schema refuses it.
        for key in _unknown_keys(stored):
            has_meaning = key.rpartition(".")[2] not in WITHOUT_MEANING | MACHINE
            if not (_is_set(key, origins) and has_meaning):
                _take_out(stored, key)
        return _override(stored, dict(origins), values, flags, note)


def _read_overrides(overrides: Sequence[str]) -> list[tuple[str, Any, str]]:
    """Return key, value and origin of each `--set KEY=VALUE`."""
    values = []
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise UsageError(f"--set {override!r} is not KEY=VALUE", "--set recover.steps=60")
        if not text.strip():
            raise UsageError(
                f"--set {key.strip()}= has no value", f"--set {key.strip()}=null takes a setting away"
            )
        try:
            values.append((key.strip(), _plain(_parse(text, f"--set {key}")), "--set"))
        except ValueError as fault:
            raise UsageError(f"--set {key}: {fault}", QUOTE) from fault
    return values


def _override(
    tree: dict[str, Any],
    origins: dict[str, str],
    values: list[tuple[str, Any, str]],
    flags: dict[str, Any],
    note: Note,
) -> tuple[Workflow, dict[str, str]]:
    """Apply overrides to a tree; settings below them that lose their effect return to their defaults."""
    below, own = copy.deepcopy(tree), set()
    named = [(key, value, "argument") for key, value in flags.items() if value is not None]
    for key, value, origin in [*values, *named]:
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise UsageError(f"{key}: {section} is a value, not a section", "opdcl config schema")
        node[name] = _from_here(value, key)
        _forget_below(origins, key)  # what stood there is replaced
        origins[key] = origin
        own.add(key)
    return validate(tree, origins, own, below, note), origins


def validate(
    tree: dict[str, Any],
    origins: dict[str, str] | None = None,
    own: Collection[str] | None = None,
    below: dict[str, Any] | None = None,
    note: Note = lambda text: None,
) -> Workflow:
    """Check a plain mapping against the schema.

    A setting without an effect is refused. If a layer below the topmost has set it, and the topmost has taken
    its effect away, it is left out instead, from `tree` and `origins` too.

    Args:
        tree: The settings of all layers.
        origins: Key -> file and line, for the settings that somebody has set; default: all of them.
        own: Keys set in the topmost layer; default: all.
        below: The settings of the layers below; default: each is known to have had an effect.
        note: Reports what is left out, if somebody had set it.
    """
    name_own_tasks(tree)
    for key, value in flatten(tree).items():
        if isinstance(value, str) and redact(value) != value:
            hint = "put it into the environment, for instance as HF_TOKEN: that is never stored"
            raise UsageError(f"{key} looks like a secret, and a run stores its configuration on disk", hint)
    flow = _checked(tree, origins)
    overruled = _overruled(without_effect(flow), origins, own, below)
    for key, reason in overruled.items():
        if _is_set(key, origins):
            note(f"{key} is left out: it has no effect {reason}")
        _take_out(tree, key)
        (origins or {}).pop(key, None)
        _forget_below(origins or {}, key)
    if overruled:
        flow = _checked(tree, origins)
    if idle := without_effect(flow):
        raise explain_idle(idle, origins or {})
    return flow


def _overruled(
    idle: dict[str, str],
    origins: dict[str, str] | None,
    own: Collection[str] | None,
    below: dict[str, Any] | None,
) -> dict[str, str]:
    """Return the settings without an effect that are no mistake: the topmost layer took it from them."""
    if own is None:
        return {}
    found = {key: reason for key, reason in idle.items() if not _is_in(key, own)}
    if not (found and below):
        return found
    try:
        before = without_effect(Workflow.model_validate(below))
    except ValidationError:  # it needs what is laid over it
        return found
    mistakes = [key for key in before if _is_set(key, origins)]
    return {key: reason for key, reason in found.items() if not _is_in(key, mistakes)}


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


def _checked(tree: dict[str, Any], origins: dict[str, str] | None) -> Workflow:
    """Return the workflow of a plain mapping; all errors are reported at once."""
    try:
        return Workflow.model_validate(tree)
    except ValidationError as fault:
        raise explain(fault, origins or {}) from fault


def _unknown_keys(tree: dict[str, Any]) -> set[str]:
    """Return the keys that the schema does not have."""
    try:
        Workflow.model_validate(tree)
    except ValidationError as fault:
        return {error_key(error)[0] for error in fault.errors() if error["type"] == "extra_forbidden"}
    return set()


def _take_out(tree: dict[str, Any], key: str) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree[section]
    del tree[name]


def _forget_below(origins: dict[str, str], section: str) -> None:
    for key in [key for key in origins if key.startswith(f"{section}.")]:
        del origins[key]


def _is_set(key: str, origins: dict[str, str] | None) -> bool:
    """Whether somebody has set a setting, or one in this section."""
    return origins is None or any(f"{origin}.".startswith(f"{key}.") for origin in origins)


def _is_in(key: str, own: Collection[str]) -> bool:
    """Whether a key, its section or one of its parts is in a collection of dotted keys."""
    return any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in own)


def dump(workflow: Workflow) -> str:
    """Return the workflow as YAML that `load` reads back; settings that are None are left out."""
    stream = io.StringIO()
    YAML(typ="safe", pure=True).dump(workflow.model_dump(exclude_none=True), stream)
    return stream.getvalue()


def _read(file: Path) -> dict:
    try:
        content = file.read_bytes()
    except OSError as fault:
        hint = "check the path and its permissions"
        raise UsageError(f"could not read {file}: {fault.strerror}", hint) from fault
    if len(content) > MAX_BYTES:
        message = f"{file} is {len(content)} bytes; a workflow has at most {MAX_BYTES}"
        raise UsageError(message, "is it the right file?")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise UsageError(f"{file} is not UTF-8 text (byte {fault.start})", "save it as UTF-8") from fault
    tree = _parse(text, str(file))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        kind = "list" if isinstance(tree, list) else "single value"
        raise UsageError(f"{file} is a {kind}, not a mapping of sections", "opdcl workflows show quickstart")
    return tree


def _parse(text: str, where: str) -> Any:
    try:
        _refuse_magic(text, where)
        return YAML(typ="rt").load(io.StringIO(text))
    except MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        line = f":{mark.line + 1}" if mark else ""
        message = f"{where}{line}: {fault.problem or fault.context}"
        raise UsageError(message, "fix the YAML at that line") from fault
    except (YAMLError, ValueError) as fault:
        first = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise UsageError(f"{where}: {first}", "fix the YAML") from fault


def _refuse_magic(text: str, where: str) -> None:
    """Refuse anchors, which let a small file expand without bound, and tags and directives.

    Deep nesting is refused as soon as it is seen: the parser's time grows with the square of the depth.
    """
    depth = 0
    for event in YAML(typ="safe", pure=True).parse(io.StringIO(text)):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > DEEPEST:
            message = f"{where}:{event.start_mark.line + 1} nests more than {DEEPEST} levels"
            raise UsageError(message, "is it the right file?")
        features = {
            "an anchor or alias": getattr(event, "anchor", None),
            "a tag": getattr(event, "tag", None),
            "a YAML directive": getattr(event, "version", None),
            "a merge key": getattr(event, "value", None) == "<<",
        }
        for name, present in features.items():
            if present:
                raise UsageError(f"{where}:{event.start_mark.line + 1} uses {name}", "write the values out")


def _plain(value: Any) -> Any:
    """Turn ruamel's decorated containers and scalars into plain ones."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise ValueError(f"{value} is a {type(value).__name__}; write it in quotes")


def _merge(tree: dict, origins: dict, new: Any, file: Path, opens_files: bool, prefix: str = "") -> None:
    for key, value in new.items():
        name = f"{prefix}{key}"
        line = new.lc.key(key)[0] + 1 if hasattr(new, "lc") else 0
        if isinstance(value, dict):
            origins.setdefault(name, f"{file}:{line}")
            if not isinstance(tree.get(str(key)), dict):
                tree[str(key)] = {}
            _merge(tree[str(key)], origins, value, file, opens_files, f"{name}.")
        else:
            try:
                value = _plain(value)
            except ValueError as fault:
                raise UsageError(f"{file}:{line}: {name}: {fault}", QUOTE) from fault
            value = _placed(value, name, lambda path: _from_folder(path, file.parent))
            tree[str(key)] = _opened(value, name) if opens_files else value
            origins[name] = f"{file}:{line}"


def _placed(value: Any, key: str, resolve: Callable[[str], str]) -> Any:
    """Resolve what a setting, also one of an arm, names; of suites only a user's own tasks are paths."""
    keys = key.split(".")
    field = ".".join(keys[2:] if keys[0] == "arms" else keys)
    if field in [f"eval.{role}" for role in ROLES]:
        return _resolved(value, lambda name: resolve(name) if is_task_file(name) else name)
    if any(fnmatch.fnmatchcase(field, pattern) for pattern in PATH_FIELDS):
        return _resolved(value, resolve)
    return value


def _from_here(value: Any, key: str) -> Any:
    """Resolve what a setting names in the current folder; what is not there stays as it was typed."""
    if isinstance(value, dict):
        return {name: _from_here(part, f"{key}.{name}") for name, part in value.items()}
    return _opened(_placed(value, key, _existing), key)


def _opened(value: Any, key: str) -> Any:
    """Return the text of the file that a value names: `@FILE` as a system prompt, a path as a template."""
    if not isinstance(value, str):
        return value
    if fnmatch.fnmatchcase(key, TEMPLATE_FIELD) and "{" not in value and os.path.isfile(value):
        return _text_of(value, key, "Jinja template")
    if value.startswith("@") and any(fnmatch.fnmatchcase(key, field) for field in SYSTEM_FIELDS):
        text = _text_of(value[1:], key, "system prompt").strip()
        if not text or text.startswith("@"):
            raise UsageError(f"{key}: names a file without a system prompt: {value[1:]}", SCHEMA)
        return text
    return value


def _text_of(file: str, key: str, kind: str) -> str:
    try:
        return Path(os.path.expanduser(file)).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as fault:
        message = f"{key}: names a file that cannot be read: {file}"
        raise UsageError(message, f"name a text file in UTF-8 that holds the {kind}") from fault


def _resolved(value: Any, resolve: Callable[[str], str]) -> Any:
    """Resolve a path, or each path of a list, whose items may end with a share."""
    if isinstance(value, str):
        return resolve(value)
    if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    parts = [(item, *split_share(item)) for item in value]
    return [resolve(source) + item.removeprefix(source) for item, source, _ in parts]


def _existing(value: str) -> str:
    resolved = _from_folder(value, Path())
    return resolved if os.path.exists(split_part(resolved)[0]) else value


def _from_folder(value: str, folder: Path) -> str:
    """Resolve a relative file name against the workflow's folder; an alias or a hub id stays as it is."""
    if value in ALIASES:
        return value
    try:
        whole = str(folder / os.path.expanduser(value))  # Path.expanduser raises for unknown users
        name, part = split_part(whole)
        if part:
            return f"{Path(name).resolve()}@{part}"
        path = Path(whole)
        looks_like_file = value.startswith((".", "~", "/")) or path.suffix.lower() in FILE_ENDINGS
        return str(path.resolve()) if looks_like_file or os.path.exists(path) else value
    except ValueError:
        return value  # NUL and lone surrogates occur in no file name


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as dotted key -> value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        is_section = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return flat


def with_setting(section: Any, key: str, value: Any) -> Any:
    """Return settings with another value at a dotted key; the value is not validated."""
    name, _, rest = key.partition(".")
    is_mapping = isinstance(section, dict)
    if rest:
        value = with_setting(section[name] if is_mapping else getattr(section, name), rest, value)
    return section | {name: value} if is_mapping else section.model_copy(update={name: value})
