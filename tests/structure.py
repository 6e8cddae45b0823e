"""Count what makes the code hard to read as a whole; `tests/unit/test_structure.py` sets limits to it.

    .venv/bin/python tests/structure.py            the table, in half a minute
    .venv/bin/python tests/structure.py --write    set the ceilings of capabilities.toml to today's lines

Lines may move from one ceiling to another. Only `--write` changes their sum, and says so.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import os
import re
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from helpers import imports
from helpers.command import ROOT, opdcl

LEDGER = ROOT / "tests" / "unit" / "capabilities.toml"

# The files at which a reader of the method begins.
ENTRIES = ("opdcl.train.recover", "opdcl.train.finetune", "opdcl.pipeline.execute")

# Two modules that name the same verbs: functions, and the commands that call them.
VERBS = re.compile(r"opdcl\.(api|cli\..*)")

# Tokens that put no code on a line.
LAYOUT = {getattr(tokenize, n) for n in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def code_lines(text: str) -> int:
    """Return the lines of a file without blank lines, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def lines_of(folder: Path) -> dict[str, int]:
    """Return the code lines of each Python file, template and HTML page in a folder, by path from there."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in LINES_IN)
    return {str(file.relative_to(folder)): LINES_IN[file.suffix](file.read_text("utf-8")) for file in files}


def template_lines(text: str) -> int:
    """Return the lines of a template or an HTML page without blank lines and comments."""
    return sum(bool(row.strip()) for row in re.sub(r"\{#.*?#\}|<!--.*?-->", "", text, flags=re.S).split("\n"))


LINES_IN = {".py": code_lines, ".j2": template_lines, ".html": template_lines}


def closure(entry: str, root: Path = ROOT) -> tuple[int, int]:
    """Return how many modules one imports, itself and indirect ones included, and their code lines."""
    files = imports.sources(root)
    modules = imports.closure(entry, imports.arrows(root))
    return len(modules), sum(code_lines(files[name].read_text(encoding="utf-8")) for name in modules)


def meanings(root: Path = ROOT, of_values: bool = False) -> dict[str, int]:
    """Return the public names of more than one class or function, with the number of their meanings.

    `of_values` asks for module constants and aliases instead. A verb of `api` and the command of that name
    are one meaning.
    """
    places: dict[str, set[str]] = defaultdict(set)
    for module, file in imports.sources(root).items():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names = [] if of_values else [node.name]
            else:
                targets = getattr(node, "targets", [getattr(node, "target", None)]) if of_values else []
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            for name in names:
                if not name.startswith("_"):
                    places[name].add("verb" if VERBS.fullmatch(module) else module)
    return {name: len(where) for name, where in sorted(places.items()) if len(where) > 1}


def counts() -> dict[str, int]:
    """Return what the head of the ledger limits, beside the lines of capabilities, as it is today."""
    from opdcl.config.reference import describe_fields

    files = imports.sources().values()
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    functions = [node.args for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = [len([*of.posonlyargs, *of.args, *of.kwonlyargs]) for of in functions]
    stems = Counter(file.stem for file in files if file.stem != "__init__")
    return {
        **{folder: sum(lines_of(ROOT / folder).values()) for folder in ("tests", "benchmarks")},
        "constants_of_several_meanings": len(meanings(of_values=True)),
        "file_names_used_twice": sum(number > 1 for number in stems.values()),
        "settings": len(list(describe_fields())),
        "functions_of_more_than_six_parameters": sum(size > 6 for size in sizes),
    }


def work_of_a_recovery(project: Path) -> dict[str, int]:
    """Fine-tune and recover in a project, and count how often that recovery validates settings and plans."""
    from opdcl.config.workflow import Workflow
    from opdcl.pipeline import plan

    opdcl(
        "run", "tiny.yaml", "-o", "tuned", "--set", "recover=null", "--set", "eval=null", cwd=project, code=0
    )
    sizes = {"steps": 2, "rollouts": 4, "max_new_tokens": 4, "validation_prompts": 2}
    settings = [word for key, n in sizes.items() for word in ("--set", f"recover.{key}={n}")]
    with counted(Workflow, "model_validate") as validations, counted(plan, "make_plan") as plans:
        opdcl("recover", "tuned", "--prompts", "prompts.jsonl", *settings, cwd=project, code=0)
    return {"validations of the settings": len(validations), "plans": len(plans)}


@contextlib.contextmanager
def counted(owner: Any, name: str) -> Iterator[list[None]]:
    """Return a list that grows by one at each call of a function, wherever it was imported to."""
    calls: list[None] = []
    original: Callable[..., Any] = getattr(owner, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    modules = [module for key, module in sys.modules.items() if key.startswith("opdcl")]
    holders = [module for module in modules if vars(module).get(name) is original and module is not owner]
    with contextlib.ExitStack() as counting:
        for holder in (owner, *holders):
            counting.enter_context(mock.patch.object(holder, name, count))
        yield calls


def read_ledger(file: Path = LEDGER) -> dict[str, Any]:
    """Return the ledger: `total`, the ceilings of `counts`, and capability -> ceiling and files."""
    return tomllib.loads(file.read_text(encoding="utf-8"))


def owners(ledger: dict[str, Any]) -> dict[str, list[str]]:
    """Return the capabilities that name a file, for each file that one names."""
    found: dict[str, list[str]] = defaultdict(list)
    for capability, entry in ledger["capability"].items():
        for file in entry["files"]:
            found[file].append(capability)
    return found


def sizes_of(ledger: dict[str, Any]) -> dict[str, int]:
    """Return the code lines of each capability; a file that is gone has none."""
    lines = lines_of(ROOT / "opdcl")
    capabilities = ledger["capability"].items()
    return {name: sum(lines.get(file, 0) for file in entry["files"]) for name, entry in capabilities}


def write_ledger(file: Path = LEDGER) -> None:
    """Set every ceiling of the ledger to today's lines, and say what became of their sum."""
    ledger, text = read_ledger(file), file.read_text(encoding="utf-8")
    sizes = sizes_of(ledger)
    for name, lines in sizes.items():
        head = re.escape(f'[capability."{name}"]\nceiling = ')
        text = re.sub(f"({head})[0-9_]+", rf"\g<1>{lines:_}", text)
    for name, number in {"total": sum(sizes.values()), **counts()}.items():
        text = re.sub(rf"(?m)^{name} = [0-9_]+", f"{name} = {number:_}", text)
        print(f"{name}: {ledger[name]:,} -> {number:,}")
    file.write_text(text, encoding="utf-8")


def table() -> Iterator[tuple[str, str]]:
    """Return what is counted, and the counts."""
    for entry in ENTRIES:
        modules, lines = closure(entry)
        yield f"closure of {entry}", f"{modules} modules, {lines:,} code lines"
    doubled = [f"{name} {count}" for name, count in meanings().items()]
    yield "public names with several meanings", f"{len(doubled)}: {', '.join(doubled)}"
    ledger = read_ledger()
    for name, lines in sizes_of(ledger).items():
        yield name, f"{lines:,} code lines, at most {ledger['capability'][name]['ceiling']:,}"
    yield "all of opdcl", f"{sum(lines_of(ROOT / 'opdcl').values()):,} code lines"
    for name, number in counts().items():
        yield name.replace("_", " "), f"{number:,}, at most {ledger[name]:,}"
    from helpers.cache import private_cache
    from helpers.tiny import make_model, make_project

    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
        private_cache(Path(cache))
        project = make_project(Path(folder), make_model(Path(folder) / "model"))
        for name, count in work_of_a_recovery(project).items():
            yield f"{name} in one recover", str(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="set the ledger's ceilings to today's lines")
    if parser.parse_args().write:
        write_ledger()
        return
    for name, count in table():
        print(f"{name:82} {count}", flush=True)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))
    main()
