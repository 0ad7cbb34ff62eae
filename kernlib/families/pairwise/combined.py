"""Sums and products of descriptors of pairs, which are formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernlib.families.pairwise.formula.descriptor import Formula


def _combined(operator: str, left: object, right: object) -> Formula:
    from kernlib.families.pairwise.formula import algebra  # most descriptors are not combined

    return algebra.combined(operator, left, right)


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
