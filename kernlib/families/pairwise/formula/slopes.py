"""Gradients of reductions over pairs, which are reductions over pairs.

With ``out[m,f] = sum_n S U_f`` and the gradient ``g`` of out, let ``P = sum_f g_f U_f`` be one more
sum over features. What an input ``t`` of the score gets is ``sum_n P dS/dt``; one of a term of the
score, by its features k, ``sum_n P dS/dterm * dterm/dt_k``; one of the unit ``sum_n S * g_f
dU_f/dt``. Without a unit P is g itself; of a matrix it is the matrix g; of ``log sum_n exp S`` it
is ``g exp(S - out)``. Inputs of columns get the same of the transposed pairs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kernlib.descriptors import derivative as rules
from kernlib.descriptors.expression import Name, Node, Number, Operation, names
from kernlib.descriptors.score.kinds import FLOAT
from kernlib.families.pairwise.formula.grammar import SUM
from kernlib.families.pairwise.formula.spec import (
    COL,
    FEATURE,
    LOGSUMEXP,
    MATRIX,
    ROW,
    TOTAL,
    Input,
    Spec,
    new_spec,
    transposed,
    used_only,
    written_out,
)

GRAD, RESULT = -1, -2  # in the place of an input: the gradient of the result, and the result


class Slope(NamedTuple):
    """A summand of an input's gradient: a spec, the places of its inputs in those of the call, or
    GRAD or RESULT, and whether it is ``turned``: of the transposed pairs. Sums over rows, over
    columns and over the batch that the input lacks are left to do."""

    spec: Spec
    places: tuple[int, ...]
    turned: bool


@lru_cache(maxsize=1024)
def slopes(spec: Spec, place: int, smallest: float) -> tuple[Slope, ...]:
    """The summands of the gradient by one input, none where it is 0 everywhere. ``smallest`` is the
    least normal number of the arithmetic."""
    by, axes = f"t{place}", spec.inputs[place].axes
    grad = Name(f"t{len(spec.inputs)}")
    of_result, weight = _weight(spec, grad)
    results = []

    def add(score: Node, unit: Node | None = None) -> None:
        if rules.ZERO not in (score, unit):
            results.append(_slope(spec, of_result, score, unit, axes))

    direct = rules.derivative(spec.score, by, smallest)
    for index, term in enumerate(spec.terms):
        if by not in names(term):
            continue
        outer = rules.derivative(spec.score, f"#{index}", smallest)
        inner = rules.derivative(term, by, smallest)
        if FEATURE in axes:
            add(rules.product(weight, outer), inner)
        else:
            direct = rules.total(direct, rules.product(outer, _sum(inner)))
    add(rules.product(weight, direct))
    if spec.unit is not None and by in names(spec.unit):
        inner = rules.product(grad, rules.derivative(spec.unit, by, smallest))
        if FEATURE in axes:
            add(spec.score, inner)
        else:
            add(rules.product(spec.score, _sum(inner)))
    return tuple(results)


def _sum(term: Node) -> Node:
    return rules.ZERO if term == rules.ZERO else Operation(SUM, (term,))


def _weight(spec: Spec, grad: Name) -> tuple[tuple[Input, ...], Node]:
    """The inputs behind those of the call, and P."""
    if spec.reduction == MATRIX:
        return (Input((ROW, COL), FLOAT),), grad
    if spec.unit is not None:
        return (Input((ROW, FEATURE), FLOAT),), Operation(SUM, (rules.product(grad, spec.unit),))
    inputs = (Input((ROW,), FLOAT),)
    if spec.reduction == TOTAL:
        return inputs, grad
    if spec.reduction != LOGSUMEXP:
        raise ValueError(f"{spec.reduction} has no gradient of this kind")
    result = Name(f"t{len(spec.inputs) + 1}")
    is_empty = Operation("==", (result, Number(float("-inf"))))
    share = Operation("exp", (rules.difference(spec.score, result),))
    share = Operation("where", (is_empty, rules.ZERO, share))
    return (*inputs, *inputs), rules.product(grad, share)


def _slope(spec: Spec, more: tuple[Input, ...], score, unit, axes) -> Slope:
    inputs = (*spec.inputs, *more)
    by_pair = set(axes) == {ROW, COL}
    kind = MATRIX if by_pair else TOTAL
    plain = new_spec(kind, written_out(spec, score), inputs, unit, spec.ranged)
    plain, places = used_only(plain)
    turned = COL in axes and not by_pair
    count = len(spec.inputs)
    places = tuple(i if i < count else (GRAD, RESULT)[i - count] for i in places)
    return Slope(transposed(plain) if turned else plain, places, turned)
