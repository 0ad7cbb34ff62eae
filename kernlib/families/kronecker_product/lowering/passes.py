"""What kernels that multiply by wgmma compute of a product: passes over memory, of one matrix or
two neighbours, which are square factors, powers of two wide; and where that is faster."""

from __future__ import annotations

import math
from typing import NamedTuple

from kernlib.families.kronecker_product.lowering import grouping
from kernlib.families.kronecker_product.lowering.grouping import Group, Size
from kernlib.lowering.arithmetic import ceil_div

ARCH = "sm_90a"
PANEL, WIDEST = 64, 128  # lines and columns of a tile; those of a matrix that is larger
NARROWEST = 8  # neighbours in memory, of 16 bytes
# Factors so wide, so many, of which other kernels take two at once.
LEAST_NARROW, WIDE_ROWS = 4, 32
MOST_WHOLE = 1 << 15, 1 << 12  # features of tf32's rows, and columns, that a block keeps whole


class Pass(NamedTuple):
    """One pass: rows of the factors that are merged along a tile's lines and, if there are any,
    along its columns; and features of x as ``(left, rows, right)`` to the former, columns of x
    ``inside``, behind them, or not."""

    lines: tuple[int, ...]
    columns: tuple[int, ...]
    left: int
    right: int
    inside: bool = False

    @property
    def factors(self) -> tuple[int, ...]:
        """Rows of each."""
        return self.lines + self.columns

    @property
    def rows(self) -> int:
        """Of the matrix along lines."""
        return math.prod(self.lines)

    @property
    def tile(self) -> tuple[int, int]:
        """Lines and columns."""
        return max(PANEL, self.rows), max(PANEL, math.prod(self.columns))

    @property
    def row_tiles(self) -> int:
        """Tiles of a row of x, or of as many columns as a tile has."""
        features = self.left * self.rows * self.right
        return features // (self.tile[0] if self.inside else math.prod(self.tile))

    def tiles(self, columns: int) -> int:
        """Those of so many rows, or columns, of x."""
        across = ceil_div(columns, self.tile[1]) if self.inside else columns
        return across * self.row_tiles

    @property
    def matrices(self) -> int:
        """Numbers of its matrices."""
        return sum(size * size for size in self.tile[: 2 if self.columns else 1])


def passes_of(product: Group, arch: str) -> tuple[Pass, ...]:
    """The passes of a product, first to last; none where the kernels take other numbers or
    sizes."""
    sizes, inside, groups = product.sizes, product.inside, _groups(product.sizes)
    if arch != ARCH or not words_of(product.dtype, product.precision) or len(groups) < 2:
        return ()
    ends = [(group, ()) for group in reversed(groups)]
    if not inside:
        ends[:2] = [(groups[-2], groups[-1])]
    features, right = math.prod(rows for rows, _ in sizes), math.prod(ends[0][1])
    each: list[Pass] = []
    for lines, columns in ends:
        rows = math.prod(lines)
        each.append(Pass(lines, columns, features // (rows * right), right, inside))
        right *= rows
    fits = features >= max(PANEL * PANEL, math.prod(each[0].tile))
    if not inside:  # copies of a matrix have columns of their own
        fits &= all(part.right >= PANEL * part.tile[0] // part.rows for part in each[1:])
    return tuple(each) if fits and (inside or math.prod(groups[-1]) >= NARROWEST) else ()


def words_of(dtype: str, precision: str) -> int:
    """Half-precision numbers that an operand is; 0 for other numbers. TF32 has as many bits as
    float16."""
    kinds = {"float16": 1, "bfloat16": 1, "float32": 1 if precision == "tf32" else 2}
    return kinds.get(dtype, 0)


def _groups(sizes: tuple[Size, ...]) -> list[tuple[int, ...]]:
    """Rows of neighbours that are merged, from the last on, up to PANEL; none where a factor is no
    power of two or not square."""
    groups: list[tuple[int, ...]] = []
    for rows, columns in reversed(sizes):
        if rows != columns or rows & (rows - 1) or rows > WIDEST:
            return []
        if groups and math.prod(groups[0]) * rows <= PANEL:
            groups[0] = (rows, *groups[0])
        else:
            groups.insert(0, (rows,))
    return groups


def is_faster(product: Group, arch: str) -> bool:
    """Whether the kernels of wgmma are faster than those for every GPU, where both take a product:
    measured on an H200, of 1024 rows. They are not where rows that a block keeps whole are read and
    written once (1024 x 16^4 of float16 in half the time), nor where several matrices are narrower
    than the tiles that they are multiplied as (32^4 on either side)."""
    parts, dtype, inside = passes_of(product, arch), product.dtype, product.inside
    if len(parts) < 2:
        return len(parts) == 1
    if _is_in_a_block(product, arch):
        return len(parts) == 2 and inside and dtype != "float32"
    if inside and (dtype, product.precision) != ("float32", "tf32"):
        narrow = [part.rows for part in parts if part.rows < PANEL]
        return len(narrow) < LEAST_NARROW or min(narrow) < WIDE_ROWS
    return len([part for part in parts[1:] if part.rows < PANEL]) < 2


def _is_in_a_block(product: Group, arch: str) -> bool:
    """Whether a block of the other kernels keeps rows, and is fast."""
    if (product.dtype, product.precision) == ("float32", "tf32"):
        is_short = math.prod(rows for rows, _ in product.sizes) <= MOST_WHOLE[product.inside]
        return is_short and max(rows for rows, _ in product.sizes) < WIDE_ROWS
    from kernlib.families.kronecker_product.kernels.halves import HALVES

    groups = grouping.groups(HALVES, product, arch)
    return groups is not None and len(groups) == 1
