"""Tests prove what kernlib promises, so that what is private may change without them: none reads a
name of one leading underscore that kernlib defines, by whichever way. Damage alone has no other way
in: tests of the cache, and those that damage a store, do read them.
"""

import ast
import re
from functools import cache
from pathlib import Path

from tests.architecture.package import MODULES
from tests.support.paths import ROOT, TESTS

# Damage, what has forms of such reads, and faults, which are put into private code.
MAY = {TESTS / "jit", TESTS / "cli" / "cases.py", TESTS / "mutants", Path(__file__)}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Who takes names as strings, by the last word of what is called.
BY_NAME = {"__setattr__", "attrgetter", "delattr", "getattr", "hasattr", "object", "setattr"}
TORCHS = {"_version"}  # of tensors: kernlib has such names of its own elsewhere


def is_private(name):
    return re.fullmatch(r"_[^\W_]\w*", name) is not None and name not in TORCHS


def texts(node):
    """The string constants inside of a node."""
    return [x.value for x in ast.walk(node) if isinstance(getattr(x, "value", None), str)]


def defined(tree):
    """Private functions, classes, globals, fields and attributes of self that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS):
            yield node.name
        if isinstance(node, (ast.Module, ast.ClassDef)):
            stored = [x for x in node.body if not isinstance(x, DEFINITIONS)]
            names = [x for each in stored for x in ast.walk(each) if isinstance(x, ast.Name)]
            yield from (x.id for x in names if isinstance(x.ctx, ast.Store))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] * (ast.unparse(node.value) in ("self", "cls"))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from texts(node.value)


@cache
def private_names():
    """Of kernlib: of modules, and in them."""
    names = {part for path in MODULES for part in path.relative_to(ROOT).with_suffix("").parts}
    names |= {name for path in MODULES for name in defined(ast.parse(path.read_text()))}
    return frozenset(filter(is_private, names))


def called(node):
    """The last word of what a call calls."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def read(text):
    """Lines and private names of kernlib that they read."""
    for node in ast.walk(ast.parse(text)):
        found = []
        if isinstance(node, ast.Attribute):
            if node.attr in private_names():
                owner = ast.unparse(node.value)
                own = owner in ("self", "cls") or owner.split(".")[0] == "torch"
                found = [] if own else [node.attr]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            found = [] if names[0].split(".")[0] == "torch" else ".".join(names).split(".")
        elif isinstance(node, ast.Call) and called(node) in BY_NAME:
            found = [text for one in node.args for text in texts(one)]
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):  # of what a loop sets
            found = [getattr(one, "value", None) for one in node.elts]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # code, and targets
            found = re.findall(r"(?:[\w)\]]\.|import )(_\w+)", node.value)
        yield from ((node.lineno, name) for name in found if name in private_names())


def test_tests_read_no_private_names_but_to_damage():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted(TESTS.rglob("*.py"))
        if not MAY & {path, *path.parents}
        for line, name in sorted({*read(path.read_text())})
    ]
    assert not wrong, "\n".join(wrong)


def test_the_reader_sees_every_form():
    assert {"_tables", "_HOMES", "_maps", "_tools", "_layers"} <= private_names()
    forms = (
        "x.y._maps", "f()._maps = 1", "del x._maps", "from kernlib.runtime.plan import _tables",
        "from kernlib.compat.kermac import _tools as t", "import kernlib.compat.kermac._tools",
        "monkeypatch.setattr(plan, '_tables', 1)", "setattr(x, '_maps', 1)",
        "patch('kernlib.runtime.plan._tables')", "object.__setattr__(x, '_maps', 1)",
        "'import kernlib\\nprint(kernlib._HOMES)'", "mock.patch.object(x, '_maps')",
        "for name in ('_maps', 'x'): monkeypatch.setattr(plan, name, 1)",
    )  # fmt: skip
    assert [form for form in forms if not list(read(form))] == []
    fine = "self._maps; torch._C._tables; x._replace(a=1); x.__dict__; f'_maps'; x._version; x.maps"
    assert not list(read(fine))
