"""Which modules a file imports, as its text says, wherever in it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator


def modules(tree: ast.AST, package: tuple[str, ...], late: bool = True) -> set[str]:
    """Modules that a file of a package imports, each `from x import y` as x.y as well: all but
    those that only type checkers see, or without ``late`` those that its own import imports."""
    return _modules(_nodes(tree, late), package)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _nodes(tree: ast.AST, late: bool = True) -> Iterator[ast.AST]:
    """All nodes but those that only type checkers see, without ``late`` those outside functions."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        if late or not isinstance(node, _FUNCTIONS):
            waiting += ast.iter_child_nodes(node)


def _modules(nodes: Iterable[ast.AST], package: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found
