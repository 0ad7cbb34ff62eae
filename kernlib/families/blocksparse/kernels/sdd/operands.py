"""The dense operands of block-sparse results on Hopper, as the copy engine is told of them: what
serves all heads or batches is one."""

from __future__ import annotations

from kernlib.families.blocksparse.lowering import hopper, mma
from kernlib.families.blocksparse.lowering.problem import Dense, Sdd
from kernlib.lowering import tma
from kernlib.lowering.config import Fact

SQUARES = (16, 32, 64)  # sizes of square blocks
SHARED = ("int a_heads", "int a_batches", "int b_heads", "int b_batches")  # 0 where one serves all
SIZES = ("int grid_rows", "int row_words", "int heads", "int capacity", "int batch", *SHARED)


def addressable(problem: Sdd, arch: str) -> bool:
    """Whether a problem is one of half types on Hopper whose operands the copy engine reads."""
    blocks, kind = problem.blocks, problem.dtype
    if arch != hopper.ARCH or kind == "float32" or not blocks.capacity or not problem.depth:
        return False
    if not blocks.grid_rows or not blocks.grid_cols:
        return False
    if hopper.is_across(problem.a) is None or hopper.is_across(problem.b) is None:
        return False
    pairs = zip((problem.a, problem.b), _extents(problem), strict=True)
    return all(tma.addressable(kind, t.alignment, extent) for t, extent in pairs)


def is_of_squares(problem: Sdd, arch: str) -> bool:
    """Whether it is one of square blocks of SQUARES, whose values lie slot behind slot."""
    blocks, values = problem.blocks, problem.values
    if blocks.rows != blocks.cols or blocks.rows not in SQUARES:
        return False
    slots_apart = blocks.capacity > 1 and values.slot != blocks.rows * blocks.cols
    if slots_apart or values.row != blocks.cols or not mma.has_chunks(problem):
        return False
    return addressable(problem, arch)


def maps(problem: Sdd) -> tuple[tma.TensorMap, ...]:
    """Of a and b, which are read by boxes of 64 x 64."""
    box = hopper.ROW, hopper.ROW, 1, 1
    return tuple(tma.tensor_map(problem.dtype, extent, box) for extent in _extents(problem))


def shared(problem: Sdd) -> dict[str, int]:
    """The values of SHARED: whether heads and batches of a, and of b, each have one."""
    numbers = (int(n > 0) for t in (problem.a, problem.b) for n in (t.head, t.batch))
    return {member.split()[1]: number for member, number in zip(SHARED, numbers, strict=True)}


def sizes(problem: Sdd) -> dict[str, int]:
    """The values of SIZES."""
    blocks = problem.blocks
    return {
        "grid_rows": blocks.grid_rows,
        "row_words": blocks.row_words,
        "heads": blocks.heads,
        "capacity": blocks.capacity,
        "batch": problem.batch,
        **shared(problem),
    }


def lines_last(problem: Sdd) -> tuple[bool, bool]:
    """Whether a has its rows side by side, and b its columns; where the depth is, they are not."""
    return bool(hopper.is_across(problem.a)), not hopper.is_across(problem.b)


def facts(left: bool, right: bool) -> dict[str, Fact]:
    """What :func:`lines_last` says, and how results are written: as blocks in memory."""
    return {"LEFT_LINES": left, "RIGHT_LINES": right, "SUMS_ACROSS": False, "LINES_LAST": False}


def words(left: bool, right: bool) -> list[str]:
    """The same in names and descriptions of kernels."""
    return ["left_lines"] * left + ["right_lines"] * right


def _extents(problem: Sdd) -> tuple[tma.Extent, tma.Extent]:
    """Of a and b."""
    blocks = problem.blocks
    return (
        _extent(problem, problem.a, blocks.rows * blocks.grid_rows, problem.depth),
        _extent(problem, problem.b, problem.depth, blocks.cols * blocks.grid_cols),
    )


def _extent(problem: Sdd, t: Dense, lines: int, columns: int) -> tma.Extent:
    heads = problem.blocks.heads if t.head else 1
    batch = problem.batch if t.batch else 1
    ends, step = (columns, lines), t.line
    if hopper.is_across(t):
        ends, step = (lines, columns), t.column
    return tma.Extent((*ends, heads, batch), (step, t.head, t.batch))
