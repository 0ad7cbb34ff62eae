"""The small language of epilogues: one arithmetic expression of ``v`` and named parameters.

An expression is parsed once with Python's own grammar and a white list; nothing is ever evaluated
as Python. From the tree come the CUDA text (``kernlib.lowering.epilogue_source``) and the torch
reference (``kernlib.runtime.expressions``).
"""

from __future__ import annotations

import ast
import keyword
import math
from functools import cache
from typing import NamedTuple

from kernlib.descriptors import nesting
from kernlib.descriptors.base import require, shown

FUNCTIONS = {
    "abs": 1,
    "cos": 1,
    "erf": 1,
    "exp": 1,
    "expm1": 1,
    "log": 1,
    "log1p": 1,
    "max": 2,
    "min": 2,
    "ndtr": 1,
    "pow": 2,
    "sin": 1,
    "sqrt": 1,
    "tanh": 1,
}
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
CONSTANTS = {"pi": 3.141592653589793, "e": 2.718281828459045}
VALUE = "v"
LANGUAGE = {*FUNCTIONS, *CONSTANTS, VALUE}
RESERVED = LANGUAGE | {  # names that no parameter may have
    "p", "inner_p", "outer_p", "inner_scale", "epsilon",
    "regularization", "row_offset", "col_offset", "feature_map", "lengthscale", "out", "accumulate",
    "debug", "a", "b", "descriptor", "x", "weight", "weights", "layout",
}  # fmt: skip
SCORES = "scores and masks of block-sparse attention"  # whose language has more than this one
POSITIONS = ("batch", "head", "row", "col")  # of a score, and the axes of the tensors that it reads
SCORE_FUNCTIONS = {"clamp": 3, "floor": 1, "mod": 2, "sign": 1, "where": 3}
_WRITTEN = {"relu": "max(v, 0)", "sigmoid": "1 / (1 + exp(-v))", "gelu": "v * ndtr(v)"}
DEEPEST = 100  # operations in one another: what walks a tree takes several frames for each


class Number(NamedTuple):
    value: float


class Integer(NamedTuple):
    """A whole number of a score's expression, which is computed in so many bits, 32 or 64."""

    value: int
    bits: int


class Name(NamedTuple):
    name: str


class Operation(NamedTuple):
    """``operator`` is one of ``+ - * / **``, ``neg``, or a key of FUNCTIONS; in scores also one of
    :mod:`kernlib.descriptors.score.kinds`."""

    operator: str
    operands: tuple


Node = Number | Integer | Name | Operation


@cache
def parse(text: str, parameters: tuple[str, ...]) -> Node:
    """The tree of ``text``, in which ``v`` and ``parameters`` may be named.

    Raises ValueError that quotes what is not understood and says what would be.
    """
    return _convert(syntax(text), text, frozenset(parameters))


def syntax(text: str, what: str = "expression", deepest: int = DEEPEST) -> ast.expr:
    """Python's tree of an expression, or of ``what`` it is, with no more than ``deepest``
    operations in one another: what all that walks it can bear.

    Raises ValueError for others, and before it is parsed for a text that is too long or too deep.
    """
    advice = "several epilogues, or " if what == "expression" else ""
    try:
        nesting.check_size(text)
    except ValueError as error:
        why = f"{error}: use {advice}parentheses in long sums"
        raise ValueError(f"{what} {shown(text)} {why}") from None
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        why = f"{error.msg}{_advice(text.strip(), what)}"
        raise ValueError(f"{what} {shown(text)} does not parse: {why}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte; nested too deep
        why = str(error) or "it is nested too deep"
        raise ValueError(f"{what} {shown(text)} does not parse: {why}") from None
    if (depth := _depth(body)) > deepest:
        raise ValueError(
            f"{what} {shown(text)} has {depth} operations in one another, of at most "
            f"{deepest}: use {advice}parentheses in long sums"
        )
    return body


def _advice(text: str, what: str) -> str:
    """Advice on two spellings that are no Python."""
    if what != "expression" and any(sign in text.replace("!=", "") for sign in ("&&", "||", "!")):
        return "; write and, or and not"
    return "; several lines go into parentheses" if "\n" in text else ""


def names(node: Node) -> frozenset[str]:
    """The names that occur in a tree, found without recursion."""
    seen, stack = set(), [node]
    while stack:
        node = stack.pop()
        if isinstance(node, Name):
            seen.add(node.name)
        elif isinstance(node, Operation):
            stack += node.operands
    return frozenset(seen)


def check_parameters(parameters: tuple[str, ...]) -> None:
    """Raises ValueError for names that no parameter of an expression may have."""
    for name in parameters:
        valid = isinstance(name, str) and name.isidentifier() and name.isascii()
        if not valid or name in keyword.kwlist:
            raise ValueError(
                f"parameter {shown(name)} is not an ASCII identifier; its value is an argument of "
                "the call"
            )
        by = "the language of expressions" if name in LANGUAGE else "arguments of calls"
        require(name not in RESERVED, f"parameter name {name!r} is taken by {by}; choose another")
    require(len(set(parameters)) == len(parameters), f"parameters {parameters} repeat a name")


def tie_share(operation: Operation) -> float:
    """The part of the derivative of a ``max`` or ``min`` that its first operand is given where both
    are equal: one half, but beside a constant all of it, and nothing in ``max(v, 0)``.

    Kernels and torch's operators alike go by this, so that no choice of torch's, which has changed,
    decides whether a layer that begins at 0 trains.
    """
    constant = [not names(operand) for operand in operation.operands]
    if constant[0] == constant[1]:
        return 0.5
    number = operation.operands[constant.index(True)]
    zero = number in (Number(0.0), Operation("neg", (Number(0.0),)))
    other = 0.0 if operation.operator == "max" and zero else 1.0
    return 1.0 - other if constant[0] else other


def _depth(node: ast.expr) -> int:
    """The depth of nested operations, counted without recursion."""
    deepest, stack = 0, [(node, 0)]
    while stack:
        node, depth = stack.pop()
        deepest = max(deepest, depth)
        inside = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        stack += [(child, depth + 1) for child in inside]
    return deepest


def _convert(node: ast.expr, text: str, parameters: frozenset[str]) -> Node:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return finite(node.value, text)
    if isinstance(node, ast.Name):
        return _convert_name(node.id, text, parameters)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        operand = _convert(node.operand, text, parameters)
        return Operation("neg", (operand,)) if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        operands = tuple(_convert(side, text, parameters) for side in (node.left, node.right))
        return Operation(OPERATORS[type(node.op)], operands)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _convert_call(node, text, parameters)
    raise ValueError(
        f"expression {shown(text)}: {shown(part_of(text, node))} is not part of the language; use "
        f"numbers, v, parameters, + - * / **, parentheses and {', '.join(FUNCTIONS)}"
        f"{_of_powers(node)}{_of_scores(node)}"
    )


def part_of(text: str, node: ast.expr) -> str:
    """The part of an expression's text from which a node of Python's tree was read."""
    return ast.get_source_segment(text.strip(), node) or type(node).__name__


def _of_powers(node: ast.expr) -> str:
    """Why ``^`` is refused, or ""."""
    return "; a power is v**2" if isinstance(getattr(node, "op", None), ast.BitXor) else ""


def _of_scores(node: ast.expr) -> str:
    """Why a condition is refused, or ""."""
    is_condition = isinstance(node, (ast.Compare, ast.BoolOp, ast.IfExp))
    signs = (ast.Not, ast.Invert, ast.BitAnd, ast.BitOr, ast.FloorDiv, ast.Mod)
    if is_condition or isinstance(getattr(node, "op", None), signs):
        return f". Conditions and whole numbers are parts of {SCORES} alone"
    return ""


def finite(value: float, text: str, what: str = "expression") -> Number:
    """A number of an expression, or of ``what`` it is.

    Raises ValueError for one that no float64 holds.
    """
    try:
        if math.isfinite(float(value)):
            return Number(float(value))
    except OverflowError:
        pass
    raise ValueError(f"{what} {shown(text)}: {shown(value)} is too large for a float64")


def _convert_name(name: str, text: str, parameters: frozenset[str]) -> Node:
    if name == VALUE or name in parameters:
        return Name(name)
    if name in CONSTANTS:
        return Number(CONSTANTS[name])
    listed = ", ".join(sorted(parameters | {VALUE}))
    arguments = (*sorted(parameters), f"my_{name}" if name in RESERVED else name)
    raise ValueError(
        f"expression {shown(text)} names {name!r}; known are {listed}, pi and e. The value itself "
        f"is v, and any number that the call is given a parameter, as in Custom(..., {arguments})"
        + (f"; positions are known to {SCORES} alone" if name in POSITIONS else "")
    )


def _convert_call(node: ast.Call, text: str, parameters: frozenset[str]) -> Node:
    function = node.func.id
    if function not in FUNCTIONS:
        from kernlib.hints import spelling  # only errors need it

        hint = spelling.argument(function, FUNCTIONS)
        if function in _WRITTEN:
            hint = f"; write {_WRITTEN[function]}"
        if function in SCORE_FUNCTIONS:
            hint = f"; {function} is part of {SCORES} alone"
        raise ValueError(
            f"expression {shown(text)} calls {function!r}; known are {', '.join(FUNCTIONS)}{hint}"
        )
    if len(node.args) != FUNCTIONS[function]:
        count = FUNCTIONS[function]
        raise ValueError(
            f"expression {shown(text)}: {function} takes {count} argument(s), got {len(node.args)}"
        )
    return Operation(function, tuple(_convert(a, text, parameters) for a in node.args))
