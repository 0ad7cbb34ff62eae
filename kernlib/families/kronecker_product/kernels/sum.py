"""Gradients of factors from the parts that blocks of the kernel of gradients have summed."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.kronecker_product.lowering.parameters import GRID_BATCH
from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Step

LANES, GROUPS, MOST_MERGED = 32, 16, 256  # as in sum.cuh
FACTOR = Fields((  # as it is applied, rows x columns; and its gradient
    "i64 row_stride", "i64 column_stride", "i64 batch_stride",
    "i64 to_row_stride", "i64 to_column_stride", "i64 to_batch_stride",
    "u32 rows", "u32 columns",
))  # fmt: skip
MATRIX = Fields((
    "i64 at",  # elements behind the first part of the launch that made them, where a part begins
    "i64 entries",  # of a part
    "u32 parts", "u32 rows", "u32 columns",
    "u32 first", "u32 factors",  # that it is the product of
    "u32 block",  # where its blocks begin
))  # fmt: skip


class Matrix(NamedTuple):
    """The members of MATRIX but the last: where its sums begin in a part, the entries of a part,
    how many parts there are, the matrix's rows and columns, and the first and the number of the
    factors that it is the product of."""

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


class Sum(Kernel):
    """A block for 32 entries, or for a matrix of several factors."""

    role = "step"
    name = "sum"
    header = "kronecker_product/gradients/sum.cuh"
    entry = "kronecker_product_sum"
    reason = "what blocks have summed of gradients, in one order"

    class Variant(NamedTuple):
        """A dtype, and how many factors and matrices there are."""

        dtype: str
        factors: int
        matrices: int

    def spec(self, subject: None, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, factors, matrices = variant
        sums, words = DTYPES[dtype].sums, f"{factors} of {matrices}"
        facts = {
            "InputT": DTYPES[dtype].cuda,
            "AccT": sums.cuda,
            "FACTORS": factors,
            "MATRICES": matrices,
            "PARAMETER_BYTES": Parameters(1 + 2 * factors, _fixed(factors, matrices).format).size,
        }
        texts = FACTOR.text("Factor"), MATRIX.text("Matrix"), _fixed(factors, matrices).text()
        threads, source = LANES * GROUPS, self.source(facts, *texts)
        shared = sums.bytes * (threads + MOST_MERGED)
        return self.named_spec(source, threads, shared, dtype, [words])

    def step(
        self,
        problem: Problem,
        turned: tuple[bool, ...],
        is_one_sum: bool,
        matrices: list[Matrix],
        workspace: tuple[str, int],
    ) -> Step:
        """The launch that adds up all parts. Gradients are contiguous, (batch, rows, columns) or,
        of factors that a call is given the transpose of, (batch, columns, rows)."""
        shapes: list[int] = []
        for factor, flag in zip(problem.factors, turned, strict=True):
            across = (1, factor.rows) if flag else (factor.columns, 1)
            shapes += FACTOR.values(
                row_stride=factor.row_stride,
                column_stride=factor.column_stride,
                batch_stride=factor.batch_stride,
                to_row_stride=across[0],
                to_column_stride=across[1],
                to_batch_stride=factor.rows * factor.columns,
                rows=factor.rows,
                columns=factor.columns,
            )
        numbers, blocks = [], 0
        for matrix in matrices:
            numbers += MATRIX.values(**matrix._asdict(), block=blocks)
            blocks += matrix.blocks
        count, batches = len(problem.factors), 1 if is_one_sum else problem.batch
        fixed = _fixed(count, len(matrices)).pack(shapes=shapes, matrices=numbers, batches=batches)
        names = [(f"{kind}{i}", 0) for kind in ("to_factor", "factor") for i in range(count)]
        spec = self.spec(None, self.Variant(problem.dtype, count, len(matrices)), "")
        return Step(spec, (blocks, min(batches, GRID_BATCH)), fixed, (workspace, *names))


def _fixed(factors: int, matrices: int) -> Fields:
    members = f"Factor shapes[{factors}]", f"Matrix matrices[{matrices}]", "i64 batches"
    return Fields(members, {"Factor": FACTOR, "Matrix": MATRIX})


SUM = Sum()
