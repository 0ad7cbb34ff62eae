"""Whether torch's batched product is faster than the portable kernel, where d is 1.

It is where a weight is one matrix, whose long sums cuBLAS takes in parts, where the tiles of the
kernel would have few columns to compute, and where it would want the weight packed. Both times are
estimated, in microseconds, by constants fitted to what 77 products of random sizes in float32 took
in CUDA graphs on an H100. Of products that they were not fitted to, half of the estimates are
within 3 % of the kernel's time and 5 % of torch's, nine tenths within 10 and 15 %; the kernel takes
more than 5 % longer than torch in 68 of 77, and what is chosen more than the faster way in 34.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernlib.families.kronecker_sparse.kernels.factor import portable
from kernlib.families.kronecker_sparse.lowering import times
from kernlib.families.kronecker_sparse.lowering.problem import Problem
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Gpu

GPU = Gpu("sm_90a", 132)  # of which there are measurements, and its multiprocessors
# That torch must be faster by. At 1.2 it takes 13 more of the 77, which gain 1 us each, and that in
# a CUDA graph alone: elsewhere the host needs longer for torch's views.
GAIN = 1.25
# What was measured: the most blocks and rows, and the least and the most columns and depth.
MOST_BLOCKS, MOST_ROWS, SIDES = 64, 16384, range(4, 513)
MOST_STRIDE = 2**31 - 1  # that cuBLAS takes

# Of torch.
LAUNCH = 2.5
TERM = 0.0315  # of the sums of a block's tile, which wait for each other
PARTS = 4.2  # in place of these, where one matrix is multiplied: sums in parts, and their sum
NARROW = 8  # columns, up to which that one is always multiplied so
FEW_ROWS, FEW_TERMS, FEW = 4, 64, 0.25  # up to which its sums take a part of TERM
TILE = 32  # rows and columns of a tile
BLOCK, BLOCK_TERM = 0.185, 0.0054  # of tiles beyond the first, and a term of them
MOVED = 0.234  # of a million bytes
# Of the portable kernel.
KERNEL_LAUNCH, PACK = 1.6, 1.9
STEP = 0.0156  # a term of sums, however many
KERNEL_TILE = 1.33
MULTIPLICATIONS = 1.45  # a million of a tile
GATHERED = 0.045  # a thousand numbers that a tile reads one by one
KERNEL_MOVED = 0.17  # of a million bytes


def gains(problem: Problem, choice: Mapping[str, object], gpu: Gpu) -> bool:
    """Whether torch takes clearly less time than the portable kernel with the tile of a ``choice``
    does. What nobody measured is the kernel's: other GPUs, other layouts and sizes, and what is not
    float32 at "fp32"."""
    if gpu != GPU or not takes(problem):
        return False
    return GAIN * torch_time(problem) < kernel_time(problem, choice)


def takes(problem: Problem) -> bool:
    """Whether a problem is one of those that were measured: float32 at "fp32", batch first, d = 1,
    with a contiguous weight and rows of x and of the result whose features lie side by side."""
    if (problem.dtype, problem.precision, problem.lanes) != ("float32", "fp32", 1):
        return False
    if problem.blocks > MOST_BLOCKS or not 1 <= problem.rows <= MOST_ROWS:
        return False
    if problem.columns not in SIDES or problem.depth not in SIDES:
        return False
    return _is_contiguous(problem) and _is_flat(problem)


def _is_contiguous(problem: Problem) -> bool:
    """Whether a weight is."""
    right = problem.right
    is_block = right.depth == 1 and right.line == problem.depth
    return is_block and (problem.blocks == 1 or right.block == problem.columns * problem.depth)


def _is_flat(problem: Problem) -> bool:
    """Whether features lie side by side, in rows that do not overlap."""
    left, out = problem.left, problem.out
    if not left.depth == out.column == 1:
        return False
    x_width, width = (problem.blocks * side for side in (problem.depth, problem.columns))
    is_apart = x_width <= left.line <= MOST_STRIDE and width <= out.row <= MOST_STRIDE
    return problem.rows == 1 or is_apart


def torch_time(problem: Problem) -> float:
    """Microseconds of torch's product."""
    sums = TERM * problem.depth
    if problem.blocks == 1:
        is_few = problem.rows <= FEW_ROWS and problem.depth <= FEW_TERMS
        sums = min(FEW * sums if is_few else sums, PARTS)
        sums = PARTS if problem.columns <= NARROW else sums
    tiles = problem.blocks * ceil_div(problem.rows, TILE) * ceil_div(problem.columns, TILE)
    more = max(0.0, tiles / GPU.multiprocessors - 1) * (BLOCK + BLOCK_TERM * problem.depth)
    return LAUNCH + sums + more + MOVED * _megabytes(problem)


def kernel_time(problem: Problem, choice: Mapping[str, object]) -> float:
    """Microseconds of the portable kernel with the tile of a choice, and of what packs its
    weight."""
    rows, columns = int(choice["rows"]), int(choice["columns"])
    read = portable.packed(problem)
    tiles, depth, gathered = portable.tile_work(read, rows, columns)
    term = MULTIPLICATIONS * 3 * rows * columns / 1e6 + GATHERED * gathered / 1e3  # 3xTF32
    rounds = times.rounds(tiles, GPU.multiprocessors)
    of_tiles = STEP * depth + rounds * (KERNEL_TILE + depth * term)
    return KERNEL_LAUNCH + PACK * (read != problem) + of_tiles + KERNEL_MOVED * _megabytes(problem)


def _megabytes(problem: Problem) -> float:
    """Of x, of the result and of the weight."""
    rows, columns, depth = problem.rows, problem.columns, problem.depth
    numbers = problem.blocks * (rows * depth + rows * columns + columns * depth)
    return numbers * DTYPES[problem.dtype].bytes / 1e6
