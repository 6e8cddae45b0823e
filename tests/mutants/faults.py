"""Faults: single changes of a module's source, made by rule from its syntax tree or planted by name."""

from __future__ import annotations

import ast
import copy
import hashlib
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType

NEGATIONS = {
    **{ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}
# Beside a whole number. Two floats are hardly ever equal, so there the bound itself makes no difference.
BOUNDS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
# Functions of two arguments whose order does not matter.
SYMMETRIC = ("min", "max", "minimum", "maximum")
# Smaller numbers are tolerances.
TOLERANCE = 1e-3
# Keywords that make no difference on one machine's CPU with UTF-8, or guard against our own mistakes only.
IDLE_KEYWORDS = ("device", "encoding", "ensure_ascii", "strict")
ARITHMETIC = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult},
}
SHOWN = 110


@dataclass(frozen=True)
class Fault:
    """One change of a module: `module` is its path below the package without `.py`, as `distill/losses`.

    `lines` are those of the changed statement; `in_function` is False where the change acts on import.
    `code` compiles the faulty module under a file's name; call it once, in a process of its own.
    """

    name: str
    module: str
    lines: range
    change: str
    in_function: bool
    code: Callable[[str], CodeType]


class _Swap(ast.NodeTransformer):
    """Put `new` in the place of `old`."""

    def __init__(self, tree: ast.Module, old: ast.AST, new: ast.AST):
        self.tree, self.old, self.new = tree, old, new

    def compiled(self, file: str) -> CodeType:
        return compile(ast.fix_missing_locations(self.visit(self.tree)), file, "exec")

    def visit(self, node: ast.AST):
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def generic(module: str, tree: ast.Module) -> list[Fault]:
    """Return every fault that the rules of `_replacements` make in a module."""
    faults, seen = [], Counter()
    for place, node, statement, in_function in _walk(tree):
        for new, change in _replacements(node):
            name = f"{module}: {place or 'module'}: {change}"
            seen[name] += 1
            name += f" ({seen[name]})" * (seen[name] > 1)
            code = _Swap(tree, node, new).compiled
            faults.append(Fault(name, module, _extent(statement), change, in_function, code))
    return faults


def sample(faults: list[Fault], count: int, seed: int) -> list[Fault]:
    """Return `count` of the faults; a change elsewhere in the module changes no choice."""
    return sorted(faults, key=lambda f: hashlib.sha256(f"{seed} {f.name}".encode()).digest())[:count]


def planted(file: Path, package: Path) -> list[tuple[Fault, list[str]]]:
    """Return the faults of a table file, each with the test files that must find it.

    Raises:
        ValueError: An old text does not occur exactly once.
    """
    rows = tomllib.loads(file.read_text(encoding="utf-8"))
    sources = {
        r["module"]: (package / f"{r['module']}.py").read_text(encoding="utf-8") for r in rows.values()
    }
    statements = {
        module: [(_extent(s), inside) for _, s, _, inside in _walk(ast.parse(source)) if _is_simple(s)]
        for module, source in sources.items()
    }
    faults = []
    for name, row in rows.items():
        source, old = sources[row["module"]], row["old"]
        if (count := source.count(old)) != 1:
            raise ValueError(f"{file.name}: the old text of {name} occurs {count} times, not once")
        first = source[: source.index(old)].count("\n") + 1
        last = first + old.count("\n")
        lines, inside_all = {first, last}, []
        for extent, inside in statements[row["module"]]:
            if extent.start <= last and first < extent.stop:
                lines |= {extent.start, extent.stop - 1}
                inside_all.append(inside)
        code = partial(compile, source.replace(old, row["new"]), mode="exec")
        span = range(min(lines), max(lines) + 1)
        in_function = bool(inside_all) and all(inside_all)
        fault = Fault(
            name, row["module"], span, row["what"], in_function, lambda f, code=code: code(filename=f)
        )
        faults.append((fault, row["tests"]))
    return faults


def _is_simple(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.ClassDef)


def _walk(
    node: ast.AST, place: str = "", statement: ast.stmt | None = None, in_function: bool = False
) -> Iterator[tuple[str, ast.AST, ast.stmt | None, bool]]:
    """Yield qualified name, node, innermost statement and whether it runs in a function, in order."""
    for child in _children(node):
        inside, name = in_function or isinstance(child, ast.FunctionDef), place
        holder = child if isinstance(child, ast.stmt) else statement
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{place}.{child.name}".lstrip(".")
        yield name, child, holder, inside
        yield from _walk(child, name, holder, inside)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children that a fault may change: no types, decorators, messages, logging or docstrings."""
    skipped: list[ast.AST | None] = []
    match node:
        case ast.FunctionDef(args=arguments):
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            every += [a for a in (arguments.vararg, arguments.kwarg) if a]
            skipped = [node.returns, *node.decorator_list, *every]
        case ast.arguments():
            skipped = [*node.args, *node.kwonlyargs, *node.posonlyargs, node.vararg, node.kwarg]
        case ast.AnnAssign():
            skipped = [node.annotation]
        case ast.ClassDef():
            skipped = [*node.decorator_list]
        case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Call(func=ast.Attribute(value=ast.Name(id="logger"))):
            return
        case ast.keyword(arg=name) if name in IDLE_KEYWORDS:
            return
    for child in ast.iter_child_nodes(node):
        if not any(child is s for s in skipped):
            yield child


def _extent(statement: ast.stmt) -> range:
    """Return a statement's lines; of a compound one, its header's; of a function, its body's."""
    body = getattr(statement, "body", None)
    if isinstance(statement, ast.FunctionDef):
        return range(body[0].lineno, statement.end_lineno + 1)
    if isinstance(body, list) and body and not isinstance(statement, ast.ClassDef):
        return range(statement.lineno, max(body[0].lineno, statement.lineno + 1))
    return range(statement.lineno, statement.end_lineno + 1)


def _replacements(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield what may stand in a node's place, and the change in words."""
    match node:
        case ast.Constant(value=bool(value)):
            yield _changed(node, value=not value)
        case ast.Constant(value=int(value) | float(value)) if value == 0 or value >= TOLERANCE:
            yield _changed(node, value=value + 1 if isinstance(value, int) else 2 * value or 1.0)
        case ast.Compare(ops=[operator], left=left, comparators=[right]):
            yield _changed(node, ops=[NEGATIONS[type(operator)]()])
            if type(operator) in BOUNDS and (_is_whole(left) or _is_whole(right)):
                yield _changed(node, ops=[BOUNDS[type(operator)]()])
        case ast.BinOp(op=operator) if type(operator) in ARITHMETIC:
            yield _changed(node, op=ARITHMETIC[type(operator)]())
        case ast.BoolOp(op=operator):
            yield _changed(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand, f"{_text(node)} -> {_text(operand)}"
        case ast.If(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            new = copy.copy(node)
            new.test = ast.UnaryOp(ast.Not(), test)
            yield new, f"if {_text(test)} -> if not {_text(test)}"
        case ast.Call():
            yield from _calls(node)
        case ast.FunctionDef():
            yield from _early_return(node)
        case ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield _removed(node)
        case ast.Expr(value=ast.Call(func=function)) if not _text(function).startswith("logger."):
            yield _removed(node)
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield _removed(node)


def _is_whole(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=int()) | ast.Call(func=ast.Name(id="len")):
            return True
        case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right):
            return _is_whole(left) or _is_whole(right)
    return False


def _calls(node: ast.Call) -> Iterator[tuple[ast.AST, str]]:
    name = _text(node.func)
    for keyword in node.keywords:
        if keyword.arg and keyword.arg not in IDLE_KEYWORDS:
            kept = [k for k in node.keywords if k is not keyword]
            yield _changed(node, f"{name}(...) without {_text(keyword)}", keywords=kept)
    if len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
        first, second, *rest = node.args
        if _text(first) != _text(second) and name.split(".")[-1] not in SYMMETRIC:
            words = f"{name}({_text(first)}, {_text(second)}) swapped"
            yield _changed(node, words, args=[second, first, *rest])


def _early_return(node: ast.FunctionDef) -> Iterator[tuple[ast.AST, str]]:
    body = node.body[isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant) :]
    if len(body) > 1:
        early = [*node.body[: node.body.index(body[1])], ast.Return(ast.Constant(None)), *body[1:]]
        yield _changed(node, f"return before {_text(body[1])}", body=early)


def _removed(node: ast.stmt) -> tuple[ast.AST, str]:
    return ast.Pass(), f"{_text(node)} -> pass"


def _changed(node: ast.AST, words: str = "", **fields: object) -> tuple[ast.AST, str]:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new, _short(words) if words else f"{_text(node)} -> {_text(new)}"


def _text(node: ast.AST) -> str:
    return _short(ast.unparse(node))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
