"""A formula of pairs: the text of its score, and the tensors that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from kernlib.descriptors.axes import Axes, as_axes
from kernlib.descriptors.base import Descriptor, explained, render, require, shown
from kernlib.descriptors.expression import Node, Operation, names
from kernlib.descriptors.score.grammar import SCORE_CONSTANTS
from kernlib.descriptors.score.kinds import ANY
from kernlib.families.pairwise.combined import Combined
from kernlib.families.pairwise.formula import grammar
from kernlib.families.pairwise.formula.spec import AXES, COL, FEATURE, ROW

Bounds = tuple[int, int] | None
Read = tuple[str, tuple[str, ...], Bounds]
Group = tuple[tuple[str, ...], Bounds]

# Arguments of calls, beside which the tensors of a formula are passed by their names.
ARGUMENTS = (
    "v", "out", "accumulate", "debug", "descriptor", "k", "largest", "row_offset", "col_offset",
    "feature_map", "lengthscale", "epsilon", "regularization", "row_potential", "col_potential",
    "weights", "row_splits", "col_splits", "radius", "axes",
)  # fmt: skip
_WORDS = (*grammar.WORDS, *SCORE_CONSTANTS, *grammar.POSITIONS)
RESERVED = dict.fromkeys(ARGUMENTS, "an argument of calls")
RESERVED |= dict.fromkeys(_WORDS, "a word of the language")
_EXAMPLE = {"x": ("row", "feature"), "y": ("col", "feature"), "s": "row", "bandwidth": ()}


@explained
@dataclass(frozen=True, slots=True, repr=False)
class Formula(Combined, Descriptor):
    """A number of each pair of a row and a column: ``out[m,n] = expression`` of tensors at m, n.

    ``expression`` is text: numbers, names of tensors, ``row`` and ``col`` (the places of the pair),
    ``+ - * / // % **``, comparisons, ``and``, ``or``, ``not``, the functions of scores
    (docs/concepts/scores.md), and ``sum(term)``, which adds a term up over features, or ``sum(term,
    0, 8)`` over some. There may be several sums, over tensors of different numbers of features.

    ``axes`` says of each tensor which axes it has, in its order: of ``"row"``, ``"col"`` and
    ``"feature"``; ``()`` is a number, or a tensor of shape (). A tensor that has features is read
    in sums only. A tensor of ``("row", "col")`` has a value for each pair.

    ``kernlib.run_kernel(formula, out=None, **tensors)`` is the matrix (M, N); ``kernel_matmul``,
    ``kernel_sum``, ``kernel_logsumexp``, ``kernel_min``, ``kernel_topk`` and their like reduce its
    rows without storing it. Tensors are float32, float64, float16 or bfloat16, whole numbers int32
    or int64, conditions bool; each may have one more dimension in front, a batch of one size or 1.
    All is computed in float64 where a tensor has it, else in float32; the result has the widest
    dtype of the tensors that have axes. Gradients of every order go to all tensors of numbers.

    Raises TypeError for what is no text or no axes; ValueError for what the language does not have,
    for reserved names, for tensors that are not read and for a formula without rows or columns.
    After the formulas of the KeOps project.

    Example:
        >>> formula = kl.Formula(
        ...     "exp(-sum((x - y) ** 2) / (s * t)) * w",
        ...     {"x": ("row", "feature"), "y": ("col", "feature"), "s": "row", "t": "col",
        ...      "w": "col"},
        ... )
        >>> x, y, one = torch.zeros(1, 2), torch.eye(2), torch.ones(2)
        >>> kl.run_kernel(formula, x=x, y=y, s=one[:1], t=one, w=2 * one)
        tensor([[0.7358, 0.7358]])
        >>> formula.names, formula.reads[0]
        (('x', 'y', 's', 't', 'w'), ('x', ('row', 'feature'), None))
        >>> formula.parameters
        ('x', 'y', 's', 't', 'w')
    """

    family: ClassVar[str] = "pairwise"
    package: ClassVar[str] = "formula"

    expression: str
    axes: Axes = ()
    # What kernels read: each tensor, and of one that has features each part that a sum adds up.
    reads: tuple[Read, ...] = field(init=False, repr=False, compare=False)
    # The tensors of each sum that have features, and their first feature and end.
    groups: tuple[Group, ...] = field(init=False, repr=False, compare=False)
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        if not isinstance(self.expression, str):
            raise TypeError(f"expression must be a string, got {shown(self.expression)}")
        axes = as_axes(self.axes, AXES, RESERVED, _EXAMPLE)
        object.__setattr__(self, "axes", axes)
        for name, of in axes:
            require(
                len(of) < len(AXES),
                f"axes of {name} are {of}: a tensor of rows and columns has no features; add them "
                "up before",
            )
        tree = self.tree(tuple((name, ANY) for name in self.names))
        unread = [name for name in self.names if name not in names(tree)]
        require(
            not unread,
            f"expression {shown(self.expression)} does not read {unread}: leave them out of axes",
        )
        for axis in (ROW, COL):
            require(
                any(axis in axes for _, axes in self.axes),
                f"no tensor of expression {shown(self.expression)} has the axis {axis!r}: each "
                "pair has a row and a column, whose tensors say how many there are",
            )
        groups = tuple(self._group(part) for part in grammar.sums(tree))
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "reads", tuple(self._reads(groups)))
        object.__setattr__(self, "text", render(self))

    def __hash__(self) -> int:
        return hash(self.text)

    def _group(self, part: Operation) -> Group:
        read = names(part)
        wide = [name for name, axes in self.axes if FEATURE in axes and name in read]
        return tuple(wide), grammar.bounds_of(part)

    def _reads(self, groups: tuple[Group, ...]) -> Iterator[Read]:
        for name, axes in self.axes:
            parts = [bounds for wide, bounds in groups if name in wide]
            yield from ((name, axes, bounds) for bounds in dict.fromkeys(parts or [None]))

    @property
    def operands(self) -> tuple[str, ...]:
        """``a`` and ``b``, where its tensors have these names: they may be passed by place."""
        return ("a", "b") if {"a", "b"} <= set(self.names) else ()

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.operands)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in order."""
        return tuple(name for name, _ in self.axes)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The tensors that are passed by name alone, in order."""
        return self.required

    def tree(self, kinds: tuple[tuple[str, str], ...]) -> Node:
        """The parsed expression, where the tensors have these ``kinds``, by their names. Raises
        ValueError for an expression that makes no number of them.

        Example:
            >>> kl.Formula("s * t", {"s": "row", "t": "col"}).tree((("s", "float"), ("t", "float")))
            Operation(operator='*', operands=(Name(name='s'), Name(name='t')))
        """
        features = frozenset(name for name, axes in self.axes if FEATURE in axes)
        return grammar.parse(self.expression, kinds, features)

    def describe(self) -> str:
        return f"Formula({self.expression})"
