"""Kinds of the parts of a score's expression, and how parts of several kinds meet.

A part is a number of the score's arithmetic, a whole number of 32 or 64 bits, or a condition. Whole
numbers are exact: where 32 bits might not hold a result, going by what positions and parts can be
at most, it is computed in 64. Beside a number, and as an argument of what gives one, a whole number
becomes one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kernlib.descriptors.expression import (
    POSITIONS,
    SCORE_FUNCTIONS,
    VALUE,
    Integer,
    Name,
    Node,
    Number,
    Operation,
)

FLOAT, INT, LONG, BOOL = "float", "int32", "int64", "bool"
ANY = "any"  # of a captured tensor before there is one
WORDS = {
    FLOAT: "a number",
    INT: "a whole number",
    LONG: "a whole number",
    BOOL: "a condition",
    ANY: "a captured value",
}
COMPARISONS = ("<", "<=", "==", "!=", ">", ">=")
CONDITIONS = (*COMPARISONS, "and", "or", "not")  # "and" and "or" have two operands or more
CONVERSIONS = (FLOAT, LONG)  # operators too, of a whole number
OPERATORS = (*CONDITIONS, *CONVERSIONS, *SCORE_FUNCTIONS, "//", "%")
MOST_POSITIONS = 2**30  # rows, columns, heads and matrices of a batch: sums of two fit 32 bits
_RANGES = {INT: (-(2**31), 2**31 - 1), LONG: (-(2**63), 2**63 - 1)}
KINDS = {  # of captured tensors, by their dtypes
    "float64": FLOAT,
    "float32": FLOAT,
    "float16": FLOAT,
    "bfloat16": FLOAT,
    "int32": INT,
    "int64": LONG,
    "bool": BOOL,
}
OWN = {VALUE: FLOAT, **dict.fromkeys(POSITIONS, INT)}  # of the names that every score has
# Arguments of calls, beside which captured tensors are given.
ARGUMENTS = (
    "layout", "scale", "causal", "window", "score", "mask", "axes", "q_lengths", "kv_lengths",
    "dropout_p", "seed", "return_lse", "out", "debug",
)  # fmt: skip


class Term(NamedTuple):
    """A part: its tree, its kind, and the least and greatest that a whole number can be."""

    node: Node
    kind: str
    low: int = 0
    high: int = 0

    @property
    def is_whole(self) -> bool:
        return self.kind in _RANGES


def named(name: str, kind: str) -> Term:
    """A value, a position, or an element of a captured tensor."""
    if name in POSITIONS:
        return Term(Name(name), INT, 0, MOST_POSITIONS - 1)
    return Term(Name(name), kind, *_RANGES.get(kind, (0, 0)))


def whole(value: int) -> Term:
    """A whole number that 64 bits hold."""
    kind = INT if _holds(INT, value, value) else LONG
    return Term(Integer(value, 32 if kind == INT else 64), kind, value, value)


def is_long(value: int) -> bool:
    """Whether 64 bits hold a whole number."""
    return _holds(LONG, value, value)


def as_float(term: Term) -> Term:
    """A term as a number of the score's arithmetic."""
    if not term.is_whole:
        return term
    if isinstance(term.node, Integer):
        return Term(Number(float(term.node.value)), FLOAT)
    return Term(Operation(FLOAT, (term.node,)), FLOAT)


def _as_long(term: Term) -> Term:
    if term.kind != INT:
        return term
    is_literal = isinstance(term.node, Integer)
    node = Integer(term.node.value, 64) if is_literal else Operation(LONG, (term.node,))
    return term._replace(node=node, kind=LONG)


def together(*terms: Term) -> tuple[Term, ...]:
    """Parts as parts of one kind, which are numbers or conditions all; of captured ones that are
    not known yet, as they are."""
    kinds = {term.kind for term in terms}
    if ANY in kinds or len(kinds) == 1:
        return terms
    convert = as_float if FLOAT in kinds else _as_long
    return tuple(convert(term) for term in terms)


def kind_of_all(*terms: Term) -> str:
    """The kind of terms that :func:`together` has made one."""
    return ANY if any(term.kind == ANY for term in terms) else terms[0].kind


def compute(operator: str, *terms: Term) -> Term:
    """An operation on numbers of any kind: whole if all of them are."""
    terms = together(*terms)
    kind = kind_of_all(*terms)
    if not all(term.is_whole for term in terms):
        return Term(Operation(operator, tuple(term.node for term in terms)), kind)
    low, high = _BOUNDS[operator](*(term[2:] for term in terms))
    if all(isinstance(term.node, Integer) for term in terms) and low == high and is_long(low):
        return whole(low)
    if kind == INT and not _holds(INT, low, high):
        terms, kind = tuple(map(_as_long, terms)), LONG
    least, most = _RANGES[kind]
    node = Operation(operator, tuple(term.node for term in terms))
    return Term(node, kind, max(low, least), min(high, most))


def select(condition: Term, first: Term, second: Term) -> Term:
    """``where``, of two numbers or of two conditions."""
    first, second = together(first, second)
    node = Operation("where", (condition.node, first.node, second.node))
    low, high = min(first.low, second.low), max(first.high, second.high)
    return Term(node, kind_of_all(first, second), low, high)


def kind_of(node: Node, kinds: dict[str, str]) -> str:
    """The kind of a tree, or of its derivative. ``kinds`` are those of names."""
    while isinstance(node, Operation):
        if node.operator in CONDITIONS:
            return BOOL
        if node.operator in CONVERSIONS:
            return node.operator
        node = node.operands[1 if node.operator == "where" else 0]
    if isinstance(node, Name):
        return kinds[node.name]
    if isinstance(node, Integer):
        return INT if node.bits == 32 else LONG
    return FLOAT


def _holds(kind: str, low: int, high: int) -> bool:
    least, most = _RANGES[kind]
    return least <= low and high <= most


# The least and the greatest that an operation can give, from those of its operands.


def _product_bounds(x: tuple, y: tuple) -> tuple[int, int]:
    ends = [a * b for a in x for b in y]
    return min(ends), max(ends)


def _quotient_bounds(x: tuple, y: tuple) -> tuple[int, int]:
    if x[0] >= 0 and y[0] > 0:
        return x[0] // y[1], x[1] // y[0]
    most = max(-x[0], x[1])
    return -most, most


def _rest_bounds(x: tuple, y: tuple) -> tuple[int, int]:
    return min(0, y[0] + 1), max(0, y[1] - 1)


def _magnitude_bounds(x: tuple) -> tuple[int, int]:
    ends = (abs(x[0]), abs(x[1]))
    return (0 if x[0] <= 0 <= x[1] else min(ends)), max(ends)


_BOUNDS: dict[str, Callable] = {
    "+": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "-": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "*": _product_bounds,
    "//": _quotient_bounds,
    "%": _rest_bounds,
    "neg": lambda x: (-x[1], -x[0]),
    "abs": _magnitude_bounds,
    "sign": lambda x: (-1, 1),
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
}
