"""Load a task of lm-eval that a user has written. Its own code runs only with the user's consent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opdcl.data.files import is_regular
from opdcl.data.stock_tasks import stock_settings
from opdcl.errors import UsageError

CONSENT = "read that code; if you trust it, --set model.trust_remote_code=true lets it run"


def own_task(name: str, file: Path, trusted: bool) -> dict[str, Any] | str:
    """Return what lm-eval loads: a task's settings, or its file if a class of its own reads them.

    `trusted` lets code run that the task names. Templates never run as code without it.

    Raises:
        UsageError: The task is not supported or damaged, or it needs code and `trusted` is false.
    """
    if not trusted:
        if code := _code_in(file):
            raise UsageError(f"suite {name!r} comes with code of its own: {code}", CONSENT)
        _confine_templates()
    settings = stock_settings(name, file)
    if settings.get("task") != name:
        raise UsageError(f"{file} is the task {settings.get('task')!r}, not {name!r}", "give its path again")
    if "class" in settings:
        return str(file)
    return settings | _with_own_files(settings, file.parent)


def task_files(file: Path) -> list[Path]:
    """Return the files that a task's scores depend on, as far as its own file tells.

    These are the file itself, those that it includes, the Python files beside them, and local data.
    """
    own = _included(file)
    code = {code for one in own for code in one.parent.glob("*.py") if code.is_file()}
    data = []
    for one in own:
        _, settings = _parse(one)
        data += _local_files(settings.get("dataset_kwargs"), file.parent)
    return [*own, *sorted(code), *dict.fromkeys(data)]


def _included(file: Path, seen: tuple[Path, ...] = ()) -> list[Path]:
    """Return a task's file and those that it includes, one of which may include others."""
    if file in seen:
        raise UsageError(f"{file} includes itself", "remove the line include")
    _, settings = _parse(file)
    files = [file]
    included = settings.get("include") or []
    for one in [included] if isinstance(included, str) else included:
        files += _included((file.parent / str(one)).resolve(), (*seen, file))
    return [*dict.fromkeys(files)]


def _parse(file: Path) -> tuple[Any, dict[str, Any]]:
    """Return the YAML nodes of a file, and its values, in which a tag of its own leaves text."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def as_text(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> str:
        return str(node.value)

    yaml.add_multi_constructor("!", as_text, Loader=Loader)
    yaml.add_multi_constructor("tag:yaml.org,2002:python/", as_text, Loader=Loader)
    if not is_regular(file):
        raise UsageError(f"{file} is not a regular file", "check the path in the task")
    try:
        text = file.read_text(encoding="utf-8")
        nodes, settings = yaml.compose(text, Loader=Loader), yaml.load(text, Loader=Loader)
    except OSError as fault:
        raise UsageError(f"{file} cannot be read: {fault.strerror}", "check the path") from fault
    except (yaml.YAMLError, ValueError, RecursionError) as fault:
        first = " ".join(str(fault).split())[:200]
        raise UsageError(f"{file} is not valid YAML: {first}", "fix the YAML") from fault
    if not isinstance(settings, dict):
        raise UsageError(f"{file} is no task of lm-eval", "it needs a line such as task: my_task")
    return nodes, settings


def _code_in(file: Path) -> str:
    """Return what of a task, or of what it includes, would run as Python, with its line; "" for nothing."""
    import lm_eval.api.metrics  # noqa: F401  # it fills the registry
    from lm_eval.api.registry import metric_registry

    for one in _included(file):
        nodes, settings = _parse(one)
        left, seen = [nodes], set()
        while left:
            node = left.pop()
            if isinstance(node, tuple):  # a key with its value
                left += node
            elif id(node) not in seen:
                seen.add(id(node))
                if node.tag.startswith("!") or ":python/" in node.tag:
                    return f"{one}:{node.start_mark.line + 1} has {node.tag.rpartition(':')[2]} {node.value}"
                left += node.value if isinstance(node.value, list) else []
        metrics = settings.get("metric_list") or []
        for metric in metrics if isinstance(metrics, list) else []:
            known = isinstance(metric, dict) and metric.get("metric") in metric_registry
            if not known or metric.get("hf_evaluate"):
                name = metric.get("metric") if isinstance(metric, dict) else metric
                return f"the metric {name!r} in {one} is not one of lm-eval's own"
    return ""


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


def _with_own_files(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings that name local data files, which lie beside the task or in the current folder."""
    kwargs = settings.get("dataset_kwargs")
    if not isinstance(kwargs, dict) or "data_files" not in kwargs:
        return {}
    return {"dataset_kwargs": kwargs | {"data_files": _placed(kwargs["data_files"], folder)}}


def _placed(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _placed(part, folder) for key, part in value.items()}
    if isinstance(value, list):
        return [_placed(part, folder) for part in value]
    if isinstance(value, str) and (folder / value).is_file():
        return str((folder / value).resolve())
    return value


def _local_files(kwargs: Any, folder: Path) -> list[Path]:
    if not isinstance(kwargs, dict):
        return []
    files, left = [], [_placed(kwargs.get("data_files"), folder)]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list):
            left += part
        elif isinstance(part, str) and Path(part).is_file():
            files.append(Path(part).resolve())
    return sorted(files)
