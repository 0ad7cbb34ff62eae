"""Tensors that an expression of pairs reads, each with its axes: ``{"s": "row", "w": ("row",
"col")}``."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from kernlib.descriptors.base import require, shown
from kernlib.descriptors.expression import RESERVED, Node
from kernlib.descriptors.score import grammar

if TYPE_CHECKING:
    from kernlib.descriptors.epilogues import Custom

Axes = tuple[tuple[str, tuple[str, ...]], ...]


def as_axes(
    value: object, axes: tuple[str, ...], reserved: Mapping[str, str], example: dict
) -> Axes:
    """Pairs of names and axes of a dict, or of such pairs. ``reserved`` names have a meaning.
    Raises TypeError and ValueError for anything else."""
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"axes must be a dict such as {example}, got {shown(value)}")
    pairs = []
    for pair in value:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"axes must be a dict such as {example}, got {shown(pair)} in it")
        name, of = pair
        of = (of,) if isinstance(of, str) else of
        if not isinstance(of, (tuple, list)):
            raise TypeError(f"axes of {shown(name)} must be a tuple of {axes}, got {shown(of)}")
        pairs.append((_checked(name, reserved), _of(name, tuple(of), axes)))
    names = [name for name, _ in pairs]
    require(len(set(names)) == len(names), f"axes repeat a name: {names}")
    return tuple(pairs)


def _checked(name: object, reserved: Mapping[str, str]) -> str:
    if not isinstance(name, str) or not name.isascii() or not name.isidentifier():
        raise ValueError(f"axes: {shown(name)} is not an ASCII identifier")
    if name in reserved or keyword.iskeyword(name):
        by = reserved.get(name, "a word of Python")
        raise ValueError(f"axes: the name {name!r} is {by}; choose another")
    return name


def _of(name: str, of: tuple, axes: tuple[str, ...]) -> tuple[str, ...]:
    for axis in of:
        if not isinstance(axis, str) or axis not in axes:
            raise ValueError(f"axes of {name} must be of {axes}, got {shown(axis)}")
    require(len(set(of)) == len(of), f"axes of {name} repeat one: {of}")
    return of


def of_epilogue(value: object, parameters: tuple[str, ...]) -> Axes:
    """The axes of tensors that an epilogue reads beside its ``parameters``. Raises as
    :func:`as_axes` does."""
    reserved = dict.fromkeys(RESERVED, "a word of the language or an argument of calls")
    reserved |= dict.fromkeys(parameters, "a parameter")
    return as_axes(value, ("row", "col"), reserved, {"s": "row", "w": ("row", "col")})


def tree_of(epilogue: Custom) -> Node:
    """The parsed expression of an epilogue that reads tensors, of any kind."""
    names = (*epilogue.parameters, *(name for name, _ in epilogue.axes))
    return grammar.parse_epilogue(epilogue.expression, names)


def refuse(epilogue: object) -> NoReturn:
    """Raises ValueError for an epilogue that reads tensors, where no formula is made of it."""
    raise ValueError(
        f"{epilogue!r} reads tensors of rows and columns, which pairs of points have: pass it to "
        "kl.squared_distance(epilogue=...) or another distance by its name, or write a kl.Formula"
    )
