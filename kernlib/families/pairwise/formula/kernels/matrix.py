"""A formula's values of all pairs, stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernlib.families.pairwise.formula.lowering import division, patch
from kernlib.families.pairwise.formula.lowering.kernel import FormulaKernel
from kernlib.families.pairwise.formula.lowering.problem import (
    MAX_BATCH_BLOCKS,
    THREADS,
    Problem,
    fixed,
    pointers,
)
from kernlib.families.pairwise.formula.spec import MATRIX
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import Lowered, Step


class Matrix(FormulaKernel):
    """Of any number of features."""

    name = "matrix"
    header = "pairwise/formula/matrix.cuh"
    entry = "formula_matrix"

    def takes(self, problem: Problem, arch: str) -> bool:
        return problem.spec.reduction == MATRIX

    def launch(
        self, subject: Any, problem: Problem, gpu: Gpu, choice: Mapping[str, Any]
    ) -> Lowered:
        if not problem.cols:
            return Lowered(())
        shape = patch.matrix(problem, gpu.arch)
        down, across = ceil_div(problem.rows, shape.tile), ceil_div(problem.cols, shape.tile)
        facts = {"SIDE": shape.side, "RESIDENT": shape.resident}
        step = Step(
            self.spec_of(
                problem, shape.text.text, facts, THREADS, shape.shared, [f"tile={shape.tile}"]
            ),
            (division.check_grid(down * across, problem), min(problem.batch, MAX_BATCH_BLOCKS)),
            fixed(problem, down, across),
            pointers(problem, ("out", 0), None),
            len(problem.scalars),
        )
        return Lowered((step,))
