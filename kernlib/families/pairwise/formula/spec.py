"""What kernels compute: a score of each pair, and what becomes of a row's scores.

``out[m] = reduce_n score(pair m, n)``, or with a ``unit`` ``out[m,f] = sum_n score(m, n) *
unit(m, n, f)``. The score reads ``terms``, which are sums over features: ``#0`` is the name of the
first. Inputs are named ``t0, t1, ...`` by their place, so that formulas that differ in names share
their kernels. The gradients of a reduction by its inputs are reductions again
(:mod:`kernlib.families.pairwise.formula.slopes`).
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from kernlib.descriptors.expression import Integer, Name, Node, Number, Operation, names
from kernlib.families.pairwise.formula import grammar

ROW, COL, FEATURE = "row", "col", "feature"
AXES = (ROW, COL, FEATURE)
MATRIX, TOTAL, LOGSUMEXP, LEAST = "matrix", "sum", "logsumexp", "min"
_TURNED = {ROW: COL, COL: ROW}


class Input(NamedTuple):
    """A tensor that has a batch and then these of AXES, in their order, and a kind of
    :mod:`kernlib.descriptors.score.kinds`; or a number of the host, which has none."""

    axes: tuple[str, ...]
    kind: str
    on_host: bool = False


class Spec(NamedTuple):
    """A computation, without sizes and dtypes. ``ranged`` rows have a first and an end column of
    their own: then there is one more tensor, whole numbers (M, 2)."""

    reduction: str
    score: Node
    terms: tuple[Node, ...] = ()
    unit: Node | None = None
    inputs: tuple[Input, ...] = ()
    ranged: bool = False

    def shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Of the result, for batch, rows, columns and features."""
        batch, rows, cols, features = sizes
        if self.reduction == MATRIX:
            return batch, rows, cols
        return (batch, rows) if self.reduction in (LOGSUMEXP, LEAST) else (batch, rows, features)

    def canonical(self) -> str:
        """A text that :func:`from_text` reads."""
        plain = tuple(map(_plain, (self.score, *self.terms)))
        unit = None if self.unit is None else _plain(self.unit)
        inputs = tuple(map(tuple, self.inputs))
        return repr((self.reduction, plain[0], plain[1:], unit, inputs, self.ranged))

    def axes_of(self, node: Node) -> frozenset[str]:
        """The axes that the value of a tree has, of a score, a term or a unit."""
        axes: set[str] = set()
        for name in names(node):
            if name in _TURNED:
                axes.add(name)
            elif name.startswith("#"):
                axes |= self.axes_of(self.terms[int(name[1:])]) - {FEATURE}
            else:
                axes.update(self.inputs[place_of(name)].axes)
        return frozenset(axes)

    def features_of(self, node: Node) -> tuple[int, ...]:
        """The places of the inputs of a term or a unit that have features, in order."""
        places = (place_of(name) for name in names(node) if name[0] == "t")
        return tuple(sorted(i for i in places if FEATURE in self.inputs[i].axes))

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds of the inputs' names."""
        return {f"t{i}": each.kind for i, each in enumerate(self.inputs)}


def place_of(name: str) -> int:
    """The place of the input that a tree calls ``name``."""
    return int(name[1:])


def new_spec(
    reduction: str,
    score: Node,
    inputs: tuple[Input, ...],
    unit: Node | None = None,
    ranged: bool = False,
) -> Spec:
    """Of a score in which sums over features stand where they are."""
    parts = grammar.sums(score)
    places = {part: Name(f"#{i}") for i, part in enumerate(parts)}
    terms = tuple(part.operands[0] for part in parts)
    return Spec(reduction, grammar.mapped(score, places.get), terms, unit, inputs, ranged)


def written_out(spec: Spec, node: Node) -> Node:
    """A tree with its sums in the place of their names."""
    sums = {Name(f"#{i}"): Operation(grammar.SUM, (term,)) for i, term in enumerate(spec.terms)}
    return grammar.mapped(node, sums.get)


def used_only(spec: Spec) -> tuple[Spec, list[int]]:
    """The spec without inputs that it does not read, and the places of the others."""
    read = names(spec.score).union(*map(names, spec.terms))
    read |= frozenset() if spec.unit is None else names(spec.unit)
    places = [i for i in range(len(spec.inputs)) if f"t{i}" in read]
    table = {f"t{old}": f"t{new}" for new, old in enumerate(places)}

    def named(node: Node) -> Node:
        return grammar.renamed(node, table)

    unit = None if spec.unit is None else named(spec.unit)
    inputs = tuple(spec.inputs[i] for i in places)
    fields = named(spec.score), tuple(map(named, spec.terms)), unit, inputs
    return Spec(spec.reduction, *fields, spec.ranged), places


def transposed(spec: Spec) -> Spec:
    """The same of pairs whose rows are columns. Matrices among the inputs must be transposed."""

    def turn(node: Node) -> Node:
        return grammar.renamed(node, _TURNED)

    inputs = tuple(
        each._replace(axes=tuple(sorted((_TURNED.get(x, x) for x in each.axes), key=AXES.index)))
        for each in spec.inputs
    )
    unit = None if spec.unit is None else turn(spec.unit)
    return Spec(
        spec.reduction, turn(spec.score), tuple(map(turn, spec.terms)), unit, inputs, spec.ranged
    )


# As text.


def _plain(node: Node):
    if isinstance(node, Number):
        return ("number", repr(node.value))  # which may be infinite
    if isinstance(node, Integer):
        return ("integer", node.value, node.bits)
    if isinstance(node, Name):
        return ("name", node.name)
    return ("do", node.operator, *map(_plain, node.operands))


def _tree(plain) -> Node:
    kind, *rest = plain
    if kind == "number":
        return Number(float(rest[0]))
    if kind == "integer":
        return Integer(*rest)
    return Name(rest[0]) if kind == "name" else Operation(rest[0], tuple(map(_tree, rest[1:])))


@lru_cache(maxsize=1024)
def from_text(text: str) -> Spec:
    """What :meth:`Spec.canonical` wrote."""
    reduction, score, terms, unit, inputs, ranged = ast.literal_eval(text)
    return Spec(
        reduction,
        _tree(score),
        tuple(map(_tree, terms)),
        None if unit is None else _tree(unit),
        tuple(Input(*each) for each in inputs),
        ranged,
    )
