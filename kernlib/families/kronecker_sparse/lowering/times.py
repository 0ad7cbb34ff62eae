"""How long the kinds of kernel take that compute products batch first, d > 1, of which untuned the
fastest is chosen.

Microseconds on an H100, each a sum of launches, bytes and rounds of tiles over the multiprocessors,
fitted to what 143 such products, most of random sizes, in float16 and in 3xTF32, took in CUDA
graphs by every kind and tile: half of the estimates are within 4 to 10 %. bfloat16 counts as
float16, TF32 as a third of the multiplications. PORTABLE and TRANSPOSED were fitted anew to 270
times of 91 of them, of which those left out of a fit are off, as a root mean square, by 12 % in
float16 and 15 % in 3xTF32, and by 11 and 7 % by way of batch last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernlib.families.kronecker_sparse.lowering import (
    hopper,
    hopper_common,
    interleaved,
    pack,
    portable,
    transpose,
    via_batch_last,
)
from kernlib.families.kronecker_sparse.lowering.problem import Problem
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.choice import Choice
from kernlib.lowering.dtypes import DTYPES
from kernlib.records import NamedTuple

MULTIPROCESSORS = 132
ROUNDS = 3  # up to which a last round that is not full counts as one that is
# Bytes of scratch that a call may take for any gain; more is worth one beyond what estimates are
# off by, as a user of large batches has memory for the result alone in mind. At 1.5 the product of
# (8, 8, 242, 12) by 3644 rows in float16 took 302 us, where with 175 MB it takes 201.
FREE_SCRATCH, GAIN = 16 << 20, via_batch_last.GAIN
# MB of x and result up to which both copies of them stay in L2, of 50 MB, from launch to launch.
IN_L2 = 25.0
SECTOR = 32  # bytes that are read or written at once where neighbours lie apart
LINE = 128  # bytes of a line of the caches
WORD = 4  # bytes of depth that a thread reads, whose neighbour reads the next ones


class Portable(NamedTuple):
    """Of portable kernels: microseconds of launches and of a round of tiles, and of a million
    numbers or bytes where nothing else is said."""

    launch: float
    pack: float
    tile: float
    multiplication: float
    gather: float  # of a thousand numbers of one tile that are read one by one
    written: float  # bytes of sectors
    read: float  # the same
    far: float  # numbers read, where neighbours read a line each
    weight: float  # numbers of the weight beside that, which many tiles read at once


class Transposed(NamedTuple):
    """By way of batch last."""

    launch: float
    byte: float  # of x and result: three launches read or write each
    far: float  # beside that, bytes of these beyond L2
    tile: float
    stage: float
    multiplication: float  # of a stage by a hundred columns, at the rate of tensor cores
    weight: float  # bytes of the packed one


class Interleaved(NamedTuple):
    """Of interleaved kernels."""

    launch: float
    byte: float  # of x and result
    stage: float
    result: float  # 100,000 bytes of a tile
    multiplication: float  # 10 million bytes of the weight by rows
    weight: float  # bytes of the packed one
    apart: float  # bytes of the result, where l end within sectors


PORTABLE = {
    2: Portable(2.21, 3.61, 0.781, 2.24, 0.157, 0.276, 0.035, 4.97, 3.29),
    4: Portable(2.06, 3.39, 1.07, 2.51, 0.08, 0.271, 0.046, 3.44, 2.91),
}
TRANSPOSED = {
    2: Transposed(8.95, 0.785, 0.246, 0.498, 0.382, 0.22, 0.871),
    4: Transposed(8.79, 0.649, 0.331, 0.552, 0.387, 0.22, 1.163),
}
INTERLEAVED = {
    2: Interleaved(5.94, 0.311, 0.248, 0.337, 0.0, 1.87, 1.76),
    4: Interleaved(4.1, 0.123, 0.498, 3.7, 0.933, 0.601, 0.886),
}


def knows(problem: Problem) -> bool:
    """Whether a problem is a product batch first, d > 1: rows of x are further apart than its
    features, which the gradient of a weight has the other way round."""
    first = problem.lanes > 1 and problem.left.lane == problem.out.lane == 1
    return first and (problem.rows == 1 or problem.left.depth <= problem.left.line)


def fastest(problem: Problem, known: Sequence[Choice]) -> str:
    """The kind that is estimated to take least time, of those of candidates by preference. Between
    `interleaved` and `transposed`, where l are in whole sectors, the model of the latter decides,
    which was measured of larger problems. Of odd sizes much scratch wants a clear gain."""
    first = {choice["kind"]: choice for choice in reversed(known)}
    kinds = interleaved.KIND, via_batch_last.KIND
    if all(kind in first for kind in kinds) and _is_in_sectors(problem):
        del first[kinds[0] if via_batch_last.pays(problem) else kinds[1]]
    estimates = {interleaved.KIND: of_interleaved, via_batch_last.KIND: of_transposed}
    found = {kind: estimates[kind](problem, first[kind]) for kind in kinds if kind in first}
    if via_batch_last.KIND in found and interleaved.KIND not in found:  # of odd sizes
        x, y, _ = _numbers(problem)
        if (x + y) * DTYPES[problem.dtype].bytes > FREE_SCRATCH:
            found[via_batch_last.KIND] *= GAIN
    tiles = [choice for choice in known if choice["kind"] == portable.KIND]
    if tiles:
        found[portable.KIND] = min(of_portable(problem, choice) for choice in tiles)
    return min(found, key=found.__getitem__)


def of_portable(
    problem: Problem, choice: Mapping[str, object], multiprocessors: int = MULTIPROCESSORS
) -> float:
    """By tiles of a choice."""
    rows, columns = int(choice["rows"]), int(choice["columns"])
    item, rates = DTYPES[problem.dtype].bytes, PORTABLE[DTYPES[problem.dtype].bytes]
    x, y, weight = _numbers(problem)
    read = portable.packed(problem)
    left, right = (access == "gather" for access in portable.accesses(read))
    row_tiles, column_tiles = ceil_div(problem.rows, rows), ceil_div(problem.columns, columns)
    tiles = row_tiles * column_tiles * problem.blocks * problem.lanes
    depth = round_up(problem.depth, portable.LINE_BYTES // item)
    gathered = min(problem.rows, rows) * left + min(problem.columns, columns) * right
    multiplications = rows * columns * _products(problem) / 1e6
    of_tile = rates.tile + depth * (rates.multiplication * multiplications)
    of_tile += depth * rates.gather * gathered / 1e3
    x_reads, weight_reads = x * column_tiles * left, weight * row_tiles * right
    near = min(problem.lanes * item, SECTOR)
    sectors = near * (rates.written * y + rates.read * (x_reads + weight_reads))
    far = _apart(problem) * (rates.far * (x_reads + weight_reads) + rates.weight * weight_reads)
    launches = rates.launch + rates.pack * (read != problem)
    slots = multiprocessors * portable.SMALL.blocks
    return launches + _rounds(tiles, slots) * of_tile + (sectors + far) / 1e6


def of_transposed(problem: Problem, choice: Mapping[str, object]) -> float:
    """By columns of a choice, batch last."""
    columns, item = int(choice["columns"]), DTYPES[problem.dtype].bytes
    rates, groups = TRANSPOSED[item], problem.blocks * problem.lanes
    rows = transpose.pitch(problem.dtype, problem.rows)
    tiles = ceil_div(rows, hopper.TILE_ROWS) * ceil_div(problem.columns, columns) * groups
    stages = ceil_div(problem.depth, hopper_common.row(problem.dtype))
    multiplications = columns * _products(problem) / 100
    of_stage = rates.stage + rates.multiplication * multiplications
    moved = problem.rows * sum(via_batch_last.feature_counts(problem)) * item / 1e6
    packed = round_up(problem.columns, columns) * stages * hopper_common.ROW_BYTES * groups / 1e6
    of_tile = rates.tile + stages * of_stage
    whole = rates.launch + rates.byte * moved + rates.far * max(0.0, moved - IN_L2)
    return whole + rates.weight * packed + _rounds(tiles, MULTIPROCESSORS) * of_tile


def of_interleaved(problem: Problem, choice: Mapping[str, object]) -> float:
    """By columns of a choice."""
    columns, item = int(choice["columns"]), DTYPES[problem.dtype].bytes
    rates, shape = INTERLEAVED[item], interleaved.shape_of(problem)
    depth = interleaved.shapes(problem.dtype, problem.precision)[shape].depth
    packed = pack.Packing(problem.dtype, columns, depth, shape.span, 1)
    tiles = ceil_div(problem.rows, shape.rows) * packed.tiles(problem)
    tiles *= problem.blocks * packed.spans(problem)
    stages = packed.stages(problem)
    multiplications = packed.stage_bytes * shape.rows * _products(problem) / 1e7
    of_tile = stages * (rates.stage + rates.multiplication * multiplications)
    of_tile += rates.result * shape.rows * columns * shape.span * item / 1e5
    x, y, _ = _numbers(problem)
    moved = (rates.byte * (x + y) + rates.apart * y * (not _is_in_sectors(problem))) * item
    moved += rates.weight * packed.workspace(problem)
    return rates.launch + moved / 1e6 + _rounds(tiles, MULTIPROCESSORS) * of_tile


def _apart(problem: Problem) -> float:
    """How far threads that read neighbouring words of depth are from reading a line each, d words
    apart: 0 where they share sectors, 1 from d = 32 on."""
    return min(1.0, max(0.0, (WORD * problem.lanes - SECTOR) / (LINE - SECTOR)))


def _is_in_sectors(problem: Problem) -> bool:
    """Whether all l of a k are whole sectors, or merged with the next."""
    whole = problem.lanes * DTYPES[problem.dtype].bytes % SECTOR == 0
    return whole or interleaved.shape_of(problem).merged


def _rounds(tiles: int, slots: int) -> float:
    """Of tiles over so many that are computed at once."""
    rounds = ceil_div(tiles, slots)
    return rounds if rounds <= ROUNDS else tiles / slots


def _products(problem: Problem) -> int:
    return hopper_common.products(problem.dtype, problem.precision)


def _numbers(problem: Problem) -> tuple[int, int, int]:
    """Of x, of the result and of the weight."""
    depths, features = via_batch_last.feature_counts(problem)
    return problem.rows * depths, problem.rows * features, depths * problem.columns
