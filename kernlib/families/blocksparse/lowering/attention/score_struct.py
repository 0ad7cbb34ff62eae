"""CUDA text of ``struct Score``, as score.cuh of kernel_sources/blocksparse/attention describes it,
from the expressions of a score and a mask.

Tensors are called by their places, so that kernels are the same whatever names a caller has. What
depends on batch and head alone is computed in the constructor; each element of a captured tensor is
read once a function, at its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kernlib.descriptors.derivative import derivative
from kernlib.descriptors.expression import VALUE, Integer, Name, Node, Operation, names
from kernlib.descriptors.score.expression import ScoreExpression, Trees
from kernlib.descriptors.score.kinds import kind_of
from kernlib.families.blocksparse.lowering.attention.problem import Score
from kernlib.families.blocksparse.lowering.attention.score_source import CAPTURED
from kernlib.lowering.typed_source import TypedSource

SMALLEST = 1e-38  # near the least float that is normal
_OF_MATRIX = ("batch", "head")  # what is the same for a whole matrix
_INLINE = "__device__ __forceinline__"
_ALWAYS = Operation("==", (Integer(0, 32), Integer(0, 32)))


def score_of(
    expression: ScoreExpression,
    dtypes: tuple[str, ...],
    by: Iterable[str] = (),
    packed: Iterable[str] = (),
    trees: Trees | None = None,
) -> Score:
    """What becomes of logits, of captured tensors of these dtypes. Kernels of gradients are given
    derivatives by what is in ``by``: ``"v"``, and names of captured tensors that
    ``expression.differentiable`` has. Of those in ``packed`` the columns lie side by side, which
    saves a multiplication of 64 bits an element. ``trees`` take the place of the expression's own,
    as where a part of the mask is a window.

    Raises TypeError and ValueError as ``expression.trees`` does, KeyError for float64, which no
    kernel reads.
    """
    trees = expression.trees(dtypes) if trees is None else trees
    score, mask = trees
    if score is None and mask is None:
        return Score()
    source = _Source(expression, dtypes, frozenset(packed))
    text = _struct(source, expression, trees, frozenset(by))
    return Score(text, dtypes, has_score=score is not None, has_mask=mask is not None)


class _Source(TypedSource):
    """Text of the trees of one expression; ``types`` are those of the members."""

    arithmetic = "float"
    functions: ClassVar = {**TypedSource.functions, "tanh": "fast_tanh"}
    infinity = "infinity(0.0f)"
    product = "__fmul_rn"

    def __init__(self, expression: ScoreExpression, dtypes: tuple[str, ...], packed: frozenset):
        super().__init__(expression.kinds(dtypes))
        self._elements: dict[str, str] = {}  # names of values of a row and column, and their text
        self._constants: dict[str, str] = {}
        self.types: dict[str, str] = {}
        for index, (name, axes) in enumerate(expression.captured):
            cuda = CAPTURED[dtypes[index]]
            at = f"captured[{index}].from<{cuda}>(batch, head)"
            if {"row", "col"}.isdisjoint(axes):
                value = f"captured_value({at})"
                kind = self._type_of(self._kinds[name])
                self._constants[name] = self._add_member(f"captured_{index}", kind, value)
            else:
                place = [self._add_member(f"at_{index}", f"const {cuda}*", at)]
                place += [self._step(index, axis, name in packed) for axis in axes]
                self._elements[name] = f"captured_value({' + '.join(filter(None, place))})"

    def _step(self, index: int, axis: str, is_packed: bool) -> str:
        """Text of what an axis adds to an address, "" for one that the constructor has added."""
        if axis not in ("row", "col"):
            return ""
        if axis == "col" and is_packed:
            return "col"
        return f"{axis} * {self._add_member(f'{axis}_{index}', 'i64', f'captured[{index}].{axis}')}"

    def _add_member(self, name: str, cuda: str, text: str) -> str:
        self.types[name] = cuda
        self.members.append((name, text))
        return name

    def function(self, head: str, tree: Node) -> str:
        """A function of an element, whose name and arguments are its head."""
        result = self._render(tree)
        used = [name for name in self._elements if name in names(tree)]
        values = "".join(
            f"        const {self._type_of(self._kinds[name])} {self._name(name)} = "
            f"{self._elements[name]};\n"
            for name in used
        )
        return f"    {_INLINE} {head} const {{\n{values}        return {result};\n    }}\n"

    def _is_constant(self, node: Node) -> bool:
        return names(node).isdisjoint((VALUE, "row", "col", *self._elements))

    def _name(self, name: str) -> str:
        if name in _OF_MATRIX:
            return self._member_of(name, "int")
        if name in self._elements:
            return f"value_{list(self._elements).index(name)}"
        return self._constants.get(name, name)

    def _member_of(self, text: str, cuda: str) -> str:
        """The member with this text, which is added if there is none."""
        names = [name for name, value in self.members if value == text]
        return names[0] if names else self._add_member(f"constant_{len(self.members)}", cuda, text)

    def _render(self, node: Node) -> str:
        if isinstance(node, Operation) and names(node) and self._is_constant(node):
            kind = kind_of(node, self._kinds)
            return self._member_of(self._operation(node), self._type_of(kind))
        return super()._render(node)


def _struct(source: _Source, expression: ScoreExpression, trees: Trees, by: frozenset[str]) -> str:
    """The whole text: functions first, which add members."""
    element, score = "(float v, int row, int col)", trees.score
    value = Name(VALUE) if score is None else score
    functions = [source.function(f"float operator(){element}", value)]
    if score is None or VALUE in by:
        functions.append(
            source.function(f"float slope{element}", derivative(value, VALUE, SMALLEST))
        )
    mask = _ALWAYS if trees.mask is None else trees.mask
    functions.append(source.function("bool keeps(int row, int col)", mask))
    indices = [index for index, name in enumerate(expression.names) if name in by]
    for index in indices:
        slope = derivative(value, expression.names[index], SMALLEST)
        functions.append(source.function(f"float slope_of_{index}{element}", slope))
    functions.append(_dispatch(indices))
    fields = "".join(f"    {source.types[name]} {name};\n" for name, _ in source.members)
    reads = "".join(f"        {name} = {text};\n" for name, text in source.members)
    return f"""#include "blocksparse/attention/elements.cuh"

struct Score {{
{fields}    {_INLINE} Score(const Captured* captured, int batch, int head) {{
{reads}    }}
{"".join(functions)}}};
"""


def _dispatch(indices: list[int]) -> str:
    """The function template that a kernel calls."""
    cases = "".join(
        f"        if constexpr (K == {index}) return slope_of_{index}(v, row, col);\n"
        for index in indices
    )
    return f"""    template <int K>
    {_INLINE} float slope_of(float v, int row, int col) const {{
{cases}        return 0.0f;
    }}
"""
