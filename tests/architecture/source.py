"""The package's modules as syntax trees, and who imports whom."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mindspeed_llm

ROOT = Path(mindspeed_llm.__file__).parent
PACKAGE = ROOT.name


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, its path and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module


@cache
def modules() -> tuple[Module, ...]:
    """All modules of the package."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))
    return tuple(found)


def imports(tree: ast.AST, module_name: str, *, is_package: bool, top_level_only: bool = False) -> set[str]:
    """Dotted names that a tree imports, wherever the import stands; `from a import b` gives both a and a.b.

    Args:
        tree: a module.
        module_name: its name, for relative imports.
        is_package: whether it is an `__init__` file.
        top_level_only: leave out imports inside functions (those run later) and under `if TYPE_CHECKING:`.
    """
    found: set[str] = set()
    for node in _walk_top_level(tree) if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module_name.split(".") if is_package else module_name.split(".")[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join(package + ([node.module] if node.module else []))
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def _walk_top_level(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _walk_top_level(child)


def is_inside(name: str, room: str) -> bool:
    """Whether the dotted name is `room` or below it."""
    return name == room or name.startswith(room + ".")
