"""Products of large factors and of odd sizes, batch first and d > 1: x transposed to batch last,
multiplied there by `hopper`, and the result transposed back.

kernel_sources/kronecker_sparse/transpose.cuh costs a read and a write of x and of the result, whose
rows may begin and end anywhere, while `portable`, which is left with what is no whole 16 bytes,
reads and writes each l by itself. `interleaved` has neither, but fetches x from L2 once for each
tile of few columns, and the weight once for each tile of rows. A batch that would take more scratch
than WORKSPACE goes in slices, one after the other.

Which of these two is faster for large factors is a matter of bytes and operations, for x, result
and packed weight of X, Y and W bytes:

    interleaved = max((X * column tiles + W * row tiles) / L2_RATES, (X + Y) / MEMORY_RATE,
                      operations / INTERLEAVED_RATES)
    transposed  = max((X + Y + W * slices) / MEMORY_RATE, operations / HOPPER_RATES)
                  + 2 * (X + Y) / MEMORY_RATE + 2 * slices * LAUNCH

On an H200, a batch of 25088, both measured in ms: (1, 768, 192, 64) in float16 5.88 and 2.71, in
TF32 8.65 and 5.21, in 3xTF32 14.4 and 8.13; (4, 1024, 1024, 16) 19.3 and 9.16, 54.5 and 17.4, 80.0
and 44.3; (1, 256, 256, 16) 0.238 and 0.345, 0.608 and 0.704, 1.26 and 0.989.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.kernels.factor import hopper
from kernlib.families.kronecker_sparse.kernels.factor.hopper import Hopper
from kernlib.families.kronecker_sparse.kernels.steps import transpose
from kernlib.families.kronecker_sparse.kernels.steps.transpose import Transpose
from kernlib.families.kronecker_sparse.lowering import hopper_common, shapes, times
from kernlib.families.kronecker_sparse.lowering.problem import (
    Layout,
    OutLayout,
    Problem,
    Scope,
    feature_counts,
    is_deep,
    is_flat,
)
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice, Gpu
from kernlib.lowering.steps import Lowered, Step

WORKSPACE = 2**30  # bytes of a transposed slice of x and of the result, beside the packed weight
GAIN = 1.2  # of a faster kind, by the model, that is worth the scratch
# Bytes a second of an H200: from L2 of tiles whose l are merged, in lines of 128 bytes, or of
# others by bytes of an element, in sectors of 32. Operations a second by SHAPES' keys.
MERGED_RATE, L2_RATES = 11e12, {2: 3.8e12, 4: 5e12}
MEMORY_RATE = 3.9e12
HOPPER_RATES = {(1, 2): 600e12, (1, 4): 330e12, (3, 4): 110e12}
INTERLEAVED_RATES = {(1, 2): 430e12, (1, 4): 200e12, (3, 4): 65e12}
LAUNCH = 5e-6  # seconds
# Bytes of scratch that a call may take for any gain; more is worth one beyond what estimates are
# off by, as a user of large batches has memory for the result alone in mind. At 1.5 the product of
# (8, 8, 242, 12) by 3644 rows in float16 took 302 us, where with 175 MB it takes 201.
FREE_SCRATCH = 16 << 20
# MB of x and result up to which both copies of them stay in L2, of 50 MB, from launch to launch.
IN_L2 = 25.0


class Rates(NamedTuple):
    """Microseconds of a million numbers or bytes where nothing else is said."""

    launch: float
    byte: float  # of x and result: three launches read or write each
    far: float  # beside that, bytes of these beyond L2
    tile: float
    stage: float
    multiplication: float  # of a stage by a hundred columns, at the rate of tensor cores
    weight: float  # bytes of the packed one


# By the bytes of a number; :mod:`..lowering.times` says of what they were fitted to.
RATES = {
    2: Rates(8.95, 0.785, 0.246, 0.498, 0.382, 0.22, 0.871),
    4: Rates(8.79, 0.649, 0.331, 0.552, 0.387, 0.22, 1.163),
}


class Transposed(Transpose):
    """The weight packed, then of each slice of the batch x turned, the product, and its result
    turned back."""

    role = "factor"
    name = "transposed"
    rank = 5

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether it is a problem to turn, whose slices `hopper` takes."""
        if arch != hopper_common.ARCH or not _are_flat(problem):
            return False
        rows = slice_rows(problem)
        if not rows:
            return False
        counts = {rows, slices_of(problem, rows)[-1][1]}
        return all(Hopper().takes(part_of(problem, count), arch) for count in counts)

    def choices(self, problem: Problem, arch: str) -> list[Choice]:
        """The widths of tile."""
        return Hopper().choices(part_of(problem, slice_rows(problem)), arch)

    def estimate(self, problem: Problem, choice: Mapping[str, int], gpu: Gpu) -> float:
        """Microseconds of the first width. Where l are in whole sectors, :func:`is_faster` decides
        between this and `interleaved`; without that, much scratch wants a clear gain."""
        if dict(choice) != self.default(problem, gpu):
            return inf
        is_rival = shapes.shape_of(problem) is not None
        if is_rival and shapes.is_in_sectors(problem):
            if not is_faster(problem):
                return inf
            is_rival = False
        x, y, _ = times.numbers(problem)
        is_much = (x + y) * DTYPES[problem.dtype].bytes > FREE_SCRATCH
        return microseconds(problem, choice) * (GAIN if is_much and not is_rival else 1)

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launches of a problem."""
        rows = slice_rows(problem)
        x, y = (transpose.size(problem.dtype, count, rows) for count in feature_counts(problem))
        starts = {"left": 0, "out": x, "workspace": x + y}
        places = {name: ("workspace", start) for name, start in starts.items()}
        steps: list[Step] = []
        for first, count in slices_of(problem, rows):
            inner = Hopper().launch(epilogue, part_of(problem, count), gpu, choice)
            packing = () if steps else inner.steps[:-1]  # the same for every slice
            before, after = self._turns(problem, first, count, starts)
            # Right before the product x is written, at whose first byte it would have to wait.
            product = inner.steps[-1]._replace(overlaps=False)
            *packing, product = [step.placed(places) for step in (*packing, product)]
            steps += [*packing, before, product, after]
        return Lowered(tuple(steps), x + y + inner.workspace)

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """Beside those of `hopper`."""
        return (
            super().axes(epilogue, scope)
            if scope.arch == hopper_common.ARCH
            else {"dtype": (), "bias": ()}
        )

    def _turns(
        self, problem: Problem, first: int, count: int, starts: dict[str, int]
    ) -> tuple[Step, Step]:
        """The launches that turn a slice of x into the workspace, and its result out of it."""
        dtype, left, out = problem.dtype, problem.left, problem.out
        itemsize, pitch = DTYPES[dtype].bytes, transpose.pitch(dtype, count)
        depths, features = feature_counts(problem)
        x = ("left", first * left.line * itemsize), ("workspace", starts["left"])
        y = ("workspace", starts["out"]), ("out", first * out.row * itemsize)
        before = self.step(dtype, (count, depths), (left.line, pitch), left.alignment, x)
        strides, is_padded = (pitch, out.row), is_whole(problem)
        after = self.step(dtype, (features, count), strides, 16, y, is_padded)
        return before, after


def microseconds(problem: Problem, choice: Mapping[str, object]) -> float:
    """What a problem takes by columns of a choice, batch last."""
    columns, item = int(choice["columns"]), DTYPES[problem.dtype].bytes
    rates, groups = RATES[item], problem.blocks * problem.lanes
    rows = transpose.pitch(problem.dtype, problem.rows)
    tiles = ceil_div(rows, hopper.TILE_ROWS) * ceil_div(problem.columns, columns) * groups
    stages = ceil_div(problem.depth, hopper_common.row(problem.dtype))
    products = hopper_common.products(problem.dtype, problem.precision)
    of_stage = rates.stage + rates.multiplication * (columns * products / 100)
    moved = problem.rows * sum(feature_counts(problem)) * item / 1e6
    packed = round_up(problem.columns, columns) * stages * hopper_common.ROW_BYTES * groups / 1e6
    of_tile = rates.tile + stages * of_stage
    time = rates.launch + rates.byte * moved + rates.far * max(0.0, moved - IN_L2)
    return time + rates.weight * packed + times.rounds(tiles, times.MULTIPROCESSORS) * of_tile


def is_faster(problem: Problem) -> bool:
    """Whether a problem of both kinds is taken by this one untuned, as the model has it."""
    of_interleaved, of_transposed = seconds(problem)
    return of_interleaved >= GAIN * of_transposed


def seconds(problem: Problem) -> tuple[float, float]:
    """What the model says of a problem: interleaved, and transposed."""
    products, itemsize = (
        hopper_common.products(problem.dtype, problem.precision),
        DTYPES[problem.dtype].bytes,
    )
    depths, features = feature_counts(problem)
    copies = 2 if products == 3 else 1  # of the packed weight
    weight = copies * depths * problem.columns * itemsize
    moved = problem.rows * (depths + features) * itemsize
    operations = 2 * problem.rows * depths * problem.columns
    shape = shapes.shape_of(problem)
    columns = shapes.columns_of(problem.dtype, problem.precision, shape, problem.columns)[0]
    of_x = problem.rows * depths * itemsize * ceil_div(problem.columns, columns)
    of_l2 = of_x + weight * ceil_div(problem.rows, shape.rows)
    of_interleaved = max(
        of_l2 / (MERGED_RATE if shape.merged else L2_RATES[itemsize]),
        moved / MEMORY_RATE,
        operations / INTERLEAVED_RATES[products, itemsize],
    )
    slices = ceil_div(problem.rows, slice_rows(problem))
    moving = (moved + weight * slices) / MEMORY_RATE
    turning = 2 * moved / MEMORY_RATE + 2 * slices * LAUNCH
    return of_interleaved, max(moving, operations / HOPPER_RATES[products, itemsize]) + turning


def _are_flat(problem: Problem) -> bool:
    """Whether features of x and of the result lie side by side, and d > 1. Rows that do not overlap
    are those of a product: in the gradient of a weight by few rows a depth is a whole row."""
    left, out = problem.left, problem.out
    depths, features = feature_counts(problem)
    if problem.rows == 1 or problem.depth == 1 or problem.lanes == 1 or is_deep(problem):
        return False
    if left.line < depths or out.row < features:
        return False
    of_x = is_flat(problem, problem.depth, left.lane, left.depth, left.block)
    return of_x and is_flat(problem, problem.columns, out.lane, out.column, out.block)


def is_whole(problem: Problem) -> bool:
    """Whether rows of the result are whole 16 bytes, aligned."""
    chunk = 16 // DTYPES[problem.dtype].bytes
    _, features = feature_counts(problem)
    return features % chunk == problem.out.row % chunk == problem.out.alignment % 16 == 0


def slice_rows(problem: Problem) -> int:
    """Rows of a slice: all, or whole tiles, as few slices as WORKSPACE permits and about as long as
    each other; 0 if it holds no tile."""
    bytes_a_row = sum(feature_counts(problem)) * DTYPES[problem.dtype].bytes
    most = WORKSPACE // bytes_a_row // hopper.TILE_ROWS * hopper.TILE_ROWS
    if problem.rows <= most or not most:
        return min(problem.rows, most)
    each = ceil_div(problem.rows, ceil_div(problem.rows, most))
    return round_up(each, hopper.TILE_ROWS)


def slices_of(problem: Problem, rows: int) -> list[tuple[int, int]]:
    """First row and rows of each slice."""
    return [(n, min(rows, problem.rows - n)) for n in range(0, problem.rows, rows)]


def part_of(problem: Problem, rows: int) -> Problem:
    """The product of a slice in the workspace: batch last, its rows padded to whole 16 bytes."""
    d, pitch = problem.lanes, transpose.pitch(problem.dtype, rows)
    left = Layout(problem.depth * d * pitch, pitch, 1, d * pitch)
    out = OutLayout(problem.columns * d * pitch, pitch, 1, d * pitch)
    return problem._replace(rows=pitch, left=left, out=out)
