"""The kernel slabs.cuh: all runs of factors in one launch, through slabs that stay in the L2 cache."""

from __future__ import annotations

import math

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_product.lowering import grouping, modes
from kernlib.families.kronecker_product.lowering.grouping import Size
from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.families.kronecker_product.lowering.runs import Run, split
from kernlib.families.kronecker_product.lowering.variant import (
    Part,
    Variant,
    matrix_numbers,
    parameters,
    run_numbers,
    spec,
    warps_of,
)
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

SLAB_BYTES = 8 << 20  # of what one run hands to the next
RING = 3  # slabs under way between two runs: one written, one read, one that may be either
CLEAR_THREADS = 256
CLEAR_PARAMETERS = Parameters(1, "<q")
CLEAR = "kronecker_product clear"
COLUMNS_INSIDE = 32  # the fewest of a slab with the factors on the left, where rows of x hold them
MOST_TICKETS = 2**31  # a counter has 32 bits, and each block takes one too many


def variant(
    sizes: tuple[tuple[Size, ...], ...], dtype: str, precision: str, inside: bool, arch: str
) -> Variant | None:
    """The kernel of these runs, first to last; None where their matrices leave no room for tiles of
    at least two blocks."""
    matrices = sum(map(grouping.matrices, sizes))
    sums = DTYPES[dtype].accumulator
    parts = []
    for index, own in enumerate(sizes):
        source = sums if index else dtype
        target = dtype if index == len(sizes) - 1 else sums
        within = inside or index > 0
        others = matrices - grouping.matrices(own)
        if grouping.widest(own) > modes.room(dtype, arch) - matrices:
            return None
        columns = modes.most_columns(own, within, dtype, arch, others)
        parts.append(Part(source, target, columns, within, own))
    widest = max(part.columns * grouping.widest(part.sizes) for part in parts)
    made = Variant(dtype, precision, tuple(parts), warps_of(dtype, widest))
    return made if made.resident(arch) > 1 else None


def columns_of(problem: Problem, found: tuple[tuple[int, int], ...]) -> int:
    """The columns of a slab; 0 where all that is handed on is no more than a ring of slabs."""
    sums = DTYPES[DTYPES[problem.dtype].accumulator].bytes
    most = max(
        math.prod(f.rows for f in problem.factors[:first])
        * math.prod(f.columns for f in problem.factors[first:])
        for first, _ in found[:-1]
    )
    columns = max(1, SLAB_BYTES // (most * sums))
    if problem.inside:
        columns = max(COLUMNS_INSIDE, columns // COLUMNS_INSIDE * COLUMNS_INSIDE)
    return columns if problem.columns > RING * columns else 0


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    found: tuple[tuple[int, int], ...],
    arch: str,
    multiprocessors: int,
) -> Lowered | None:
    """The launches of a call of several runs, where they can be one kernel's and gain by it."""
    slab = columns_of(problem, found) if len(found) > 1 and problem.batch == 1 else 0
    if not slab:
        return None
    parts = split(problem, found, slab)
    sizes = tuple(part.sizes for part in parts)
    made = variant(sizes, problem.dtype, problem.precision, problem.inside, arch)
    if made is None:
        return None
    count = ceil_div(problem.columns, slab)
    tickets = sum(
        run.outer * run.inner * ceil_div(run.columns, part.columns)
        for run, part in zip(parts, made.parts, strict=True)
    )
    if (count + len(parts)) * tickets >= MOST_TICKETS:
        return None
    return _steps(epilogue, problem, slab, parts, made, tickets, arch, multiprocessors)


def _steps(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    slab: int,
    parts: list[Run],
    made: Variant,
    tickets: int,
    arch: str,
    multiprocessors: int,
) -> Lowered:
    count, last = ceil_div(problem.columns, slab), (problem.columns - 1) % slab + 1
    item = DTYPES[DTYPES[problem.dtype].accumulator].bytes
    counters = 1 + len(parts) * count
    at, rings = round_up(4 * counters, 256), []
    for run in parts[:-1]:
        rings.append(at)
        at = round_up(at + RING * run.elements * item, 256)
    ends = ((slab * problem.x.column, count), (slab * problem.out.column, count))
    numbers = []
    for index, (run, part) in enumerate(zip(parts, made.parts, strict=True)):
        source = (parts[index - 1].elements, RING) if index else ends[0]
        target = (run.elements, RING) if index < len(parts) - 1 else ends[1]
        numbers += run_numbers(run, part, _last(run, problem, slab, last), (source, target))
    layout = parameters(len(parts), len(problem.factors), epilogue)
    fixed = layout.pack(*numbers, *matrix_numbers(parts), 1, count, tickets)
    kernel = spec(epilogue, made, arch)
    middle = [(WORKSPACE, ring) for ring in rings]
    factors = [(f"factor{number}", 0) for number in _order(parts, problem)]
    pointers = [("x", 0), *middle, *middle, ("out", 0), *factors, (WORKSPACE, 0)]
    pointers += text.vector_pointers(epilogue)
    grid = min(made.resident(arch) * multiprocessors, (count + len(parts) - 1) * tickets), 1
    scalars = text.scalar_count(epilogue)
    return Lowered((_clear(counters), Step(kernel, grid, fixed, tuple(pointers), scalars)), at)


def _order(parts: list[Run], problem: Problem) -> list[int]:
    """The numbers of the factors in the order of their runs."""
    found, end = [], len(problem.factors)
    for run in parts:
        found += range(end - len(run.factors), end)
        end -= len(run.factors)
    return found


def _last(run: Run, problem: Problem, slab: int, columns: int) -> tuple[int, int]:
    """Outer indices and columns of a run in a slab of so few columns of the problem."""
    if not problem.inside and (run.inside or run.outer > 1):
        return run.outer // slab * columns, run.columns
    return run.outer, run.columns // slab * columns


def clear() -> KernelSpec:
    """The kernel that sets counters to zero."""
    source = f"""constexpr int THREADS = {CLEAR_THREADS};
constexpr int PARAMETER_BYTES = {CLEAR_PARAMETERS.size};

#include "kronecker_product/modes/clear.cuh"
"""
    entry = "kronecker_product_clear"
    made = KernelSpec("kronecker_product", source, entry, CLEAR_THREADS, 0, description=CLEAR)
    return named(made)


def _clear(counters: int) -> Step:
    fixed = CLEAR_PARAMETERS.pack(counters)
    return Step(clear(), (ceil_div(counters, CLEAR_THREADS), 1), fixed, ((WORKSPACE, 0),))
