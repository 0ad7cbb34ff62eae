"""Gradients of a weight of batch-first operands with 2 to 8 l, half types, by the kernel of
kernel_sources/kronecker_sparse/interleaved_gradient/interleaved_gradient.cuh.

It reads the operand of more features as it lies. The other one gets each l by itself first
(deinterleave.cuh), and split_k_sum.cuh adds up the parts of the batch, in order.
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.lowering import (
    deinterleave,
    hopper_common,
    portable,
    transpose,
    weight_gradient,
)
from kernlib.families.kronecker_sparse.lowering.problem import (
    MAX_BLOCKS,
    Layout,
    Problem,
    is_deep,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.choice import Choice
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.wgmma import multiply

KIND = "interleaved_gradient"
LANES = range(2, 9)
BIAS_LANES = (2,)  # of more there are no registers for the sums of the left operand
TILE_ROWS, TILE_DEPTH = 128, 32
ROW = hopper_common.ROW_BYTES // 2  # elements of a swizzled row
FRAGMENT = 4  # registers of the fragment of one l
MOST_REGISTERS = 204  # of a thread for sums, and for the fragments of a step
MIN_ROWS = 32  # of fewer, most of a tile would be nothing
MOST_TILES = 2  # of columns, each of which reads the left operand; six took longer than transposes
PARAMETERS = Parameters(1, "<7iI", maps=2)


class Variant(NamedTuple):
    """Everything that code generation chooses."""

    dtype: str
    lanes: int
    columns: int  # of a tile
    bias: bool = False  # whether the left operand is summed too


def candidates(problem: Problem, arch: str) -> list[Choice]:
    """The width of tile for a problem, none if it is not one of this kernel's."""
    if arch != hopper_common.ARCH or problem.dtype == "float32" or not is_deep(problem):
        return []
    problem, _ = oriented(problem)
    if problem.lanes not in LANES or problem.rows < MIN_ROWS:
        return []
    left, right, d = problem.left, problem.right, problem.lanes
    is_flat = transpose.is_flat(problem, problem.rows, left.lane, left.line, left.block)
    is_flat = is_flat and transpose.is_flat(
        problem, problem.columns, right.lane, right.line, right.block
    )
    if not is_flat or problem.blocks * d * max(problem.rows, problem.columns) >= 2**31:
        return []
    if not tma.addressable(problem.dtype, left.alignment, _left(problem)):
        return []
    if not tma.addressable(problem.dtype, 16, _right(problem)):
        return []
    columns = columns_of(problem.columns, d)
    if ceil_div(problem.columns, columns) > MOST_TILES:
        return []
    most = _tiles(problem, columns) * ceil_div(problem.depth, TILE_DEPTH)
    is_counted = most <= hopper_common.MAX_TILES and deinterleave.blocks_of(problem) <= MAX_BLOCKS
    return [{"columns": columns}] if is_counted else []


default = hopper_common.default


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    arch: str,
    multiprocessors: int,
    choice: Choice,
) -> Lowered:
    """The launches of a call. An epilogue needs whole sums: those go to the portable kernel."""
    if epilogue:
        return portable.lower_untuned(epilogue, problem, arch, multiprocessors)
    problem, (left, right) = oriented(problem)
    place = round_up(deinterleave.size(problem), transpose.ALIGNMENT)
    inner = launches(problem, multiprocessors)
    places = {"left": (left, 0), "h": ("workspace", 0), "workspace": ("workspace", place)}
    steps = deinterleave.step(problem, right), *(each.placed(places) for each in inner.steps)
    return Lowered(steps, place + inner.workspace)


def launches(problem: Problem, multiprocessors: int, bias: bool = False) -> Lowered:
    """The launches for an oriented problem whose right operand, "h", has each l by itself, as
    :func:`deinterleave.layout` says: its sums, and the sum of splits. With ``bias`` that of the
    left operand over the batch is a result too, (blocks, rows, lanes)."""
    columns = columns_of(problem.columns, problem.lanes)
    row_tiles, column_tiles = ceil_div(problem.rows, TILE_ROWS), ceil_div(problem.columns, columns)
    tiles, stages = _tiles(problem, columns), ceil_div(problem.depth, TILE_DEPTH)
    part = weight_gradient.part_of(stages, tiles, multiprocessors)
    parts = ceil_div(stages, part)
    partial, one = portable.partial_layout(problem, bias)
    fixed = PARAMETERS.pack(
        row_tiles, column_tiles, problem.blocks, problem.rows, problem.depth, part,
        partial.row, tiles * parts,
    )  # fmt: skip
    main = Step(
        spec(Variant(problem.dtype, problem.lanes, columns, bias)),
        (min(multiprocessors, tiles * parts), 1),
        fixed,
        (("left", 0), ("h", 0), ("workspace", 0)),
        maps=_maps(problem),
        overlaps=True,
    )
    return Lowered(
        (main, portable.reduce_step(problem, partial, one, parts, bias)), 4 * one * parts
    )


def variants(
    epilogues: list[tuple[Epilogue, ...]], sizes: tuple[int, int, int], arch: str, kinds: list
) -> list[KernelSpec]:
    """Every spec that :func:`launches` can choose for the gradients of weights of b x c blocks (b,
    c and d are ``sizes``), for products of few rows and their gradients by x, and ``kinds`` of
    numbers: (dtype, precision)."""
    *counts, d = sizes
    if arch != hopper_common.ARCH or d not in LANES:
        return []
    halves = [dtype for dtype, _ in kinds if dtype != "float32"]
    specs = [
        spec(Variant(dtype, d, columns_of(n, d), bias))
        for dtype in halves
        for n in counts
        for bias in {False, d in BIAS_LANES}
    ]
    others = [
        each
        for dtype in halves
        for each in (
            deinterleave.spec(dtype, d),
            *(portable.reduce_spec(dtype, bias) for bias in {False, d in BIAS_LANES}),
        )
    ]
    return list(dict.fromkeys(specs + others))


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
    box = (ROW, 1, TILE_DEPTH, 1)
    return tuple(
        tma.tensor_map(problem.dtype, extent, box) for extent in (_left(problem), _right(problem))
    )


def shared_memory(variant: Variant) -> tuple[int, int]:
    """Stages that fit, and bytes of all."""
    boxes = TILE_ROWS * variant.lanes // ROW + variant.lanes * ceil_div(variant.columns, ROW)
    return hopper_common.stages(0, boxes * TILE_DEPTH * hopper_common.ROW_BYTES)


def spec(variant: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    dtype, lanes, columns, bias = variant
    stages, shared = shared_memory(variant)
    words = [f"{TILE_ROWS}x{columns}x{lanes}", *["bias"] * bias]
    result = KernelSpec(
        "kronecker_sparse",
        _source(variant, stages),
        "kronecker_sparse_interleaved_gradient",
        hopper_common.THREADS,
        shared,
        description=text.describe("kronecker_sparse", KIND, dtype, "fp32", words, ()),
    )
    return named(result, dtype, *words)


def _source(variant: Variant, stages: int) -> str:
    """The generated CUDA text: types, a few constants, the wgmma, one include."""
    dtype, lanes, columns, bias = variant
    return f"""#include "common/types.cuh"

using InputT = {DTYPES[dtype].cuda};

constexpr int LANES = {lanes};
constexpr int TILE_COLUMNS = {columns};
constexpr int STAGES = {stages};
constexpr bool BIAS = {str(bias).lower()};
constexpr int PARAMETER_BYTES = {PARAMETERS.size};

#include "common/hopper.cuh"
{multiply(dtype, columns, True, right_lines=True)}
#include "kronecker_sparse/interleaved_gradient/interleaved_gradient.cuh"
"""
