"""Gradients of a weight of batch-first operands with 2 to 8 l, half types, on Hopper.

The operand of more features is read as it lies. The other one gets each l by itself first
(deinterleave.cuh), and split_k_sum.cuh adds up the parts of the batch, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.kernels.factor.portable import Portable
from kernlib.families.kronecker_sparse.kernels.gradient.weight_gradient import part_of
from kernlib.families.kronecker_sparse.kernels.steps import deinterleave, split_k_sum
from kernlib.families.kronecker_sparse.kernels.steps.deinterleave import Deinterleave
from kernlib.families.kronecker_sparse.kernels.steps.split_k_sum import SplitKSum
from kernlib.families.kronecker_sparse.kernels.steps.transpose import ALIGNMENT
from kernlib.families.kronecker_sparse.lowering import hopper_common
from kernlib.families.kronecker_sparse.lowering.problem import (
    MAX_BLOCKS,
    Layout,
    Problem,
    Scope,
    is_deep,
    is_flat,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.wgmma import multiply

LANES = range(2, 9)
BIAS_LANES = (2,)  # of more there are no registers for the sums of the left operand
TILE_ROWS, TILE_DEPTH = 128, 32
ROW = hopper_common.ROW_BYTES // 2  # elements of a swizzled row
FRAGMENT = 4  # registers of the fragment of one l
MOST_REGISTERS = 204  # of a thread for sums, and for the fragments of a step
MIN_ROWS = 32  # of fewer, most of a tile would be nothing
MOST_TILES = 2  # of columns, each of which reads the left operand; six took longer than transposes
FIXED = Fields((
    "int row_tiles", "int column_tiles",
    "int blocks", "int rows",  # a, b
    "int depth",  # batch
    "int split_depth",  # stages of a split
    "int pitch",
    "u32 tiles",  # of all blocks and splits
))  # fmt: skip
PARAMETERS = Parameters(1, FIXED.format, maps=2)


class InterleavedGradient(Kernel):
    """Sums over parts of the batch of all l together, and their sum."""

    role = "factor"
    name = "interleaved_gradient"
    header = "kronecker_sparse/interleaved_gradient/interleaved_gradient.cuh"
    entry = "kronecker_sparse_interleaved_gradient"
    rank = 1
    reason = (
        "gradients of a weight, batch first with 2 to 8 l of half types, of an operand that is "
        "read as it lies"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        dtype: str
        lanes: int
        columns: int  # of a tile
        bias: bool = False  # whether the left operand is summed too

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether the kernel computes a problem."""
        if arch != hopper_common.ARCH or problem.dtype == "float32" or not is_deep(problem):
            return False
        problem, _ = oriented(problem)
        left, right, d = problem.left, problem.right, problem.lanes
        rows, columns = problem.rows, problem.columns
        if d not in LANES or rows < MIN_ROWS or problem.blocks * d * max(rows, columns) >= 2**31:
            return False
        for side, count in ((left, rows), (right, columns)):
            if not is_flat(problem, count, side.lane, side.line, side.block):
                return False
        for alignment, extent in ((left.alignment, _left(problem)), (16, _right(problem))):
            if not tma.addressable(problem.dtype, alignment, extent):
                return False
        width = columns_of(columns, d)
        most = _tiles(problem, width) * ceil_div(problem.depth, TILE_DEPTH)
        is_counted = most <= hopper_common.MAX_TILES
        is_counted = is_counted and deinterleave.blocks_of(problem) <= MAX_BLOCKS
        return is_counted and ceil_div(columns, width) <= MOST_TILES

    def choices(self, problem: Problem, arch: str) -> list[Choice]:
        """The width of tile."""
        problem, _ = oriented(problem)
        return [{"columns": columns_of(problem.columns, problem.lanes)}]

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launches of a problem. An epilogue needs whole sums: those go to the portable
        kernel."""
        if epilogue:
            return Portable().launch_untuned(epilogue, problem, gpu)
        problem, (left, right) = oriented(problem)
        place = round_up(deinterleave.size(problem), ALIGNMENT)
        inner = self.sums(problem, gpu)
        places = {"left": (left, 0), "h": ("workspace", 0), "workspace": ("workspace", place)}
        steps = (step.placed(places) for step in inner.steps)
        return Lowered((Deinterleave().step(problem, right), *steps), place + inner.workspace)

    def sums(self, problem: Problem, gpu: Gpu, bias: bool = False) -> Lowered:
        """The launches for an oriented problem whose right operand, "h", has each l by itself, as
        :func:`deinterleave.layout` says: its sums, and the sum of splits. With ``bias`` that of the
        left operand over the batch is a result too, (blocks, rows, lanes)."""
        columns = columns_of(problem.columns, problem.lanes)
        tiles, stages = _tiles(problem, columns), ceil_div(problem.depth, TILE_DEPTH)
        part = part_of(stages, tiles, gpu.multiprocessors)
        parts = ceil_div(stages, part)
        partial, one = split_k_sum.layout(problem, bias)
        fixed = FIXED.values(
            row_tiles=ceil_div(problem.rows, TILE_ROWS),
            column_tiles=ceil_div(problem.columns, columns),
            blocks=problem.blocks,
            rows=problem.rows,
            depth=problem.depth,
            split_depth=part,
            pitch=partial.row,
            tiles=tiles * parts,
        )
        main = Step(
            self.spec((), self.Variant(problem.dtype, problem.lanes, columns, bias), gpu.arch),
            (min(gpu.multiprocessors, tiles * parts), 1),
            PARAMETERS.pack(*fixed),
            (("left", 0), ("h", 0), ("workspace", 0)),
            maps=_maps(problem),
            overlaps=True,
        )
        of_parts = SplitKSum().step(problem, partial, one, parts, bias)
        return Lowered((main, of_parts), 4 * one * parts)

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """Of weights of b x c blocks, of products of few rows and of their gradients by x."""
        *counts, d = scope.sizes
        is_so = scope.arch == hopper_common.ARCH and d in LANES and not epilogue
        return {
            "dtype": scope.halves if is_so else [],
            "lanes": [d],
            "columns": {columns_of(count, d) for count in counts} if is_so else [],
            "bias": (False, True) if d in BIAS_LANES else (False,),
        }

    def specs(self, epilogue: tuple[Epilogue, ...], scope: Scope, arch: str) -> list[KernelSpec]:
        """The specifications of all variants, and of the launches before and behind them."""
        specs = super().specs(epilogue, scope, arch)
        for dtype, lanes, _, bias in self.variants(epilogue, scope):
            specs.append(Deinterleave().spec((), Deinterleave.Variant(dtype, lanes)))
            specs.append(SplitKSum().spec((), SplitKSum.Variant(dtype, bias)))
        return list(dict.fromkeys(specs))

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, lanes, columns, bias = variant
        stages, shared = shared_memory(variant)
        words = [f"{TILE_ROWS}x{columns}x{lanes}", *["bias"] * bias]
        facts = {
            "InputT": DTYPES[dtype].cuda,
            "LANES": lanes,
            "TILE_COLUMNS": columns,
            "STAGES": stages,
            "BIAS": bias,
            "PARAMETER_BYTES": PARAMETERS.size,
        }
        texts = FIXED.text(), multiply(dtype, columns, True, right_lines=True)
        source = self.source(facts, *texts, includes=hopper_common.INCLUDES)
        return self.named_spec(source, hopper_common.THREADS, shared, dtype, words)


def columns_of(count: int, lanes: int) -> int:
    """The tile that holds all columns, else the one that pads them least."""
    most = (MOST_REGISTERS // lanes - FRAGMENT) * 2 // 8 * 8
    if count <= most:
        return round_up(count, 8)
    return round_up(ceil_div(count, ceil_div(count, most)), 8)


def oriented(problem: Problem) -> tuple[Problem, tuple[str, str]]:
    """The problem with the operand of more features on its left, and the operands' names."""
    if problem.rows >= problem.columns:
        return problem, ("left", "right")
    out = problem.out._replace(row=problem.out.column, column=problem.out.row)
    turned = problem._replace(
        rows=problem.columns, columns=problem.rows, left=problem.right, right=problem.left, out=out
    )
    return turned, ("right", "left")


def _tiles(problem: Problem, columns: int) -> int:
    """Tiles of the whole depth."""
    tiles = ceil_div(problem.rows, TILE_ROWS) * ceil_div(problem.columns, columns)
    return problem.blocks * tiles


def _left(problem: Problem) -> tma.Extent:
    left = problem.left
    sizes = (problem.rows * problem.lanes, problem.blocks, problem.depth, 1)
    return tma.Extent(sizes, (left.block, left.depth, 0))


def _right(problem: Problem) -> tma.Extent:
    right: Layout = deinterleave.layout(problem)
    sizes = (problem.columns, problem.lanes, problem.depth, problem.blocks)
    return tma.Extent(sizes, (right.lane, right.depth, right.block))


def _maps(problem: Problem) -> tuple[tma.TensorMap, ...]:
    boxes = (_left(problem), TILE_DEPTH), (_right(problem), TILE_DEPTH)
    return hopper_common.maps(problem.dtype, *boxes)


def shared_memory(variant: InterleavedGradient.Variant) -> tuple[int, int]:
    """Stages that fit, and bytes of all."""
    boxes = TILE_ROWS * variant.lanes // ROW + variant.lanes * ceil_div(variant.columns, ROW)
    return hopper_common.stages(0, boxes * TILE_DEPTH * hopper_common.ROW_BYTES)
