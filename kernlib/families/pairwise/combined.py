"""Sums and products of descriptors of pairs, which are formulas."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from kernlib.families.pairwise.formula.descriptor import Formula


def algebra() -> ModuleType:
    """The module that makes formulas of descriptors, by its name: it knows the descriptors, and
    most of them are not combined."""
    return import_module("kernlib.families.pairwise.formula.algebra")


def _combined(operator: str, left: object, right: object) -> Formula:
    return algebra().combined(operator, left, right)


def reads_tensors(epilogue: object) -> bool:
    """Whether one of some epilogues reads tensors of rows and columns, and makes a formula."""
    several = epilogue if isinstance(epilogue, (tuple, list)) else (epilogue,)
    return any([getattr(each, "axes", ()) for each in several])


class Combined:
    """Base of descriptors that ``+``, ``*`` and ``**`` take, beside others and numbers."""

    __slots__ = ()

    def __add__(self, other: object) -> Formula:
        return _combined("+", self, other)

    def __radd__(self, other: object) -> Formula:
        return _combined("+", other, self)

    def __mul__(self, other: object) -> Formula:
        return _combined("*", self, other)

    def __rmul__(self, other: object) -> Formula:
        return _combined("*", other, self)

    def __pow__(self, other: object) -> Formula:
        return _combined("**", self, other)
