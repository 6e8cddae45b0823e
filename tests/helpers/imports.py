"""The imports between the modules of opdcl, and what they must not do: run in circles or against the order.

An arrow is an import of one module by another, function-local imports included.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from helpers.command import ROOT

# From the bottom to the top. A package may import those on lines above it, never its own line or lines below.
ORDER = (
    ("version",),
    ("errors", "repetition", "sanitize", "words"),
    ("faults",),
    ("config",),
    ("hub", "parallel", "rundir"),
    ("data", "launcher"),
    ("model",),
    ("sampling",),
    ("train",),
    ("measure",),
    ("results",),
    ("console",),
    ("arguments", "outcomes"),
    ("pipeline",),
    ("deploy",),
    ("api", "doctor"),
    ("opdcl",),
    ("cli",),
)
# Packages that may import less than their place in the order allows.
ONLY = {"results": {"rundir", "config", "hub", "sanitize", "errors", "faults", "repetition"}}
# `python -m opdcl` is the command line; `opdcl` itself loads the verbs of api lazily.
ENTRIES = {"__main__"}


@dataclass(frozen=True)
class Arrow:
    """One module imports another one of the package."""

    source: str
    target: str

    @property
    def packages(self) -> tuple[str, str]:
        return package_of(self.source), package_of(self.target)


def package_of(module: str) -> str:
    """Return the package or top-level module: `config` for `opdcl.config.load`."""
    return module.split(".")[1] if "." in module else module


def sources(root: Path = ROOT) -> dict[str, Path]:
    """Return every module of the package: name -> file."""
    files = sorted((root / "opdcl").rglob("*.py"))
    return {_name(file.relative_to(root)): file for file in files}


def arrows(root: Path = ROOT) -> set[Arrow]:
    """Return the imports between modules, wherever in a file they are."""
    modules = sources(root)
    return {
        Arrow(name, target)
        for name, file in modules.items()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for target in _targets(node, name, file, set(modules))
        if target != name
    }


def between_packages(found: set[Arrow]) -> set[tuple[str, str]]:
    """Return the arrows that leave a package, as pairs of packages."""
    return {a.packages for a in found if len({*a.packages}) == 2 and a.packages[0] not in ENTRIES}


def circle(edges: set[tuple[str, str]]) -> list[str]:
    """Return the nodes of one circle, the first one twice; none if there is no circle."""
    try:
        TopologicalSorter(_following(edges)).prepare()
    except CycleError as fault:
        return fault.args[1]
    return []


def against_order(found: set[Arrow]) -> list[str]:
    """Return the arrows that run upwards, stay on one line of the order, or leave a package's short list."""
    level = {name: i for i, line in enumerate(ORDER) for name in line}
    bad = []
    for arrow in sorted(found, key=lambda a: (a.source, a.target)):
        source, target = arrow.packages
        if source == target or source in ENTRIES:
            continue
        if target not in ONLY.get(source, {target}) or level.get(source, -1) <= level.get(target, len(ORDER)):
            bad.append(f"{arrow.source} -> {arrow.target}")
    return bad


def closure(module: str, found: set[Arrow]) -> set[str]:
    """Return a module and all that it imports, directly or by way of others."""
    following = _following({(arrow.source, arrow.target) for arrow in found})
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        if (current := waiting.pop()) not in reached:
            reached.add(current)
            waiting += following[current]
    return reached


def _name(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def _targets(node: ast.AST, name: str, file: Path, modules: set[str]) -> list[str]:
    """Return the modules of the package that one statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in modules]
    if not isinstance(node, ast.ImportFrom):
        return []
    origin = node.module or ""
    if node.level:  # relative: one dot is the module's own package
        parts = name.split(".") if file.stem == "__init__" else name.split(".")[:-1]
        origin = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
    if origin.split(".")[0] != "opdcl":
        return []
    full = [f"{origin}.{alias.name}" for alias in node.names]
    return [target if target in modules else origin for target in full]


def _following(edges: set[tuple[str, str]]) -> dict[str, set[str]]:
    """Return the targets of each source."""
    following = defaultdict(set)
    for source, target in edges:
        following[source].add(target)
    return following
