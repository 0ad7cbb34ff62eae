"""The sums of a pairwise call on the CPU, by whichever of torch's operators is fastest at them.

Each fills blocks of rows and columns of ``sum_k inner(op(a, b))`` for points (M, K) and (N, K) of
one batch entry, in their dtype.
"""

from __future__ import annotations

import math

import torch

from kernlib.families.pairwise import reference, stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.runtime import precision

_DIRECT = "donot_use_mm_for_euclid_dist"
# Features that torch.cdist adds up at once: their sum is 8e-7 off in float32, that of 1000 1.6e-6.
LONGEST_SUM = 256
# Up to so many differences torch.cdist takes less time than the preparation of a product.
FEWEST_DIFFERENCES = 1 << 17
ENTRIES = 1 << 20  # of a block of rows, which stays in cache until it is finished
# A pair is close where its squared distance is below this part of |a|^2 + |b|^2. There a product
# has lost 3 bits in float32 (7e-7 of 64 features), and 6 in float64 (2e-14).
CLOSE = {torch.float32: 2.0**-3, torch.float64: 2.0**-6}
CLOSE_TWICE = 2.0**-24  # the same of float32 points whose product is one of float64
# Below, squares are denormals in part.
SMALLEST = {torch.float32: 1e-30, torch.float64: 1e-280}
# Of so many entries of some rows that are close, all are cheaper than each: a pair of 64 features
# takes 60 ns by itself, 16 as one of all, and 3 by a product in float64.
SEVERAL, MOST = 1 / 32, 1 / 6
PAIRS = 1 << 21  # numbers of coordinates that are gathered at once
FEW_FEATURES = 16  # up to which a product costs less than to write it, in float64 too
# Entries up to which two more passes over them cost less than to put the sides together.
FEW_ENTRIES = 1 << 16
# Entries of a block of squares, which stays in cache until it is finished: 16 MB if all is done in
# its memory, 1 MB if a second block is needed.
ENTRIES_OF_SQUARES, ENTRIES_BESIDE = 1 << 22, 1 << 17


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
            distances = torch.cdist(a[:, part], b[:, part], self.p, _DIRECT)
            if self.p == 2 and not self.rooted:
                distances.mul_(distances)
            if part.start:
                out.add_(distances)
            else:
                out.copy_(distances)


class _Dots:
    """Dot products."""

    rooted, entries = False, ENTRIES

    def __init__(self, a: torch.Tensor, b: torch.Tensor):
        self.a, self.b = a, b.T

    def fill(self, out: torch.Tensor, rows: slice, columns: slice) -> None:
        a, b = self.a[rows], self.b[:, columns]
        if a.shape[1] > precision.LONGEST_SUM:
            out.copy_(precision.product(a, b))
        else:
            torch.mm(a, b, out=out)


class Squares:
    """``|b[n] - a[m]|^2`` of points (M, K) and (N, K), block by block of rows, by a product of
    matrices, as accurate as differences.

    With columns moved by the mean of ``a``, ``|a - b|^2 = |a|^2 + |b|^2 - 2 a b`` is one product
    of ``(-2 a, |a|^2, 1)`` and ``(b, 1, |b|^2)``. It loses digits where the distance is small
    beside ``|a|^2 + |b|^2``. Such pairs are computed anew: few of them by differences of their
    coordinates; of many, the rows by a product in float64 first. Points of few features, of which
    many pairs are close, are multiplied in float64 at once.
    """

    rooted = False

    def __init__(self, a: torch.Tensor, b: torch.Tensor, same: bool):
        """``same`` says that ``b`` is ``a``, whose points are then 0 from themselves."""
        self.a, self.b, self.same, self.dtype = a, b, same, a.dtype
        few = a.dtype == torch.float32 and a.shape[1] <= FEW_FEATURES
        self.product = torch.float64 if few else a.dtype
        self.entries = ENTRIES_BESIDE if few else ENTRIES_OF_SQUARES
        self.beside = None  # memory of a block's product, where that is not the block's own
        self.center = a.mean(0)
        x, y = self._moved(self.product)
        self.of_a = (x * x).sum(1)
        self.of_b = self.of_a if same else (y * y).sum(1)
        self.most = float(self.of_a.max()), float(self.of_b.max())
        # The mean would carry a NaN or infinity of one point to every point. Overflows are those of
        # the result's type.
        self.usable = sum(self.most) < torch.finfo(a.dtype).max / 4
        self.part, self.smallest = CLOSE_TWICE if few else CLOSE[a.dtype], SMALLEST[a.dtype]
        self.sides, self.points = None, (x, y.T)
        if a.shape[0] * b.shape[0] > FEW_ENTRIES:
            self.sides = _sides(x, y, self.of_a, self.of_b)
        self.twice = None  # the sides in float64

    def fill(self, out: torch.Tensor, rows: slice, columns: slice) -> None:
        """The entries of some rows and columns, into a matrix of their size."""
        squares = self._product(out, rows, columns)
        diagonal = None
        if self.same and rows.start < columns.stop and columns.start < rows.stop:
            diagonal = rows.start - columns.start
            # Not close, so that no row is mended for it alone.
            squares.diagonal(diagonal).fill_(math.inf)
        low = self._low(squares, rows)
        if squares is not out:
            out.copy_(squares)
        if low is not None:
            self._mend(out, rows, columns, low)
        if diagonal is not None:
            out.diagonal(diagonal).zero_()

    def _moved(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The points from the center, in a type."""
        center = self.center.to(dtype)
        x = self.a.to(dtype) - center
        return x, (x if self.same else self.b.to(dtype) - center)

    def _product(self, out: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
        """A block in ``out``, or in memory beside it."""
        if self.product != out.dtype:
            if self.beside is None:  # the first block is the largest
                self.beside = out.new_empty(out.numel(), dtype=self.product)
            out = self.beside[: out.numel()].view(out.shape)
        if self.sides is not None:
            left, right = self.sides
            return torch.mm(left[rows], right[:, columns], out=out)
        left, right = self.points
        added = self.of_b[columns]
        torch.addmm(added, left[rows], right[:, columns], alpha=-2, out=out)
        return out.add_(self.of_a[rows, None])

    def _low(self, made: torch.Tensor, rows: slice) -> torch.Tensor | None:
        """The rows of a block that have close pairs, None without such rows. For points about
        equally far from their centre one number shows that there are none."""
        least = made.amin(1)
        of_a, of_b = self.most
        if float(least.amin()) >= (of_a + of_b) * self.part + self.smallest:
            return None
        low = least < self.of_a[rows].mul(self.part).add_(of_b * self.part + self.smallest)
        return low.nonzero()[:, 0] if low.any() else None

    def _mend(self, out: torch.Tensor, rows: slice, columns: slice, low: torch.Tensor) -> None:
        """Compute the close pairs in the rows ``low`` of a block anew."""
        some = low.shape[0] < out.shape[0]
        squares = out[low] if some else out
        places = low + rows.start
        close = squares < self._limits(places, columns, self.part)
        if self.product is torch.float32 and _part(close) > SEVERAL:
            close = self._by_float64(squares, places, columns)
        if _part(close) > MOST:
            direct = "donot_use_mm_for_euclid_dist"
            distances = torch.cdist(self.a[places], self.b[columns], compute_mode=direct)
            torch.mul(distances, distances, out=squares)
        else:
            self._by_differences(squares, places, columns, close)
        if some:
            out[low] = squares

    def _limits(self, places: torch.Tensor, columns: slice, part: float) -> torch.Tensor:
        sizes = torch.add(self.of_a[places, None], self.of_b[columns])
        return sizes.mul_(part).add_(self.smallest).to(self.a.dtype)

    def _by_float64(self, found, places: torch.Tensor, columns: slice) -> torch.Tensor:
        """The rows of the product in float64, and which of their pairs are close still."""
        if self.twice is None:
            x, y = self._moved(torch.float64)
            self.twice = _sides(x, y, (x * x).sum(1), (y * y).sum(1))
        left, right = self.twice
        found.copy_(left[places] @ right[:, columns])
        return found < self._limits(places, columns, CLOSE_TWICE)

    def _by_differences(self, found, places: torch.Tensor, columns: slice, close) -> None:
        at_once = max(1, PAIRS // max(1, self.a.shape[1]))
        for pairs in close.nonzero().split(at_once):
            m, n = pairs.unbind(1)
            differences = self.b[n + columns.start] - self.a[places[m]]
            found[m, n] = differences.mul_(differences).sum(1)


def _sides(x: torch.Tensor, y: torch.Tensor, of_x, of_y) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrices whose product is the squared distances of points with the squares ``of_x`` and
    ``of_y``."""
    left = torch.cat((x * -2, of_x[:, None], x.new_ones(x.shape[0], 1)), 1)
    return left, torch.cat((y, y.new_ones(y.shape[0], 1), of_y[:, None]), 1).T


def _part(close: torch.Tensor) -> float:
    return int(close.count_nonzero()) / close.numel()


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
    """The object that fills blocks of a descriptor's sums. ``b`` is ``a`` if ``same``. Both have
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
    has_order = isinstance(descriptor.inner, stages.Power) and p in (0, 1, 2, math.inf)
    return p if has_order else None


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
    return a.dtype == torch.float64 or not precision.is_rounded_on_cpu()


def _are_finite(*points: torch.Tensor) -> bool:
    return all(bool(x.isfinite().all()) for x in points)
