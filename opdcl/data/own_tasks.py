"""Load a task of lm-eval that a user has written. Its own code runs only with the user's consent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opdcl.data.files import is_regular
from opdcl.data.stock_tasks import stock_settings
from opdcl.errors import UsageError


def own_task(name: str, file: Path, trusted: bool) -> dict[str, Any] | str:
    """Return what lm-eval loads: a task's settings, or its file if a class of its own reads them.

    `trusted` lets code run that the task names. Templates never run as code without it.

    Raises:
        UsageError: The task is not supported or damaged, or it needs code and `trusted` is false.
    """
    if not trusted:
        for one in _included(file):
            _refuse_code(name, one)
        _confine_templates()
    settings = stock_settings(name, file)
    if settings.get("task") != name:
        raise UsageError(f"{file} is the task {settings.get('task')!r}, not {name!r}", "give its path again")
    if "class" in settings:
        return str(file)
    kwargs = settings.get("dataset_kwargs")
    if isinstance(kwargs, dict) and "data_files" in kwargs:
        placed = _placed(kwargs["data_files"], file.parent)
        return settings | {"dataset_kwargs": kwargs | {"data_files": placed}}
    return settings


def task_files(file: Path) -> list[Path]:
    """Return the files that a task's scores depend on, as far as its own file tells.

    These are the file itself, those that it includes, the Python files beside them, and local data.
    """
    own = _included(file)
    code: set[Path] = set()
    data: list[Path] = []
    for one in own:
        code.update(path for path in one.parent.glob("*.py") if path.is_file())
        kwargs = _settings(one).get("dataset_kwargs")
        if isinstance(kwargs, dict):
            named = _texts(_placed(kwargs.get("data_files"), file.parent))
            data += sorted(Path(text).resolve() for text in named if Path(text).is_file())
    return [*own, *sorted(code), *dict.fromkeys(data)]


def _included(file: Path, seen: tuple[Path, ...] = ()) -> list[Path]:
    """Return a task's file and those that it includes, one of which may include others."""
    if file in seen:
        raise UsageError(f"{file} includes itself", "remove the line include")
    files = [file]
    included = _settings(file).get("include") or []
    for one in [included] if isinstance(included, str) else included:
        files += _included((file.parent / str(one)).resolve(), (*seen, file))
    return [*dict.fromkeys(files)]


def _text(file: Path) -> str:
    if not is_regular(file):
        raise UsageError(f"{file} is not a regular file", "check the path in the task")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as fault:
        raise UsageError(f"{file} cannot be read: {fault}", "check that it is text in UTF-8") from fault


def _settings(file: Path) -> dict[str, Any]:
    """Return the values of a file, in which a tag of its own leaves text."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def as_text(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> str:
        return str(node.value)

    yaml.add_multi_constructor("!", as_text, Loader=Loader)
    yaml.add_multi_constructor("tag:yaml.org,2002:python/", as_text, Loader=Loader)
    try:
        settings = yaml.load(_text(file), Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as fault:
        first = " ".join(str(fault).split())[:200]
        raise UsageError(f"{file} is not valid YAML: {first}", "fix the YAML") from fault
    if not isinstance(settings, dict):
        raise UsageError(f"{file} is no task of lm-eval", "it needs a line such as task: my_task")
    return settings


def _refuse_code(name: str, file: Path) -> None:
    """Refuse a file of which something would run as Python: a value with a tag, or a metric of others.

    Raises:
        UsageError: It has such a thing.
    """
    import lm_eval.api.metrics  # noqa: F401  # it fills the registry
    import yaml
    from lm_eval.api.registry import metric_registry

    text = _text(file)
    for token in yaml.scan(text):
        if isinstance(token, yaml.TagToken):
            number = token.start_mark.line
            raise _needs_consent(name, f"{file}:{number + 1} has {text.splitlines()[number].strip()}")
    metrics = _settings(file).get("metric_list") or []
    for metric in metrics if isinstance(metrics, list) else []:
        metric = metric if isinstance(metric, dict) else {"metric": metric}
        if metric.get("metric") not in metric_registry or metric.get("hf_evaluate"):
            raise _needs_consent(
                name, f"the metric {metric.get('metric')!r} in {file} is not one of lm-eval's own"
            )


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
