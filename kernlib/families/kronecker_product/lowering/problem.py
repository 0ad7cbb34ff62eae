"""A Kronecker product as lowering sees it: sizes, strides and names of dtypes."""

from __future__ import annotations

import math
from typing import NamedTuple


class Layout(NamedTuple):
    """Elements from one batch, outer index, column and feature to the next, and the alignment of
    the first in bytes; and from one inner index, of an outer one's, to the next."""

    batch: int
    outer: int
    column: int
    feature: int
    alignment: int = 16
    inner: int = 0


class Factor(NamedTuple):
    """A matrix as it multiplies, ``rows`` being summed over, with the elements from one row, one
    column and one of a batch to the next."""

    rows: int
    columns: int
    row_stride: int
    column_stride: int
    batch_stride: int = 0


class Problem(NamedTuple):
    """``out[b, o, c, (q1 .. qN)] = sum x[b, o, c, (p1 .. pN)] * F1[p1, q1] * .. * FN[pN, qN]``.
    Columns c are rows of x with the factors on the right, columns of x with them on the left, where
    they lie ``inside``: behind the features. ``summands`` are what the epilogue adds a multiple of,
    laid out beside out."""

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
    def in_features(self) -> int:
        return math.prod(factor.rows for factor in self.factors)

    @property
    def out_features(self) -> int:
        return math.prod(factor.columns for factor in self.factors)
