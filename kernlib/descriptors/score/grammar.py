"""From the text of a score or a mask to its tree: Python's grammar and a white list.

Every part is of a kind that is known when it is read (:mod:`kernlib.descriptors.score.kinds`), and
the tree has an operation for each conversion. Captured tensors that are not there yet are of any
kind: then the tree is good for nothing but names, and what is wrong whatever they hold is found.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import NoReturn

from kernlib.descriptors.base import shown
from kernlib.descriptors.expression import (
    CONSTANTS,
    FUNCTIONS,
    OPERATORS,
    SCORE_FUNCTIONS,
    VALUE,
    Node,
    Number,
    Operation,
    finite,
    part_of,
    syntax,
)
from kernlib.descriptors.score import kinds
from kernlib.descriptors.score.kinds import ANY, BOOL, FLOAT, OWN, Term

SCORE_CONSTANTS = {**CONSTANTS, "inf": float("inf")}
DEEPEST = 50  # operations in one another: derivatives, several times as deep, are walked too
CALLS = {**FUNCTIONS, **SCORE_FUNCTIONS}  # with the number of arguments
_WHOLE = {ast.FloorDiv: "//", ast.Mod: "%"}
_COMPARISONS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_CONDITIONS = {ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "!=", ast.And: "and", ast.Or: "or"}
_TIGHT = "; & | ^ and ~ bind more tightly than comparisons, which need parentheses beside them"
_EXACT = ("abs", "max", "min", "sign")  # of whole numbers, whole


@cache
def parse_score(text: str, captured: tuple[tuple[str, str], ...]) -> Node:
    """The tree of a score, which is a number. ``captured`` are names and kinds.

    Raises ValueError that quotes what is wrong and says what would do.
    """
    reader = Reader("score", text, dict(captured))
    return kinds.as_float(reader.number(syntax(text, "score", DEEPEST))).node


@cache
def parse_mask(text: str, captured: tuple[tuple[str, str], ...]) -> Node:
    """The tree of a mask, which is a condition and knows no logit. Raises as :func:`parse_score`
    does."""
    reader = Reader("mask", text, dict(captured))
    return reader.condition(syntax(text, "mask", DEEPEST)).node


@cache
def parse_epilogue(text: str, tensors: tuple[str, ...]) -> Node:
    """The tree of an epilogue of pairs, whose ``tensors`` are of any kind. Raises as
    :func:`parse_score` does."""
    variables = {name: kind for name, kind in OWN.items() if name in (VALUE, "row", "col")}
    reader = Reader("expression", text, dict.fromkeys(tensors, ANY), variables)
    return kinds.as_float(reader.number(syntax(text, "expression", DEEPEST))).node


class Reader:
    """Reads one text. ``what`` it is stands in errors; ``variables`` are names and kinds beside
    those of captured tensors: by default those of a score, or of a mask."""

    def __init__(
        self,
        what: str,
        text: str,
        captured: dict[str, str],
        variables: dict[str, str] | None = None,
    ):
        self.what, self.text = what, text
        if variables is None:
            variables = {k: v for k, v in OWN.items() if k != VALUE or what != "mask"}
        self.known = {**variables, **captured}

    def refuse(self, node: ast.expr, why: str) -> NoReturn:
        """Raises ValueError with the part that is wrong."""
        part = shown(part_of(self.text, node))
        raise ValueError(f"{self.what} {shown(self.text)}: {part} {why}")

    def read(self, node: ast.expr) -> Term:
        if type(node) not in _READERS:
            self._refuse_unknown(node)
        return getattr(self, _READERS[type(node)])(node)

    def number(self, node: ast.expr) -> Term:
        """A part that is a number of any kind."""
        return self._number(node, self.read(node))

    def _number(self, node: ast.expr, term: Term) -> Term:
        if term.kind == BOOL:
            part = part_of(self.text, node)
            self.refuse(node, f"is a condition, not a number; where({part}, 1, 0) is one")
        return term

    def condition(self, node: ast.expr, more: str = "") -> Term:
        term = self.read(node)
        if term.kind not in (BOOL, ANY):
            part = part_of(self.text, node)
            if term.kind == FLOAT and self.what == "mask" and isinstance(node, ast.Name):
                more += f"; floats that are added to logits are a score, v + {part}"
            what = kinds.WORDS[term.kind]
            self.refuse(node, f"is {what}, not a condition; compare it, as in {part} != 0{more}")
        return term

    def constant(self, node: ast.Constant) -> Term:
        value = node.value
        if type(value) is int and kinds.is_long(value):
            return kinds.whole(value)
        if type(value) in (int, float):
            return Term(finite(value, self.text, self.what), FLOAT)
        self._refuse_unknown(node)

    def name(self, node: ast.Name) -> Term:
        name = node.id
        if name in self.known:
            return kinds.named(name, self.known[name])
        if name in SCORE_CONSTANTS:
            return Term(Number(SCORE_CONSTANTS[name]), FLOAT)
        from kernlib.hints import scores  # only errors need it

        self.refuse(node, scores.unknown_name(self.what, name, tuple(self.known)))

    def unary(self, node: ast.UnaryOp) -> Term:
        if isinstance(node.op, ast.UAdd):
            return self.number(node.operand)
        if isinstance(node.op, ast.USub):
            return _negative(self.number(node.operand))
        term = self.condition(node.operand, _TIGHT if isinstance(node.op, ast.Invert) else "")
        return Term(Operation("not", (term.node,)), BOOL)

    def binary(self, node: ast.BinOp) -> Term:
        kind, sides = type(node.op), (node.left, node.right)
        if kind in _CONDITIONS:
            more = _TIGHT + ("; a power is **" if kind is ast.BitXor else "")
            terms = [self.condition(side, more) for side in sides]
            return Term(Operation(_CONDITIONS[kind], tuple(term.node for term in terms)), BOOL)
        if kind in _WHOLE:
            return self._of_whole(_WHOLE[kind], *sides)
        if kind not in OPERATORS:
            self._refuse_unknown(node)
        terms = [self.number(side) for side in sides]
        if kind in (ast.Div, ast.Pow):
            terms = map(kinds.as_float, terms)
        return kinds.compute(OPERATORS[kind], *terms)

    def joined(self, node: ast.BoolOp) -> Term:
        terms = [self.condition(value) for value in node.values]
        operator = _CONDITIONS[type(node.op)]
        return Term(Operation(operator, tuple(term.node for term in terms)), BOOL)

    def compared(self, node: ast.Compare) -> Term:
        """The conjunction of a chain's comparisons."""
        sides = [node.left, *node.comparators]
        terms = [self.read(side) for side in sides]
        nodes = []
        for index, op in enumerate(node.ops):
            operator = _COMPARISONS.get(type(op))
            if operator is None:
                self._refuse_unknown(node)
            pair = terms[index : index + 2]
            if BOOL in (pair[0].kind, pair[1].kind):
                self._check_conditions(operator, sides[index : index + 2], pair)
            pair = tuple(term.node for term in kinds.together(*pair))
            nodes.append(Operation(operator, pair))
        return Term(nodes[0] if len(nodes) == 1 else Operation("and", tuple(nodes)), BOOL)

    def _check_conditions(self, operator: str, sides: list, pair: list[Term]) -> None:
        """Raises ValueError unless both are conditions, which are equal or are not."""
        for side, term in zip(sides, pair, strict=True):
            if term.kind == BOOL and operator not in ("==", "!="):
                self.refuse(
                    side, f"is a condition, which has no order: {operator} compares numbers"
                )
        for side, term in zip(sides, pair, strict=True):
            if term.kind not in (BOOL, ANY):
                what = kinds.WORDS[term.kind]
                self.refuse(
                    side, f"is {what} beside a condition; a condition is used as it is, or not c"
                )

    def selected(self, node: ast.IfExp) -> Term:
        return self._select(node.test, node.body, node.orelse)

    def _select(self, condition: ast.expr, *values: ast.expr) -> Term:
        test, terms = self.condition(condition), [self.read(value) for value in values]
        if {term.kind for term in terms} - {BOOL, ANY}:  # numbers, of which none is a condition
            terms = list(map(self._number, values, terms))
        return kinds.select(test, *terms)

    def _of_whole(self, operator: str, *sides: ast.expr) -> Term:
        terms = [self.number(side) for side in sides]
        for side, term in zip(sides, terms, strict=True):
            if term.kind == FLOAT:
                self.refuse(
                    side,
                    f"is a number with a fraction, and {operator} takes whole numbers; of others "
                    "floor(x / y) is the quotient and x - floor(x / y) * y the rest",
                )
        return kinds.compute(operator, *terms)

    def call(self, node: ast.Call) -> Term:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in CALLS or node.keywords or len(node.args) != CALLS[name]:
            from kernlib.hints import scores  # only errors need it

            self.refuse(node, scores.wrong_call(name, node, CALLS))
        if name == "where":
            return self._select(*node.args)
        if name == "mod":
            return self._of_whole("%", *node.args)
        terms = [self.number(argument) for argument in node.args]
        if name == "clamp":
            return kinds.compute("min", kinds.compute("max", *terms[:2]), terms[2])
        if name == "floor" and terms[0].is_whole:
            return terms[0]
        if name not in _EXACT:
            terms = map(kinds.as_float, terms)
        return kinds.compute(name, *terms)

    def _refuse_unknown(self, node: ast.expr) -> NoReturn:
        from kernlib.hints import scores  # only errors need it

        self.refuse(node, scores.unknown_part(node, CALLS, self.what))


def _negative(term: Term) -> Term:
    return kinds.compute("neg", term)


_READERS: dict[type, str] = {
    ast.Constant: "constant",
    ast.Name: "name",
    ast.UnaryOp: "unary",
    ast.BinOp: "binary",
    ast.BoolOp: "joined",
    ast.Compare: "compared",
    ast.IfExp: "selected",
    ast.Call: "call",
}
