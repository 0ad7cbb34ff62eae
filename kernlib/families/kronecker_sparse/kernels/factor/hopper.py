"""Products on Hopper, batch last, and batch first with d = 1.

The copy engine wants strides of whole 16 bytes; other layouts go to the portable kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.kernels.steps.pack import Pack, Packing
from kernlib.families.kronecker_sparse.lowering import hopper_common
from kernlib.families.kronecker_sparse.lowering.problem import Problem, Scope, is_deep, is_small
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.tma import TensorMap
from kernlib.lowering.wgmma import multiply

TILE_ROWS = 128
TILES = (
    "int row_tiles", "int column_tiles",  # of a group
    "int blocks", "int lanes",  # a, d
    "int rows", "int columns", "int depth",  # batch, b, c
    "int split_depth",  # blocks of k of a part, where sums are partial
)  # fmt: skip
FIXED = Fields((*TILES, "int teams", "u32 tiles"))  # of CTAs, where weights stay; of all groups
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


class Hopper(Kernel):
    """Persistent CTAs: the copy engine brings tiles of x, and of the weight unless it stays."""

    role = "factor"
    name = "hopper"
    header = "kronecker_sparse/hopper/hopper.cuh"
    entry = "kronecker_sparse_hopper"
    rank = 6
    reason = (
        "TMA and wgmma of sm_90a, batch last or d = 1, where strides are whole 16 bytes and "
        "rows are enough to pay for packing the weight; of few long rows, and of gradients of a "
        "weight, the sums are split and added up by a launch behind it"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        dtype: str
        precision: str
        batch_last: bool  # x; and the result, which in half types may differ
        out_last: bool
        columns: int
        resident: int  # blocks; 0 where the weight moves with x
        packed: bool

    def takes(self, problem: Problem, arch: str, mixed: bool = False) -> bool:
        """Whether the kernel computes a problem. Only who asks for ``mixed`` layouts has kernels
        for them: they are not among those that are compiled ahead."""
        last = _layouts(problem)
        return arch == hopper_common.ARCH and last is not None and (mixed or last in ALIKE)

    def choices(self, problem: Problem, arch: str) -> list[Choice]:
        """The widths of tile."""
        each = _columns(problem.dtype, problem.precision, problem.columns)
        return [{"columns": columns} for columns in each]

    def pays(self, problem: Problem, gpu: Gpu) -> bool:
        """Of few rows `portable` is faster."""
        return not is_small(problem)

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launches of a problem, the first of them that of the packing if there is one."""
        variant = _variant(problem, int(choice["columns"]))
        packing = packing_of(variant)
        row_tiles, column_tiles = ceil_div(problem.rows, TILE_ROWS), packing.tiles(problem)
        tiles = row_tiles * column_tiles * problem.blocks * problem.lanes
        grid = min(gpu.multiprocessors, tiles)
        teams = min(grid, TEAMS) if variant.resident and _writes_most(problem, variant) else grid
        fixed = FIXED.values(
            row_tiles=row_tiles,
            column_tiles=column_tiles,
            **problem.sizes,
            split_depth=0,
            teams=teams,
            tiles=tiles,
        )
        main = Step(
            self.spec(epilogue, variant, gpu.arch),
            (grid, 1),
            _parameters(epilogue, variant).pack(*fixed),
            text.pointers(("left", "out", "workspace" if variant.packed else "right"), epilogue),
            text.scalar_count(epilogue),
            _maps(problem, variant),
            overlaps=variant.packed,  # 1.2 to 2.4 us less a call on an H200
        )
        if not variant.packed:
            return Lowered((main,))
        return Lowered((Pack().step(problem, packing), main), packing.workspace(problem))

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """Of any strides that the copy engine takes."""
        is_hopper = scope.arch == hopper_common.ARCH
        return {
            "dtype": scope.dtypes if is_hopper else [],
            "precision": scope.precisions,
            "batch_last": (True, False),
            "out_last": (True, False),
            "columns": COLUMNS[1],
            "resident": (0, *RESIDENT),
            "packed": (False, True),
        }

    def is_legal(self, variant: Variant, epilogue: tuple[Epilogue, ...], scope: Scope) -> bool:
        """Whether a product of the scope, its gradient by x or, without epilogues, that by the
        weight takes such a tile."""
        dtype, precision, batch_last, out_last, columns, resident, packed = variant
        if (dtype, precision) not in scope.numbers or not (packed or dtype != "float32"):
            return False
        b, c, _ = scope.sizes
        if (batch_last, out_last) in (MIXED if scope.mixed else ALIKE):
            for width, depth in ((b, c), (c, b)):
                blocks = {_resident(dtype, precision, columns, depth), *[0] * (width > columns)}
                if columns in _columns(dtype, precision, width) and resident in blocks:
                    return True
        # The depth of the gradient of a weight is the batch.
        if epilogue or batch_last != out_last or (batch_last and c > 1):
            return False
        row = hopper_common.row(dtype)
        blocks = {_resident(dtype, precision, columns, n * row) for n in BLOCKS}
        return columns in _columns(dtype, precision, c) and resident in blocks

    def specs(self, epilogue: tuple[Epilogue, ...], scope: Scope, arch: str) -> list[KernelSpec]:
        """The specifications of all variants, and of what packs their weights."""
        variants = [each for each in self.variants(epilogue, scope) if each.packed]
        packs = Pack().specs_of(map(packing_of, variants))
        return super().specs(epilogue, scope, arch) + packs

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, precision, batch_last, out_last, columns, resident, packed = variant
        stages, out_parts, shared = shared_memory(variant)
        words = [f"{TILE_ROWS}x{columns}", "batch_last" if batch_last else "batch_first"]
        words += ["to", "batch_last" if out_last else "batch_first"] * (batch_last != out_last)
        words += [f"resident={resident}"] * bool(resident) + ["packed"] * packed
        facts = {
            **hopper_common.facts(dtype, precision, epilogue),
            "BATCH_LAST": batch_last,
            "OUT_LAST": out_last,
            "TILE_COLUMNS": columns,
            "STAGES": stages,
            "OUT_PARTS": out_parts,
            "RESIDENT": resident,
            "PACKED": packed,
            "RIGHT_LINES": False,
            "PARTIAL": False,
            "PARAMETER_BYTES": _parameters(epilogue, variant).size,
        }
        wgmma = multiply(dtype, columns, dtype == "float32", batch_last)
        texts = FIXED.text(), hopper_common.finish(epilogue), wgmma
        source = self.source(facts, *texts, includes=hopper_common.INCLUDES)
        threads = hopper_common.THREADS
        return self.named_spec(source, threads, shared, dtype, words, epilogue, precision)


def _writes_most(problem: Problem, variant: Hopper.Variant) -> bool:
    """Whether a tile's result is most of what it moves."""
    weights = variant.resident * _block_bytes(variant.dtype, variant.precision, variant.columns)
    one = ceil_div(problem.columns, variant.columns) == 1
    return one and weights <= TEAM_BYTES and problem.columns >= 2 * problem.depth


def _columns(dtype: str, precision: str, count: int) -> list[int]:
    """Widths of tile by preference: one tile where it holds all columns, else those that pad them
    least, of whole 128-byte rows."""
    widths = COLUMNS[hopper_common.products(dtype, precision)]
    single = [columns for columns in widths if columns >= count]
    if single:
        return single[:1]
    row, least = hopper_common.row(dtype), widths[-1] // 2
    aligned = [columns for columns in widths if columns % row == 0 and columns >= least]
    return hopper_common.by_padding(aligned, count)


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
    rows, extent = problem.rows, hopper_common.extent
    x = extent(problem, problem.left, rows, problem.depth, batch_last)
    return x, extent(problem, problem.out, rows, problem.columns, out_last)


def _variant(problem: Problem, columns: int) -> Hopper.Variant:
    dtype, precision = problem.dtype, problem.precision
    tiles = ceil_div(problem.columns, columns)
    near = tiles == 1 or tiles * problem.blocks * problem.lanes <= RESIDENT_GROUPS
    resident = _resident(dtype, precision, columns, problem.depth) if near else 0
    packed = dtype == "float32" or not _is_packed_already(problem)
    return Hopper.Variant(dtype, precision, *_layouts(problem), columns, resident, packed)


def _is_packed_already(problem: Problem) -> bool:
    """Whether a weight's rows can be copied as they are: depths side by side."""
    side_by_side = problem.right.depth == 1 or problem.depth == 1
    alignment, extent = problem.right.alignment, _weight_extent(problem)
    return side_by_side and tma.addressable(problem.dtype, alignment, extent)


def _weight_extent(problem: Problem) -> tma.Extent:
    return hopper_common.extent(problem, problem.right, problem.columns, problem.depth, False)


def _resident(dtype: str, precision: str, columns: int, depth: int) -> int:
    """Blocks of the weight that stay in shared memory, 0 if they do not fit."""
    blocks = ceil_div(depth, hopper_common.row(dtype))
    count = next((count for count in RESIDENT if blocks <= count), 0)
    return count if count * _block_bytes(dtype, precision, columns) <= RESIDENT_BYTES else 0


def _block_bytes(dtype: str, precision: str, columns: int) -> int:
    """Of a block of the weight along its depth, packed or not."""
    products = hopper_common.products(dtype, precision)
    return Packing(dtype, columns, hopper_common.row(dtype), 1, products).stage_bytes


def packing_of(variant: Hopper.Variant) -> Packing:
    dtype, depth = variant.dtype, hopper_common.row(variant.dtype)
    products = hopper_common.products(dtype, variant.precision)
    order = BATCH_LAST_ORDER if dtype == "float32" and variant.batch_last else (0,)
    return Packing(dtype, variant.columns, depth, 1, products, order)


def shared_memory(variant: Hopper.Variant) -> tuple[int, int, int]:
    """Stages and staged parts of y that fit, and bytes of all: of the parts those of two tiles, if
    four stages are left, else of fewer."""
    dtype, precision, _, out_last, columns, resident, _ = variant
    row, weights = hopper_common.row(dtype), _block_bytes(dtype, precision, columns)
    stage = TILE_ROWS * hopper_common.ROW_BYTES + (0 if resident else weights)
    part = (min(columns, row) * 64 // row if out_last else 64) * hopper_common.ROW_BYTES
    two_tiles = 2 * ceil_div(columns, row)
    for parts in sorted({max(2, two_tiles), 4, 2}, reverse=True):
        count, shared = hopper_common.stages(resident * weights + 2 * parts * part, stage)
        if count >= 4 or parts == 2:
            break
    return count, parts, shared


def _parameters(epilogue: tuple[Epilogue, ...], variant: Hopper.Variant) -> Parameters:
    count = 2 if variant.packed else 3
    return text.parameters(int(variant.packed), FIXED.format, epilogue, maps=count)


def _maps(problem: Problem, variant: Hopper.Variant) -> tuple[TensorMap, ...]:
    """Maps of x, of y and, if it is not packed, of the weight."""
    row, columns = hopper_common.row(variant.dtype), variant.columns
    x, y = _extents(problem, variant.batch_last, variant.out_last)
    boxes = [
        (x, row if variant.batch_last else TILE_ROWS),
        (y, min(columns, row) if variant.out_last else 64),
    ]
    if not variant.packed:
        boxes.append((_weight_extent(problem), columns))
    return hopper_common.maps(variant.dtype, *boxes)
