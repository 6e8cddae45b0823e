"""How much code the package is, and how dense: syntax nodes, code lines, nested comprehensions, imports."""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

# Tokens that put no code on a line.
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


@dataclass
class Weight:
    """The counts of one or several files."""

    nodes: int = 0
    lines: int = 0
    """Lines of code, without comments, docstrings and blank lines."""
    statements: int = 0
    nested: int = 0
    """Comprehensions with another one inside."""
    imports: int = 0
    """Lines of code that import."""

    def add(self, text: str) -> None:
        """Add the counts of a file's text."""
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        self.nodes += len(nodes)
        self.lines += len(code_lines(text) - docstring_lines(nodes))
        self.statements += sum(isinstance(node, ast.stmt) for node in nodes)
        self.nested += sum(isinstance(node, COMPREHENSIONS) and has_inner(node) for node in nodes)
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.imports += node.end_lineno - node.lineno + 1

    @property
    def density(self) -> float:
        """Syntax nodes a line of code."""
        return self.nodes / max(self.lines, 1)

    @property
    def nested_share(self) -> float:
        """Nested comprehensions per 1,000 statements."""
        return 1000 * self.nested / max(self.statements, 1)

    @property
    def import_share(self) -> float:
        """Share of the lines of code that import."""
        return self.imports / max(self.lines, 1)


def weigh(folder: Path) -> Weight:
    """Return the weight of all Python files in a folder."""
    weight = Weight()
    for file in folder.rglob("*.py"):
        weight.add(file.read_text(encoding="utf-8"))
    return weight


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines that hold code or a string."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def docstring_lines(nodes: list[ast.AST]) -> set[int]:
    """Return the numbers of the lines of modules', classes' and functions' docstrings."""
    lines: set[int] = set()
    for node in nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines.update(range(first.lineno, first.end_lineno + 1))
    return lines


def has_inner(comprehension: ast.AST) -> bool:
    """Return whether a comprehension has another one inside."""
    inner = [node for node in ast.walk(comprehension) if isinstance(node, COMPREHENSIONS)]
    return len(inner) > 1
