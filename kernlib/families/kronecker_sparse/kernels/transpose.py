"""Matrices turned over; and gradients of a weight of batch-first operands with d > 1, turned to
batch last, then summed by another kernel.

A turn costs a read and a write of both operands. Summed as they are, features d apart and batches a
row apart would each be a 32-byte sector. The kind `transposed` has its launches from here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.kernels.portable import Portable
from kernlib.families.kronecker_sparse.kernels.weight_gradient import WeightGradient
from kernlib.families.kronecker_sparse.lowering.problem import (
    MAX_BLOCKS,
    Layout,
    Problem,
    Scope,
    is_deep,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

THREADS = 256
TILE = 64
ALIGNMENT = 256  # of each operand in the workspace
FIXED = Fields((
    "i64 row_stride", "i64 pitch",  # of in and of out
    "u32 rows", "u32 columns",  # n and f
    "u32 column_tiles",
    "u32 vectors",  # whether rows of in take aligned 16-byte loads
    "u32 whole",  # whether lines of out take aligned 16-byte stores
    "u32 unused",
))  # fmt: skip


class Transpose(Kernel):
    """Turns a matrix and, if it is to, adds up its rows by tiles."""

    role = "step"
    name = "turn"
    header = "kronecker_sparse/transpose.cuh"
    entry = "kronecker_sparse_transpose"
    reason = (
        "x turned to batch last, or the result back: the product between them is `hopper`'s, "
        "chosen where a model of times says that this is fastest"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        dtype: str
        bias: bool = False

    def step(
        self,
        dtype: str,
        sizes: tuple[int, int],
        strides: tuple[int, int],
        alignment: int,
        pointers: tuple[tuple[str, int], ...],
        whole: bool = True,
        bias: bool = False,
    ) -> Step:
        """The launch that turns ``sizes``, rows and columns, at the first of ``pointers`` to
        columns and rows at the second: rows and turned columns lie ``strides`` elements apart. The
        first row begins at ``alignment`` modulo 16; turned columns take ``whole`` 16 bytes,
        aligned, of which the last may end in zeros, or lie anywhere, and nothing behind them is
        written. With ``bias`` a third pointer gets the sums of TILE rows each, in float32."""
        rows, columns = sizes
        row_stride, pitch = strides
        chunk = 16 // DTYPES[dtype].bytes
        tiles = ceil_div(columns, TILE), ceil_div(rows, TILE)
        fixed = FIXED.pack(
            row_stride=row_stride,
            pitch=pitch,
            rows=rows,
            columns=columns,
            column_tiles=tiles[0],
            vectors=row_stride % chunk == 0 and alignment % 16 == 0,
            whole=whole,
            unused=0,
        )
        spec = self.spec((), Transpose.Variant(dtype, bias))
        return Step(spec, (tiles[0] * tiles[1], 1), fixed, pointers)

    def axes(self, subject: tuple, scope: Scope) -> Mapping[str, Iterable]:
        """Without sums."""
        return {"dtype": scope.dtypes, "bias": (False,)}

    def spec(self, subject: tuple, variant: Variant, arch: str = "") -> KernelSpec:
        """The specification of a variant, of half types if it sums rows too."""
        dtype, bias = variant
        facts = {
            "InputT": DTYPES[dtype].cuda,
            "HALF_INPUT": dtype != "float32",
            "BIAS": bias,
            "PARAMETER_BYTES": Parameters(2 + bias, FIXED.format).size,
        }
        source = self.source(facts, FIXED.text())
        return Transpose().named_spec(source, THREADS, 0, dtype, ["bias"] * bias)


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


def is_flat(problem: Problem, count: int, lane: int, near: int, block: int) -> bool:
    """Whether features (i, j, l), ``count`` of j and with these strides of l, j and i, lie side by
    side."""
    d = problem.lanes
    return (
        (lane == 1 or d == 1)
        and (near == d or count == 1)
        and (block == d * count or problem.blocks == 1)
    )


def _inner(problem: Problem, arch: str) -> Kernel:
    """What sums a turned problem."""
    return WeightGradient() if WeightGradient().takes(problem, arch) else Portable()


def pitch(dtype: str, count: int) -> int:
    """From one turned line of ``count`` elements to the next: whole chunks of 16 bytes."""
    chunk = 16 // DTYPES[dtype].bytes
    return round_up(count, chunk)


def size(dtype: str, lines: int, count: int) -> int:
    """Workspace of turned lines of ``count`` elements each, in bytes."""
    return ceil_div(lines * pitch(dtype, count) * DTYPES[dtype].bytes, ALIGNMENT) * ALIGNMENT


def transposed_problem(problem: Problem) -> Problem:
    """The problem over operands in the workspace, where the depth is contiguous."""
    d, apart = problem.lanes, pitch(problem.dtype, problem.depth)

    def side(count: int) -> Layout:
        return Layout(count * d * apart, apart, d * apart, 1, 16, True)

    return problem._replace(left=side(problem.rows), right=side(problem.columns))
