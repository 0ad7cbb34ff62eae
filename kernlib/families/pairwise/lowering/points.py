"""First gradients of products and sums with a kernel matrix, of more features than
:mod:`kernlib.families.pairwise.lowering.backward` takes, of squared distances and dot products
(kernel_sources/pairwise/points/points.cuh). Nothing of the matrix is stored.

On sm_90a a launch of :mod:`kernlib.families.pairwise.lowering.backward` is five here: the centre
and the packing of points (pack.py), that of lines, products by tensor cores, and behind their gate
the kernel of the lanes. Elsewhere, and of a descriptor that is to be ``direct``, it is that kernel
alone. Both leave the same partial results: those of hyperparameters one for each row.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import pack, points_source, reduce
from kernlib.families.pairwise.lowering.backward import OPERANDS, Problem
from kernlib.families.pairwise.lowering.backward_source import Derivatives
from kernlib.families.pairwise.lowering.pack import ARCH
from kernlib.families.pairwise.lowering.points_source import (
    DIRECT_TILE,
    FIXED,
    GROUP,
    TILE_N,
    Variant,
)
from kernlib.families.pairwise.lowering.problem import MAX_BATCH_BLOCKS, scalar_count
from kernlib.jit import targets
from kernlib.lowering import division
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

WIDTHS = (1, 2, 4)  # columns of g and v that a launch takes
# Up to which registers hold what :func:`crowd` counts of three warpgroups, and of two.
CROWDED, MOST_CROWDED = 80, 152
MOST_FEATURES = 128
LEAST_STAGES = 2
DIRECT_RESIDENT = 2  # blocks of a multiprocessor
EIGHT = 8  # features that a block packs
SLOPES = {"difference": "SquareSlope", "dot": "IdentitySlope"}
# Microseconds: of a launch, of a million pairs and of each feature of these, by tensor cores and on
# the lanes; of what stores blocks of the matrix, as measured on an H200, 45 of 20 features, 30 of
# 64. The others are floors and a fifth.
LAUNCH, PRODUCTS, LANES = 30, (0.65, 0.019), (0.8, 0.18)
BLOCKS = 200, 30


class Place(NamedTuple):
    """Where lines begin in the workspace, behind what the packing of points keeps there, its size,
    and the stride of lines from batch entry to batch entry, in bytes."""

    points: pack.Workspace
    lines: int
    size: int
    lines_stride: int


def takes(descriptor: Pairwise, problem: Problem, arch: str) -> bool:
    """Whether the kernels compute a launch: sums that are products, of a size that they know."""
    known = pack.is_product(descriptor, problem) and problem.k <= MOST_FEATURES
    if not known or problem.slope != SLOPES[descriptor.operator]:
        return False
    if problem.times_p or problem.times_scale or problem.columns > WIDTHS[-1]:
        return False
    made = variant(problem, 0)
    blocks = ceil_div(problem.m, DIRECT_TILE) * division.MAX_SPLITS * problem.batch
    fits = made.direct_bytes <= targets.SHARED_BYTES[arch]
    return fits and blocks <= reduce.MAX_BLOCKS and problem.batch <= MAX_BATCH_BLOCKS


def by_products(descriptor: Pairwise, problem: Problem, arch: str) -> bool:
    """Whether tensor cores compute a launch that the kernels take."""
    if arch != ARCH or not descriptor.takes_products:
        return False
    made = variant(problem, 0)
    return made.stages >= LEAST_STAGES and workspace(problem, made).size <= pack.MAX_WORKSPACE


def pays(descriptor: Pairwise, problem: Problem, arch: str, launches: int) -> bool:
    """Whether so many launches like this one are faster than blocks of the matrix."""
    pairs = problem.m * problem.n * problem.batch * 1e-6
    products = by_products(descriptor, problem, arch)
    each, feature = PRODUCTS if products else LANES
    tile = 3 * TILE_N if products else DIRECT_TILE
    padded = round_up(problem.m, tile) * round_up(problem.n, TILE_N) * problem.batch * 1e-6
    own = LAUNCH + padded * (each + feature * problem.k)
    return launches * own < BLOCKS[0] + pairs * BLOCKS[1]


def columns_of(problem: Problem, hyper: int) -> int:
    """Columns of g and v that a launch with so many hyperparameters takes: as many as registers
    hold."""
    fitting = (
        width
        for width in reversed(WIDTHS)
        if crowd(_variant(problem._replace(columns=width), hyper)) <= MOST_CROWDED
    )
    return next(fitting, 1)


def variant(problem: Problem, hyper: int, warpgroups: int | None = None) -> Variant:
    """The code for a problem with so many hyperparameters, with as many warpgroups as registers and
    shared memory hold."""
    made = _variant(problem, hyper)._replace(warpgroups=warpgroups or 3)
    few = made.stages < LEAST_STAGES or crowd(made) > CROWDED
    return made if warpgroups or not few else made._replace(warpgroups=2)


def _variant(problem: Problem, hyper: int) -> Variant:
    width, difference = round_up(problem.k, 8), problem.slope == SLOPES["difference"]
    return Variant(
        problem.role, round_up(problem.k, 16), width if problem.points else 8,
        next(width for width in WIDTHS if width >= problem.columns), problem.weighted,
        problem.points, problem.values, hyper, difference,
        difference and problem.points and problem.k < width, 3, problem.inner, problem.outer,
        problem.root, problem.epsilon,
    )  # fmt: skip


def crowd(made: Variant) -> int:
    """Registers that grow with a variant: sums of features on their way to totals and these, and of
    two rows numbers and sums on the lanes, twice as well."""
    own = made.points + made.values * made.sets + made.hyper
    return made.width * made.points + 2 * made.numbers + 4 * own


def workspace(problem: Problem, made: Variant) -> Place:
    """What a launch keeps where."""
    points = pack.workspace(problem, made)
    each = ceil_div(problem.n, GROUP) * (GROUP // TILE_N) * made.lines_bytes
    lines = round_up(points.size, pack.ALIGNMENT)
    size = lines + round_up(each * problem.batch, pack.ALIGNMENT)
    return Place(points, lines, size, each if problem.batch > 1 else 0)


def lower(
    descriptor: Pairwise,
    derivatives: Derivatives,
    problem: Problem,
    arch: str,
    multiprocessors: int,
    scalar_strides: tuple[int, ...],
    warpgroups: int | None = None,
) -> Lowered:
    """The launches for a problem that the kernels take. Each row gets ``parts`` partial sums."""
    hyper = len(derivatives.others)
    made = variant(problem, hyper, warpgroups)
    products = by_products(descriptor, problem, arch)
    rows, unit = (made.rows, GROUP) if products else (DIRECT_TILE, DIRECT_TILE)
    slots = multiprocessors * (1 if products else DIRECT_RESIDENT)
    sums = made.points * problem.k + made.values * problem.columns + hyper
    shape = division.Sums(problem.n, problem.m * max(1, sums), problem.batch)
    per_split = division.split(shape, ceil_div(problem.m, rows), unit, slots)
    place = workspace(problem, made) if products else None
    given = descriptor, derivatives, problem, tuple(scalar_strides), place, made, per_split
    steps = [_step("direct", *given)]
    if place is not None:
        steps = [
            *pack.steps(descriptor, problem, made, place.points),
            _step("pack", *given), _step("main", *given), *steps,
        ]  # fmt: skip
    parts = ceil_div(problem.n, per_split)
    return Lowered(tuple(steps), place.size if place else 0, parts=parts, per_part=per_split)


def _step(
    kind: str,
    descriptor: Pairwise,
    derivatives: Derivatives,
    problem: Problem,
    strides: tuple[int, ...],
    place: Place | None,
    made: Variant,
    per_split: int,
) -> Step:
    """One of the launches that have struct PointsLaunch: "pack", "main" or "direct"."""
    splits, gated = ceil_div(problem.n, per_split), place is not None
    row_blocks = ceil_div(problem.m, made.rows if kind == "main" else DIRECT_TILE)
    grid = (row_blocks * splits * problem.batch, 1)
    if kind == "pack":
        parts = (made.width // EIGHT if made.points else 0) + 1
        grid = (ceil_div(problem.n, GROUP) * parts, problem.batch)
        spec = points_source.pack_spec(descriptor, made)
    elif kind == "main":
        spec = points_source.spec(descriptor, derivatives, made)
    else:
        spec = points_source.direct_spec(descriptor, derivatives, made, gated)
    fixed = fixed_parameters(problem, place, per_split, row_blocks, strides)
    return Step(spec, grid, fixed, _pointers(place), scalar_count(descriptor))


def _pointers(place: Place | None) -> tuple[tuple[str, int], ...]:
    """Those of struct PointsLaunch; where there is no workspace nobody reads its own."""
    operands = tuple((name, 0) for name in OPERANDS)
    if place is None:
        return (("a", 0),) * points_source.IN_WORKSPACE + operands
    points = place.points
    offsets = (points.doubtful, points.packed_a, points.packed_b, points.a_info, points.b_info)
    offsets += place.lines, points.centre
    return (*((WORKSPACE, offset) for offset in offsets), *operands)


def fixed_parameters(
    problem: Problem,
    place: Place | None,
    per_split: int,
    row_blocks: int,
    scalar_strides: tuple[int, ...],
) -> bytes:
    """What follows the numbers in struct PointsLaunch of points/parameters.cuh."""
    layouts = (problem.a, problem.b, problem.g, problem.v)
    views = [x for layout in layouts for x in pack.view(layout)]
    strides = [0] * 6
    if place is not None:
        points = place.points
        strides = [points.a_stride, points.b_stride, points.a_points, points.b_points]
        strides += [place.lines_stride, points.centre_pitch if points.centres > 1 else 0]
    # Rows and lines are in the order of their difference here, whichever is whose.
    factor = problem.factor if problem.slope == SLOPES["dot"] else abs(problem.factor)
    splits = ceil_div(problem.n, per_split)
    return struct.pack(
        f"<{len(scalar_strides)}q{FIXED}", *scalar_strides, *views, problem.m, problem.n,
        problem.batch, per_split, *strides, factor, problem.k, problem.columns, row_blocks, splits,
    )  # fmt: skip
