"""Descriptors as text, such as ``Pairwise(operator='dot', ..., epilogue=(Polynomial(degree=3),))``.

A registered op takes its descriptor in this form, so a saved program holds it. Every field is
written, so that a changed default changes no saved program. Text is parsed with Python's own
grammar and a white list; nothing is ever evaluated as Python.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module

from kernlib.descriptors import nesting
from kernlib.descriptors.base import Descriptor, Part, parsed, render, shown

_CONSTANTS = (type(None), bool, int, float, str)
NO_FUNCTIONS: Mapping[str, Callable] = {}
LONGEST = 100_000  # characters; an expression in it has ten times fewer
DEEPEST = 2 * nesting.DEEPEST  # an expression in it counts too
_NAMED = {"inf": float("inf"), "nan": float("nan")}


@cache
def to_text(descriptor: Descriptor) -> str:
    """The text of a descriptor, from which :func:`from_text` makes an equal one.

    Raises TypeError for anything but a descriptor, and for a field that is no plain value.
    """
    if not isinstance(descriptor, Descriptor):
        raise TypeError(f"descriptor must be a kernlib descriptor, got {shown(descriptor)}")
    try:
        return render(descriptor)
    except TypeError as error:
        raise TypeError(f"{descriptor!r} holds what has no text: {error}") from None


def from_text(text: str, functions: Mapping[str, Callable] = NO_FUNCTIONS) -> Descriptor:
    """The descriptor of a text, built and so validated by its constructors. ``functions`` are
    others that it may call, by name.

    Raises ValueError for what is no descriptor's text, for types that are not known (those of a
    module are once it is imported) and for fields their constructors refuse.
    """
    if functions:
        return _parse(text, functions)
    descriptor = parsed.get(text)
    if descriptor is None:
        descriptor = parsed[text] = _parse(text, functions)
    return descriptor


def _parse(text: str, functions: Mapping[str, Callable]) -> Descriptor:
    try:
        nesting.check_size(text, LONGEST, DEEPEST)
    except ValueError as error:
        raise ValueError(f"{_short(text)} {error}: no descriptor does") from None
    try:
        value = _build(ast.parse(text, mode="eval").body, functions)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{_short(text)} is not the text of a descriptor: {error}") from None
    if not isinstance(value, Descriptor):
        raise ValueError(f"{_short(text)} is the text of {value!r}, which is no descriptor")
    return value


def _build(node: ast.expr, functions: Mapping[str, Callable]):
    """The value of one node of the grammar. Raises ValueError and what constructors raise."""
    if isinstance(node, ast.Constant) and isinstance(node.value, _CONSTANTS):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMED:
        return _NAMED[node.id]
    if isinstance(node, ast.Tuple):
        return tuple(_build(item, functions) for item in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_build(node.operand, functions)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        fields = {keyword.arg: _build(keyword.value, functions) for keyword in node.keywords}
        if None in fields or len(fields) != len(node.keywords):
            raise ValueError(f"the fields of {node.func.id} are not name=value, each once")
        make = functions.get(node.func.id) or _type(node.func.id)
        return make(**fields)
    raise ValueError(f"{_short(ast.unparse(node))} is not part of the grammar")


def _type(name: str) -> type:
    """The descriptor's or part's class of that name. Raises ValueError for others."""
    import_module("kernlib.descriptors.gates")  # calls without one do not load it
    types = [cls for cls in _subclasses(Part) if dataclasses.is_dataclass(cls)]
    # The last of a module and name: dataclass(slots=True) makes a second class in place of the
    # first, which may still be listed.
    matches = {(cls.__module__, cls.__qualname__): cls for cls in types if cls.__name__ == name}
    if not matches:
        names = ", ".join(sorted({cls.__name__ for cls in types}))
        raise ValueError(f"{name!r} is no type of a descriptor or a part; known are {names}")
    if len(matches) > 1:
        raise ValueError(f"{name!r} is the name of several types: {sorted(matches)}")
    return matches.popitem()[1]


def _subclasses(cls: type) -> list[type]:
    return [c for direct in cls.__subclasses__() for c in (direct, *_subclasses(direct))]


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "...")
