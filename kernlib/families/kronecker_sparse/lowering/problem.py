"""What lowering of Kronecker-sparse calls takes and answers: plain named tuples.

One problem covers a factor forward, its gradient by x and its gradient by the weight:

    out[i,l,r,s] = Finish(sum_q left[i,l,r,q] * right[i,l,s,q])

over blocks i, lanes l, rows r, columns s and depth q. Forward, rows are the batch, columns and
depth a block's output and input features; for the weight's gradient the batch is the depth.
"""

from __future__ import annotations

from typing import NamedTuple

Pattern = tuple[int, int, int, int]
MAX_BLOCKS = 2**31 - 1  # of a grid's first axis
DEEP = 1024  # depth from which few tiles are summed in parts


class Layout(NamedTuple):
    """Strides of an operand, in elements, by block, lane, line (row or column of out) and depth;
    ``alignment`` is the address of the first element modulo 16 (an aligned one may say 0 or 16);
    ``padded``, whether lines end in zeros up to whole 16 bytes."""

    block: int
    lane: int
    line: int
    depth: int = 0
    alignment: int = 16
    padded: bool = False


class OutLayout(NamedTuple):
    """Strides of the output, as of :class:`Layout`."""

    block: int
    lane: int
    row: int
    column: int
    alignment: int = 16

    @property
    def strides(self) -> dict[str, int]:
        """By the names of their fields in parameters."""
        return {f"out_{name}_stride": getattr(self, name) for name in self._fields[:4]}


class Problem(NamedTuple):
    """One call's shapes and layouts, as lowering sees them. ``precision`` is "fp32" or "tf32", and
    "fp32" for half types."""

    blocks: int
    lanes: int
    rows: int
    columns: int
    depth: int
    left: Layout
    right: Layout
    out: OutLayout
    dtype: str = "float32"
    precision: str = "fp32"

    @property
    def sizes(self) -> dict[str, int]:
        """Blocks, lanes, rows, columns and depth by name."""
        return dict(zip(self._fields[:5], self[:5], strict=True))


class Scope(NamedTuple):
    """What is known of problems whose kernels are compiled ahead: ``sizes`` b, c and d of factors,
    ``numbers`` (dtype, precision), and the target. ``mixed`` of batches that are last on one side
    alone."""

    sizes: tuple[int, int, int]
    numbers: tuple[tuple[str, str], ...]
    arch: str
    mixed: bool = False

    @property
    def dtypes(self) -> list[str]:
        return list(dict.fromkeys(dtype for dtype, _ in self.numbers))

    @property
    def precisions(self) -> list[str]:
        return list(dict.fromkeys(precision for _, precision in self.numbers))

    @property
    def halves(self) -> list[str]:
        """Its dtypes of 16 bits."""
        return [dtype for dtype in self.dtypes if dtype != "float32"]


def is_deep(problem: Problem) -> bool:
    """Whether tiles are few and their sums long, as in the gradient of a weight."""
    return problem.depth > DEEP and problem.depth >= 4 * max(problem.rows, problem.columns)


def is_small(problem: Problem) -> bool:
    """Whether a problem has so few rows that packing the weight costs more than the kinds which ask
    for it gain: on an H200 (1, 768, 192, 2) in float32, 64 rows, takes 16.4 us by `interleaved` and
    10.9 by `portable`, whose host makes one launch instead of two. Of a long depth it makes two."""
    half = problem.dtype != "float32"
    if problem.rows > (64 if half else 128) or problem.depth > (192 if half else DEEP - 1):
        return False
    # Batch first, `portable` reads and writes each l by itself.
    batch_last = problem.rows > 1 and problem.left.line == problem.out.row == 1
    return batch_last or problem.lanes <= 4 or problem.rows <= 16


def feature_counts(problem: Problem) -> tuple[int, int]:
    """Of x and of the result."""
    groups = problem.blocks * problem.lanes
    return groups * problem.depth, groups * problem.columns


def is_flat(problem: Problem, count: int, lane: int, near: int, block: int) -> bool:
    """Whether features (i, j, l), ``count`` of j and with these strides of l, j and i, lie side by
    side."""
    d = problem.lanes
    return (
        (lane == 1 or d == 1)
        and (near == d or count == 1)
        and (block == d * count or problem.blocks == 1)
    )


def depth_first(problem: Problem, layout: Layout, lines: int) -> bool:
    """Whether an operand's depths lie closer together than its lines."""
    return problem.depth > 1 and (lines == 1 or layout.depth <= layout.line)
