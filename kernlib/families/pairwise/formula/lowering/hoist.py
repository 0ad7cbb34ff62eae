"""Where the parts of a tree are computed: once a thread, a row, a column or a pair, and products
put in an order in which most is computed where it costs least."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kernlib.descriptors.expression import Name, Node, Number, Operation
from kernlib.families.pairwise.formula.spec import COL, FEATURE, ROW, Spec

THREAD, PAIR = "thread", "pair"
LEVELS = (THREAD, ROW, COL, PAIR)
# Operators that trees of users lack: a reciprocal and a product of such that are finite for what is
# not 0, and a product with log2(e).
RECIPROCAL, BOUNDED, FOR_EXP2 = "reciprocal", "bounded", "for_exp2"
_FOLDED = (1e-30, 1e30)  # sizes of numbers that are multiplied here: float holds their product


class Place(NamedTuple):
    """A level, and whether there is a value for each feature."""

    level: str
    featured: bool


class Places:
    """The places of the parts of a spec's trees. Sums over features are values of a pair where
    ``sums_of_pairs``, else of what their terms depend on."""

    def __init__(self, spec: Spec, sums_of_pairs: bool):
        self._spec, self._sums_of_pairs = spec, sums_of_pairs
        self._axes: dict[Node, frozenset[str]] = {}

    def of(self, node: Node) -> Place:
        axes = self._axes_of(node)
        both = frozenset((ROW, COL)) & axes
        level = PAIR if len(both) == 2 else next(iter(both), THREAD)
        return Place(level, FEATURE in axes)

    def _axes_of(self, node: Node) -> frozenset[str]:
        if node not in self._axes:
            if isinstance(node, Operation):
                axes = frozenset().union(*map(self._axes_of, node.operands))
            elif isinstance(node, Name) and node.name[0] == "#" and self._sums_of_pairs:
                axes = frozenset((ROW, COL))
            else:
                axes = self._spec.axes_of(node)
            self._axes[node] = axes
        return self._axes[node]


class Factors(NamedTuple):
    """A product: a ``number``, the factors of each level, and those of a pair. Each is a node and
    whether it divides."""

    number: float
    thread: list[tuple[Node, bool]]
    row: list[tuple[Node, bool]]
    col: list[tuple[Node, bool]]
    pair: list[tuple[Node, bool]]


def factors_of(node: Node, level_of: Callable[[Node], str]) -> Factors:
    """A tree of numbers as a product. Parts below a pair stay in one piece, but denominators are
    split: the square of a bandwidth of 1e-20 has no reciprocal in float."""
    factors = Factors(1.0, [], [], [], [])
    number = 1.0
    stack = [(node, False)]
    while stack:
        node, divides = stack.pop()
        level = level_of(node)
        operator = node.operator if isinstance(node, Operation) else ""
        splits = level == PAIR or divides
        if operator == "neg" and splits:
            number = -number
            stack.append((node.operands[0], divides))
        elif operator in "*/" and operator and splits:
            left, right = node.operands
            stack += [(right, divides != (operator == "/")), (left, divides)]
        elif isinstance(node, Number) and _may_fold(number, node.value):
            number = number / node.value if divides else number * node.value
        else:
            getattr(factors, level).append((node, divides))
    return factors._replace(number=number)


def _may_fold(number: float, other: float) -> bool:
    least, most = _FOLDED
    sizes = number, other, number * other, number / (other or 1)
    return all(least < abs(x) < most for x in sizes)


def product(number: float, factors: Iterable[tuple[Node, bool]]) -> Node:
    """A number times factors, one of which there is at least, as a tree."""
    result: Node | None = None
    bounded = False
    for node, divides in factors:
        bounded |= divides
        factor = Operation(RECIPROCAL, (node,)) if divides else node
        if result is None:
            result = factor
        else:
            result = Operation(BOUNDED if bounded else "*", (result, factor))
    if number == 1.0:
        return result
    if number == -1.0:
        return Operation("neg", (result,))
    if not math.isfinite(number):
        raise ValueError(f"a factor of {number}")
    return Operation(BOUNDED if bounded else "*", (Number(number), result))


def outside_unit(spec: Spec) -> Spec:
    """The spec whose unit has no factors that all features share: they are the score's."""
    if spec.unit is None:
        return spec
    inside: list[tuple[Node, bool]] = []
    score, stack = spec.score, [(spec.unit, False)]
    while stack:
        node, divides = stack.pop()
        operator = node.operator if isinstance(node, Operation) else ""
        if FEATURE not in spec.axes_of(node):
            score = Operation("/" if divides else "*", (score, node))
        elif operator == "neg":
            score = Operation("neg", (score,))
            stack.append((node.operands[0], divides))
        elif operator in ("*", "/"):
            left, right = node.operands
            stack += [(right, divides != (operator == "/")), (left, divides)]
        else:
            inside.append((node, divides))
    if not inside:  # a unit of one feature
        return spec
    unit = Number(1.0) if inside[0][1] else inside[0][0]
    for node, divides in inside[0 if inside[0][1] else 1 :]:
        unit = Operation("/" if divides else "*", (unit, node))
    return spec._replace(score=score, unit=unit)
