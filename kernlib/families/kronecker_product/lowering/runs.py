"""A Kronecker product as runs of neighbouring factors: what each reads and writes."""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

from kernlib.families.kronecker_product.lowering import grouping
from kernlib.families.kronecker_product.lowering.grouping import Group, Mode, Size
from kernlib.families.kronecker_product.lowering.problem import Factor, Layout, Problem
from kernlib.lowering.dtypes import DTYPES


class Run(NamedTuple):
    """One run, of the factors from ``first`` on: columns of ``outer`` times ``inner`` indices, and
    which output feature each result is, as strides of outer index, inner one, column and own
    feature, of a column divided by ``divisor`` first. It reads x if it ``begins``, and writes the
    result if it ``ends``. ``summands`` are those of the last run, which alone has an epilogue, and
    ``back`` is where the gradient by x goes, if one is asked for."""

    batch: int
    outer: int
    inner: int
    columns: int
    inside: bool
    factors: tuple[Factor, ...]
    x: Layout
    out: Layout
    summands: tuple[Layout, ...]
    feature: tuple[int, int, int, int]
    divisor: int = 1
    back: Layout | None = None
    dtype: str = "float32"
    precision: str = "fp32"
    first: int = 0
    begins: bool = True
    ends: bool = True

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Rows and columns of its factors."""
        return tuple([(factor.rows, factor.columns) for factor in self.factors])

    @property
    def elements(self) -> int:
        """Of its result."""
        width = math.prod(factor.columns for factor in self.factors)
        return self.batch * self.outer * self.inner * self.columns * width

    @property
    def names(self) -> list[tuple[str, int]]:
        """The pointers of a Step to its factors."""
        return [(f"factor{self.first + index}", 0) for index in range(len(self.factors))]


def ends_of(run: Run | Group) -> tuple[str, str]:
    """Dtypes of what a run reads and writes: between two launches they are those of the sums."""
    between = DTYPES[run.dtype].accumulator
    return run.dtype if run.begins else between, run.dtype if run.ends else between


class _Part(NamedTuple):
    source: str
    target: str
    columns: int
    inside: bool
    sizes: tuple[Size, ...]


class Part(_Part):
    """One run as a kernel has it: dtypes of what it reads and writes, the tile's columns and
    whether they are its last dimension, and sizes of the factors."""

    @cached_property
    def modes(self) -> tuple[Mode, ...]:
        """The modes of its run, in the order in which they are applied."""
        return grouping.modes(self.sizes, self.columns, self.inside)

    @property
    def features(self) -> tuple[int, int]:
        """Of a column that is read, and that is written."""
        return tuple([math.prod(size[side] for size in self.sizes) for side in (0, 1)])

    @property
    def words(self) -> list[str]:
        """Words that tell it from other parts, for names and descriptions."""
        sizes = ["x".join(map(str, size)) for size in self.sizes]
        return [*sizes, f"{self.columns}c" + "i" * self.inside]


def split(
    problem: Problem,
    groups: tuple[tuple[int, int], ...],
    slab: int = 0,
    back: Layout | None = None,
) -> list[Run]:
    """The runs of a problem, whose results but the last lie in the workspace without gaps, in the
    order of x's dimensions. With a ``slab``, those of so many columns of the problem, which end
    where they end for any number. With ``back``, the layout of a gradient by x, each run knows that
    of the gradient by what it reads: in the workspace it takes the place of that."""
    columns = slab or problem.columns
    runs, x = [], problem.x
    for first, last in groups:
        before = math.prod(factor.rows for factor in problem.factors[:first])
        behind = math.prod(factor.columns for factor in problem.factors[last:])
        factors = problem.factors[first:last]
        sizes = [math.prod(getattr(f, name) for f in factors) for name in ("rows", "columns")]
        out = problem.out
        if first:  # into the workspace: (batch, columns, before, width, behind), or columns last
            features = before * sizes[1] * behind
            strides = (1, columns) if problem.inside else (features, 1)
            out = Layout(features * columns, 0, *strides)
        beside = () if first else problem.summands
        part = problem._replace(columns=columns, x=x, out=out, summands=beside)
        run = _run(part, back, before, sizes, behind, factors, slab)
        ends = {"first": first, "begins": not runs, "ends": first == 0}
        runs.append(run._replace(dtype=problem.dtype, precision=problem.precision, **ends))
        x, back = out, back and out
    return runs


def _run(
    problem: Problem, back: Layout | None, before: int, sizes: list, behind: int, factors, slab: int
) -> Run:
    """One run over features (before, width, behind), of which ``before`` or ``behind`` go to the
    tile's columns and the rest to outer and inner indices. Output features are those of the last
    run, which alone has an epilogue: nothing is before it. ``back`` is the layout of a gradient by
    x, if there is one."""
    sides = [(problem.x, sizes[0]), *((s, sizes[1]) for s in (problem.out, *problem.summands))]
    sides += [(back, sizes[0])] if back else []
    outer = [s.feature * size * behind for s, size in sides]  # from one before to the next
    within = [s.feature * behind for s, _ in sides]
    rows, features = [s.column for s, _ in sides], [s.feature for s, _ in sides]
    columns, none = problem.columns, [0] * len(sides)

    def run(outers, inners, count, inside: bool, strides: tuple, feature, divisor: int = 1) -> Run:
        x, out, *rest = _layouts(sides, *strides, within)
        gradient = rest.pop() if back else None
        begin = problem.batch, outers, inners, count, inside, factors, x, out
        return Run(*begin, tuple(rest), feature, divisor, gradient)

    if problem.inside:  # (before, width, behind, columns)
        apart = slab or any(s.feature != columns * s.column for s, _ in sides)
        if behind > 1 and apart:
            strides = outer, features, rows
            return run(before, behind, columns, True, strides, (0, 1, 0, behind))
        strides = outer, none, rows
        return run(before, 1, behind * columns, True, strides, (0, 0, 1, behind), columns)
    if behind > 1:  # (columns, before, width, behind)
        return run(columns, before, behind, True, (rows, outer, features), (0, 0, 1, behind))
    if before > 1 and any(row != step * before for row, step in zip(rows, outer, strict=True)):
        return run(columns, 1, before, False, (rows, none, outer), (0, 0, 0, 1))
    strides = none, none, outer if before > 1 else rows
    return run(1, 1, columns * before, False, strides, (0, 0, 0, 1))


def _layouts(sides: list, *strides: list[int]) -> list[Layout]:
    """Those of x, of the result, of summands and of the gradient: outer index, inner one, column,
    feature."""
    return [
        Layout(side.batch, outer, column, feature, side.alignment, inner)
        for (side, _), outer, inner, column, feature in zip(sides, *strides, strict=True)
    ]
