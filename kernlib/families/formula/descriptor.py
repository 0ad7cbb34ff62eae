"""A formula of pairs: the text of its score, and the tensors that it reads."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

from kernlib.descriptors.base import Descriptor, explained, render, require, shown
from kernlib.descriptors.expression import Node, names
from kernlib.descriptors.score.grammar import SCORE_CONSTANTS
from kernlib.descriptors.score.kinds import ANY
from kernlib.families.formula import grammar
from kernlib.families.formula.spec import AXES, COL, FEATURE, ROW

Axes = tuple[tuple[str, tuple[str, ...]], ...]

# Arguments of calls, beside which the tensors of a formula are passed by their names.
ARGUMENTS = (
    "v", "out", "accumulate", "debug", "descriptor", "k", "largest", "row_offset", "col_offset",
    "feature_map", "lengthscale", "epsilon", "regularization", "row_potential", "col_potential",
    "weights", "row_splits", "col_splits", "radius", "axes",
)  # fmt: skip
RESERVED = {*grammar.WORDS, *SCORE_CONSTANTS, *grammar.POSITIONS, *ARGUMENTS}
_EXAMPLE = {"x": ("row", "feature"), "y": ("col", "feature"), "s": "row", "bandwidth": ()}


@explained
@dataclass(frozen=True, slots=True, repr=False)
class Formula(Descriptor):
    """A number of each pair of a row and a column: ``out[m,n] = expression`` of tensors at m, n.

    ``expression`` is text: numbers, names of tensors, ``row`` and ``col`` (the places of the pair),
    ``+ - * / // % **``, comparisons, ``and``, ``or``, ``not``, the functions of scores
    (docs/concepts/scores.md), and ``sum(term)``, which adds a term up over features. There may be
    several sums, over tensors of different numbers of features.

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
    """

    family: ClassVar[str] = "formula"

    expression: str
    axes: Axes = ()
    # The names of the tensors of each sum that have features.
    groups: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        if not isinstance(self.expression, str):
            raise TypeError(f"expression must be a string, got {shown(self.expression)}")
        object.__setattr__(self, "axes", as_axes(self.axes))
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
        wide = [name for name, axes in self.axes if FEATURE in axes]
        groups = (tuple(x for x in wide if x in names(part)) for part in grammar.sums(tree))
        object.__setattr__(self, "groups", tuple(groups))
        object.__setattr__(self, "text", render(self))

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in order."""
        return tuple(name for name, _ in self.axes)

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.names

    def tree(self, kinds: tuple[tuple[str, str], ...]) -> Node:
        """The parsed expression, where the tensors have these kinds."""
        features = frozenset(name for name, axes in self.axes if FEATURE in axes)
        return grammar.parse(self.expression, kinds, features)

    def describe(self) -> str:
        return f"Formula({self.expression})"


@lru_cache(maxsize=256)
def _checked(axes: Axes) -> Axes:
    repeated = [name for i, (name, _) in enumerate(axes) if name in dict(axes[:i])]
    require(not repeated, f"axes repeat the name(s) {repeated}")
    for name, of in axes:
        if not isinstance(name, str) or not name.isascii() or not name.isidentifier():
            raise ValueError(f"axes: {shown(name)} is not an ASCII identifier")
        if name in RESERVED or keyword.iskeyword(name):
            by = "an argument of calls" if name in ARGUMENTS else "a word of the language"
            raise ValueError(f"axes: the name {name!r} is {by}; choose another")
        for axis in of:
            if not isinstance(axis, str) or axis not in AXES:
                raise ValueError(f"axes of {name} must be of {AXES}, got {shown(axis)}")
        require(len(set(of)) == len(of), f"axes of {name} repeat one: {of}")
        if len(of) == len(AXES):
            raise ValueError(
                f"axes of {name} are {of}: a tensor of rows and columns has no features; add "
                "them up before"
            )
    return axes


def as_axes(value: object) -> Axes:
    """Pairs of names and axes. Raises TypeError and ValueError for anything else."""
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"axes must be a dict such as {_EXAMPLE}, got {shown(value)}")
    pairs = []
    for pair in value:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"axes must be a dict such as {_EXAMPLE}, got {shown(pair)} in it")
        name, of = pair
        of = (of,) if isinstance(of, str) else of
        if not isinstance(of, (tuple, list)):
            raise TypeError(f"axes of {shown(name)} must be a tuple of {AXES}, got {shown(of)}")
        pairs.append((name, tuple(of)))
    try:
        return _checked(tuple(pairs))
    except TypeError:  # what cannot be hashed is no name
        raise TypeError(f"axes must be a dict such as {_EXAMPLE}, got {shown(value)}") from None
