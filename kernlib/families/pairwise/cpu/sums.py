"""The sums of a pairwise call on the CPU, by whichever of torch's operators is fastest at them.

Each fills blocks of rows and columns of ``sum_k inner(op(a, b))`` for points (M, K) and (N, K) of
one batch entry, in their dtype.
"""

from __future__ import annotations

import math

import torch

from kernlib.families.pairwise import reference, stages
from kernlib.families.pairwise.cpu import products
from kernlib.families.pairwise.cpu.squares import Squares
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.runtime.precision import is_rounded_on_cpu

_DIRECT = "donot_use_mm_for_euclid_dist"
# Of features that torch.cdist adds up at once: 8e-7 off in float32, 1000 of them 1.6e-6.
LONGEST_SUM = 256
# Differences up to which torch.cdist takes less time than what a product needs beside itself.
FEWEST_DIFFERENCES = 1 << 17
ENTRIES = 1 << 20  # of a block of rows, which stays in cache until it is finished


class _Distances:
    """By torch.cdist, from differences: power sums of p = 0, 1 and 2, the largest of p = inf.
    ``rooted`` asks for the distances of p = 2 instead, which it says to be."""

    entries = ENTRIES

    def __init__(self, a: torch.Tensor, b: torch.Tensor, p: float, rooted: bool):
        self.a, self.b, self.p = a, b, p
        features = a.shape[1]
        self.rooted = rooted and features <= LONGEST_SUM
        step = features if math.isinf(p) else LONGEST_SUM
        self.parts = [slice(k, k + step) for k in range(0, features, step)]

    def fill(self, out: torch.Tensor, rows: slice, columns: slice) -> None:
        a, b = self.a[rows], self.b[columns]
        for part in self.parts:
            found = torch.cdist(a[:, part], b[:, part], self.p, _DIRECT)
            if self.p == 2 and not self.rooted:
                found.mul_(found)
            if part.start:
                out.add_(found)
            else:
                out.copy_(found)


class _Dots:
    """Dot products."""

    rooted, entries = False, ENTRIES

    def __init__(self, a: torch.Tensor, b: torch.Tensor):
        self.a, self.b = a, b.T

    def fill(self, out: torch.Tensor, rows: slice, columns: slice) -> None:
        a, b = self.a[rows], self.b[:, columns]
        if a.shape[1] > products.LONGEST_SUM:
            out.copy_(products.product(a, b))
        else:
            torch.mm(a, b, out=out)


class _Formula:
    """All others, by the reference."""

    rooted, entries = False, ENTRIES

    def __init__(self, descriptor: Pairwise, a, b, p: float | None, scale: float | None):
        self.descriptor, self.a, self.b, self.numbers = descriptor, a, b, (p, scale)

    def fill(self, out: torch.Tensor, rows: slice, columns: slice) -> None:
        out.copy_(reference.sums(self.descriptor, self.a[rows], self.b[columns], *self.numbers))


def of(
    descriptor: Pairwise, a, b, p: float | None, scale: float | None, same: bool
) -> _Distances | _Dots | _Formula | Squares:
    """What fills blocks of a descriptor's sums, ``b`` being ``a`` where ``same`` says so. Both have
    points and features."""
    if descriptor.operator == "dot":
        if isinstance(descriptor.inner, stages.Identity):
            return _Dots(a, b)
        return _Formula(descriptor, a, b, p, scale)
    order = order_of(descriptor, p)
    if order is None or (math.isinf(order) and not _are_finite(a, b)):  # torch drops a NaN there
        return _Formula(descriptor, a, b, p, scale)
    if order == 2 and _takes_products(descriptor, a, b):
        squares = Squares(a, b, same)
        if squares.usable:
            return squares
    return _Distances(a, b, order, order == 2 and isinstance(descriptor.outer, stages.Sqrt))


def order_of(descriptor: Pairwise, p: float | None) -> float | None:
    """The order of the norm whose sums these are, None where torch.cdist has none."""
    if isinstance(descriptor.inner, stages.Square):
        return 2.0
    if isinstance(descriptor.inner, stages.Abs):
        return 1.0
    own = isinstance(descriptor.inner, stages.Power) and p in (0, 1, 2, math.inf)
    return p if own else None


def is_of_squares(descriptor: Pairwise, p: float | None) -> bool:
    """Whether the sums are those of squares."""
    return isinstance(descriptor.inner, stages.Square) or (
        isinstance(descriptor.inner, stages.Power) and p == 2
    )


def _takes_products(descriptor: Pairwise, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether products are worth their preparation, and torch's are those of float32."""
    differences = a.shape[0] * b.shape[0] * a.shape[1]
    if descriptor.direct or differences < FEWEST_DIFFERENCES:
        return False
    return a.dtype == torch.float64 or not is_rounded_on_cpu()


def _are_finite(*points: torch.Tensor) -> bool:
    return all(bool(x.isfinite().all()) for x in points)
