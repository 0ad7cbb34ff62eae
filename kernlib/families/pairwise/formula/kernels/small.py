"""Reductions of formulas of few features, whose rows lie in registers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from kernlib.families.pairwise.formula.kernels.join import JOIN
from kernlib.families.pairwise.formula.lowering import division
from kernlib.families.pairwise.formula.lowering.kernel import FormulaKernel, reducer_of, results
from kernlib.families.pairwise.formula.lowering.problem import (
    MAX_BATCH_BLOCKS,
    THREADS,
    Problem,
    fixed,
    pointers,
)
from kernlib.families.pairwise.formula.lowering.source import Text, by_size, formula
from kernlib.families.pairwise.formula.spec import MATRIX
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.kernel import Choice, Gpu
from kernlib.lowering.steps import Lowered, Step

WIDTH = 16  # features of a unit that a block has
MOST_FEATURES = 64  # of all loops, which are unrolled
MOST_ROW, MOST_LINE = 48, 96  # registers of a row, and words of a column
# Registers of rows, their sums and a line, from which on some spill: of several rows, and of one.
REGISTERS, MOST_REGISTERS = 96, 116


class Shape(NamedTuple):
    """What a formula takes, for one width of its unit: words of a row, a column and a thread, of
    ``size`` registers each."""

    text: Text
    width: int
    row: int
    line: int
    thread: int
    size: int

    @property
    def fits(self) -> bool:
        held = (self.row + self.thread) * self.size
        return held <= MOST_ROW and self.line <= MOST_LINE and self.registers(1) < MOST_REGISTERS

    def registers(self, rows: int) -> int:
        """Of so many rows with their sums, and of what they share."""
        words = rows * (self.row + 2 * max(1, self.width) + 2)
        return (words + self.thread + self.line) * self.size

    @property
    def rows(self) -> int:
        """Of a thread: each read of a column serves them all."""
        return next((rows for rows in (4, 2) if self.registers(rows) < REGISTERS), 1)


@lru_cache(maxsize=256)
def shape_of(problem: Problem) -> Shape:
    """That of a problem."""
    width = min(problem.features, WIDTH)
    groups = by_size(problem, width)
    text = formula(problem, groups, sums_of_pairs=False)
    row, line, thread = (each.total(groups) for each in (text.row, text.col, text.thread))
    return Shape(text, width, row, line, thread, problem.bytes // 4)


class Small(FormulaKernel):
    """Of formulas whose loops are short, and that read no matrices."""

    name = "small"
    header = "pairwise/formula/small.cuh"
    entry = "formula_small"

    def takes(self, problem: Problem, arch: str) -> bool:
        if problem.spec.reduction == MATRIX or problem.reads_pairs:
            return False
        if sum(problem.sizes) > MOST_FEATURES:
            return False
        return shape_of(problem).fits

    def launch(
        self, subject: Any, problem: Problem, gpu: Gpu, choice: Mapping[str, Any]
    ) -> Lowered:
        shape = shape_of(problem)
        chunks = ceil_div(problem.outputs, shape.width)
        line_bytes = round_up(max(1, shape.line) * problem.bytes, 16)
        slots = (2 * sum(problem.sizes) + 4 + shape.width + 8) * (2 if problem.bytes == 8 else 1)
        work = division.Work(
            problem.rows, division.sums_of(problem), chunks, slots, line_bytes, gpu.multiprocessors,
        )  # fmt: skip
        make = division.cut_ranges if problem.spec.ranged else division.cut
        cut = make(work, shape.rows)
        cut = cut._replace(**{name: value for name, value in choice.items() if name != "kind"})
        splits = ceil_div(max(1, problem.cols), cut.per_split)
        row_blocks = work.row_blocks(cut.rows, cut.partners)
        blocks = division.check_grid(row_blocks * splits * chunks, problem)
        out, indices, workspace = results(problem, splits)
        facts = {
            "Reducer": reducer_of(problem, shape.width),
            "THREADS": THREADS,
            "ROWS": cut.rows,
            "PARTNERS": cut.partners,
            "STAGE": work.stage(cut.partners),
            "CHUNKED": chunks > 1,
        }
        words = [f"rows={cut.rows}", f"partners={cut.partners}"]
        step = Step(
            self.spec_of(problem, shape.text.text, facts, THREADS, 0, words),
            (blocks, min(problem.batch, MAX_BATCH_BLOCKS)),
            fixed(problem, row_blocks, splits, cut.per_split, chunks),
            pointers(problem, out, indices),
            len(problem.scalars),
        )
        if splits == 1:
            return Lowered((step,))
        join = JOIN.step(problem, splits, indices[1] if indices else 0)
        return Lowered((step, join), workspace)

    def choices(self, problem: Problem, arch: str) -> list[Choice]:
        return [{}]
