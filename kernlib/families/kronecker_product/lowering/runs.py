"""A Kronecker product as runs of neighbouring factors: what each reads and writes."""

from __future__ import annotations

import math

from kernlib.families.kronecker_product.lowering.grouping import Size
from kernlib.families.kronecker_product.lowering.problem import Factor, Layout, Problem
from kernlib.records import NamedTuple


class Run(NamedTuple):
    """One run: columns of ``outer`` times ``inner`` indices, and which output feature each result
    is, as strides of outer index, inner one, column and own feature, of a column divided by
    ``divisor`` first. ``summands`` are those of the last run, which alone has an epilogue, and
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

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Rows and columns of its factors."""
        return tuple([(factor.rows, factor.columns) for factor in self.factors])

    @property
    def elements(self) -> int:
        """Of its result."""
        width = math.prod(factor.columns for factor in self.factors)
        return self.batch * self.outer * self.inner * self.columns * width


def split(
    problem: Problem,
    found: tuple[tuple[int, int], ...],
    slab: int = 0,
    back: Layout | None = None,
) -> list[Run]:
    """The runs of a problem, whose results but the last lie in the workspace without gaps, in the
    order of x's dimensions. With a ``slab``, those of so many columns of the problem, which end
    where they end for any number. With ``back``, the layout of a gradient by x, each run knows that
    of the gradient by what it reads: in the workspace it takes the place of that."""
    columns = slab or problem.columns
    made, x = [], problem.x
    for first, last in found:
        before = math.prod(factor.rows for factor in problem.factors[:first])
        behind = math.prod(factor.columns for factor in problem.factors[last:])
        own = problem.factors[first:last]
        sizes = [math.prod(getattr(f, name) for f in own) for name in ("rows", "columns")]
        out = problem.out
        if first:  # into the workspace: (batch, columns, before, own, behind), or columns last
            features = before * sizes[1] * behind
            strides = (1, columns) if problem.inside else (features, 1)
            out = Layout(features * columns, 0, *strides)
        beside = () if first else problem.summands
        part = problem._replace(columns=columns, x=x, out=out, summands=beside)
        made.append(_run(part, back, before, sizes, behind, own, slab))
        x, back = out, back and out
    return made


def _run(
    problem: Problem, back: Layout | None, before: int, sizes: list, behind: int, own, slab: int
) -> Run:
    """One run over features (before, own, behind), of which ``before`` or ``behind`` go to the
    tile's columns and the rest to outer and inner indices. Output features are those of the last
    run, which alone has an epilogue: nothing is before it. ``back`` is the layout of a gradient by
    x, if there is one."""
    sides = [(problem.x, sizes[0]), *((s, sizes[1]) for s in (problem.out, *problem.summands))]
    sides += [(back, sizes[0])] if back else []
    outer = [s.feature * size * behind for s, size in sides]  # from one before to the next
    own_strides = [s.feature * behind for s, _ in sides]
    rows, features = [s.column for s, _ in sides], [s.feature for s, _ in sides]
    columns, none = problem.columns, [0] * len(sides)

    def made(outers, inners, count, inside: bool, strides: tuple, feature, divisor: int = 1) -> Run:
        x, out, *rest = _layouts(sides, *strides, own_strides)
        gradient = rest.pop() if back else None
        begin = problem.batch, outers, inners, count, inside, own, x, out
        return Run(*begin, tuple(rest), feature, divisor, gradient)

    if problem.inside:  # (before, own, behind, columns)
        apart = slab or any(s.feature != columns * s.column for s, _ in sides)
        if behind > 1 and apart:
            strides = outer, features, rows
            return made(before, behind, columns, True, strides, (0, 1, 0, behind))
        strides = outer, none, rows
        return made(before, 1, behind * columns, True, strides, (0, 0, 1, behind), columns)
    if behind > 1:  # (columns, before, own, behind)
        return made(columns, before, behind, True, (rows, outer, features), (0, 0, 1, behind))
    if before > 1 and any(row != step * before for row, step in zip(rows, outer, strict=True)):
        return made(columns, 1, before, False, (rows, none, outer), (0, 0, 0, 1))
    strides = none, none, outer if before > 1 else rows
    return made(1, 1, columns * before, False, strides, (0, 0, 0, 1))


def _layouts(sides: list, *strides: list[int]) -> list[Layout]:
    """Those of x, of the result, of summands and of the gradient: outer index, inner one, column,
    feature."""
    return [
        Layout(side.batch, outer, column, feature, side.alignment, inner)
        for (side, _), outer, inner, column, feature in zip(sides, *strides, strict=True)
    ]
