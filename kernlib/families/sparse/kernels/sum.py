"""The launch behind a product whose columns were divided: sums of parts, added up in order."""

from __future__ import annotations

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.kernels.base import PartialSums
from kernlib.families.sparse.lowering.problem import Problem
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Step


class Sum(PartialSums):
    """Adds up float32 sums [part][n][row], a thread a row."""

    name = "sum"
    header = "sparse/sum.cuh"
    entry = "sparse_sum"
    reason = "parts of sums that blocks have left, added up in one order"
    fixed = Fields((
        "i64 rows", "i64 part_stride", "i64 out_vector_stride", "i64 out_row_stride",
        "int columns", "int parts",
    ))  # fmt: skip
    threads = 128

    def step(
        self,
        epilogue: tuple[Epilogue, ...],
        problem: Problem,
        arch: str,
        parts: int,
        begin: int = 0,
    ) -> Step:
        """Adds up ``parts`` sums, which begin at a byte of the workspace."""
        step = self.step_of(
            epilogue,
            problem,
            self.Variant(problem.dtype),
            arch,
            (ceil_div(problem.rows, self.threads), min(problem.columns, 65535)),
            part_stride=problem.columns * problem.rows,
            parts=parts,
        )
        return step.placed({WORKSPACE: (WORKSPACE, begin)})
