"""The kernel sum.cuh of kernel_sources/kronecker_product/gradients: gradients of factors from the
parts that blocks have made."""

from __future__ import annotations

from kernlib.families.kronecker_product.lowering.gradient_variant import Variant
from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.families.kronecker_product.lowering.variant import GRID_BATCH
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Step
from kernlib.records import NamedTuple

LANES, GROUPS, MOST_MERGED = 32, 16, 256  # as in sum.cuh
FACTOR, MATRIX = "6q2I", "2q6I"


class Matrix(NamedTuple):
    """What struct Matrix of sum.cuh holds, without its first block: where its sums begin in a part,
    the entries of a part, how many parts there are, the matrix's rows and columns, and the first
    and the number of the factors that it is the product of."""

    at: int
    entries: int
    parts: int
    rows: int
    columns: int
    first: int
    factors: int

    @property
    def blocks(self) -> int:
        """One, where the factors need all sums."""
        return 1 if self.factors > 1 else ceil_div(self.rows * self.columns, LANES)


def matrices(made: Variant, first: int, begin: int, count: int) -> list[Matrix]:
    """Those of a run, whose factors are those from ``first`` on, and whose ``count`` parts of a
    sum begin at an element."""
    found, at = [], begin
    for mode in made.modes:
        own = (mode.rows, mode.columns, first + mode.first, mode.parts)
        found.append(Matrix(at, made.entries, count, *own))
        at += mode.rows * mode.columns
    return found


def step(
    problem: Problem,
    turned: tuple[bool, ...],
    is_one_sum: bool,
    found: list[Matrix],
    workspace: tuple[str, int],
) -> Step:
    """The launch that adds up all parts. Gradients are contiguous, (batch, rows, columns) or, of
    factors that a call is given the transpose of, (batch, columns, rows)."""
    numbers: list[int] = []
    for factor, flag in zip(problem.factors, turned, strict=True):
        across = (1, factor.rows) if flag else (factor.columns, 1)
        strides = factor.row_stride, factor.column_stride, factor.batch_stride
        whole = factor.rows * factor.columns
        numbers += [*strides, *across, whole, factor.rows, factor.columns]
    blocks = 0
    for matrix in found:
        numbers += [*matrix, blocks]
        blocks += matrix.blocks
    batch = 1 if is_one_sum else problem.batch
    count = len(problem.factors)
    fixed = _parameters(count, len(found)).pack(*numbers, batch)
    names = [(f"{kind}{index}", 0) for kind in ("to_factor", "factor") for index in range(count)]
    kernel = spec(problem.dtype, count, len(found))
    return Step(kernel, (blocks, min(batch, GRID_BATCH)), fixed, (workspace, *names))


def _parameters(factors: int, matrices: int) -> Parameters:
    fixed = f"<{FACTOR * factors}{MATRIX * matrices}q"
    return Parameters(1 + 2 * factors, fixed)


def spec(dtype: str, factors: int, matrices: int) -> KernelSpec:
    """The KernelSpec of a sum for so many factors, which are so many matrices."""
    sums = DTYPES[dtype].sums
    source = f"""#include "common/types.cuh"

using InputT = {DTYPES[dtype].cuda};
using AccT = {sums.cuda};

constexpr int FACTORS = {factors};
constexpr int MATRICES = {matrices};
constexpr int PARAMETER_BYTES = {_parameters(factors, matrices).size};

#include "kronecker_product/gradients/sum.cuh"
"""
    words = f"{factors} of {matrices}"
    made = KernelSpec(
        "kronecker_product",
        source,
        "kronecker_product_sum",
        LANES * GROUPS,
        sums.bytes * (LANES * GROUPS + MOST_MERGED),
        description=f"kronecker_product sum {dtype} {words}",
    )
    return named(made, dtype, words)
