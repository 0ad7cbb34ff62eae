"""What kernels that multiply by wgmma compute of a product: passes over memory, of one matrix or
two neighbours, which are square factors, powers of two wide."""

from __future__ import annotations

import math
from typing import NamedTuple

from kernlib.families.kronecker_product.lowering.grouping import Group, Size
from kernlib.families.kronecker_product.lowering.slabs import EXPONENT_BYTES
from kernlib.jit.targets import SHARED_BYTES
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES

ARCH = "sm_90a"
PANEL, WIDEST = 64, 128  # lines and columns of a tile; those of a matrix that is larger
NARROWEST = 8  # neighbours in memory, of 16 bytes
MOST_PASSES, MOST_APART, MOST_INSIDE = 3, 2, 4  # of one launch; by one each; and on the left
SLAB_BYTES = 1 << 20  # of what a pass hands to the next in one launch
WORKERS, WIDE_WORKERS = 512, 256  # threads that have a tile; where each has 64 sums of it
HELPER_REGISTERS, REGISTERS = 40, 65536  # of a thread that has none; of a multiprocessor
MOST_STAGES, SLAB_STAGES = 4, 2  # tiles that a group has under way; where they wait for others
ALIGNMENT, BARRIERS, NOTE_BYTES = 1024, 16, 32  # of a panel; bytes of a stage; of a tile under way
MORE_NOTES = 2  # tiles that are under way and have left their stage
LARGEST_EXPONENT = 14  # exponent of float16's large numbers
BOUND_ARRAYS = 2  # as in bounds.cuh


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


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue: the dtype, words of an operand,
    passes of a launch, first to last, and the rows of a slab where there are several; launches
    ``before`` and ``behind`` it that float16 is handed on between."""

    dtype: str
    words: int
    passes: tuple[Pass, ...]
    slab: int = 0
    before: int = 0
    behind: int = 0

    @property
    def sizes(self) -> list[Size]:
        """Of the factors, as a launch has them."""
        return [(rows, rows) for each in self.passes for rows in each.factors]

    @property
    def workers(self) -> int:
        """As many as registers last for."""
        is_wide = any(each.tile[1] > PANEL for each in self.passes)
        return WIDE_WORKERS if is_wide else WORKERS

    @property
    def groups(self) -> int:
        """Tiles that a block computes at a time."""
        return self.workers // (2 * self.passes[0].tile[0])

    @property
    def threads(self) -> int:
        """With a warp for each group that copies its tiles, and one that tells of them if there are
        several passes: in whole warpgroups, which share out registers."""
        return self.workers + round_up(32 * self.groups * min(2, len(self.passes)), 128)

    @property
    def worker_registers(self) -> int:
        """What helpers leave of those that a block begins with."""
        begins = min(REGISTERS // self.threads, 255) // 8 * 8 * self.threads
        helpers = self.threads - self.workers
        return min(240, (begins - helpers * HELPER_REGISTERS) // self.workers // 8 * 8)

    @property
    def panel(self) -> int:
        """Numbers of a tile."""
        return max(math.prod(each.tile) for each in self.passes)

    @property
    def matrices(self) -> int:
        """Bytes of all matrices."""
        return 2 * self.words * sum(each.matrices for each in self.passes)

    @property
    def scales(self) -> int:
        """Columns of a tile that are scaled each for itself, or 1 for all."""
        return PANEL if self.passes[0].inside else 1

    @property
    def powers(self) -> int:
        """How many arrays of powers of two go from pass to pass."""
        return len(self.passes) - 1 if self.dtype == "float16" else 0

    @property
    def bounds(self) -> int:
        """How many arrays there are of what scales numbers that launches hand on."""
        return BOUND_ARRAYS if self.before + self.behind else 0

    @property
    def stage_bytes(self) -> int:
        """Of a tile as it arrives, and as a panel."""
        return self.panel * max(2 * self.words, DTYPES[self.dtype].bytes)

    @property
    def stages(self) -> int:
        """As many as there is room for; 0 where there is none."""
        most = SLAB_STAGES if len(self.passes) > 1 else MOST_STAGES
        return max(0, min(most, self._room // (self.groups * self._bytes_of_stage)))

    @property
    def _bytes_of_stage(self) -> int:
        powers = self.panel // PANEL * EXPONENT_BYTES * (self.powers > 0)
        return self.stage_bytes + BARRIERS + NOTE_BYTES + powers

    @property
    def _room(self) -> int:
        """For stages, beside what else there is."""
        return SHARED_BYTES[ARCH] - self._fixed_bytes

    @property
    def _fixed_bytes(self) -> int:
        numbers = 2 * len(self.passes) + 4 * self.scales * self.groups
        numbers += 2 * (1 + WIDEST) * (self.behind > 0)  # growths of matrices, sums of columns
        notes = MORE_NOTES * self.groups * NOTE_BYTES
        return self.matrices + 4 * round_up(numbers, 4) + notes + ALIGNMENT

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        return self._fixed_bytes + self.groups * self.stages * self._bytes_of_stage


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


def exponents(part: Pass) -> tuple[int, int]:
    """Of the largest number of a tile, and of the matrix along its lines: what this makes of that
    is below 2^15 where it is multiplied again."""
    if not part.columns:
        return LARGEST_EXPONENT, LARGEST_EXPONENT
    both = LARGEST_EXPONENT - 1 - (part.rows - 1).bit_length()
    return both - both // 2, both // 2
