"""CUDA text of gradients of reductions: the struct ``Slopes``, derivatives of what follows the sums
of pairs, in the arithmetic of :mod:`kernlib.families.pairwise.lowering.finish`."""

from __future__ import annotations

import math
from typing import NamedTuple

from kernlib.descriptors.derivative import ONE, Derivative, separated
from kernlib.descriptors.expression import VALUE, Node, Number, Operation, names
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering.finish import COMMON_SCALARS, ReductionSource, factors_of
from kernlib.lowering.epilogue_source import function_struct

LARGEST = "3.402823466e38f"
# 1 / p, and 1 where the root is the sum itself.
_ROOT = "read(0) == AccT(0) || read(0) == infinity(AccT()) ? AccT(1) : AccT(1) / read(0)"


class Derivatives(NamedTuple):
    """Those of one call: ``by_sum``, the derivative of what follows the sums, None where
    that is the sum itself; those by hyperparameters, in the order of their totals, where a
    ``degree`` stands for the bandwidth of a kernel of quotients of points by it: text of the power
    of a distance that the sums are, as ``dK/dbandwidth = -degree / bandwidth * s * dK/ds``."""

    by_sum: Derivative | None
    others: tuple[Derivative | str, ...] = ()


class _Tree(NamedTuple):
    """As much of an epilogue as makes text."""

    node: Node
    parameters: tuple[str, ...] = ()
    vectors: tuple = ()
    summands: tuple = ()

    def tree(self) -> Node:
        return self.node


class SlopeSource(ReductionSource):
    """:class:`ReductionSource` with the constants of an exponent bounded where they are multiplied,
    as the square of the reciprocal of a tiny bandwidth is infinite, and quotients in 2 ulp."""

    def _operation(self, node: Operation) -> str:
        if node.operator == "/" and not self._is_constant(node.operands[1]):
            left, right = (self._render(operand) for operand in node.operands)
            return f"quotient({left}, {right})"
        if node.operator != "exp":
            return super()._operation(node)
        rest, factors, negative = factors_of(node.operands[0], self._is_constant)
        number, parts = -1.0 if negative else 1.0, []
        for factor in factors:
            scale, others = _parts(factor)
            number, parts = number * scale, parts + others
        texts = sorted(self._render(part) for part in parts)
        product = texts[0] if texts else f"AccT({number!r})"
        for text in texts[1:]:
            product = self._member(f"bounded({product}, {text})")
        if texts and number != 1.0:
            product = f"AccT({number!r}) * {product}"
        return f"exp2_approximate({self._render(rest)} * {self._member(f'for_exp2({product})')})"


def _parts(node: Node) -> tuple[float, list[Node]]:
    """A constant as the product of a number and what is none, so that one kernel's exponentials
    are the same text wherever they come from, and are computed once."""
    if isinstance(node, Number):
        return node.value, []
    if not isinstance(node, Operation):
        return 1.0, [node]
    if node.operator == "neg":
        number, parts = _parts(node.operands[0])
        return -number, parts
    if node.operator in "*/":
        (number, parts), (other, more) = (_parts(operand) for operand in node.operands)
        if node.operator == "*":
            return number * other, parts + more
        return _over(number, parts, other, more)
    if node.operator == "reciprocal":
        return _over(1.0, [], *_parts(node.operands[0]))
    return 1.0, [node]


def _over(number: float, parts: list, other: float, more: list) -> tuple[float, list[Node]]:
    inverse = [Operation("reciprocal", (part,)) for part in more]
    return (number / other if other else math.inf), parts + inverse


def is_curved(derivatives: Derivatives) -> bool:
    """Whether a sum that is NaN makes its derivative NaN too."""
    return derivatives.by_sum is not None and VALUE in names(derivatives.by_sum.tree())


def slopes(descriptor: Pairwise, derivatives: Derivatives, root: bool) -> str:
    """The struct. ``root``: whether the outer exponent is the reciprocal of the inner one."""
    expressions = [
        each for each in (derivatives.by_sum, *derivatives.others) if isinstance(each, Derivative)
    ]
    parameters = sorted({name for each in expressions for name in each.parameters})
    if any(isinstance(each, str) for each in derivatives.others):
        parameters = sorted({*parameters, "bandwidth"})
    pairs = [(ONE, ONE) if derivatives.by_sum is None else separated(derivatives.by_sum.tree())]
    pairs += [separated(x.tree()) for x in derivatives.others if isinstance(x, Derivative)]
    source = SlopeSource((_Tree(ONE, tuple(parameters)), *map(_Tree, sum(pairs, ()))), "0")
    texts = iter(zip(source.steps[1::2], source.steps[2::2], strict=True))
    scale, by_sum = next(texts)
    adds, factors = [], []
    for index, each in enumerate(derivatives.others):
        if isinstance(each, Derivative):
            constant, text = next(texts)
            adds.append(f"totals[{index}] = multiply_add(w, {text}, totals[{index}]);")
            factors.append(f"{constant} * total")
        else:  # the sums of infinite distances, whose slopes are 0, are finite
            term = f"multiply_add(x, fminf(s, {LARGEST}), totals[{index}])"
            adds.append(f"totals[{index}] = {term};")
            constant = f"-({each}) * reciprocal(parameter_bandwidth)"
            factors.append(f"{source._member(constant)} * (constant * total)")
    members = [
        (name, _place(descriptor, expressions, name[len("parameter_") :], root))
        if index < len(parameters)
        else (name, text)
        for index, (name, text) in enumerate(source.members)
    ]
    outer = expressions[0].outer if expressions else "Identity"
    value = "AccT v = fast_sqrt(s);" if outer == "Sqrt" else "AccT v = s;"
    text = function_struct(
        "Slopes",
        [("AccT", *member) for member in (*members, ("constant", scale))],
        "AccT s",
        [value, f"v = {by_sum};"],
        _others(value, adds, factors),
    )
    return f"namespace approximate {{\n{text}}}\nusing approximate::Slopes;\n"


def _others(value: str, adds: list[str], factors: list[str]) -> str:
    """Text of what adds a pair's derivatives by hyperparameters to totals, and of what totals are
    multiplied by."""
    body = "".join(f"        {line}\n" for line in adds)
    value = f"        {value}\n" if adds else ""
    cases = "".join(
        f"        if (index == {index}) return {text};\n" for index, text in enumerate(factors)
    )
    inline = "    __device__ __forceinline__"
    return f"""{inline} void add(AccT* totals, AccT s, AccT w, AccT x) const {{
{value}{body}    }}
{inline} AccT whole(int index, AccT total) const {{
{cases}        return total;
    }}
"""


def _place(descriptor: Pairwise, expressions: list[Derivative], name: str, root: bool) -> str:
    """Text that reads a parameter of the derivatives."""
    if name in descriptor.parameters:
        return f"read({len(COMMON_SCALARS) + descriptor.parameters.index(name)})"
    if any(each.exponent == name for each in expressions):
        return _ROOT if root else f"read({COMMON_SCALARS.index('outer_p')})"
    return f"read({COMMON_SCALARS.index('epsilon')})"
