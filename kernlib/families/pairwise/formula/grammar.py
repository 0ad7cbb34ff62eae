"""From the text of a formula to its tree: the language of scores, with sums over features.

``sum(term)`` is a number of a pair: its term is computed for each feature and added up, and
``sum(term, first, end)`` of the features from one place up to another alone. All else of a formula
is computed once a pair.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache

from kernlib.descriptors.expression import Integer, Name, Node, Operation, names, syntax
from kernlib.descriptors.score import kinds
from kernlib.descriptors.score.grammar import CALLS, DEEPEST, Reader
from kernlib.descriptors.score.kinds import FLOAT, INT, Term

SUM = "sum"
POSITIONS = {"row": INT, "col": INT}


@cache
def parse(text: str, tensors: tuple[tuple[str, str], ...], features: frozenset[str]) -> Node:
    """The tree of a formula. ``tensors`` are names and kinds; ``features`` those that have a value
    for each feature, which are read in sums only.

    Raises ValueError that quotes what is wrong and says what would do.
    """
    reader = _Reader(text, dict(tensors), features)
    return kinds.as_float(reader.number(syntax(text, "expression", DEEPEST))).node


def sums(node: Node) -> tuple[Node, ...]:
    """The sums over features of a tree, each once, in order."""
    seen: dict[Node, None] = {}
    stack = [node]
    while stack:
        node = stack.pop()
        if not isinstance(node, Operation):
            continue
        if node.operator == SUM:
            seen[node] = None
        else:
            stack += reversed(node.operands)
    return tuple(seen)


class _Reader(Reader):
    def __init__(self, text: str, tensors: dict[str, str], features: frozenset[str]):
        super().__init__("formula", text, tensors, POSITIONS)
        self.features, self.inside = features, False

    def name(self, node: ast.Name) -> Term:
        if node.id in self.features and not self.inside:
            self.refuse(
                node,
                f"has a value for each feature, and a formula has one value for each pair: add them"
                f" up, as in sum({node.id} * ...)",
            )
        return super().name(node)

    def call(self, node: ast.Call) -> Term:
        if not isinstance(node.func, ast.Name) or node.func.id != SUM:
            return super().call(node)
        if len(node.args) not in (1, 3) or node.keywords:
            self.refuse(
                node, "is no sum: it takes a term, as in sum((x - y) ** 2), and perhaps the first "
                "and the end of some features, as in sum(x * y, 0, 8)"
            )  # fmt: skip
        if self.inside:
            self.refuse(node, "is a sum in a sum: there is one dimension of features")
        self.inside = True
        try:
            term = kinds.as_float(self.number(node.args[0])).node
        finally:
            self.inside = False
        if names(term).isdisjoint(self.features):
            listed = ", ".join(sorted(self.features)) or 'none has an axis "feature"'
            self.refuse(node, f"adds up nothing that has features (which have: {listed})")
        return Term(Operation(SUM, (term, *self._bounds(node))), FLOAT)

    def _bounds(self, node: ast.Call) -> tuple[Integer, ...]:
        """The first feature and the end of a sum of some."""
        places = []
        for bound in node.args[1:]:
            if not isinstance(bound, ast.Constant) or type(bound.value) is not int:
                self.refuse(bound, "is no place of a feature, which is a whole number")
            places.append(Integer(bound.value, 32))
        if places and not 0 <= places[0].value < places[1].value:
            self.refuse(node, "adds up no feature: the end lies behind the first")
        return tuple(places)


def bounds_of(part: Operation) -> tuple[int, int] | None:
    """The first feature and the end of a sum of some features, None of all."""
    _, *bounds = part.operands
    return (bounds[0].value, bounds[1].value) if bounds else None


def placed(node: Node, places: dict[tuple[str, tuple[int, int] | None], str]) -> Node:
    """The tree with the names of ``places`` in the place of its own, and sums of some features as
    sums of all of a tensor that has these."""

    def change(part: Node) -> Node | None:
        if isinstance(part, Name):
            return Name(places.get((part.name, None), part.name))
        if not isinstance(part, Operation) or part.operator != SUM:
            return None
        bounds = bounds_of(part)
        table = {name: places[name, at] for name, at in places if at == bounds}
        table = {name: new for (name, at), new in places.items() if at is None} | table
        return Operation(SUM, (renamed(part.operands[0], table),))

    return mapped(node, change)


def mapped(node: Node, change: Callable[[Node], Node | None]) -> Node:
    """The tree with what ``change`` returns in the place of a part, unless that is None."""
    changed = change(node)
    if changed is not None:
        return changed
    if not isinstance(node, Operation):
        return node
    return Operation(node.operator, tuple(mapped(x, change) for x in node.operands))


def renamed(node: Node, table: dict[str, str]) -> Node:
    """The tree with other names."""

    def change(part: Node) -> Node | None:
        return Name(table.get(part.name, part.name)) if isinstance(part, Name) else None

    return mapped(node, change)


WORDS = {*CALLS, SUM}
