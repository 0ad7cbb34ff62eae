"""CUDA text of a pairwise reduction's kernel: ``Finish`` in the arithmetic of values that are
summed as soon as they are there (``kernel_sources/pairwise/reduce/math.cuh``)."""

from __future__ import annotations

from kernlib.descriptors.expression import Node, Number, Operation
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import finish as outer
from kernlib.lowering.epilogue_source import EpilogueSource


class ReductionSource(EpilogueSource):
    """:class:`EpilogueSource` with ``exp(v * constant)`` as ``2^(v * constant')``, in one
    multiplication and one special-function instruction, and every division by a constant as one
    multiplication."""

    def _quotient(self, left: Node, right: Node) -> Operation:
        return Operation("*", (left, Operation("reciprocal", (right,))))

    def _operation(self, node: Operation) -> str:
        if node.operator != "exp":
            return super()._operation(node)
        rest, factors, negative = factors_of(node.operands[0], self._is_constant)
        product = Number(-1.0 if negative else 1.0)
        for factor in factors:
            product = Operation("*", (product, factor)) if product != Number(1.0) else factor
        text = self._render(rest)
        return f"exp2_approximate({text} * {self._member(f'for_exp2({self._render(product)})')})"


def lists(kept: int, waiting: int, count: int, largest: bool) -> str:
    """What the kernels that keep lists define (``kernel_sources/pairwise/topk/topk.cuh``): entries
    in order and those that wait, of ``count`` lists of a block."""
    return f"""#define KEPT {kept}
constexpr int WAITING = {waiting};
constexpr int LISTS = {count};
{order(largest)}"""


def order(largest: bool) -> str:
    """What ``kernel_sources/pairwise/topk/keys.cuh`` needs."""
    return f"constexpr bool LARGEST = {str(largest).lower()};\n"


def factors_of(node: Node, is_constant) -> tuple[Node, list[Node], bool]:
    """A tree as ``rest * factors``, the factors constant, and whether it is negated."""
    factors: list[Node] = []
    negative = False
    while isinstance(node, Operation) and node.operator in ("neg", "*", "/"):
        if node.operator == "neg":
            negative, node = not negative, node.operands[0]
            continue
        left, right = node.operands
        if is_constant(right):
            divides = node.operator == "/"
            factors.append(Operation("reciprocal", (right,)) if divides else right)
            node = left
        elif node.operator == "*" and is_constant(left):
            factors.append(left)
            node = right
        else:
            break
    return node, factors, negative


def finish(descriptor: Pairwise, variant, source: type[ReductionSource] = ReductionSource) -> str:
    """The struct ``Finish``: outer stage and epilogue of one sum. ``variant`` has ``inner``,
    ``outer``, ``root`` and ``epsilon``: whether values below an epsilon count as 0."""
    text = outer.finish(descriptor, variant, source=source, epsilon=variant.epsilon)
    return f"namespace approximate {{\n{text}}}\nusing approximate::Finish;\n"
