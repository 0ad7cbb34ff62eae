"""What the estimates of kernels share that compute products batch first, d > 1.

Microseconds on an H100, each a sum of launches, bytes and rounds of tiles over the multiprocessors,
fitted to what 143 such products, most of random sizes, in float16 and in 3xTF32, took in CUDA
graphs by every kernel and tile: half of the estimates are within 4 to 10 %. bfloat16 counts as
float16, TF32 as a third of the multiplications. Those of `portable` and `transposed` were fitted
anew to 270 times of 91 of them, of which those left out of a fit are off, as a root mean square, by
12 % in float16 and 15 % in 3xTF32, and by 11 and 7 % by way of batch last.
"""

from __future__ import annotations

from kernlib.families.kronecker_sparse.lowering.problem import Problem, feature_counts
from kernlib.lowering.arithmetic import ceil_div

MULTIPROCESSORS = 132
ROUNDS = 3  # up to which a last round that is not full counts as one that is
SECTOR = 32  # bytes that are read or written at once where neighbours lie apart


def knows(problem: Problem) -> bool:
    """Whether a problem is a product batch first, d > 1: rows of x are further apart than its
    features, which the gradient of a weight has the other way round."""
    first = problem.lanes > 1 and problem.left.lane == problem.out.lane == 1
    return first and (problem.rows == 1 or problem.left.depth <= problem.left.line)


def rounds(tiles: int, slots: int) -> float:
    """Of tiles over so many that are computed at once."""
    count = ceil_div(tiles, slots)
    return count if count <= ROUNDS else tiles / slots


def numbers(problem: Problem) -> tuple[int, int, int]:
    """Of x, of the result and of the weight."""
    depths, features = feature_counts(problem)
    return problem.rows * depths, problem.rows * features, depths * problem.columns
