"""The kernel slabs.cuh: all runs of factors in one launch, by slabs that stay in the L2 cache."""

from __future__ import annotations

import math
from itertools import pairwise

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_product.lowering import grouping, halves, modes
from kernlib.families.kronecker_product.lowering.grouping import Size
from kernlib.families.kronecker_product.lowering.halves import Halves
from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.families.kronecker_product.lowering.runs import Run, split
from kernlib.families.kronecker_product.lowering.variant import (
    LINE,
    Part,
    Variant,
    matrix_numbers,
    parameters,
    run_numbers,
    spec,
    summand_numbers,
    warps_of,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.records import NamedTuple

SLAB_BYTES = 4 << 20  # of what one run hands to the next
RESTAGED_BYTES = 32 << 20  # the same where a block stages matrices anew with each change of runs
DISTANCE = 2  # tickets between a tile and what it waits for, as a multiple of the blocks
CLEAR_THREADS = 256
EXPONENT_BYTES = 2
CLEAR_PARAMETERS = Parameters(1, "<q")
CLEAR = "kronecker_product clear"
COLUMNS_INSIDE = 32  # the fewest of a slab with the factors on the left, where rows of x hold them
MOST_TICKETS = 2**31  # a counter has 32 bits, and each block takes one too many


class Slabs(NamedTuple):
    """How a problem is cut: columns of a slab but the last of a batch, slabs of a batch, tickets of
    a slab in all runs, and by how many slabs a run is behind the one before. ``ring`` slabs are
    under way between two runs: one that is written, one that is read, and those between."""

    columns: int
    count: int
    tickets: int
    lag: int

    @property
    def ring(self) -> int:
        """Slabs that the ring between two runs has room for."""
        return 2 * self.lag + 1


def variant(
    sizes: tuple[tuple[Size, ...], ...],
    dtype: str,
    precision: str,
    inside: bool,
    arch: str,
    is_varied: bool,
) -> Variant | None:
    """The kernel of these runs, first to last, of matrices that vary with the batch or not: one of
    which a multiprocessor holds two blocks, if there is any, and first one that has all matrices at
    once. None where not even one run's fit."""
    for blocks, restaged in ((2, False), (2, True), (1, False), (1, True)):
        if restaged or not is_varied:
            made = _variant(sizes, dtype, precision, inside, arch, restaged, blocks)
            if made is not None and made.resident(arch) >= blocks:
                return made
    return None


def _variant(sizes, dtype, precision, inside, arch, restaged: bool, blocks: int) -> Variant | None:
    arithmetic = grouping.arithmetic_of(dtype, precision)
    found = [grouping.matrices(own, arithmetic) for own in sizes]
    matrices, sums = max(found) if restaged else sum(found), DTYPES[dtype].accumulator
    room = modes.room(dtype, arch) // blocks - LINE
    parts = []
    for index, own in enumerate(sizes):
        source, target = sums if index else dtype, sums if index < len(sizes) - 1 else dtype
        within = inside or index > 0
        if grouping.widest(own) + matrices > room:
            return None
        columns = modes.most_columns(own, within, dtype, precision, arch, matrices - found[index])
        parts.append(Part(source, target, columns, within, own))
    widest = max(part.columns * grouping.widest(part.sizes) for part in parts)
    warps = warps_of(dtype, widest)
    return Variant(dtype, precision, tuple(parts), warps, restaged=restaged)


def gains(
    problem: Problem,
    found: tuple[tuple[int, int], ...],
    made: Variant,
    arch: str,
    multiprocessors: int,
) -> bool:
    """Whether what a run hands to the next would not stay in the L2 cache as a whole."""
    columns = _columns(problem, found, made)
    blocks = made.resident(arch) * multiprocessors
    cut = _cut(problem, columns, split(problem, found, columns), made, blocks)
    return problem.batch * cut.count > cut.ring


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    found: tuple[tuple[int, int], ...],
    made: Variant | Halves,
    arch: str,
    multiprocessors: int,
) -> Lowered | None:
    """The launches of a call of several runs by one kernel, behind another that clears its
    counters; None where these have too few bits."""
    columns = _columns(problem, found, made)
    parts = split(problem, found, columns)
    cut = _cut(problem, columns, parts, made, made.resident(arch) * multiprocessors)
    whole = problem.batch * cut.count
    if (whole + len(parts) * cut.lag) * cut.tickets >= MOST_TICKETS:
        return None
    return _steps(epilogue, problem, cut, parts, made, arch, multiprocessors)


def _columns(problem: Problem, found: tuple[tuple[int, int], ...], made: Variant | Halves) -> int:
    """The columns of a slab."""
    most = max(
        math.prod(f.rows for f in problem.factors[:first])
        * math.prod(f.columns for f in problem.factors[first:])
        for first, _ in found[:-1]
    )
    wanted = RESTAGED_BYTES if made.restaged else SLAB_BYTES
    columns = max(1, wanted // (most * made.itemsize))
    if problem.inside:
        columns = max(COLUMNS_INSIDE, columns // COLUMNS_INSIDE * COLUMNS_INSIDE)
    return min(columns, problem.columns)


def _cut(
    problem: Problem, columns: int, parts: list[Run], made: Variant | Halves, blocks: int
) -> Slabs:
    tickets = sum(
        run.outer * run.inner * ceil_div(run.columns, part.columns)
        for run, part in zip(parts, made.parts, strict=True)
    )
    lag = ceil_div(DISTANCE * blocks, tickets)
    return Slabs(columns, ceil_div(problem.columns, columns), tickets, lag)


def _steps(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    cut: Slabs,
    parts: list[Run],
    made: Variant | Halves,
    arch: str,
    multiprocessors: int,
) -> Lowered:
    last = (problem.columns - 1) % cut.columns + 1  # columns of the last slab
    counters = 1 + len(parts) * problem.batch * cut.count
    at, rings, handed = round_up(4 * counters, 256), [], []
    for run in parts[:-1]:
        rings.append((WORKSPACE, at))
        handed.append(run.elements // problem.batch)
        at = round_up(at + cut.ring * handed[-1] * made.itemsize, 256)
    ends = [(cut.columns * side.column, 0) for side in (problem.x, problem.out)]
    between = [(elements, cut.ring) for elements in handed]
    slabs = list(zip([ends[0], *between], [*between, ends[1]], strict=True))
    numbers = []
    for run, part, slab in zip(parts, made.parts, slabs, strict=True):
        run = _within(run, *(ring > 0 for _, ring in slab))
        numbers += run_numbers(run, part, _last(run, problem, cut.columns, last), slab)
    whole = problem.batch, cut.count, cut.tickets, cut.lag
    numbers += [*matrix_numbers(parts), *whole]
    factors = [(f"factor{number}", 0) for number in _order(parts, problem)]
    pointers = [("x", 0), *rings, *rings, ("out", 0), *factors, (WORKSPACE, 0)]
    if isinstance(made, Halves):
        kernel = halves.spec(epilogue, made, arch)
        for writer, reader in pairwise(parts) if made.powers else ():
            handed, count = _powers(writer, reader, problem.inside, cut.columns)
            numbers += handed
            pointers.append((WORKSPACE, at))
            at = round_up(at + cut.ring * count * EXPONENT_BYTES, 256)
        layout = halves.layout(made, len(problem.factors), epilogue)
    else:
        kernel = spec(epilogue, made, arch)
        layout = parameters(len(parts), len(problem.factors), epilogue)
    numbers += summand_numbers(parts[-1], [cut.columns * s.column for s in problem.summands])
    fixed = layout.pack(*numbers)
    pointers += text.vector_pointers(epilogue) + text.summand_pointers(epilogue)
    tickets = (problem.batch * cut.count + (len(parts) - 1) * cut.lag) * cut.tickets
    grid = min(made.resident(arch) * multiprocessors, tickets), 1
    scalars = text.scalar_count(epilogue)
    step = Step(kernel, grid, fixed, tuple(pointers), scalars)
    return Lowered((clear_step(counters), step), at)


def _powers(writer: Run, reader: Run, inside: bool, slab: int) -> tuple[list[int], int]:
    """Of the parameter struct what says which of the writer's columns an element of the reader's
    tile is of, and the count of these columns in a slab: from one outer index of the reader,
    feature and inner index on, of inner index and column modulo two numbers."""
    own = math.prod(factor.rows for factor in reader.factors)
    behind = writer.inner if inside else (writer.columns if writer.inside else 1)
    count = writer.outer * writer.inner * writer.columns
    if inside:
        found = [own * behind * slab, behind * slab, slab, behind, slab]
    else:
        found = [reader.inner * own * behind, behind, own * behind, reader.inner, behind]
    return [*found, count], count


def _within(run: Run, source: bool, target: bool) -> Run:
    """A run whose source or target is a ring, which knows no batches."""
    x, out = run.x, run.out
    x = x._replace(batch=0) if source else x
    return run._replace(x=x, out=out._replace(batch=0) if target else out)


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


def clear_step(counters: int) -> Step:
    """The launch that sets so many counters at the beginning of the workspace to zero."""
    fixed = CLEAR_PARAMETERS.pack(counters)
    return Step(clear(), (ceil_div(counters, CLEAR_THREADS), 1), fixed, ((WORKSPACE, 0),))
