"""CUDA text of epilogues: a struct that reads the parameters once and maps one value."""

from __future__ import annotations

from kernlib.descriptors.epilogues import Epilogue
from kernlib.descriptors.expression import VALUE, Node, Number, Operation, names

_FUNCTIONS = {
    "abs": "absolute",
    "max": "maximum",
    "min": "minimum",
    "pow": "power",
}
_UNROLLED_DEGREE = 16  # largest integer exponent written out as multiplications


class EpilogueSource:
    """Text of a chain of epilogues over parameters read by ``read(first + i)``.

    What depends on parameters alone becomes a member, computed once a thread: a division by a
    bandwidth is a multiplication by its reciprocal.
    """

    def __init__(self, epilogues: tuple[Epilogue, ...], first: str):
        self.members: list[tuple[str, str]] = []
        parameters = [name for epilogue in epilogues for name in epilogue.parameters]
        for index, name in enumerate(parameters):
            self.members.append((f"parameter_{name}", f"read({first} + {index})"))
        self.steps = [self._render(epilogue.tree()) for epilogue in epilogues]

    def _member(self, text: str) -> str:
        for name, value in self.members:
            if value == text:
                return name
        name = f"constant_{len(self.members)}"
        self.members.append((name, text))
        return name

    def _render(self, node: Node) -> str:
        """Text of a tree, with its parts that need no ``v`` moved to members."""
        if isinstance(node, Operation) and VALUE not in names(node):
            text = self._operation(node)
            return self._member(text) if names(node) else text
        if isinstance(node, Operation):
            return self._operation(node)
        if isinstance(node, Number):
            return _literal(node.value)
        return node.name if node.name == VALUE else f"parameter_{node.name}"

    def _operation(self, node: Operation) -> str:
        if node.operator == "/" and VALUE not in names(node.operands[1]):
            reciprocal = Operation("reciprocal", (node.operands[1],))
            return self._operation(Operation("*", (node.operands[0], reciprocal)))
        if node.operator == "reciprocal":
            return f"reciprocal({self._render(node.operands[0])})"
        if node.operator == "**":
            return self._power(*node.operands)
        parts = [self._render(operand) for operand in node.operands]
        if node.operator == "neg":
            return f"(-{parts[0]})"
        if node.operator in "+-*/":
            return f"({parts[0]} {node.operator} {parts[1]})"
        return f"{_FUNCTIONS.get(node.operator, node.operator)}({', '.join(parts)})"

    def _power(self, base: Node, exponent: Node) -> str:
        text = self._render(base)
        if isinstance(exponent, Number) and exponent.value.is_integer():
            degree = int(exponent.value)
            if 1 <= degree <= _UNROLLED_DEGREE:
                return f"integer_power<{degree}>({text})"
        return f"power({text}, {self._render(exponent)})"


def _literal(value: float) -> str:
    return f"AccT({value!r})"
