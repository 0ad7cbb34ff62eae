"""How long launches of kernels for any sizes take in microseconds: by tiles, bytes and constants
fitted to what 60 products of 2 to 8 factors of 2 to 128 rows and columns, on 1 to 2353 rows, and 16
of sizes that are powers of two took in CUDA graphs on an H100, in float32 and float64; those of
matrices to the 60 measured anew, in float16 too. Two thirds of the estimates are within 13 % of
ragged products, nine tenths within 28 %, of all three dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from kernlib.families.kronecker_product.lowering.grouping import CHUNK, Mode
from kernlib.families.kronecker_product.lowering.parameters import is_vectors
from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.families.kronecker_product.lowering.runs import Part, Run
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Gpu

GPU = Gpu("sm_90a", 132)  # of which there are measurements
TOO_MUCH = 1e15  # microseconds of what takes more than MOST_BYTES
MOST_BYTES = 1 << 30  # beside x and result, of what waits between two launches or products


class Rates(NamedTuple):
    """Of a factor applied to a tile in one dtype, in microseconds: the barriers around it; a term
    of STEP_RESULTS results of one warp, by tensor cores; a number that a warp reads from shared
    memory or writes there; of barriers and numbers the part that is left where rows and columns are
    multiples of 8, so that nothing is asked of each number; and a number of a matrix, which blocks
    put into shared memory at once."""

    mode: float
    step: float
    number: float
    aligned: float
    matrix: float


# Of 16 warps a term takes 0.018 in 3xTF32 and 0.023 in float64, for as many results as registers
# hold: 1.5 and 2.8 times the rate of tensor cores (495 and 67 TFLOP/s), as most tiles leave a part
# of them empty. Half types are computed as float32 is, by one product in place of three, and their
# matrices go through registers, where the others' are copied.
RATES = {
    "float32": Rates(0.86, 0.018, 0.0018, 0.89, 0.0007),
    "float64": Rates(1.05, 0.023, 0.00045, 0.39, 0.0004),
    "float16": Rates(0.86, 0.018, 0.0018, 0.89, 0.0010),
}
RATES["bfloat16"] = RATES["float16"]
STEP_RESULTS = 1024  # that a warp holds in registers of 32 threads, 32 of float64 each
READS = 2  # of a number that is summed over, for each that is written: fragments overlap
# Microseconds, and bytes a microsecond.
LAUNCH = 1.4  # in a graph, beside what follows
SINGLE = 0.0031  # a number that goes from or to memory alone, not 16 aligned bytes at once
TICKET = 1.0  # of a tile in slabs: an atomic's way to memory and back, a flag, and no reading ahead
BYTES = 6.1e6  # to a large part in the L2 cache, or behind what multiprocessors compute
PIECE = 107  # bytes that take as long as a jump to where a tile goes on in memory
MEMORY_BYTES = 3.0e6  # of HBM3, as it is copied
CACHE = 50e6  # bytes of the L2 cache
SECTOR = 32  # bytes that memory writes at once
# Of a result whose sectors two tiles share, where each run is a launch: as if memory read what one
# of them has left out and wrote it twice, at half of MEMORY_BYTES. Slabs, whose blocks take tiles
# that are neighbours one behind the other, do not take that longer. 13 products have such launches,
# of which 6 were measured both ways; counters of memory, which would show why, were not read.
SHARED_BYTES = 1.6e6


class Launch(NamedTuple):
    """One of kernels for any sizes: runs of factors, the dtype, the parts of the kernel, its warps,
    bytes of an element, and how many blocks it has."""

    runs: tuple[Run, ...]
    dtype: str
    parts: tuple[Part, ...]
    warps: int
    itemsize: int
    blocks: int


def launch(runs: tuple[Run, ...], variant: Any, blocks: int) -> Launch:
    """That of a variant of such a kernel, of so many blocks."""
    return Launch(runs, variant.dtype, variant.parts, variant.warps, variant.itemsize, blocks)


def are_known(problem: Problem, gpu: Gpu) -> bool:
    """Whether times were measured that are like a problem on a GPU: not of TF32, from the left, or
    of factors that vary with the batch."""
    if gpu != GPU or problem.dtype not in RATES or problem.precision != "fp32":
        return False
    return not problem.inside and not any(factor.batch_stride for factor in problem.factors)


def are_ragged(problem: Problem) -> bool:
    """Whether not all sizes are multiples of 8. Of those that are, kernels were measured that rules
    choose, and no others."""
    return any(f.rows % CHUNK or f.columns % CHUNK for f in problem.factors)


def kernel_time(launches: Sequence[Launch]) -> float:
    """Microseconds of launches, one behind the other."""
    time = 0.0
    for index, launch in enumerate(launches):
        several = len(launch.runs) > 1
        time += LAUNCH * (1 + several)  # behind one that clears counters
        for run, part in zip(launch.runs, launch.parts, strict=True):
            time += _run_time(launch, run, part, several)
        if index < len(launches) - 1:
            handed = launch.runs[-1].elements * launch.itemsize
            time += 2 * max(0.0, handed - CACHE) / MEMORY_BYTES
    return time


def _run_time(launch: Launch, run: Run, part: Part, several: bool) -> float:
    """A run's: each block takes tiles in turn, one warp at the rate of another, however many there
    are on a multiprocessor."""
    applied, rates, warps = part.modes, RATES[launch.dtype], launch.warps
    tiles = run.batch * run.outer * run.inner * ceil_div(run.columns, part.columns)
    tile = sum(_mode_time(mode, rates, warps) for mode in applied)
    reads, writes = is_vectors(run, part)
    alone = applied[0].inputs * (not reads) + applied[-1].outputs * (not writes)
    tile += alone * SINGLE / warps + TICKET * several
    matrices = rates.matrix * sum(mode.matrix for mode in applied)
    time = ceil_div(tiles, launch.blocks) * tile + matrices
    moved = _moved(run, part, launch.itemsize, several)
    return time + moved * GPU[1] / min(GPU[1], launch.blocks)


def _mode_time(mode: Mode, rates: Rates, warps: int) -> float:
    steps = mode.rows * ceil_div(mode.outputs, STEP_RESULTS * warps)
    apart = rates.mode + rates.number * (READS * mode.inputs + mode.outputs) / warps
    is_ragged = mode.matrix > mode.rows * mode.columns
    return rates.step * steps + (apart if is_ragged else rates.aligned * apart)


def _moved(run: Run, part: Part, itemsize: int, several: bool) -> float:
    """Of what a run reads and writes."""
    width = math.prod(factor.columns for factor in run.factors)
    features = math.prod(factor.rows for factor in run.factors)
    written = run.elements * itemsize
    moved = (written + run.elements // width * features * itemsize) / BYTES
    if not run.inside:
        return moved
    piece, line = part.columns * itemsize, run.columns * itemsize  # or all of a line
    moved *= max(1.0, min(1 + PIECE / piece, line / piece))
    if not several and piece < line and (piece % SECTOR or line % SECTOR):
        moved += max(0.0, written - CACHE) / SHARED_BYTES
    return moved
