"""Load a task of lm-eval that a user has written. Its own code runs only with the user's consent."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opdcl.data.files import is_regular
from opdcl.data.stock_tasks import refuse_unsafe, stock_settings, supported
from opdcl.errors import UsageError

# Kinds of data that `datasets` reads without help from elsewhere; it has others, such as databases.
PLAIN_DATA = ("json", "csv", "parquet", "arrow", "text")
MOST_FILES, MOST_VALUES = 100, 1_000_000


@dataclass
class _Part:
    """A file of a task and those that it includes."""

    file: Path
    settings: dict[str, Any]
    """What the file itself says; a value with a tag is its text."""
    tagged: list[str]
    """Its lines that have a tag, by which lm-eval knows Python."""
    included: list[_Part]

    def all(self) -> list[_Part]:
        parts = [self]
        for one in self.included:
            parts += one.all()
        return parts

    def merged(self) -> dict[str, Any]:
        """Return the settings with those that are included, as lm-eval merges them: the last one counts."""
        settings: dict[str, Any] = {}
        for one in self.included:
            settings |= one.merged()
        return settings | self.settings


def own_task(name: str, file: Path, trusted: bool) -> dict[str, Any]:
    """Return the settings of a task, which lm-eval runs as they are: no file is read again.

    `trusted` lets code run that the task names. Templates never run as code without it.

    Raises:
        UsageError: The task is not supported or damaged, or it needs code and `trusted` is false.
    """
    whole = _read(file, set())
    if trusted:
        settings = stock_settings(name, file)
    else:
        settings = whole.merged()
        _refuse_code(name, whole, settings)
        _confine_templates()
        refuse_unsafe(name, bool(settings.get("unsafe_code")))
        settings = supported(name, settings)
    if settings.get("task") != name:
        raise UsageError(f"{file} is the task {settings.get('task')!r}, not {name!r}", "give its path again")
    kwargs = settings.get("dataset_kwargs")
    if isinstance(kwargs, dict) and "data_files" in kwargs:
        placed = _placed(kwargs["data_files"], file.parent)
        return settings | {"dataset_kwargs": kwargs | {"data_files": placed}}
    return settings


def task_files(file: Path) -> list[Path]:
    """Return the files that a task's scores depend on, as far as its own file tells.

    These are the file itself, those that it includes, the Python files beside them, and local data.
    """
    parts = _read(file, set()).all()
    code: set[Path] = set()
    data: list[Path] = []
    for part in parts:
        code.update(path for path in part.file.parent.glob("*.py") if path.is_file())
        kwargs = part.settings.get("dataset_kwargs")
        if isinstance(kwargs, dict):
            named = _texts(_placed(kwargs.get("data_files"), file.parent))
            data += sorted(Path(text).resolve() for text in named if Path(text).is_file())
    return [*(part.file for part in parts), *sorted(code), *dict.fromkeys(data)]


def _read(file: Path, seen: set[Path]) -> _Part:
    """Read a task, each of its files once; nothing of it runs.

    Like lm-eval, it follows links first: what a file includes is named from where the file really lies.
    """
    file = Path(os.path.realpath(file))  # which, unlike `resolve`, raises nothing at links in a circle
    if file in seen:
        raise UsageError(f"{file} includes itself, or is included twice", "remove the line include")
    seen.add(file)
    if len(seen) > MOST_FILES:
        raise UsageError(
            f"{file} is one of more than {MOST_FILES} files of a task", "write it in fewer files"
        )
    settings, tagged = _parse(file)
    included = settings.pop("include", None) or []
    names = included if isinstance(included, list) else [included]
    return _Part(file, settings, tagged, [_read(file.parent / str(name), seen) for name in names])


def _parse(file: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what a file says, with text in place of each value that has a tag, and the lines of these."""
    import yaml

    text, tagged = _text(file), []
    # The parser that lm-eval uses, with its safe values only.
    base: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader

    class Loader(base):
        pass

    def as_text(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> str:
        number = node.start_mark.line
        tagged.append(f"{file}:{number + 1} has {text.splitlines()[number].strip()}")
        return str(node.value)

    yaml.add_multi_constructor("", as_text, Loader=Loader)
    try:
        settings = yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as fault:
        first = " ".join(str(fault).split())[:200]
        raise UsageError(f"{file} is not valid YAML: {first}", "fix the YAML") from fault
    if not isinstance(settings, dict):
        raise UsageError(f"{file} is no task of lm-eval", "it needs a line such as task: my_task")
    _refuse_endless(file, settings)
    return settings, tagged


def _refuse_endless(file: Path, settings: dict[str, Any]) -> None:
    """Refuse values that hold themselves, which YAML can write with & and *."""
    left: list[Any] = [settings]
    count = 0
    while left:
        value = left.pop()
        count += 1
        if count > MOST_VALUES:
            message = f"{file} has a value that holds itself, or more than {MOST_VALUES:,} values"
            raise UsageError(message, "write it without & and *")
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value


def _text(file: Path) -> str:
    if not is_regular(file):
        raise UsageError(f"{file} is not a regular file", "check the path in the task")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as fault:
        raise UsageError(f"{file} cannot be read: {fault}", "check that it is text in UTF-8") from fault


def _refuse_code(name: str, whole: _Part, settings: dict[str, Any]) -> None:
    """Refuse a task of which something would run as Python.

    That is a value with a tag, or a text by which lm-eval or `datasets` finds something to run or to read as
    more than data.

    Raises:
        UsageError: It has such a thing.
    """
    import lm_eval.api.metrics  # noqa: F401  # it fills the registry
    from lm_eval.api.registry import metric_registry
    from lm_eval.prompts import PROMPT_REGISTRY

    for part in whole.all():
        if part.tagged:
            raise _needs_consent(name, part.tagged[0])
    if "class" in settings:
        raise _needs_consent(name, f"its class {settings['class']!r}")
    metrics = settings.get("metric_list") or []
    for metric in metrics if isinstance(metrics, list) else [metrics]:
        metric = metric if isinstance(metric, dict) else {"metric": metric}
        if str(metric.get("metric")) not in metric_registry or metric.get("hf_evaluate"):
            raise _needs_consent(name, f"the metric {metric.get('metric')!r} is not one of lm-eval's own")
    prompt = settings.get("use_prompt")
    if prompt is not None and str(prompt).partition(":")[0] not in PROMPT_REGISTRY:
        raise _needs_consent(name, f"the prompts {prompt!r} are not lm-eval's own")
    _refuse_other_data(name, settings)


def _refuse_other_data(name: str, settings: dict[str, Any]) -> None:
    """Refuse data that neither are plain files nor lie on the Hub or in a folder."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    kind = str(settings.get("dataset_path"))
    if kind in _PACKAGED_DATASETS_MODULES and kind not in PLAIN_DATA:
        raise _needs_consent(name, f"data of the kind {kind!r}, not one of {', '.join(PLAIN_DATA)}")


def _needs_consent(name: str, code: str) -> UsageError:
    hint = "read that code; if you trust it, --set model.trust_remote_code=true lets it run"
    return UsageError(f"suite {name!r} comes with code of its own: {code}", hint)


def _confine_templates() -> None:
    """Make lm-eval render templates in a sandbox: without it a template can reach all of Python."""
    import lm_eval.utils
    from jinja2.sandbox import SandboxedEnvironment

    former = lm_eval.utils.env
    if isinstance(former, SandboxedEnvironment):
        return
    confined = SandboxedEnvironment(
        loader=former.loader, undefined=former.undefined, keep_trailing_newline=former.keep_trailing_newline
    )
    confined.filters.update(former.filters)
    lm_eval.utils.env = confined


def _placed(value: Any, folder: Path) -> Any:
    """Return local data files, which lie beside the task or in the current folder, by their paths."""
    if isinstance(value, dict):
        return {key: _placed(part, folder) for key, part in value.items()}
    if isinstance(value, list):
        return [_placed(part, folder) for part in value]
    if isinstance(value, str) and (folder / value).is_file():
        return str((folder / value).resolve())
    return value


def _texts(value: Any) -> list[str]:
    """Return the texts in lists and objects of any depth."""
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    texts: list[str] = []
    for part in parts if isinstance(value, dict | list) else []:
        texts += _texts(part)
    return texts
