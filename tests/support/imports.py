"""Which files a file of the checkout imports, as its text says, wherever in it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path


def closure(
    first: Iterable[str], root: Path, left_out: Collection[str], lazy: Collection[str]
) -> set[str]:
    """Names, relative to ``root``, of ``first`` and of all files of the checkout that these
    import, however far, but not by way of those in ``left_out``.

    The packages in ``lazy`` load names when they are first used: who takes such a name of its
    package imports its home.
    """
    homes = {name: home for package in lazy for name, home in _homes(root, package).items()}
    found: set[str] = set()
    waiting = list(first)
    while waiting:
        name = waiting.pop()
        if name not in found and name not in left_out:
            found.add(name)
            waiting += _imported(root, name, homes)
    return found


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


def _imported(root: Path, name: str, homes: dict[str, str]) -> set[str]:
    """Files of the checkout that one of them imports."""
    used = _used((root / name).read_text(), Path(name).parent.parts)
    paths = [one.replace(".", "/") for one in used | {homes[x] for x in used & homes.keys()}]
    options = {option for path in paths for option in (f"{path}.py", f"{path}/__init__.py")}
    return {option for option in options if (root / option).is_file()}


@cache  # a run asks of each file once for every family
def _used(text: str, package: tuple[str, ...]) -> frozenset[str]:
    nodes = list(_nodes(ast.parse(text)))
    return frozenset(_modules(nodes, package) | _attributes(nodes))


def _homes(root: Path, name: str) -> dict[str, str]:
    """Dotted names that a package loads when they are first used, to the modules that have them."""
    package = ".".join(Path(name).parent.parts)
    for node in ast.parse((root / name).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES":
            homes = ast.literal_eval(node.value).items()
            return {f"{package}.{one}": home for home, names in homes for one in names}
    return {}


def _attributes(nodes: list[ast.AST]) -> set[str]:
    """Dotted names that are taken of imported packages, as in `import kernlib as kl; kl.nn.X`."""
    imported = {"kernlib": "kernlib"}
    for node in nodes:
        if isinstance(node, ast.Import):
            imported |= {one.asname: one.name for one in node.names if one.asname}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            found |= {f"{imported[first]}.{rest}"} if first in imported else set()
    return found
