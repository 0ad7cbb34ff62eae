"""The kernel of kernel_sources/kronecker_sparse/hopper/hopper.cuh: batch last, and batch first with
d = 1.

The copy engine wants strides of whole 16 bytes; other layouts go to the portable kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.lowering import hopper_common, pack
from kernlib.families.kronecker_sparse.lowering.problem import Problem, is_deep
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.choice import Choice
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.tma import TensorMap
from kernlib.lowering.wgmma import multiply

KIND = "hopper"
TILE_ROWS = 128
FIXED = "<10i"  # struct Fixed
# Columns of a tile: accumulators are half as many a thread; 3xTF32 keeps two sets of them.
COLUMNS = {1: (16, 32, 48, 64, 96, 128, 192, 256), 3: (16, 32, 48, 64, 96, 128)}
RESIDENT = (1, 2, 3, 4)  # blocks of a weight along its depth that may stay in shared memory
BLOCKS = (*RESIDENT, RESIDENT[-1] + 1)  # of any depth, as far as it matters
RESIDENT_BYTES = 128 * 1024
# Teams of CTAs that write neighbouring rows at the same time, which DRAM takes 8 % faster in
# (4,192,48,16), batch last; each CTA then reads more groups' weights.
TEAMS = 4
TEAM_BYTES = 32 * 1024  # of a group's weights, up to which that pays
RESIDENT_GROUPS = 64  # with fewer, CTAs that share rows of x compute them at about the same time
# wgmma's eight depths in this order leave batch-last fp32 without bank conflicts: see
# hopper/multiply.cuh.
BATCH_LAST_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
ALIKE = (True, True), (False, False)  # whether x and the result have the batch last
MIXED = (True, False), (False, True)  # in half types, d = 1


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    precision: str
    batch_last: bool  # x; and the result, which in half types may differ
    out_last: bool
    columns: int
    resident: int  # blocks; 0 where the weight moves with x
    packed: bool


class Sizes(NamedTuple):
    """Shared memory of a variant."""

    stages: int
    out_parts: int
    shared_bytes: int


def candidates(problem: Problem, arch: str, mixed: bool = False) -> list[Choice]:
    """The widths of tile for a problem, none if it is not one of this kernel's. Only who asks for
    ``mixed`` layouts has kernels for them: they are not among those that are compiled ahead."""
    last = _layouts(problem)
    if arch != hopper_common.ARCH or last is None or (last in MIXED and not mixed):
        return []
    known = _columns(problem.dtype, problem.precision, problem.columns)
    return [{"columns": columns} for columns in known]


default = hopper_common.default


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
    row_tiles, column_tiles = ceil_div(problem.rows, TILE_ROWS), packed.tiles(problem)
    tiles = row_tiles * column_tiles * problem.blocks * problem.lanes
    extents = (problem.blocks, problem.lanes, problem.rows, problem.columns, problem.depth)
    grid = min(multiprocessors, tiles)
    teams = min(grid, TEAMS) if variant.resident and _writes_most(problem, variant) else grid
    weights = "workspace" if variant.packed else "right"
    main = Step(
        spec(epilogue, variant),
        (grid, 1),
        _parameters(epilogue, variant).pack(row_tiles, column_tiles, *extents, 0, teams, tiles),
        (("left", 0), ("out", 0), (weights, 0), *text.vector_pointers(epilogue)),
        text.scalar_count(epilogue),
        _maps(problem, variant),
        overlaps=variant.packed,  # 1.2 to 2.4 us less a call on an H200
    )
    if not variant.packed:
        return Lowered((main,))
    return Lowered((pack.step(problem, packed), main), packed.workspace(problem))


def variants(
    epilogues: list[tuple[Epilogue, ...]],
    sizes: tuple[int, int, int],
    arch: str,
    kinds: list,
    layouts: tuple[tuple[bool, bool], ...] = ALIKE,
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for products of b x c blocks (b, c and d are
    ``sizes``) and their gradients, and ``kinds`` of numbers: (dtype, precision). ``layouts`` say
    whether x and the result of products have the batch last."""
    if arch != hopper_common.ARCH:
        return []
    b, c, _ = sizes
    products = [
        Variant(dtype, precision, *last, columns, resident, packed)
        for dtype, precision in kinds
        for width, depth in dict.fromkeys(((b, c), (c, b)))
        for columns in _columns(dtype, precision, width)
        for resident in {_resident(dtype, precision, columns, depth), *([0] * (width > columns))}
        for last in layouts
        for packed in _packed(dtype)
    ]
    # The depth of the gradient of a weight is the batch.
    gradients = [
        Variant(dtype, precision, batch_last, batch_last, columns, resident, packed)
        for dtype, precision in kinds
        for columns in _columns(dtype, precision, c)
        for resident in {
            _resident(dtype, precision, columns, n * hopper_common.row(dtype)) for n in BLOCKS
        }
        for batch_last in ((False, True) if c == 1 else (False,))
        for packed in _packed(dtype)
    ]
    found = [spec(epilogue, variant) for variant in products for epilogue in epilogues]
    found += [spec((), variant) for variant in gradients]
    packed = [_packing(variant) for variant in products + gradients if variant.packed]
    found += [spec for each in dict.fromkeys(packed) for spec in pack.specs(each)]
    return list(dict.fromkeys(found))


def _writes_most(problem: Problem, variant: Variant) -> bool:
    """Whether a tile's result is most of what it moves."""
    weights = variant.resident * _block_bytes(variant.dtype, variant.precision, variant.columns)
    one = ceil_div(problem.columns, variant.columns) == 1
    return one and weights <= TEAM_BYTES and problem.columns >= 2 * problem.depth


def _packed(dtype: str) -> tuple[bool, ...]:
    """Whether weights are packed: those that are split or rounded are in any case."""
    return (True,) if dtype == "float32" else (False, True)


def _columns(dtype: str, precision: str, count: int) -> list[int]:
    """Widths of tile by preference: one tile where it holds all columns, else those that pad them
    least, of whole 128-byte rows."""
    known = COLUMNS[hopper_common.products(dtype, precision)]
    single = [columns for columns in known if columns >= count]
    if single:
        return single[:1]
    row, least = hopper_common.row(dtype), known[-1] // 2
    whole = [columns for columns in known if columns % row == 0 and columns >= least]
    return sorted(whole, key=lambda columns: (round_up(count, columns), -columns))


def _layouts(problem: Problem) -> tuple[bool, bool] | None:
    """Whether rows of x, and of the result, lie side by side; None for what the copy engine or the
    tiles do not take. Both are alike wherever they may be, and in float32."""
    rows, depth, lanes = problem.rows, problem.depth, problem.lanes
    tiles = ceil_div(rows, TILE_ROWS) * ceil_div(problem.columns, 16) * problem.blocks * lanes
    if is_deep(problem) or tiles > hopper_common.MAX_TILES:
        return None
    left, out = problem.left, problem.out
    of_x = (rows > 1 and left.line == 1, lanes == 1 and (left.depth == 1 or depth == 1))
    of_y = (rows > 1 and out.row == 1, lanes == 1 and (out.column == 1 or problem.columns == 1))
    for last in ALIKE if problem.dtype == "float32" else ALIKE + MIXED:
        x_last, y_last = last
        is_so = of_x[not x_last] and of_y[not y_last]
        if is_so and hopper_common.addresses(problem, *_extents(problem, *last)):
            return last
    return None


def _extents(problem: Problem, batch_last: bool, out_last: bool) -> tuple[tma.Extent, tma.Extent]:
    """Of x and of y."""
    left, out, lanes, blocks = problem.left, problem.out, problem.lanes, problem.blocks
    rows, columns, depth = problem.rows, problem.columns, problem.depth
    if batch_last:
        x = tma.Extent((rows, lanes, depth, blocks), (left.lane, left.depth, left.block))
    else:
        x = tma.Extent((depth, lanes, rows, blocks), (left.lane, left.line, left.block))
    if out_last:
        y = tma.Extent((rows, lanes, columns, blocks), (out.lane, out.column, out.block))
    else:
        y = tma.Extent((columns, lanes, rows, blocks), (out.lane, out.row, out.block))
    return x, y


def _variant(problem: Problem, columns: int) -> Variant:
    dtype, precision = problem.dtype, problem.precision
    tiles = ceil_div(problem.columns, columns)
    near = tiles == 1 or tiles * problem.blocks * problem.lanes <= RESIDENT_GROUPS
    resident = _resident(dtype, precision, columns, problem.depth) if near else 0
    packed = dtype == "float32" or not _is_packed_already(problem)
    return Variant(dtype, precision, *_layouts(problem), columns, resident, packed)


def _is_packed_already(problem: Problem) -> bool:
    """Whether a weight's rows can be copied as they are: depths side by side."""
    side_by_side = problem.right.depth == 1 or problem.depth == 1
    alignment, extent = problem.right.alignment, _weight_extent(problem)
    return side_by_side and tma.addressable(problem.dtype, alignment, extent)


def _weight_extent(problem: Problem) -> tma.Extent:
    right, lanes, blocks = problem.right, problem.lanes, problem.blocks
    sizes = (problem.depth, lanes, problem.columns, blocks)
    return tma.Extent(sizes, (right.lane, right.line, right.block))


def _resident(dtype: str, precision: str, columns: int, depth: int) -> int:
    """Blocks of the weight that stay in shared memory, 0 if they do not fit."""
    blocks = ceil_div(depth, hopper_common.row(dtype))
    count = next((count for count in RESIDENT if blocks <= count), 0)
    return count if count * _block_bytes(dtype, precision, columns) <= RESIDENT_BYTES else 0


def _block_bytes(dtype: str, precision: str, columns: int) -> int:
    """Of a block of the weight along its depth, packed or not."""
    products = hopper_common.products(dtype, precision)
    return pack.Packing(dtype, columns, hopper_common.row(dtype), 1, products).stage_bytes


def _packing(variant: Variant) -> pack.Packing:
    dtype, depth = variant.dtype, hopper_common.row(variant.dtype)
    products = hopper_common.products(dtype, variant.precision)
    order = BATCH_LAST_ORDER if dtype == "float32" and variant.batch_last else (0,)
    return pack.Packing(dtype, variant.columns, depth, 1, products, order)


def shared_memory(variant: Variant) -> Sizes:
    """Stages and staged parts of y that fit: of the latter those of two tiles, if four stages are
    left, else of fewer."""
    dtype, precision, _, out_last, columns, resident, _ = variant
    row, weights = hopper_common.row(dtype), _block_bytes(dtype, precision, columns)
    stage = TILE_ROWS * hopper_common.ROW_BYTES + (0 if resident else weights)
    part = (min(columns, row) * 64 // row if out_last else 64) * hopper_common.ROW_BYTES
    whole = 2 * ceil_div(columns, row)
    for parts in sorted({max(2, whole), 4, 2}, reverse=True):
        count, shared = hopper_common.stages(resident * weights + 2 * parts * part, stage)
        if count >= 4 or parts == 2:
            break
    return Sizes(count, parts, shared)


def spec(epilogue: tuple[Epilogue, ...], variant: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    dtype, precision, batch_last, out_last, columns, resident, packed = variant
    sizes = shared_memory(variant)
    words = [f"{TILE_ROWS}x{columns}", "batch_last" if batch_last else "batch_first"]
    words += ["to", "batch_last" if out_last else "batch_first"] * (batch_last != out_last)
    words += [f"resident={resident}"] * bool(resident) + ["packed"] * packed
    made = KernelSpec(
        "kronecker_sparse",
        _source(epilogue, variant, sizes),
        "kronecker_sparse_hopper",
        hopper_common.THREADS,
        sizes.shared_bytes,
        description=text.describe("kronecker_sparse", KIND, dtype, precision, words, epilogue),
    )
    return named(made, dtype, *[precision] * (dtype == "float32"), *words, epilogue=epilogue)


def _source(epilogue: tuple[Epilogue, ...], variant: Variant, sizes: Sizes) -> str:
    """The generated CUDA text: types, ``Finish``, a few constants, the wgmma, one include."""
    dtype, precision, batch_last, out_last, columns, resident, packed = variant
    registers = dtype == "float32"
    return f"""{hopper_common.preamble(dtype, epilogue)}
constexpr bool BATCH_LAST = {str(batch_last).lower()};
constexpr bool OUT_LAST = {str(out_last).lower()};
constexpr int TILE_COLUMNS = {columns};
constexpr int STAGES = {sizes.stages};
constexpr int OUT_PARTS = {sizes.out_parts};
constexpr int RESIDENT = {resident};
constexpr int PARAMETER_BYTES = {_parameters(epilogue, variant).size};
constexpr bool RIGHT_LINES = false;
#define PARTIAL 0
#define PACKED {int(packed)}
#define PRODUCTS {hopper_common.products(dtype, precision)}
#define HALF_INPUT {int(dtype != "float32")}

#include "common/hopper.cuh"
{multiply(dtype, columns, registers, batch_last)}
#include "kronecker_sparse/hopper/hopper.cuh"
"""


def _parameters(epilogue: tuple[Epilogue, ...], variant: Variant) -> Parameters:
    count = 2 if variant.packed else 3
    return text.parameters(int(variant.packed), FIXED, epilogue, maps=count)


def _maps(problem: Problem, variant: Variant) -> tuple[TensorMap, ...]:
    """Maps of x, of y and, if it is not packed, of the weight."""
    dtype, row, columns = variant.dtype, hopper_common.row(variant.dtype), variant.columns
    x, y = _extents(problem, variant.batch_last, variant.out_last)
    found = [
        (x, row if variant.batch_last else TILE_ROWS),
        (y, min(columns, row) if variant.out_last else 64),
    ]
    if not variant.packed:
        found.append((_weight_extent(problem), columns))
    return tuple(tma.tensor_map(dtype, extent, (row, 1, count, 1)) for extent, count in found)
