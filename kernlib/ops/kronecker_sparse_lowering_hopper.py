"""The kernel of kernel_sources/kronecker_sparse/hopper.cuh: batch last, and batch first with d = 1.

The copy engine wants strides of whole 16 bytes; other layouts go to the portable kernel.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.ops import kronecker_sparse_lowering_pack as packing
from kernlib.ops import kronecker_sparse_lowering_source as text
from kernlib.ops import kronecker_sparse_lowering_wgmma as wgmma
from kernlib.ops.kronecker_sparse_lowering_problem import (
    TYPES,
    Choice,
    Lowered,
    Problem,
    Step,
    ceil,
)
from kernlib.tensor_map import TensorMap

KIND = "hopper"
TILE_ROWS = 128
FIXED = "<10i"  # struct Fixed
# Columns of a tile: accumulators are half as many a thread; fp32 keeps two sets of them.
COLUMNS = {"half": (16, 32, 48, 64, 96, 128, 192, 256), "float": (16, 32, 48, 64, 96, 128)}
RESIDENT = (1, 2, 4)  # blocks of a weight along its depth that may stay in shared memory
RESIDENT_BYTES = 96 * 1024
# wgmma's eight depths in this order leave batch-last fp32 without bank conflicts (multiply.cuh).
BATCH_LAST_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    precision: str
    batch_last: bool
    columns: int
    resident: int  # blocks; 0 where the weight moves with x
    packed: bool


class Sizes(NamedTuple):
    """Shared memory of a variant."""

    stages: int
    out_buffers: int
    shared_bytes: int


def candidates(problem: Problem, arch: str) -> list[Choice]:
    """The widths of tile for a problem, none if it is not one of this kernel's."""
    if arch != wgmma.ARCH or _batch_last(problem) is None:
        return []
    return [{"columns": columns} for columns in _columns(problem.dtype, problem.columns)]


def default(problem: Problem, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned."""
    return known[0]


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    arch: str,
    multiprocessors: int,
    choice: Choice,
) -> Lowered:
    """The launches of a call with the columns of ``choice``, one of :func:`candidates`."""
    variant = _variant(problem, int(choice["columns"]))
    packed = _packing(variant)
    row_tiles, column_tiles = ceil(problem.rows, TILE_ROWS), packed.tiles(problem)
    tiles = row_tiles * column_tiles * problem.blocks * problem.lanes
    extents = (problem.blocks, problem.lanes, problem.rows, problem.columns, problem.depth)
    sizes = (row_tiles, column_tiles, *extents, 0, 0, tiles)
    maps, pointers = _maps(problem, variant)
    names = tuple((f"vector{k}", 0) for k in range(len(text.vectors(epilogue))))
    main = Step(
        spec(epilogue, variant),
        (min(multiprocessors, tiles), 1),
        _padded(struct.pack(FIXED, *sizes), epilogue, variant),
        (*pointers, *names),
        text.scalar_count(epilogue),
        maps,
    )
    if not variant.packed:
        return Lowered((main,))
    return Lowered((packing.step(problem, packed), main), packed.workspace(problem))


def specs(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, choice: Choice
) -> list[KernelSpec]:
    """The specs that :func:`lower` takes for a choice."""
    variant = _variant(problem, int(choice["columns"]))
    return [packing.spec(_packing(variant))] * variant.packed + [spec(epilogue, variant)]


def variants(
    epilogues: list[tuple[Epilogue, ...]], sizes: tuple[int, int], arch: str, kinds: list
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for products of b x c blocks, ``sizes``, and by x of
    their gradients, and ``kinds`` of numbers: (dtype, precision)."""
    if arch != wgmma.ARCH:
        return []
    made = [
        Variant(dtype, precision, batch_last, columns, _resident(dtype, precision, *tile), packed)
        for dtype, precision in kinds
        for width, depth in dict.fromkeys((sizes, sizes[::-1]))
        for columns in _columns(dtype, width)
        for tile in [(columns, width, depth)]
        for batch_last in (False, True)
        for packed in ((True,) if dtype == "float32" else (False, True))
    ]
    found = [spec(epilogue, variant) for variant in made for epilogue in epilogues]
    found += [packing.spec(_packing(variant)) for variant in made if variant.packed]
    return list(dict.fromkeys(found))


def _columns(dtype: str, count: int) -> list[int]:
    """Widths of tile by preference: one tile where it holds all columns, else those that pad them
    least, of whole 128-byte rows."""
    known = COLUMNS["float" if dtype == "float32" else "half"]
    single = [columns for columns in known if columns >= count]
    if single:
        return single[:1]
    row = wgmma.ROW_BYTES // TYPES[dtype][1]
    whole = [columns for columns in known if columns % row == 0 and columns >= known[-1] // 2]
    return sorted(whole, key=lambda columns: (ceil(count, columns) * columns, -columns))


def _batch_last(problem: Problem) -> bool | None:
    """Whether rows lie side by side; None for what the copy engine or the tiles do not take."""
    rows, depth = problem.rows, problem.depth
    tiles = ceil(rows, TILE_ROWS) * ceil(problem.columns, 16) * problem.blocks * problem.lanes
    if wgmma.is_deep(problem) or tiles > wgmma.MAX_TILES:
        return None
    left, out = problem.left, problem.out
    if rows > 1 and left.line == out.row == 1 and _takes(problem, True):
        return True
    first = problem.lanes == 1 and (left.depth == 1 or depth == 1)
    if first and (out.column == 1 or problem.columns == 1) and _takes(problem, False):
        return False
    return None


def _takes(problem: Problem, batch_last: bool) -> bool:
    (x, x_strides), (y, y_strides) = _extents(problem, batch_last)
    dtype = problem.dtype
    return wgmma.addressable(dtype, problem.left.alignment, x, x_strides) and wgmma.addressable(
        dtype, problem.out.alignment, y, y_strides
    )


def _extents(problem: Problem, batch_last: bool) -> tuple[tuple, tuple]:
    """Sizes and strides, in elements, of x and of y as their maps have them."""
    left, out, lanes, blocks = problem.left, problem.out, problem.lanes, problem.blocks
    rows, columns, depth = problem.rows, problem.columns, problem.depth
    if batch_last:
        x = (rows, lanes, depth, blocks), (left.lane, left.depth, left.block)
        y = (rows, lanes, columns, blocks), (out.lane, out.column, out.block)
    else:
        x = (depth, lanes, rows, blocks), (left.lane, left.line, left.block)
        y = (columns, lanes, rows, blocks), (out.lane, out.row, out.block)
    return x, y


def _variant(problem: Problem, columns: int) -> Variant:
    dtype, precision = problem.dtype, problem.precision
    resident = _resident(dtype, precision, columns, problem.columns, problem.depth)
    packed = dtype == "float32" or not _is_packed_already(problem)
    return Variant(dtype, precision, bool(_batch_last(problem)), columns, resident, packed)


def _is_packed_already(problem: Problem) -> bool:
    """Whether a weight's rows can be copied as they are: depths side by side."""
    side_by_side = problem.right.depth == 1 or problem.depth == 1
    alignment = problem.right.alignment
    sizes, strides = weight_extent(problem)
    return side_by_side and wgmma.addressable(problem.dtype, alignment, sizes, strides)


def weight_extent(problem: Problem) -> tuple[tuple, tuple]:
    """Sizes and strides, in elements, of the weight as its map has it."""
    right, lanes, blocks = problem.right, problem.lanes, problem.blocks
    sizes = (problem.depth, lanes, problem.columns, blocks)
    return sizes, (right.lane, right.line, right.block)


def _resident(dtype: str, precision: str, columns: int, width: int, depth: int) -> int:
    """Blocks of the weight that stay in shared memory, where one tile holds all its columns."""
    blocks = ceil(depth, wgmma.ROW_BYTES // TYPES[dtype][1])
    copies = 2 if wgmma.products_of(dtype, precision) == 3 else 1
    for count in RESIDENT:
        if width <= columns and blocks <= count:
            return count if count * copies * columns * wgmma.ROW_BYTES <= RESIDENT_BYTES else 0
    return 0


def _packing(variant: Variant) -> packing.Packing:
    depth = wgmma.ROW_BYTES // TYPES[variant.dtype][1]
    products = wgmma.products_of(variant.dtype, variant.precision)
    reordered = variant.dtype == "float32" and variant.batch_last
    order = BATCH_LAST_ORDER if reordered else (0,)
    return packing.Packing(variant.dtype, variant.columns, depth, 1, products, order)


def shared_memory(variant: Variant) -> Sizes:
    """Stages and staged tiles of y that fit, two of the latter if four stages still do."""
    row = wgmma.ROW_BYTES // TYPES[variant.dtype][1]
    weights = _packing(variant).stage_bytes
    stage = TILE_ROWS * wgmma.ROW_BYTES + (0 if variant.resident else weights)
    blocks = 64 // row if variant.batch_last else ceil(variant.columns, row)
    lines = variant.columns if variant.batch_last else 64
    out = 2 * blocks * lines * wgmma.ROW_BYTES
    kept = 1024 + 256 + variant.resident * weights  # swizzled rows are aligned; barriers
    for buffers in (2, 1):
        count = wgmma.stages(kept + buffers * out, stage)
        if count >= 4 or buffers == 1:
            break
    return Sizes(count, buffers, kept - 256 + buffers * out + count * stage)


def spec(epilogue: tuple[Epilogue, ...], variant: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    dtype, precision, batch_last, columns, resident, packed = variant
    sizes = shared_memory(variant)
    assert sizes.shared_bytes <= targets.SHARED_BYTES[wgmma.ARCH] and sizes.stages >= 2, variant
    words = [f"{TILE_ROWS}x{columns}", "batch_last" if batch_last else "batch_first"]
    words += ["resident"] * bool(resident) + ["packed"] * packed
    return KernelSpec(
        "kronecker_sparse",
        _source(epilogue, variant, sizes),
        "kronecker_sparse_hopper",
        wgmma.THREADS,
        sizes.shared_bytes,
        description=text.describe(KIND, dtype, precision, words, epilogue),
    )


def _source(epilogue: tuple[Epilogue, ...], variant: Variant, sizes: Sizes) -> str:
    """The generated CUDA text: types, ``Finish``, a few constants, the wgmma, one include."""
    dtype, precision, batch_last, columns, resident, packed = variant
    registers = dtype == "float32"
    return f"""{wgmma.preamble(dtype, epilogue)}
constexpr bool BATCH_LAST = {str(batch_last).lower()};
constexpr int TILE_COLUMNS = {columns};
constexpr int STAGES = {sizes.stages};
constexpr int OUT_BUFFERS = {sizes.out_buffers};
constexpr int RESIDENT = {resident};
constexpr int PRODUCTS = {wgmma.products_of(dtype, precision)};
constexpr int PARAMETER_BYTES = {_parameter_bytes(epilogue, variant)};
constexpr bool RIGHT_LINES = false;
#define PARTIAL 0
#define PACKED {int(packed)}
#define HALF_INPUT {int(dtype != "float32")}

{wgmma.multiply(dtype, columns, registers, batch_last)}
#include "kronecker_sparse/hopper.cuh"
"""


def _parameter_bytes(epilogue: tuple[Epilogue, ...], variant: Variant) -> int:
    vectors, scalars = len(text.vectors(epilogue)), text.scalar_count(epilogue)
    maps = 2 if variant.packed else 3
    return wgmma.parameter_bytes(maps, variant.packed + vectors, scalars, struct.calcsize(FIXED))


def _padded(fixed: bytes, epilogue: tuple[Epilogue, ...], variant: Variant) -> bytes:
    """``fixed`` up to the end of the parameter struct."""
    vectors, scalars = len(text.vectors(epilogue)), text.scalar_count(epilogue)
    before = 128 * (2 if variant.packed else 3) + 8 * (variant.packed + vectors) + 16 * scalars
    return fixed.ljust(_parameter_bytes(epilogue, variant) - before, b"\0")


def _maps(problem: Problem, variant: Variant) -> tuple[tuple[TensorMap, ...], tuple]:
    """Maps of x, of y and, if it is not packed, of the weight; and whose addresses these and the
    parameter struct begin with."""
    dtype, batch_last, columns = variant.dtype, variant.batch_last, variant.columns
    row = wgmma.ROW_BYTES // TYPES[dtype][1]
    x, y = _extents(problem, batch_last)
    boxes = [(row, 1, row, 1), (row, 1, columns, 1)] if batch_last else [
        (row, 1, TILE_ROWS, 1), (row, 1, 64, 1),
    ]  # fmt: skip
    maps = [_map(dtype, *extent, box) for extent, box in zip((x, y), boxes, strict=True)]
    if variant.packed:
        return tuple(maps), (("left", 0), ("out", 0), ("workspace", 0))
    maps.append(_map(dtype, *weight_extent(problem), (row, 1, columns, 1)))
    return tuple(maps), (("left", 0), ("out", 0), ("right", 0))


def _map(dtype: str, sizes: tuple, strides: tuple, box: tuple) -> TensorMap:
    return TensorMap(dtype, sizes, wgmma.byte_strides(dtype, sizes, strides), box, 128)
