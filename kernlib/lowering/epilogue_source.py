"""CUDA text of expressions, and of epilogues: a struct that reads the parameters once and then maps
one value at a time."""

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


class ExpressionSource:
    """CUDA text of trees. Parts that are the same for all elements of a thread become ``members``:
    (name, text) of a value that is computed once a thread. So a division by a bandwidth becomes a
    multiplication by its reciprocal."""

    arithmetic = "AccT"  # the CUDA type of numbers

    def __init__(self) -> None:
        self.members: list[tuple[str, str]] = []

    def _name(self, name: str) -> str:
        """The text for a name of the tree."""
        raise NotImplementedError

    def _is_constant(self, node: Node) -> bool:
        """Whether a tree is the same for all elements of a thread."""
        raise NotImplementedError

    def _member(self, text: str) -> str:
        """The name of the member that has this text, made if need be."""
        for name, value in self.members:
            if value == text:
                return name
        name = f"constant_{len(self.members)}"
        self.members.append((name, text))
        return name

    def _render(self, node: Node) -> str:
        """Text of a tree, with its parts that are the same for all elements moved to members."""
        if isinstance(node, Operation) and self._is_constant(node):
            text = self._operation(node)
            return self._member(text) if names(node) else text
        if isinstance(node, Operation):
            return self._operation(node)
        if isinstance(node, Number):
            return self._literal(node.value)
        return self._name(node.name)

    def _literal(self, value: float) -> str:
        return f"{self.arithmetic}({value!r})"

    def _operation(self, node: Operation) -> str:
        if node.operator == "/" and self._is_constant(node.operands[1]):
            return self._operation(self._quotient(*node.operands))
        if node.operator == "reciprocal":
            return self._reciprocal(node.operands[0])
        if node.operator == "**":
            return self._power(*node.operands)
        parts = [self._render(operand) for operand in node.operands]
        if node.operator == "neg":
            return f"(-{parts[0]})"
        if node.operator in "+-*/":
            return f"({parts[0]} {node.operator} {parts[1]})"
        return f"{_FUNCTIONS.get(node.operator, node.operator)}({', '.join(parts)})"

    def _quotient(self, left: Node, right: Node) -> Operation:
        """A division by a constant, as a multiplication by its reciprocal. Where the constant is a
        product it is two multiplications, since the square of a bandwidth of 1e-20 has no
        reciprocal in float."""
        parts = right.operands if _is_product(right) else (right,)
        for part in parts:
            left = Operation("*", (left, Operation("reciprocal", (part,))))
        return left

    def _reciprocal(self, node: Node) -> str:
        """The text of a reciprocal. For a product it is the product of the reciprocals, since the
        square of a bandwidth of 1e20 is infinite in float."""
        if _is_product(node):
            parts = [self._render(Operation("reciprocal", (each,))) for each in node.operands]
            return f"bounded({', '.join(parts)})"
        return f"reciprocal({self._render(node)})"

    def _power(self, base: Node, exponent: Node) -> str:
        text = self._render(base)
        if isinstance(exponent, Number) and exponent.value.is_integer():
            degree = int(exponent.value)
            if 1 <= degree <= _UNROLLED_DEGREE:
                return f"integer_power<{degree}>({text})"
        return f"power({text}, {self._render(exponent)})"


class EpilogueSource(ExpressionSource):
    """Text of a chain of epilogues. ``read(first + i)`` reads the i-th scalar parameter.
    ``read.vector(k)`` is the address of the k-th vector, whose element ``feature`` belongs to
    ``v``.

    ``steps`` has the expression of each epilogue, over the result ``v`` of the one before. What
    depends on scalars alone becomes one of ``members``. ``vectors`` are members of type ``const
    InputT*``. Their names do not depend on those of the parameters, so that the factors of a chain,
    which must name their biases differently, share their kernels. Of a summand, ``given[k]`` is the
    element that belongs to ``v``, and ``counts`` has the condition under which it is read.
    """

    def __init__(self, epilogues: tuple[Epilogue, ...], first: str):
        vectors = [name for epilogue in epilogues for name in epilogue.vectors]
        parameters = [name for epilogue in epilogues for name in epilogue.parameters]
        summands = dict(pair for epilogue in epilogues for pair in epilogue.summands)
        scalars = [name for name in parameters if name not in (*vectors, *summands)]
        super().__init__()
        self.members += [
            (f"parameter_{name}", f"read({first} + {index})") for index, name in enumerate(scalars)
        ]
        self.vectors: list[tuple[str, str]] = [
            (f"vector_{index}", f"read.vector({index})") for index in range(len(vectors))
        ]
        self.counts = [
            "true" if scale is None else f"parameter_{scale} != AccT(0)"
            for scale in summands.values()
        ]
        self._elements = {
            name: f"convert<AccT>(vector_{index}[feature])" for index, name in enumerate(vectors)
        }
        self._elements |= {name: f"given[{index}]" for index, name in enumerate(summands)}
        self.steps = [self._render(epilogue.tree()) for epilogue in epilogues]

    def _is_constant(self, node: Node) -> bool:
        return names(node).isdisjoint((VALUE, *self._elements))

    def _name(self, name: str) -> str:
        if name == VALUE:
            return name
        return self._elements.get(name, f"parameter_{name}")


def function_struct(
    name: str,
    members: list[tuple[str, str, str]],
    arguments: str,
    steps: list[str],
    others: str = "",
) -> str:
    """Text of a struct. Its constructor takes ``read``, a function that reads parameters, and sets
    the ``members``: (type, name, value). Its call operator takes ``arguments`` and returns the
    value ``v`` that ``steps`` compute. ``others`` is the text of further functions."""
    fields = "".join(f"    {kind} {member};\n" for kind, member, _ in members)
    reads = "".join(f"        {member} = {value};\n" for _, member, value in members)
    body = "".join(f"        {step}\n" for step in steps)
    return f"""struct {name} {{
{fields}    template <class Read>
    __device__ __forceinline__ explicit {name}(Read read) {{
{reads}    }}
    __device__ __forceinline__ AccT operator()({arguments}) const {{
{body}        return v;
    }}
{others}}};
"""


def _is_product(node: Node) -> bool:
    return isinstance(node, Operation) and node.operator == "*"
