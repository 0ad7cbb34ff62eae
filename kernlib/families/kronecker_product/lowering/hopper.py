"""The launches of the kernels of kernel_sources/kronecker_product/hopper."""

from __future__ import annotations

import math

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_product.lowering import largest
from kernlib.families.kronecker_product.lowering.grouping import Size
from kernlib.families.kronecker_product.lowering.hopper_variant import (
    MOST_PASSES,
    PANEL,
    Hopper,
    spec,
    variants,
)
from kernlib.families.kronecker_product.lowering.problem import Layout, Problem
from kernlib.families.kronecker_product.lowering.runs import Run
from kernlib.families.kronecker_product.lowering.slabs import (
    EXPONENT_BYTES,
    MOST_TICKETS,
    clear,
    clear_step,
)
from kernlib.families.kronecker_product.lowering.variant import (
    Part,
    matrix_numbers,
    parameters,
    run_numbers,
    summand_numbers,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

# Of what a launch for each pass hands on in a workspace; how many parts of the rows there are.
PART_BYTES, MOST_PARTS = 256 << 20, 64
DISTANCE = 2  # tickets between a tile and what it waits for, as a multiple of groups of threads
MOST_TICKET_TILES, LEAST_TICKETS = 4, 6  # tiles of a ticket; tickets of a group of threads
TILES = 19  # where run_numbers has the number of tiles
SHIFTS = 8  # launches of a product at most, and more, so that rows follow at 32 bytes
POWER_PLACE = 6  # numbers of a PowerPlace, of which none is read


def lower(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> Lowered | None:
    """The launches of a problem; None where others take it."""
    sizes = problem.sizes
    kind = problem.dtype, problem.precision, problem.inside
    made = variants(sizes, *kind, arch) if problem.batch == 1 else []
    if not made:
        return None
    tiles = max(part.tiles(problem.columns) for one in made for part in one.passes)
    if tiles * MOST_PASSES >= MOST_TICKETS:
        return None
    if len(made[0].passes) > 1:
        return _in_slabs(epilogue, problem, made[0], multiprocessors)
    return _apart(epilogue, problem, made, multiprocessors)


def _apart(
    epilogue: tuple[Epilogue, ...], problem: Problem, made: list[Hopper], multiprocessors: int
) -> Lowered:
    """A launch for each pass. Each but the first takes the result's place, tile by tile; or that of
    part of the rows, or columns, in the workspace, where the result may be a summand as well. What
    scales float16 is found of x before."""
    handed, count, columns, places = problem.out, problem.columns, problem.columns, 0
    bytes_each = problem.in_features * DTYPES[problem.dtype].bytes
    bounds, first = _bounds(problem, made[0], multiprocessors)
    if len(made) > 1 and problem.summands:
        count = max(PART_BYTES // bytes_each, ceil_div(columns, MOST_PARTS))
        count = round_up(count, PANEL) if problem.inside else count
        count, places = min(count, columns), min(count, round_up(columns, PANEL))
        inner = (1, places) if problem.inside else (problem.in_features, 1)
        handed = Layout(0, 0, *inner)
    kernels, last = [], len(problem.factors)
    for one in made:
        factors = range(last - len(one.sizes), last)
        last = factors.start
        own = epilogue * (last == 0)
        kernels.append((one, spec(own, one), own, factors))
    between = handed, bounds
    steps = [
        _step(problem, *kernel, (begin, min(count, columns - begin)), between, multiprocessors)
        for begin in range(0, columns, count)
        for kernel in kernels
    ]
    return Lowered((*first, *steps), bounds + places * bytes_each)


def _bounds(problem: Problem, made: Hopper, multiprocessors: int) -> tuple[int, list[Step]]:
    """Bytes of the workspace for what scales numbers that launches hand on, a number of each of
    these and then of each row, or column; and the launches that find what is of x."""
    if not made.bounds:
        return 0, []
    count, place = SHIFTS + problem.columns, (WORKSPACE, 4 * SHIFTS)
    steps = [clear_step(count), largest.step(problem, multiprocessors, place)]
    return round_up(4 * count, 256), steps


def _step(
    problem: Problem,
    made: Hopper,
    kernel: KernelSpec,
    epilogue: tuple[Epilogue, ...],
    factors: range,
    rows: tuple[int, int],
    between: tuple[Layout, int],
    multiprocessors: int,
) -> Step:
    """The launch of one pass over rows, or columns, from one on, so many. What lies between two of
    them is in the result, or has a place in the workspace."""
    handed, place = between
    begins, ends = factors.stop == len(problem.factors), factors.start == 0
    (part,), (begin, count), item = made.passes, rows, DTYPES[problem.dtype].bytes
    run = _run(problem, factors, handed)
    tiles = part.tiles(count)
    numbers = [*_run_numbers(run, problem.dtype, count, tiles, (0, 0)), *matrix_numbers([run])]
    numbers += [1, 1, tiles, 0, *[0] * (POWER_PLACE * made.bounds)]
    numbers += summand_numbers(run, [0] * len(run.summands))

    def at(name: str, side: Layout) -> tuple[str, int]:
        return name, begin * side.column * item

    inner = at("out", handed) if handed is problem.out else (WORKSPACE, place)
    pointers = [at("x", problem.x) if begins else inner]
    pointers += [at("out", problem.out) if ends else inner]
    bounds = (WORKSPACE, 0), (WORKSPACE, 4 * (SHIFTS + begin))
    pointers += [*_names(factors), *bounds[: made.bounds], *text.vector_pointers(epilogue)]
    pointers += [
        at(name, side)
        for (name, _), side in zip(text.summand_pointers(epilogue), run.summands, strict=True)
    ]
    grid = min(tiles, multiprocessors), 1
    fixed = parameters(1, len(factors), epilogue, made.bounds).pack(*numbers)
    return Step(kernel, grid, fixed, tuple(pointers), text.scalar_count(epilogue))


def _in_slabs(
    epilogue: tuple[Epilogue, ...], problem: Problem, made: Hopper, multiprocessors: int
) -> Lowered:
    """One launch of all passes, behind another that clears its counters. What goes from pass to
    pass takes the result's place, or that of a ring in the workspace where the result may be a
    summand as well or has no aligned rows."""
    count = ceil_div(problem.columns, made.slab)
    tiles = _ticket_tiles(made, problem, multiprocessors)
    tickets = sum(part.row_tiles for part in made.passes) * made.slab // tiles
    lag = min(count, ceil_div(DISTANCE * made.groups * multiprocessors, tickets))
    counters, runs = 1 + len(made.passes) * count, len(made.passes)
    handed, ring, at = problem.out, 0, round_up(4 * counters, 256)
    if problem.summands or not _is_plain(problem.out):
        handed, ring = Layout(0, 0, problem.in_features, 1), 2 * lag + 1
    rows = (ring or count) * made.slab  # that what goes on has places for
    ends, powers, last = [("x", 0)], [], len(problem.factors)
    numbers, found, names = [], [], []
    for index, part in enumerate(made.passes):
        factors = range(last - len(part.factors), last)
        last = factors.start
        run = _run(problem, factors, handed)
        slabs = ring * (index > 0), ring * (last > 0)
        own = part.row_tiles * made.slab // tiles
        numbers += [*_run_numbers(run, problem.dtype, problem.columns, own, slabs)[:-1], tiles]
        found.append(run)
        names += _names(factors)
        ends.append((WORKSPACE, at) if ring and last else ("out", 0))
        if ring and last:
            bytes_of_row = problem.in_features * DTYPES[problem.dtype].bytes
            at = round_up(at + rows * bytes_of_row, 256)
        if made.powers and last:
            powers.append((WORKSPACE, at))
            at = round_up(at + rows * part.row_tiles * part.tile[0] // 16 * EXPONENT_BYTES, 256)
    numbers += [*matrix_numbers(found), 1, count, tickets, lag, *[0] * (POWER_PLACE * made.powers)]
    numbers += summand_numbers(run, [0] * len(run.summands))
    pointers = [*ends[:-1], *ends[1:], *names, (WORKSPACE, 0), *powers]
    pointers += text.vector_pointers(epilogue) + text.summand_pointers(epilogue)
    fixed = parameters(runs, len(names), epilogue, made.powers).pack(*numbers)
    grid = min(count * tickets, multiprocessors), 1
    scalars = text.scalar_count(epilogue)
    step = Step(spec(epilogue, made), grid, fixed, tuple(pointers), scalars)
    return Lowered((clear_step(counters), step), at)


def _ticket_tiles(made: Hopper, problem: Problem, multiprocessors: int) -> int:
    """Tiles of a row that a ticket is of: several, where there are tickets enough for all groups of
    threads to be busy alike."""
    row_tiles = math.gcd(*(part.row_tiles for part in made.passes))
    tiles, each = problem.columns * row_tiles * len(made.passes), LEAST_TICKETS * made.groups
    found = MOST_TICKET_TILES
    while found > 1 and (row_tiles % found or tiles < found * each * multiprocessors):
        found //= 2
    return found


def _is_plain(out: Layout) -> bool:
    """Whether rows are contiguous, and take 16-byte accesses."""
    return out.feature == 1 and out.column % 8 == 0 and out.alignment % 16 == 0


def _run(problem: Problem, factors: range, handed: Layout) -> Run:
    """A pass as others have it: whole rows are its columns, or they are those of x."""
    begins, ends = factors.stop == len(problem.factors), factors.start == 0
    x, out = problem.x if begins else handed, problem.out if ends else handed
    own, summands = problem.factors[factors.start : factors.stop], problem.summands if ends else ()
    strides = (0, 0, 0, 1)
    return Run(1, 1, 1, problem.columns, problem.inside, own, x, out, summands, strides)


def _run_numbers(run: Run, dtype: str, rows: int, tiles: int, rings: tuple[int, int]) -> list[int]:
    """Of the parameter struct what is a pass's."""
    whole = Part(dtype, dtype, 1, run.inside, run.sizes)
    slabs = tuple((0, ring) for ring in rings)
    numbers = run_numbers(run._replace(columns=rows), whole, (1, rows), slabs)
    return [*numbers[:TILES], tiles, *numbers[TILES + 1 :]]


def _names(factors: range) -> list[tuple[str, int]]:
    return [(f"factor{number}", 0) for number in factors]


def specs(
    epilogue: tuple[Epilogue, ...],
    sizes: tuple[Size, ...],
    dtype: str,
    precision: str,
    inside: bool,
    arch: str,
) -> list[KernelSpec]:
    """The kernels of :func:`lower`."""
    made = variants(sizes, dtype, precision, inside, arch)
    found = [spec(epilogue * (one is made[-1]), one) for one in made]
    if made and made[0].bounds:
        return [clear(), largest.spec(inside), *found]
    return [clear(), *found] if made and len(made[0].passes) > 1 else found
