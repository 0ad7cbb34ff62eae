"""The window in a mask, ``-right <= row - col <= left``, by which whole tiles are decided."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.descriptors.expression import Integer, Name, Node, Operation

_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "=="}
_COLUMN, _ROW = Name("col"), Name("row")


class Window(NamedTuple):
    """``row - left <= col <= row + right``, None for what is not bounded, and ``rest``: what else
    of the mask must hold, None for nothing. With right = 0 it is causal."""

    left: int | None = None
    right: int | None = None
    rest: Node | None = None


def structure(mask: Node) -> Window:
    """A mask's parts, all of which must hold, as a window and the rest."""
    left = right = None
    parts = []
    for part in _parts(mask):
        bounds = _bounds(part)
        if bounds is None:
            parts.append(part)
            continue
        low, high = bounds  # of row - col
        right = _least(right, None if low is None else -low)
        left = _least(left, high)
    rest = Operation("and", tuple(parts)) if len(parts) > 1 else parts[0] if parts else None
    return Window(left, right, rest)


def _least(x: int | None, y: int | None) -> int | None:
    return min((bound for bound in (x, y) if bound is not None), default=None)


def _parts(mask: Node) -> list[Node]:
    if isinstance(mask, Operation) and mask.operator == "and":
        return [part for operand in mask.operands for part in _parts(operand)]
    return [mask]


def _bounds(part: Node) -> tuple[int | None, int | None] | None:
    """The least and the greatest row - col that a comparison permits, or None if it is another."""
    if not isinstance(part, Operation) or part.operator not in _TURNED:
        return None
    distance = _distance(part)
    if distance is not None:
        return distance
    sides = [_linear(side) for side in part.operands]
    if None in sides:
        return None
    row, col, number = (x - y for x, y in zip(*sides, strict=True))
    if (row, col) not in ((1, -1), (-1, 1)):
        return None
    # row - col + number, or its negative, beside 0
    operator = part.operator if row == 1 else _TURNED[part.operator]
    return _interval(operator, -number if row == 1 else number)


def _distance(part: Operation) -> tuple[int, int] | None:
    """The bounds of a distance of at most a number: ``abs(row - col) <= w``."""
    operator, (x, y) = part.operator, part.operands
    if isinstance(x, Integer):
        operator, x, y = _TURNED[operator], y, x
    if not (isinstance(x, Operation) and x.operator == "abs" and isinstance(y, Integer)):
        return None
    most = {"<": y.value - 1, "<=": y.value}.get(operator)
    inside = _linear(x.operands[0])
    if most is None or inside not in ((1, -1, 0), (-1, 1, 0)):
        return None
    return -most, most


def _interval(operator: str, number: int) -> tuple[int | None, int | None]:
    """The interval that ``row - col <operator> number`` permits."""
    return {
        "<": (None, number - 1),
        "<=": (None, number),
        ">": (number + 1, None),
        ">=": (number, None),
        "==": (number, number),
    }[operator]


def _linear(node: Node) -> tuple[int, int, int] | None:
    """Multiples of row and col and a number that a tree is the sum of, or None."""
    if isinstance(node, Integer):
        return 0, 0, node.value
    if node in (_ROW, _COLUMN):
        return int(node == _ROW), int(node == _COLUMN), 0
    if not isinstance(node, Operation) or node.operator not in ("+", "-", "neg", "int64"):
        return None
    parts = [_linear(operand) for operand in node.operands]
    if None in parts:
        return None
    if node.operator == "int64":
        return parts[0]
    if node.operator == "neg":
        return tuple(-x for x in parts[0])
    sign = 1 if node.operator == "+" else -1
    return tuple(x + sign * y for x, y in zip(*parts, strict=True))
