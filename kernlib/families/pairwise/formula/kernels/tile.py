"""Reductions of formulas of any number of features, by tiles of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernlib.families.pairwise.formula.kernels.join import JOIN
from kernlib.families.pairwise.formula.lowering import division, patch
from kernlib.families.pairwise.formula.lowering.kernel import FormulaKernel, reducer_of, results
from kernlib.families.pairwise.formula.lowering.problem import (
    MAX_BATCH_BLOCKS,
    THREADS,
    Problem,
    fixed,
    pointers,
)
from kernlib.families.pairwise.formula.spec import MATRIX
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.division import split
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import Lowered, Step


class Tile(FormulaKernel):
    """Of all formulas."""

    name = "tile"
    header = "pairwise/formula/tile.cuh"
    entry = "formula_tile"
    rank = 1

    def takes(self, problem: Problem, arch: str) -> bool:
        return problem.spec.reduction != MATRIX

    def launch(
        self, subject: Any, problem: Problem, gpu: Gpu, choice: Mapping[str, Any]
    ) -> Lowered:
        shape = patch.tile(problem, gpu.arch)
        chunks = ceil_div(problem.outputs, patch.LANES * shape.span) if shape.span else 1
        row_blocks = patch.row_blocks(problem, shape)
        slots = gpu.multiprocessors * shape.resident
        per_split = split(division.sums_of(problem), row_blocks * chunks, shape.tile, slots)
        splits = ceil_div(max(1, problem.cols), per_split)
        blocks = division.check_grid(row_blocks * splits * chunks, problem)
        out, indices, workspace = results(problem, splits)
        facts = {
            "SIDE": shape.side,
            "SPAN": shape.span,
            "RESIDENT": shape.resident,
            "Reducer": "RowSum" if shape.span else reducer_of(problem, 0),
        }
        words = [f"tile={shape.tile}", *[f"span={shape.span}"] * bool(shape.span)]
        step = Step(
            self.spec_of(problem, shape.text.text, facts, THREADS, shape.shared, words),
            (blocks, min(problem.batch, MAX_BATCH_BLOCKS)),
            fixed(problem, row_blocks, splits, per_split, chunks),
            pointers(problem, out, indices),
            len(problem.scalars),
        )
        if splits == 1:
            return Lowered((step,))
        join = JOIN.step(problem, splits, indices[1] if indices else 0)
        return Lowered((step, join), workspace)
