"""CUDA text of trees whose parts have kinds: numbers, whole numbers and conditions
(:mod:`kernlib.descriptors.score.kinds`)."""

from __future__ import annotations

from typing import ClassVar

from kernlib.descriptors.expression import Integer, Node, Operation
from kernlib.descriptors.score.kinds import BOOL, COMPARISONS, FLOAT, INT, LONG, kind_of
from kernlib.lowering.epilogue_source import ExpressionSource

# Operations that show the last bit of a quotient or a product: 41 * (1 / 41) is below 1.
_JUMPS = ("floor", "sign", *COMPARISONS)


class TypedSource(ExpressionSource):
    """Text of such trees, of names of these ``kinds``. ``functions`` are the device functions of
    operators, ``product`` one that rounds a product before something is added to it."""

    functions: ClassVar[dict[str, str]] = {
        "//": "floor_quotient",
        "%": "floor_rest",
        "sign": "sign_of",
    }
    infinity: ClassVar[str] = "infinity(AccT(0))"
    product: ClassVar[str] = "rounded_product"

    def __init__(self, kinds: dict[str, str]):
        super().__init__()
        self._kinds = kinds
        self._is_exact = False  # within one of _JUMPS

    def _type_of(self, kind: str) -> str:
        """The CUDA type of a kind."""
        return {FLOAT: self.arithmetic, INT: "int", LONG: "i64", BOOL: "bool"}[kind]

    def _render(self, node: Node) -> str:
        return _integer(node) if isinstance(node, Integer) else super()._render(node)

    def _literal(self, value: float) -> str:
        infinity = self.infinity
        odd = {"inf": infinity, "-inf": f"(-{infinity})", "nan": f"({infinity} - {infinity})"}
        return odd.get(repr(value)) or super()._literal(value)

    def _operation(self, node: Operation) -> str:
        operator = node.operator
        if operator in _JUMPS and not self._is_exact:
            self._is_exact = True
            text = self._operation(node)
            self._is_exact = False
            return text
        if self._is_exact and operator in ("*", "/") and kind_of(node, self._kinds) == FLOAT:
            return self._rounded(operator, *node.operands)
        if operator in self.functions:
            node = Operation(self.functions[operator], node.operands)
        if operator not in ("and", "or", "not", "where", *COMPARISONS, FLOAT, LONG):
            return super()._operation(node)
        parts = [self._render(operand) for operand in node.operands]
        if operator in (FLOAT, LONG):
            return f"{self._type_of(operator)}({parts[0]})"
        if operator == "not":
            return f"(!{parts[0]})"
        if operator == "where":
            return f"({parts[0]} ? {parts[1]} : {parts[2]})"
        # Not && and ||: what is cheap costs less than a branch, and all elements are read before.
        sign = {"and": "&", "or": "|"}.get(operator, operator)
        return f"({f' {sign} '.join(parts)})"

    def _rounded(self, operator: str, left: Node, right: Node) -> str:
        """A product or a quotient as the reference has it: rounded before what is added to it, and
        without a reciprocal."""
        if operator == "*":
            return f"{self.product}({self._render(left)}, {self._render(right)})"
        if isinstance(right, Operation) and right.operator == "*":
            first, second = right.operands
            return self._rounded("/", Operation("/", (left, first)), second)
        return f"({self._render(left)} / {self._render(right)})"


def _integer(node: Integer) -> str:
    if node.bits == 32:
        return f"int({node.value})"
    if node.value == -(2**63):  # whose magnitude no literal has
        return "(-9223372036854775807ll - 1)"
    return f"i64({node.value}ll)"
