"""Gradients of a weight of batch-first operands with d > 1, turned to batch last, then summed by
another kernel.

A turn costs a read and a write of both operands. Summed as they are, features d apart and batches a
row apart would each be a 32-byte sector.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.kernels.factor.portable import Portable
from kernlib.families.kronecker_sparse.kernels.gradient.weight_gradient import WeightGradient
from kernlib.families.kronecker_sparse.kernels.steps.transpose import TILE, Transpose, pitch, size
from kernlib.families.kronecker_sparse.lowering.problem import (
    MAX_BLOCKS,
    Layout,
    Problem,
    is_deep,
    is_flat,
)
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.steps import WORKSPACE, Lowered, Step


class Turned(Transpose):
    """Both operands turned into the workspace, and what sums them there."""

    role = "factor"
    name = "turned"
    rank = 2

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether it is a problem to turn."""
        return is_deep(problem) and _is_batch_first(problem)

    def choices(self, problem: Problem, arch: str) -> list[Choice]:
        """What sums the turned problem."""
        inner = transposed_problem(problem)
        return _inner(inner, arch).choices(inner, arch)

    def default(self, problem: Problem, gpu: Gpu) -> Choice:
        """Of these the one taken untuned."""
        inner = transposed_problem(problem)
        return _inner(inner, gpu.arch).default(inner, gpu)

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launches of a problem."""
        turned = transposed_problem(problem)
        inner = _inner(turned, gpu.arch).launch(epilogue, turned, gpu, choice)
        left, right = (
            size(problem.dtype, problem.blocks * count * problem.lanes, problem.depth)
            for count in (problem.rows, problem.columns)
        )
        starts = {"left": 0, "right": left, "workspace": left + right}
        places = {name: (WORKSPACE, start) for name, start in starts.items()}
        turns = [
            self._turn(problem, "left", problem.left, problem.rows, 0),
            self._turn(problem, "right", problem.right, problem.columns, left),
        ]
        steps = [step.placed(places) for step in inner.steps]
        return Lowered((*turns, *steps), left + right + inner.workspace)

    def _turn(self, problem: Problem, name: str, side: Layout, count: int, place: int) -> Step:
        """The launch that turns an operand of ``count`` lines a group."""
        sizes = problem.depth, problem.blocks * count * problem.lanes
        strides = side.depth, pitch(problem.dtype, problem.depth)
        pointers = (name, 0), ("workspace", place)
        return self.step(problem.dtype, sizes, strides, side.alignment, pointers)


def _is_batch_first(problem: Problem) -> bool:
    """Whether both operands are rows of features (i, j, l) without gaps."""
    d = problem.lanes
    sides = ((problem.left, problem.rows), (problem.right, problem.columns))
    return d > 1 and all(
        is_flat(problem, count, side.lane, side.line, side.block)
        and problem.blocks * d * count < 2**31
        and ceil_div(problem.blocks * d * count, TILE) * ceil_div(problem.depth, TILE) <= MAX_BLOCKS
        for side, count in sides
    )


def _inner(problem: Problem, arch: str) -> Kernel:
    """What sums a turned problem."""
    return WeightGradient() if WeightGradient().takes(problem, arch) else Portable()


def transposed_problem(problem: Problem) -> Problem:
    """The problem over operands in the workspace, where the depth is contiguous."""
    d, apart = problem.lanes, pitch(problem.dtype, problem.depth)

    def side(count: int) -> Layout:
        return Layout(count * d * apart, apart, d * apart, 1, 16, True)

    return problem._replace(left=side(problem.rows), right=side(problem.columns))
