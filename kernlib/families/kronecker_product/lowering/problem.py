"""A Kronecker product as lowering sees it: sizes, strides and names of dtypes."""

from __future__ import annotations

import math

from kernlib.records import NamedTuple


class Layout(NamedTuple):
    """Strides of a tensor in elements: from one batch, outer index, column, feature and inner index
    to the next (an outer index has several inner ones); and the alignment of the first element in
    bytes."""

    batch: int
    outer: int
    column: int
    feature: int
    alignment: int = 16
    inner: int = 0


class Factor(NamedTuple):
    """A matrix as it multiplies, whose ``rows`` are summed over, and its strides in elements from
    row to row, from column to column, and from batch to batch."""

    rows: int
    columns: int
    row_stride: int
    column_stride: int
    batch_stride: int = 0


class Problem(NamedTuple):
    """``out[b, o, c, (q1 .. qN)] = sum x[b, o, c, (p1 .. pN)] * F1[p1, q1] * .. * FN[pN, qN]``.
    With the factors on the right, the columns c are the rows of x. With the factors on the left,
    they are the columns of x and lie ``inside``, which means behind the features. ``summands`` are
    the layouts of what the epilogue adds a multiple of."""

    batch: int
    columns: int
    inside: bool
    factors: tuple[Factor, ...]
    x: Layout
    out: Layout
    dtype: str
    precision: str  # of float32: "fp32" or "tf32"
    summands: tuple[Layout, ...] = ()

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the factors."""
        return tuple([(factor.rows, factor.columns) for factor in self.factors])

    @property
    def in_features(self) -> int:
        """The product of the rows of all factors."""
        return math.prod(factor.rows for factor in self.factors)

    @property
    def out_features(self) -> int:
        """The product of the columns of all factors."""
        return math.prod(factor.columns for factor in self.factors)
