"""The kernels of kernel_sources/kronecker_product/hopper, which multiply by wgmma: square factors,
powers of two wide, one or two neighbours in a pass over memory; hopper.cuh makes one pass in a
launch, slabs.cuh several."""

from __future__ import annotations

import math

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_product.kernels import hopper_passes
from kernlib.families.kronecker_product.kernels.clear import CLEAR
from kernlib.families.kronecker_product.kernels.hopper_passes import (
    MOST_PASSES,
    PassesKernel,
    Variant,
)
from kernlib.families.kronecker_product.kernels.largest import LARGEST
from kernlib.families.kronecker_product.lowering import grouping, parameters, passes
from kernlib.families.kronecker_product.lowering.grouping import Group
from kernlib.families.kronecker_product.lowering.passes import PANEL, passes_of, words_of
from kernlib.families.kronecker_product.lowering.problem import Layout, Problem
from kernlib.families.kronecker_product.lowering.runs import Part, Run
from kernlib.families.kronecker_product.lowering.slabs import EXPONENT_BYTES
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice, Gpu
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

MOST_APART, MOST_INSIDE = 2, 4  # passes of a launch each; and on the left
SLAB_BYTES = 1 << 20  # of what a pass hands to the next in one launch
# Of what a launch for each pass hands on in a workspace; how many parts of the rows there are.
PART_BYTES, MOST_PARTS = 256 << 20, 64
DISTANCE = 2  # tickets between a tile and what it waits for, as a multiple of groups of threads
MOST_TICKET_TILES, LEAST_TICKETS = 4, 6  # tiles of a ticket; tickets of a group of threads
SHIFTS = 8  # launches of a product at most, and more, so that rows follow at 32 bytes
POWER_PLACE = 6  # numbers of a PowerPlace, of which none is read


class HopperSlabs(PassesKernel):
    """All passes in one launch, which hand on slabs of rows in the L2 cache."""

    header = "kronecker_product/hopper/slabs.cuh"
    entry = "kronecker_product_hopper_slabs"
    reason = "the passes of `hopper` in one launch, by slabs that stay in the L2 cache"
    kind = "hopper_slabs"

    def variants_of(self, product: Group, arch: str) -> list[Variant]:
        """The only kernel of a product. None on the left, where it has no room, and for factors of
        128, whose passes wait long for each other (320 x 128^3 of float16: 2.6 ms, not 3.7)."""
        parts, dtype = passes_of(product, arch), product.dtype
        if product.inside or not 1 < len(parts) <= MOST_PASSES:
            return []
        handed = math.prod(rows for rows, _ in product.sizes) * DTYPES[dtype].bytes
        words = words_of(dtype, product.precision)
        variant = Variant(dtype, words, parts, max(1, SLAB_BYTES // handed))
        fits = (
            all(each.tile[0] == PANEL for each in parts)
            and variant.stages == hopper_passes.SLAB_STAGES
        )
        return [variant] if fits else []

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, gpu: Gpu, choice: Choice
    ) -> Lowered:
        """The launch of all passes, behind another that clears its counters. What goes from pass to
        pass takes the result's place, or that of a ring in the workspace where the result may be a
        summand as well or has no aligned rows."""
        (variant,) = self.variants_of(grouping.product_of(problem), gpu.arch)
        dtype, parts = problem.dtype, variant.passes
        item, count = DTYPES[dtype].bytes, ceil_div(problem.columns, variant.slab)
        tiles = _ticket_tiles(variant, problem, gpu.multiprocessors)
        tickets = sum(part.row_tiles for part in parts) * variant.slab // tiles
        lag = min(count, ceil_div(DISTANCE * variant.groups * gpu.multiprocessors, tickets))
        counters = 1 + len(parts) * count
        handed, ring, at = problem.out, 0, round_up(4 * counters, 256)
        if problem.summands or not _is_plain(problem.out):
            handed, ring = Layout(0, 0, problem.in_features, 1), 2 * lag + 1
        rows = (ring or count) * variant.slab  # that what goes on has places for
        ends, powers, last = [("x", 0)], [], len(problem.factors)
        numbers, runs = [], []
        for index, part in enumerate(parts):
            factors = range(last - len(part.factors), last)
            last = factors.start
            runs.append(_run(problem, factors, handed))
            slabs = (0, ring * (index > 0)), (0, ring * (last > 0))
            count_of_run = part.row_tiles * variant.slab // tiles
            numbers.append(_values(runs[-1], problem.columns, count_of_run, slabs, tiles))
            ends.append((WORKSPACE, at) if ring and last else ("out", 0))
            if ring and last:
                at = round_up(at + rows * problem.in_features * item, 256)
            if variant.powers and last:
                powers.append((WORKSPACE, at))
                places = rows * part.row_tiles * part.tile[0] // 16
                at = round_up(at + places * EXPONENT_BYTES, 256)
        places, counts = [0] * (POWER_PLACE * variant.powers), (1, count, tickets, lag)
        names = [name for run in runs for name in run.names]
        pointers = [*ends[:-1], *ends[1:], *names, (WORKSPACE, 0), *powers]
        pointers += text.vector_pointers(epilogue) + text.summand_pointers(epilogue)
        fixed = parameters.pack(epilogue, runs, numbers, counts, places)
        grid = min(count * tickets, gpu.multiprocessors), 1
        spec = self.spec(epilogue, variant, gpu.arch)
        step = Step(spec, grid, fixed, tuple(pointers), text.scalar_count(epilogue))
        return Lowered((CLEAR.step(counters), step), at)

    def specs(self, epilogue: tuple[Epilogue, ...], scope: Group, arch: str) -> list[KernelSpec]:
        """The kernels of :meth:`launch`, where they pay."""
        specs = [self.spec(epilogue, each, arch) for each in self.variants_of(scope, arch)]
        return [CLEAR.spec(), *specs] if specs and passes.is_faster(scope, arch) else []


class Hopper(PassesKernel):
    """One pass. A product is a launch of each, on the left or where one of all has no room."""

    header = "kronecker_product/hopper/hopper.cuh"
    entry = "kronecker_product_hopper"
    kind = "hopper"
    rank = 1
    reason = (
        "wgmma of sm_90a for square factors of a power of two: chosen where it reads memory "
        "once, or where no block keeps a whole row"
    )

    def variants_of(self, product: Group, arch: str) -> list[Variant]:
        """The kernels of a product, in the order of their launches."""
        parts, dtype = passes_of(product, arch), product.dtype
        most = MOST_INSIDE if product.inside else MOST_APART
        if len(parts) > most or HopperSlabs().variants_of(product, arch):
            return []
        places = [(index, len(parts) - 1 - index) for index in range(len(parts))]
        if dtype != "float16":
            places = [(0, 0)] * len(parts)
        words = words_of(dtype, product.precision)
        pairs = zip(parts, places, strict=True)
        return [Variant(dtype, words, (each,), 0, *place) for each, place in pairs]

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, gpu: Gpu, choice: Choice
    ) -> Lowered:
        """A launch for each pass. Each but the first takes the result's place, tile by tile; or
        that of part of the rows, or columns, in the workspace, where the result may be a summand as
        well. What scales float16 is found of x before."""
        variants = self.variants_of(grouping.product_of(problem), gpu.arch)
        handed, count, columns, places = problem.out, problem.columns, problem.columns, 0
        bytes_each = problem.in_features * DTYPES[problem.dtype].bytes
        bounds, steps = _bounds(problem, variants[0], gpu.multiprocessors)
        if len(variants) > 1 and problem.summands:
            count = max(PART_BYTES // bytes_each, ceil_div(columns, MOST_PARTS))
            count = round_up(count, PANEL) if problem.inside else count
            count, places = min(count, columns), min(count, round_up(columns, PANEL))
            inner = (1, places) if problem.inside else (problem.in_features, 1)
            handed = Layout(0, 0, *inner)
        kernels, last = [], len(problem.factors)
        for variant in variants:
            run = _run(problem, range(last - len(variant.sizes), last), handed)
            last = run.first
            spec = self.spec(epilogue * run.ends, variant, gpu.arch)
            kernels.append((variant, spec, epilogue * run.ends, run))
        steps += [
            _step(*kernel, (begin, min(count, columns - begin)), handed is problem.out, bounds, gpu)
            for begin in range(0, columns, count)
            for kernel in kernels
        ]
        return Lowered(tuple(steps), bounds + places * bytes_each)

    def specs(self, epilogue: tuple[Epilogue, ...], scope: Group, arch: str) -> list[KernelSpec]:
        """The kernels of :meth:`launch`, where they pay."""
        variants = self.variants_of(scope, arch) if passes.is_faster(scope, arch) else []
        specs = [self.spec(epilogue * (one is variants[-1]), one, arch) for one in variants]
        if variants and variants[0].bounds:
            return [CLEAR.spec(), LARGEST.spec(None, LARGEST.Variant(scope.inside), arch), *specs]
        return specs


def _bounds(problem: Problem, variant: Variant, multiprocessors: int) -> tuple[int, list[Step]]:
    """Bytes of the workspace for what scales numbers that launches hand on, a number of each of
    these and then of each row, or column; and the launches that find what is of x."""
    if not variant.bounds:
        return 0, []
    count, place = SHIFTS + problem.columns, (WORKSPACE, 4 * SHIFTS)
    steps = [CLEAR.step(count), LARGEST.step(problem, multiprocessors, place)]
    return round_up(4 * count, 256), steps


def _step(
    variant: Variant,
    spec: KernelSpec,
    epilogue: tuple[Epilogue, ...],
    run: Run,
    rows: tuple[int, int],
    in_result: bool,
    place: int,
    gpu: Gpu,
) -> Step:
    """The launch of one pass over rows, or columns, from one on, so many. What lies between two of
    them is in the result, or has a place in the workspace."""
    (part,), (begin, count), item = variant.passes, rows, DTYPES[run.dtype].bytes
    tiles = part.tiles(count)
    numbers = [_values(run, count, tiles)]
    places = [0] * (POWER_PLACE * variant.bounds)

    def at(name: str, side: Layout) -> tuple[str, int]:
        return name, begin * side.column * item

    def end(is_end: bool, name: str, side: Layout) -> tuple[str, int]:
        return at(name if is_end else "out", side) if is_end or in_result else (WORKSPACE, place)

    pointers = [end(run.begins, "x", run.x), end(run.ends, "out", run.out), *run.names]
    pointers += ((WORKSPACE, 0), (WORKSPACE, 4 * (SHIFTS + begin)))[: variant.bounds]
    pointers += text.vector_pointers(epilogue)
    pointers += [
        at(name, side)
        for (name, _), side in zip(text.summand_pointers(epilogue), run.summands, strict=True)
    ]
    fixed = parameters.pack(epilogue, [run], numbers, (1, 1, tiles, 0), places)
    grid = min(tiles, gpu.multiprocessors), 1
    return Step(spec, grid, fixed, tuple(pointers), text.scalar_count(epilogue))


def _ticket_tiles(variant: Variant, problem: Problem, multiprocessors: int) -> int:
    """Tiles of a row that a ticket is of: several, where there are tickets enough for all groups of
    threads to be busy alike."""
    row_tiles = math.gcd(*(part.row_tiles for part in variant.passes))
    tiles = problem.columns * row_tiles * len(variant.passes)
    each, count = LEAST_TICKETS * variant.groups, MOST_TICKET_TILES
    while count > 1 and (row_tiles % count or tiles < count * each * multiprocessors):
        count //= 2
    return count


def _is_plain(out: Layout) -> bool:
    """Whether rows are contiguous, and take 16-byte accesses."""
    return out.feature == 1 and out.column % 8 == 0 and out.alignment % 16 == 0


def _run(problem: Problem, factors: range, handed: Layout) -> Run:
    """A pass as others have it: whole rows are its columns, or they are those of x."""
    begins, ends = factors.stop == len(problem.factors), factors.start == 0
    x, out = problem.x if begins else handed, problem.out if ends else handed
    some, summands = problem.factors[factors.start : factors.stop], problem.summands if ends else ()
    sides, kind = (some, x, out, summands, (0, 0, 0, 1)), (problem.dtype, problem.precision)
    columns = problem.columns, problem.inside
    return Run(1, 1, 1, *columns, *sides, 1, None, *kind, factors.start, begins, ends)


def _values(
    run: Run, rows: int, tiles: int, slabs=((0, 0), (0, 0)), ticket_tiles: int = 0
) -> tuple:
    """The fixed values of a pass over so many rows, or columns, of x."""
    part = Part(run.dtype, run.dtype, 1, run.inside, run.sizes)
    run = run._replace(columns=rows)
    return parameters.run_values(run, part, (1, rows), slabs, tiles, ticket_tiles)
