"""The kernel slices/reduce.cuh of kernel_sources/sparse: panels of products with the formats u8,
u4 and u2, added up in their order."""

from __future__ import annotations

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.kernels.base import PartialSums
from kernlib.families.sparse.lowering.codes import grid
from kernlib.families.sparse.lowering.problem import Problem
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import Step

ROWS = 32  # of a block


class Reduce(PartialSums):
    """Adds up float32 sums [panel][n][row]."""

    name = "sum of panels"
    header = "sparse/slices/reduce.cuh"
    entry = "sparse_slices_reduce"
    reason = "panels of `slices`, added up in one order"
    fixed = Fields((
        "i64 out_column_stride", "i64 out_row_stride",
        "u32 panels", "u32 rows", "u32 columns", "u32 unused",
    ))  # fmt: skip
    threads = 256

    def step(self, epilogue: tuple[Epilogue, ...], problem: Problem, arch: str) -> Step:
        """The launch behind that of a problem."""
        panels, _ = grid((problem.rows, problem.cols), problem.fact("width"))
        blocks = ceil_div(problem.rows, ROWS), problem.columns
        variant = self.Variant(problem.dtype)
        return self.step_of(epilogue, problem, variant, arch, blocks, panels=panels)
